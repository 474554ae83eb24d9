//! Bytes of a file to text, whatever encoding they have.

use chardetng::EncodingDetector;
use encoding_rs::{Encoding, UTF_8, UTF_16BE, UTF_16LE};

/// Text with more control characters than one in this many is none.
const TEXT_PER_CONTROL: usize = 50;

/// What a file's bytes are.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decoded {
    /// Text, without a byte order mark.
    Text {
        text: String,
        /// `Some` unless it is UTF-8.
        encoding: Option<&'static str>,
        /// Sequences of bytes that no character has, left out.
        damaged: usize,
    },
    /// No text in any encoding.
    Binary,
}

/// Decodes what has a byte order mark by it, UTF-8 and UTF-16 by how they look, and older encodings
/// by the guess of the detector that browsers use.
pub(super) fn decode(bytes: &[u8]) -> Decoded {
    if let Some((encoding, mark)) = Encoding::for_bom(bytes) {
        return decode_as(encoding, &bytes[mark..]);
    }
    if bytes.contains(&0) {
        return match utf_16(bytes) {
            Some(encoding) => decode_as(encoding, bytes),
            None => Decoded::Binary,
        };
    }
    let controls = bytes
        .iter()
        .filter(|&&byte| byte < 32 && !matches!(byte, b'\t' | b'\n' | b'\r' | 0x0c | 0x1b));
    if controls.count() * TEXT_PER_CONTROL > bytes.len() {
        return Decoded::Binary;
    }
    let (mut valid, mut damaged) = (0, 0);
    for chunk in bytes.utf8_chunks() {
        valid += chunk.valid().chars().filter(|c| !c.is_ascii()).count();
        damaged += usize::from(!chunk.invalid().is_empty());
    }
    // One cut character does not make another encoding of a file.
    if damaged == 0 || valid > damaged {
        return decode_as(UTF_8, bytes);
    }
    let mut detector = EncodingDetector::new();
    detector.feed(bytes, true);
    decode_as(detector.guess(None, false), bytes)
}

fn decode_as(encoding: &'static Encoding, bytes: &[u8]) -> Decoded {
    const REPLACEMENT: char = '\u{fffd}';
    let (text, had_errors) = encoding.decode_without_bom_handling(bytes);
    let mut text = text.into_owned();
    let mut damaged = 0;
    if had_errors {
        damaged = text.matches(REPLACEMENT).count();
        text.retain(|c| c != REPLACEMENT);
    }
    Decoded::Text {
        text,
        encoding: (encoding != UTF_8).then(|| encoding.name()),
        damaged,
    }
}

/// Text in Latin letters has a zero in nearly every other byte of UTF-16.
fn utf_16(bytes: &[u8]) -> Option<&'static Encoding> {
    let zeros = |parity: usize| {
        let bytes = bytes.iter().skip(parity).step_by(2);
        bytes.filter(|&&byte| byte == 0).count()
    };
    let (even, odd, units) = (zeros(0), zeros(1), bytes.len() / 2);
    let is_most = |zeros: usize, others: usize| zeros * 2 > units && others * 20 < units;
    match () {
        () if !bytes.len().is_multiple_of(2) => None,
        () if is_most(odd, even) => Some(UTF_16LE),
        () if is_most(even, odd) => Some(UTF_16BE),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &[u8]) -> (String, Option<&'static str>, usize) {
        match decode(bytes) {
            Decoded::Text {
                text,
                encoding,
                damaged,
            } => (text, encoding, damaged),
            Decoded::Binary => panic!("{bytes:?} is text"),
        }
    }

    fn utf_16_bytes(text: &str, order: fn(u16) -> [u8; 2]) -> Vec<u8> {
        text.encode_utf16().flat_map(order).collect()
    }

    #[test]
    fn byte_order_marks_are_no_text() {
        assert_eq!(
            text(b"\xef\xbb\xbf{\"text\""),
            ("{\"text\"".into(), None, 0)
        );
        let words = "naïve words";
        for (mark, order, name) in [
            (
                &b"\xff\xfe"[..],
                u16::to_le_bytes as fn(u16) -> [u8; 2],
                "UTF-16LE",
            ),
            (b"\xfe\xff", u16::to_be_bytes, "UTF-16BE"),
        ] {
            let marked = [mark, &utf_16_bytes(words, order)].concat();
            assert_eq!(text(&marked), (words.into(), Some(name), 0));
            // Without the mark, too.
            assert_eq!(text(&marked[2..]), (words.into(), Some(name), 0));
        }
    }

    #[test]
    fn older_encodings_are_guessed() {
        let words = "Der Bär läuft über die Straße, und die Möwe schläft. ".repeat(3);
        let latin_1: Vec<u8> = words.chars().map(|c| u8::try_from(c).unwrap()).collect();
        assert_eq!(text(&latin_1), (words, Some("windows-1252"), 0));
        let words = "日本語の文章です。犬が走っています。";
        let (shift_jis, _, _) = encoding_rs::SHIFT_JIS.encode(words);
        assert_eq!(text(&shift_jis), (words.into(), Some("Shift_JIS"), 0));
    }

    #[test]
    fn a_cut_character_is_left_out_and_counted() {
        let cut = &"Straße über Straße ß".as_bytes()[..23];
        assert_eq!(text(cut), ("Straße über Straße ".into(), None, 1));
    }

    #[test]
    fn what_is_no_text_is_binary() {
        assert_eq!(decode(&[7, 0, 0, 0, 1, 2, 0, 255, 3]), Decoded::Binary);
        assert_eq!(decode(&[1, 2, 3, 4, 200, 201, 5, 6]), Decoded::Binary);
        assert_eq!(text(b""), (String::new(), None, 0));
    }
}
