//! The shared secret of a job, and proofs of knowing it that do not tell it.

use std::{fmt, io};

use hmac::{Hmac, Mac};
use sha2::Sha256;

pub(super) const PROOF_BYTES: usize = 32;

/// Never used twice, so that a proof cannot be replayed.
pub(crate) type Nonce = [u8; 32];

/// Whose proof it is: that of one end cannot be sent back as that of the other.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Host,
    Guest,
}

/// A key, of which the token or a session cannot be read.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// The secret of a job with this token; without one, a secret that everybody knows.
    pub(crate) fn new(token: Option<&str>) -> Self {
        let mut mac = keyed(b"burn-shard token 1");
        mac.update(token.unwrap_or_default().as_bytes());
        Self(mac.finalize().into_bytes().into())
    }

    /// The secret of one meeting of the job: what was in another, earlier one, does not fit.
    pub(crate) fn of_session(&self, session: &Nonce) -> Self {
        let mut mac = keyed(&self.0);
        mac.update(b"session");
        mac.update(session);
        Self(mac.finalize().into_bytes().into())
    }

    /// Shows that `side` knows the secret and means `payload`, in a conversation with these nonces.
    pub(super) fn prove(&self, side: Side, nonces: [&Nonce; 2], payload: &[u8]) -> [u8; 32] {
        self.mac(side, nonces, payload)
            .finalize()
            .into_bytes()
            .into()
    }

    /// Whether `proof` is what [`Secret::prove`] returns; takes as long whatever is wrong.
    pub(super) fn verify(
        &self,
        proof: &[u8],
        side: Side,
        nonces: [&Nonce; 2],
        payload: &[u8],
    ) -> bool {
        self.mac(side, nonces, payload).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, nonces: [&Nonce; 2], payload: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&self.0);
        // All but the last have a fixed length, so that no two lists give the same bytes.
        mac.update(match side {
            Side::Host => b"host ",
            Side::Guest => b"guest",
        });
        mac.update(nonces[0]);
        mac.update(nonces[1]);
        mac.update(payload);
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("a key of any length should do")
}

pub(crate) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}
