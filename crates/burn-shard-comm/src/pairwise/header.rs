//! Agreement: that all ranks have called the same collective, before anything of it is sent.
//!
//! Each rank sends a header of fixed size to all others and then reads theirs. Once that is done every
//! rank has arrived, so it is all a barrier needs. Small collectives send their elements right behind
//! the header, and are over after this one phase.
//!
//! All headers are sent before any is awaited. A rank that waits for a late one has therefore told
//! everybody that it is there itself, and is not taken for late by the others.

use super::{
    desk::Slots,
    group::Group,
    line::{Failure, Line},
    words::{
        CALL_BYTES, TEXT_BYTES, VERSION, decode_call, encode_call, encode_call_bounded, hash_call,
        shortened,
    },
};
use crate::{call::Call, segments::Segments};

/// Most bytes that follow a header to one rank. Twice this and a header are less than the 4 KiB that a
/// transport sends before the other end receives: a rank can be one collective ahead of another.
pub(super) const INLINE_BYTES: usize = 2000;

const HEADER_BYTES: usize = 40;
const MAGIC: [u8; 4] = [b'B', b'S', b'P', VERSION];

/// One rank's part in a collective.
#[derive(Clone, Copy)]
pub(super) struct Numbered<'a> {
    /// Whose turn it is, among all collectives of this rank.
    pub(super) ticket: u64,
    /// Number of the collective in its group.
    pub(super) sequence: u64,
    pub(super) group: &'a Group,
    pub(super) call: &'a Call,
    /// None: an announcement, a barrier, or a broadcast that this rank receives.
    pub(super) input: Option<&'a dyn Segments>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    /// Bytes that follow right away.
    inline_bytes: u32,
    /// Bytes of the encoded call, should ranks disagree.
    call_bytes: u32,
    /// Number of the group.
    group: u32,
    sequence: u64,
    /// Hash of the encoded call.
    hash: [u8; 16],
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.inline_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.call_bytes.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..].copy_from_slice(&self.hash);
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let (magic, rest) = bytes.split_at(4);
        if magic != MAGIC {
            return Err(format!(
                "sent a header that begins with {magic:?}, expected {MAGIC:?} (all ranks have to run the same version)"
            ));
        }
        let u32_at = |at: usize| {
            let bytes = rest[at..at + 4].try_into();
            u32::from_le_bytes(bytes.expect("4 bytes should be 4"))
        };
        let header = Self {
            inline_bytes: u32_at(0),
            call_bytes: u32_at(4),
            group: u32_at(8),
            sequence: u64::from_le_bytes(rest[12..20].try_into().expect("8 bytes should be 8")),
            hash: rest[20..].try_into().expect("16 bytes should be 16"),
        };
        if to_usize(header.inline_bytes) > INLINE_BYTES || to_usize(header.call_bytes) > CALL_BYTES
        {
            return Err(format!("sent a header without sense: {header:?}"));
        }
        Ok(header)
    }
}

