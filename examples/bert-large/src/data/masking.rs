//! Which tokens are hidden, and what stands in their place.

use rand::Rng;
use rand::seq::{IndexedRandom, index};

use super::tokenizer::Vocabulary;

/// The share of tokens that the model has to find, as in the BERT paper.
const MASKED: f64 = 0.15;
/// The share of hidden tokens that `[MASK]` replaces; a random word replaces half of the others.
const AS_MASK: f64 = 0.8;

/// A hidden token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Where it was.
    pub position: usize,
    /// What it was.
    pub token: u32,
}

/// Hides 15 % of the tokens at `candidates` (at least one, if there are any): 80 % of them
/// become `[MASK]`, 10 % a random word, 10 % stay. Returns what was hidden, by position.
pub fn hide(
    ids: &mut [u32],
    candidates: &[usize],
    vocabulary: &Vocabulary,
    rng: &mut impl Rng,
) -> Vec<Hidden> {
    if candidates.is_empty() {
        return Vec::new();
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a sequence length"
    )]
    let count = (candidates.len() as f64 * MASKED).round().max(1.0) as usize;
    let mut chosen = index::sample(rng, candidates.len(), count).into_vec();
    chosen.sort_unstable();
    let mut hide = |position: usize| {
        let token = ids[position];
        if rng.random_bool(AS_MASK) {
            ids[position] = vocabulary.mask;
        } else if rng.random_bool(0.5) {
            ids[position] = vocabulary.words.choose(rng).copied().unwrap_or(token);
        }
        Hidden { position, token }
    };
    chosen
        .into_iter()
        .map(|index| hide(candidates[index]))
        .collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const MASK: u32 = 4;

    /// Words are the even ids.
    fn vocabulary() -> Vocabulary {
        Vocabulary {
            size: 5_000,
            unknown: 1,
            cls: 2,
            sep: 3,
            mask: MASK,
            words: (6..10_000).step_by(2).collect(),
        }
    }

    #[test]
    fn fifteen_percent_are_hidden_eighty_ten_ten() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut hidden, mut masks, mut kept) = (0, 0, 0);
        for _ in 0..1000 {
            let original: Vec<u32> = (0..100).map(|i| 100 + i).collect();
            let mut ids = original.clone();
            let candidates: Vec<usize> = (10..90).collect();
            for found in hide(&mut ids, &candidates, &vocabulary(), &mut rng) {
                assert!((10..90).contains(&found.position));
                assert_eq!(found.token, original[found.position]);
                hidden += 1;
                masks += usize::from(ids[found.position] == MASK);
                kept += usize::from(ids[found.position] == found.token);
                let shown = ids[found.position];
                assert!(shown == found.token || shown.is_multiple_of(2));
            }
        }
        assert_eq!(hidden, 12_000);
        // Binomial: the standard deviation of a share of 12,000 is at most 0.0037.
        assert!((masks as f64 / 12_000.0 - 0.8).abs() < 0.015, "{masks}");
        assert!((kept as f64 / 12_000.0 - 0.1).abs() < 0.015, "{kept}");
    }

    #[test]
    fn a_short_row_hides_one_token_and_an_empty_one_none() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut ids = [2, 7, 3];
        assert_eq!(
            hide(&mut ids, &[1], &vocabulary(), &mut rng),
            [Hidden {
                position: 1,
                token: 7
            }]
        );
        assert_eq!(hide(&mut ids, &[], &vocabulary(), &mut rng), []);
    }
}
