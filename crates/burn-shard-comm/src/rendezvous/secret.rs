//! The shared secret of a job, and proofs of knowing it that do not tell it.

use std::{fmt, io};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::placement::Token;

pub(super) const PROOF_BYTES: usize = 32;

/// Never used twice, so that a proof cannot be replayed.
pub(crate) type Nonce = [u8; 32];

/// The end that proves: the proof of one end cannot be sent back as that of the other.
#[derive(Clone, Copy)]
pub(super) enum Role {
    Connecting,
    Accepting,
}

/// A key, of which the token or a session cannot be read.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// The secret of a job with this token; without one, a secret that everybody knows.
    pub(crate) fn new(token: Option<&Token>) -> Self {
        let mut mac = keyed(b"burn-shard token 1");
        mac.update(token.map_or(&[], Token::as_bytes));
        Self(mac.finalize().into_bytes().into())
    }

    /// The secret of one meeting of the job: what was in another, earlier one, does not fit.
    pub(crate) fn of_session(&self, session: &Nonce) -> Self {
        let mut mac = keyed(&self.0);
        mac.update(b"session");
        mac.update(session);
        Self(mac.finalize().into_bytes().into())
    }

    /// Shows that the end `role` knows the secret and means `payload`, in a conversation with these nonces.
    pub(super) fn prove(&self, role: Role, nonces: [&Nonce; 2], payload: &[u8]) -> [u8; 32] {
        self.mac(role, nonces, payload)
            .finalize()
            .into_bytes()
            .into()
    }

    /// Whether `proof` is what [`Secret::prove`] returns; takes the same time whatever is wrong.
    pub(super) fn verify(
        &self,
        proof: &[u8],
        role: Role,
        nonces: [&Nonce; 2],
        payload: &[u8],
    ) -> bool {
        self.mac(role, nonces, payload).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: Role, nonces: [&Nonce; 2], payload: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&self.0);
        // All but the last have a fixed length, so that no two lists give the same bytes.
        mac.update(match role {
            Role::Connecting => b"connecting",
            Role::Accepting => b"accepting ",
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