/// Returns once all ranks are known to have called the same as their collective of this number.
///
/// `inline(to)` is sent to rank `to` behind the header; what others sent is in their slot of `inbox`.
pub(super) fn agree(
    line: &mut Line<'_>,
    numbered: Numbered<'_>,
    inline: impl Fn(usize) -> Vec<u8>,
    inbox: &mut Slots<'_>,
) -> Result<(), Failure> {
    let Numbered {
        sequence,
        group,
        call,
        ..
    } = numbered;
    let written = encode_call(call);
    let hash = hash_call(&written);
    let written = if written.len() > CALL_BYTES {
        encode_call_bounded(call)
    } else {
        written
    };
    let mine = Header {
        inline_bytes: 0,
        call_bytes: to_u32(written.len()),
        group: group.number,
        sequence,
        hash: hash.to_le_bytes(),
    };
    let mut others = group.members.others();
    others.sort_unstable();
    line.begin(others);
    for (to, _) in line.rounds() {
        let bytes = inline(to);
        let inline_bytes = to_u32(bytes.len());
        line.send(
            to,
            &Header {
                inline_bytes,
                ..mine
            }
            .encode(),
        )?;
        if !bytes.is_empty() {
            line.send(to, &bytes)?;
        }
    }
    let mut headers = vec![mine; line.world_size()];
    for (_, from) in line.rounds() {
        let mut bytes = [0; HEADER_BYTES];
        line.receive(from, &mut bytes)?;
        let peer = line.peer(from);
        let header =
            Header::decode(&bytes).map_err(|message| Failure::OutOfStep { peer, message })?;
        if header.group != group.number {
            let message = "sent the header of another group's collective (ranks have to start the collectives of all their groups in one order)".to_owned();
            return Err(Failure::OutOfStep { peer, message });
        }
        if header.sequence != sequence {
            let found = header.sequence;
            let message = format!("sent the header of collective #{found}, expected #{sequence}");
            return Err(Failure::OutOfStep { peer, message });
        }
        if header.inline_bytes > 0 {
            line.receive(from, inbox.slot(from, to_usize(header.inline_bytes)))?;
        }
        headers[from] = header;
        line.missing.retain(|&rank| rank != peer);
    }
    if headers.iter().all(|header| header.hash == mine.hash) {
        return Ok(());
    }
    // Every rank has the same headers before it, and comes here.
    let own = call.described(numbered.input);
    let description = shortened(&own.description);
    let mut calls = vec![own; line.world_size()];
    for (to, from) in line.rounds() {
        let mut theirs = vec![0; to_usize(headers[from].call_bytes)];
        line.exchange(to, &written, from, &mut theirs)?;
        let peer = line.peer(from);
        calls[from] =
            decode_call(&theirs).map_err(|message| Failure::OutOfStep { peer, message })?;
    }
    for (to, from) in line.rounds() {
        calls[from].description = exchange_text(line, to, &description, from)?;
    }
    // Last words overtake data: nobody leaves before everybody has read all this.
    for (to, from) in line.rounds() {
        if line.exchange(to, &[1], from, &mut [0]).is_err() {
            break;
        }
    }
    Err(Failure::Mismatch(calls.into()))
}

/// Sends `text` to rank `to` while that of rank `from` comes.
fn exchange_text(
    line: &mut Line<'_>,
    to: usize,
    text: &str,
    from: usize,
) -> Result<String, Failure> {
    let mut length = [0; 4];
    line.exchange(to, &to_u32(text.len()).to_le_bytes(), from, &mut length)?;
    let bytes = to_usize(u32::from_le_bytes(length));
    if bytes > TEXT_BYTES {
        return Err(Failure::OutOfStep {
            peer: line.peer(from),
            message: format!("sent a description of {bytes} bytes, expected at most {TEXT_BYTES}"),
        });
    }
    let mut theirs = vec![0; bytes];
    line.exchange(to, text.as_bytes(), from, &mut theirs)?;
    Ok(String::from_utf8_lossy(&theirs).into_owned())
}

fn to_usize(bytes: u32) -> usize {
    usize::try_from(bytes).expect("a bounded length should fit a usize")
}

fn to_u32(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a bounded length should fit a u32")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_way_and_strange_ones_are_refused() {
        let header = Header {
            inline_bytes: 7,
            call_bytes: 1 << 20,
            group: 0xfedc_ba98,
            sequence: u64::MAX - 3,
            hash: *b"0123456789abcdef",
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        let mut strange = bytes;
        strange[3] += 1;
        assert!(
            Header::decode(&strange)
                .unwrap_err()
                .contains("same version")
        );
        for at in [6, 11] {
            let mut strange = bytes;
            strange[at] = 0xff;
            assert!(Header::decode(&strange).unwrap_err().contains("sense"));
        }
    }

    #[test]
    fn the_hash_is_the_same_in_every_build() {
        let call = crate::call::Caller::barrier();
        assert_eq!(
            hash_call(&encode_call(&call)),
            228_431_433_574_174_448_999_238_125_845_345_073_149
        );
    }
}
