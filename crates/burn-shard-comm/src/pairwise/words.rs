//! What ranks tell each other about failures and calls, as bytes.
//!
//! A failing rank leaves with *words*: the first cause it knows of, so that all ranks name the same
//! one. Ranks that disagree send each other their whole [`Call`]s.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use siphasher::sip128::SipHasher13;

use crate::{
    call::Call,
    communicator::{Collective, ReduceOp},
    dtype::DType,
    error::{Error, with_ranks},
};

/// Version of what travels between ranks; ranks of other versions are refused.
pub(super) const VERSION: u8 = 2;

/// Most bytes of a text in words; what is longer is cut.
pub(super) const TEXT_BYTES: usize = 2048;
/// Most ranks named in words.
const RANKS: usize = 256;
/// Most bytes of an encoded call.
pub(super) const CALL_BYTES: usize = 1 << 20;
/// Most segments of an encoded call, so that it is never longer; the rest is left out.
const SEGMENTS: usize = CALL_BYTES / 10 - 10;

/// Color and ranks of the sub-group that words are about.
type InGroup = Option<(usize, Vec<usize>)>;

#[derive(Serialize, Deserialize)]
enum Words {
    Deadline {
        rank: usize,
        collective: u8,
        sequence: u64,
        waited: Duration,
        missing: Vec<usize>,
    },
    RankLeft {
        rank: usize,
        collective: u8,
        sequence: u64,
        missing: Vec<usize>,
    },
    Aborted {
        rank: usize,
        reason: String,
    },
    RankPanicked {
        rank: usize,
        message: String,
    },
    RankDied {
        rank: usize,
        peer: usize,
        message: String,
    },
    OutOfStep {
        rank: usize,
        peer: usize,
        message: String,
    },
}

/// The words for a failure of `rank`.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "what is not told as itself is told as a text"
)]
pub(super) fn encode(rank: usize, error: &Error) -> Vec<u8> {
    let (group, cause) = error.root_cause_in();
    let words = match cause {
        Error::Deadline {
            rank,
            collective,
            sequence,
            waited,
            missing,
        } => Words::Deadline {
            rank: *rank,
            collective: *collective as u8,
            sequence: *sequence,
            waited: *waited,
            missing: missing.iter().copied().take(RANKS).collect(),
        },
        Error::RankLeft {
            rank,
            collective,
            sequence,
            missing,
        } => Words::RankLeft {
            rank: *rank,
            collective: *collective as u8,
            sequence: *sequence,
            missing: missing.iter().copied().take(RANKS).collect(),
        },
        Error::Aborted { rank, reason } => Words::Aborted {
            rank: *rank,
            reason: shortened(reason),
        },
        Error::RankPanicked { rank, message } => Words::RankPanicked {
            rank: *rank,
            message: shortened(message),
        },
        Error::RankDied {
            rank,
            peer,
            message,
        } => Words::RankDied {
            rank: *rank,
            peer: *peer,
            message: shortened(message),
        },
        Error::OutOfStep {
            rank,
            peer,
            message,
        } => Words::OutOfStep {
            rank: *rank,
            peer: *peer,
            message: shortened(message),
        },
        other => Words::Aborted {
            rank,
            reason: shortened(&match group {
                Some((_, ranks)) => with_ranks(other, ranks),
                None => other.to_string(),
            }),
        },
    };
    let mut bytes = vec![VERSION];
    let group = group.map(|(color, ranks)| {
        let ranks: Vec<usize> = ranks.iter().copied().take(RANKS).collect();
        (color, ranks)
    });
    bytes.extend(postcard::to_stdvec(&(group, words)).expect("words should be encodable"));
    bytes
}

/// What `peer` meant; `rank` is the one that heard it.
pub(super) fn decode(rank: usize, peer: usize, bytes: &[u8]) -> Error {
    let unknown = |what: String| Error::OutOfStep {
        rank,
        peer,
        message: format!("left with words that mean nothing here: {what}"),
    };
    let (group, words) = match bytes.split_first() {
        Some((&VERSION, rest)) => match postcard::from_bytes::<(InGroup, Words)>(rest) {
            Ok(words) => words,
            Err(error) => return unknown(format!("{error} ({} bytes)", bytes.len())),
        },
        Some((version, _)) => return unknown(format!("version {version}, expected {VERSION}")),
        None => return unknown("none".to_owned()),
    };
    let of = |collective: u8| {
        let known = Collective::ALL.get(usize::from(collective)).copied();
        known.unwrap_or(Collective::Barrier)
    };
    let error = match words {
        Words::Deadline {
            rank,
            collective,
            sequence,
            waited,
            missing,
        } => Error::Deadline {
            rank,
            collective: of(collective),
            sequence,
            waited,
            missing,
        },
        Words::RankLeft {
            rank,
            collective,
            sequence,
            missing,
        } => Error::RankLeft {
            rank,
            collective: of(collective),
            sequence,
            missing,
        },
        Words::Aborted { rank, reason } => Error::Aborted { rank, reason },
        Words::RankPanicked { rank, message } => Error::RankPanicked { rank, message },
        Words::RankDied {
            rank,
            peer,
            message,
        } => Error::RankDied {
            rank,
            peer,
            message,
        },
        Words::OutOfStep {
            rank,
            peer,
            message,
        } => Error::OutOfStep {
            rank,
            peer,
            message,
        },
    };
    match group {
        Some((color, ranks)) => Error::SubGroup {
            color,
            ranks: ranks.into(),
            error: Arc::new(error),
        },
        None => error,
    }
}

