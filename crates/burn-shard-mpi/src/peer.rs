//! What was exchanged with another rank, and what it says of that when it leaves.
//!
//! MPI keeps the order of messages with one tag, not that of a farewell among others: so a farewell
//! carries counts.

/// What was exchanged with another rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Peer {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Its own counts, once it has left in order.
    pub(crate) left: Option<Counts>,
}

/// Messages that a rank had sent to this one, and received from it, when it left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

impl Peer {
    /// Whether a message of it is still to come.
    pub(crate) fn may_send(&self) -> bool {
        self.left.is_none_or(|counts| self.received < counts.sent)
    }

    /// Whether it has received all that was sent to it, or may yet.
    pub(crate) fn may_receive(&self) -> bool {
        self.left.is_none_or(|counts| self.sent <= counts.received)
    }

    /// The counts and `words`, as they travel.
    pub(crate) fn letter(self, words: &[u8]) -> Vec<u8> {
        let mut letter = Vec::with_capacity(16 + words.len());
        letter.extend_from_slice(&self.sent.to_le_bytes());
        letter.extend_from_slice(&self.received.to_le_bytes());
        letter.extend_from_slice(words);
        letter
    }

    /// What a letter says.
    pub(crate) fn open(letter: &[u8]) -> (Counts, Vec<u8>) {
        let number = |at: usize| {
            let bytes = letter
                .get(at..at + 8)
                .and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let counts = Counts {
            sent: number(0),
            received: number(8),
        };
        (counts, letter.get(16..).unwrap_or_default().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_sent_before_it_left_is_waited_for() {
        let counts = Counts {
            sent: 3,
            received: 2,
        };
        let peer = |sent, received| Peer {
            sent,
            received,
            left: Some(counts),
        };
        assert!(peer(0, 2).may_send());
        assert!(!peer(0, 3).may_send());
        assert!(peer(2, 0).may_receive());
        assert!(!peer(3, 0).may_receive());
        assert!(Peer::default().may_send() && Peer::default().may_receive());
    }

    #[test]
    fn a_letter_says_what_was_written() {
        let peer = Peer {
            sent: 1 << 40,
            received: 7,
            left: None,
        };
        let (counts, words) = Peer::open(&peer.letter(b"why"));
        assert_eq!((counts.sent, counts.received), (1 << 40, 7));
        assert_eq!(words, b"why");
    }
}
