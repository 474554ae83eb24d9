//! What has to hold for whatever bytes come over a connection; for tests with random bytes (`properties.rs`) and
//! for fuzzing (`fuzz/` of the repository).
//!
//! Each function panics if a property does not hold.

use serde::{Serialize, de::DeserializeOwned};

use super::{
    frame::first_message,
    handshake::Accepting,
    message::{Join, MAX_REPLY_BYTES, MAX_REQUEST_BYTES, Reply, Request},
    secret::Secret,
};
use crate::placement::Token;

/// The accepting end of the handshake admits nobody who does not know the token, answers the same however the
/// bytes are cut, and takes no more memory than a message has. `cuts`: lengths of the pieces, repeated.
pub fn handshake(bytes: &[u8], cuts: &[u8]) {
    let token = Token::new("a token that these bytes do not know").expect("it should not be empty");
    let secret = Secret::new(Some(&token));
    let whole = answer(&secret, &mut std::iter::once(bytes));
    let pieces = answer(&secret, &mut pieces(bytes, cuts));
    assert_eq!(whole, pieces, "another answer to the same bytes in pieces");
    assert!([0, 10, 42, 43].contains(&whole), "{whole} bytes of answer");
}

/// How many bytes a stranger who sends `pieces` is answered.
fn answer(secret: &Secret, pieces: &mut dyn Iterator<Item = &[u8]>) -> usize {
    let mut accepting = Accepting::new().expect("there should be random numbers");
    let mut sent = Vec::new();
    for piece in pieces {
        // As the acceptor reads: what is not wanted stays in the connection.
        let mut rest = piece;
        while !rest.is_empty() && accepting.wanted_bytes() > 0 {
            let now = rest.len().min(accepting.wanted_bytes());
            match accepting.advance(&rest[..now], secret, &mut sent) {
                Ok(None) => {}
                Ok(Some(payload)) => panic!("admitted a stranger with {payload:?}"),
                Err(_) => return sent.len(),
            }
            rest = &rest[now..];
        }
    }
    sent.len()
}

/// Messages to and from the store are read or refused; what is read is sent with the same meaning again, and
/// what is not read yet is kept.
pub fn messages(bytes: &[u8]) {
    messages_of::<Request>(bytes, MAX_REQUEST_BYTES);
    messages_of::<Reply>(bytes, MAX_REPLY_BYTES);
    if let Ok(join) = postcard::from_bytes::<Join>(bytes) {
        same_again(&join);
    }
}

fn messages_of<T: Serialize + DeserializeOwned>(bytes: &[u8], max_bytes: usize) {
    let mut inbox = bytes.to_vec();
    loop {
        let before = inbox.len();
        match first_message::<T>(&mut inbox, max_bytes) {
            Ok(Some(message)) => same_again(&message),
            Ok(None) => {
                assert_eq!(
                    inbox.len(),
                    before,
                    "bytes of an unfinished message are gone"
                );
                return;
            }
            Err(_) => return,
        }
        assert!(inbox.len() + 4 <= before, "a message of no bytes");
    }
}

fn same_again<T: Serialize + DeserializeOwned>(message: &T) {
    let bytes = postcard::to_allocvec(message).expect("what was read should be sendable");
    let again: T = postcard::from_bytes(&bytes).expect("what was sent should be readable");
    let twice = postcard::to_allocvec(&again).expect("what was read should be sendable");
    assert_eq!(bytes, twice);
}

/// The pieces that `cuts` makes of `bytes`: all of them, in order.
fn pieces<'a>(bytes: &'a [u8], cuts: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut cuts = cuts.iter().copied().cycle();
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = usize::from(cuts.next().unwrap_or(u8::MAX)).clamp(1, rest.len());
        let (piece, after) = rest.split_at(length);
        rest = after;
        Some(piece)
    })
}