pub(super) fn shortened(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[derive(Serialize, Deserialize)]
struct Written {
    collective: u8,
    dtype: Option<u8>,
    op: Option<u8>,
    root: Option<usize>,
    numels: Vec<usize>,
    label: u64,
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// What ranks compare of a call: a hash of all of its bytes.
pub(super) fn hash_call(written: &[u8]) -> u128 {
    SipHasher13::new_with_key(b"burn-shard calls")
        .hash(written)
        .as_u128()
}

/// What tells a call from others, the same on every machine.
pub(crate) fn identity(call: &Call) -> u128 {
    hash_call(&encode_call(call))
}

/// A call as bytes; equal calls have equal bytes on every machine.
pub(super) fn encode_call(call: &Call) -> Vec<u8> {
    encode_segments(call, usize::MAX)
}

/// A call as at most [`CALL_BYTES`] bytes: of very long lists the beginning.
pub(super) fn encode_call_bounded(call: &Call) -> Vec<u8> {
    encode_segments(call, SEGMENTS)
}

fn encode_segments(call: &Call, most: usize) -> Vec<u8> {
    let written = Written {
        collective: call.collective as u8,
        dtype: call.dtype.map(|dtype| dtype as u8),
        op: call.op.map(|op| op as u8),
        root: call.root,
        numels: call.numels.iter().copied().take(most).collect(),
        label: call.label,
    };
    postcard::to_stdvec(&written).expect("a call should be encodable")
}

/// The call of `peer`; an error says what is wrong with the bytes.
pub(super) fn decode_call(bytes: &[u8]) -> Result<Call, String> {
    let written: Written = postcard::from_bytes(bytes).map_err(|error| error.to_string())?;
    let unknown = |what: &str, number: u8| format!("{what} number {number} is not known here");
    let dtype = written.dtype.map(|number| {
        let known = DType::ALL.get(usize::from(number)).copied();
        known.ok_or_else(|| unknown("dtype", number))
    });
    let op = written.op.map(|number| {
        let known = OPS.get(usize::from(number)).copied();
        known.ok_or_else(|| unknown("operation", number))
    });
    let collective = Collective::ALL.get(usize::from(written.collective));
    Ok(Call {
        collective: *collective.ok_or_else(|| unknown("collective", written.collective))?,
        dtype: dtype.transpose()?,
        op: op.transpose()?,
        root: written.root,
        numels: written.numels,
        label: written.label,
        description: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_way() {
        let collective = Collective::AllGather;
        let errors = [
            Error::Deadline {
                rank: 3,
                collective,
                sequence: 1 << 40,
                waited: Duration::from_millis(1234),
                missing: vec![0, 500],
            },
            Error::RankLeft {
                rank: 0,
                collective,
                sequence: 7,
                missing: vec![1],
            },
            Error::Aborted {
                rank: 1,
                reason: "out of data".to_owned(),
            },
            Error::RankPanicked {
                rank: 2,
                message: String::new(),
            },
            Error::RankDied {
                rank: 2,
                peer: 1,
                message: "connection reset".to_owned(),
            },
            Error::OutOfStep {
                rank: 2,
                peer: 1,
                message: "?".to_owned(),
            },
        ];
        for error in errors {
            let heard = decode(9, 8, &encode(5, &error));
            assert_eq!(format!("{heard:?}"), format!("{error:?}"));
            let error = Error::SubGroup {
                color: 3,
                ranks: [7, 2].into(),
                error: Arc::new(error),
            };
            let heard = decode(9, 8, &encode(5, &error));
            assert_eq!(format!("{heard:?}"), format!("{error:?}"));
        }
        // The first cause is told, not what followed from it.
        let cause = Error::Aborted {
            rank: 1,
            reason: "first".to_owned(),
        };
        let poisoned = Error::Poisoned {
            rank: 0,
            collective,
            cause: std::sync::Arc::new(cause.clone()),
        };
        assert_eq!(encode(0, &poisoned), encode(0, &cause));
    }

    #[test]
    fn words_are_bounded_and_nonsense_is_an_error() {
        let reason = "ä".repeat(100_000);
        let words = encode(0, &Error::Aborted { rank: 0, reason });
        assert!(words.len() < TEXT_BYTES + 16);
        assert!(matches!(
            decode(1, 0, &words),
            Error::Aborted { rank: 0, .. }
        ));
        let mut bytes = words;
        for _ in 0..200 {
            for bad in [&bytes[..bytes.len() / 2], &bytes[1..], &[7; 40], &[]] {
                let error = decode(1, 0, bad);
                assert!(error.to_string().contains("rank 0"), "{error}");
            }
            bytes.pop();
        }
    }

    #[test]
    fn calls_survive_the_way() {
        for collective in Collective::ALL {
            for dtype in DType::ALL {
                for op in OPS {
                    let call = Call {
                        collective,
                        dtype: Some(dtype),
                        op: Some(op),
                        root: Some(300),
                        numels: vec![0, 1, usize::MAX],
                        label: u64::MAX,
                        description: String::new(),
                    };
                    assert_eq!(decode_call(&encode_call(&call)).unwrap(), call);
                }
            }
        }
        let call = crate::call::Caller::barrier();
        let bytes = encode_call(&call);
        assert_eq!(decode_call(&bytes).unwrap(), call);
        assert!(decode_call(&bytes[..2]).is_err());
        assert!(decode_call(&[9, 0, 0, 0, 0, 0]).is_err());
        let mut long = call;
        long.numels = vec![usize::MAX; 200_000];
        assert!(encode_call_bounded(&long).len() <= CALL_BYTES);
    }
}
