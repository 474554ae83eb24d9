//! The shared secret of a job.

use std::fmt;

use super::PlacementError;

pub(super) const VARIABLE: &str = "BURN_SHARD_TOKEN";

/// The shared secret of a job: any bytes, compared as they are. `Debug` does not show them.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// Fewest bytes of a token that is hard to guess.
    pub(crate) const STRONG_BYTES: usize = 16;
    /// Fewest different bytes among them.
    pub(crate) const STRONG_DIFFERENT: usize = 8;

    /// A token of these bytes.
    ///
    /// # Errors
    ///
    /// Refuses one that is empty or only white space ([`PlacementError::Empty`]).
    ///
    /// # Examples
    ///
    /// ```
    /// # use burn_shard_comm::Token;
    /// assert!(Token::new("from head -c 32 /dev/urandom | base64").is_ok());
    /// assert!(Token::new("").is_err());
    /// ```
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, PlacementError> {
        let bytes = bytes.into();
        if bytes.trim_ascii().is_empty() {
            return Err(PlacementError::Empty { variable: VARIABLE });
        }
        Ok(Self(bytes))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it may be used where strangers can reach a port: somebody who listens in a rank's place can try
    /// tokens on what the rank sends, as fast as a hash is computed. Length and variety say little about a
    /// secret, but exclude words.
    pub(crate) fn is_strong(&self) -> bool {
        let mut different = self.0.clone();
        different.sort_unstable();
        different.dedup();
        self.0.len() >= Self::STRONG_BYTES && different.len() >= Self::STRONG_DIFFERENT
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_strong_if_it_is_long_and_of_many_bytes() {
        let strong = |token: &[u8]| Token::new(token).unwrap().is_strong();
        assert!(strong(b"0123456789abcdef"));
        assert!(strong(&[
            0xff, 1, 2, 3, 4, 5, 6, 0xfe, 0xff, 0xff, 0xff, 0xff, 1, 1, 1, 1
        ]));
        for weak in [
            &b"secret"[..],
            b"0123456789abcde",
            b"aaaaaaaaaaaaaaaaaaaaaaaa",
            b"abcabcabcabcabcabc",
        ] {
            assert!(!strong(weak), "{weak:?}");
        }
    }

    #[test]
    fn a_token_is_never_shown_and_never_empty() {
        assert_eq!(format!("{:?}", Token::new("secret").unwrap()), "Token(..)");
        for empty in ["", " ", "\n"] {
            assert!(Token::new(empty).is_err(), "{empty:?}");
        }
    }
}
