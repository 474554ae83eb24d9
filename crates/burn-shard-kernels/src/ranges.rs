//! Which elements of a flat buffer one launch steps.

use std::ops::Range;

/// Joins ranges that are neighbours but for padding: each that starts where the one before it ends, rounded
/// up to `align_numel` elements. A step makes one launch per range, so members of a group that follow each
/// other take one together.
///
/// The padding between them is then stepped too. That is harmless where parameters, gradients and moments
/// are zeros there, as `cube::pack` and `cube::zero` leave it: Adam, `AdamW` and SGD keep zeros, if Adam's
/// `epsilon` is not 0 (which would make 0 / 0 of them).
///
/// `ranges` are in order and share no element; empty ones are left out.
///
/// # Panics
///
/// If `align_numel` is 0.
///
/// # Examples
///
/// ```
/// use burn_shard_kernels::merge_ranges;
///
/// // Members of 10, 3 and 16 elements at multiples of 16; the one between the last two has no gradient.
/// let ranges = [0..10, 16..19, 48..64];
/// assert_eq!(merge_ranges(&ranges, 16), [0..19, 48..64]);
/// ```
#[must_use]
pub fn merge_ranges(ranges: &[Range<usize>], align_numel: usize) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if last.end.next_multiple_of(align_numel) == range.start => {
                last.end = range.end;
            }
            _ => merged.push(range.clone()),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members as a layout places them, and those of `stepped`.
    fn members(
        numels: &[usize],
        align: usize,
        stepped: impl Fn(usize) -> bool,
    ) -> Vec<Range<usize>> {
        let mut start = 0;
        let mut ranges = Vec::new();
        for (index, numel) in numels.iter().enumerate() {
            if stepped(index) {
                ranges.push(start..start + numel);
            }
            start = (start + numel).next_multiple_of(align);
        }
        ranges
    }

    #[test]
    fn adjacent_members_of_a_transformer_take_one_launch() {
        // The shards of 3 ranks of a block of BERT-large.
        let (hidden, inner) = (1024usize, 4096usize);
        let block = [
            hidden * hidden,
            hidden,
            hidden * hidden,
            hidden,
            hidden * hidden,
            hidden,
            hidden * hidden,
            hidden,
            hidden,
            hidden,
            hidden * inner,
            inner,
            inner * hidden,
            hidden,
            hidden,
            hidden,
        ];
        let shards: Vec<usize> = block.iter().map(|numel| numel.div_ceil(3)).collect();
        for align in [16, 64, 128] {
            let all = members(&shards, align, |_| true);
            assert_eq!(merge_ranges(&all, align).len(), 1);
            let but_one = members(&shards, align, |index| index != 5);
            assert_eq!(merge_ranges(&but_one, align).len(), 2);
            let every_other = members(&shards, align, |index| index % 2 == 0);
            assert_eq!(merge_ranges(&every_other, align).len(), 8);
        }
    }

    #[test]
    fn a_member_that_is_not_stepped_stays_outside() {
        for numels in [[1, 1, 1], [16, 1, 16], [15, 17, 3], [16, 16, 16], [7, 0, 9]] {
            let ranges = members(&numels, 16, |index| index != 1);
            let merged = merge_ranges(&ranges, 16);
            let skipped = members(&numels, 16, |index| index == 1).remove(0);
            for element in skipped {
                assert!(
                    merged.iter().all(|range| !range.contains(&element)),
                    "{numels:?}: {merged:?}"
                );
            }
        }
    }
}
