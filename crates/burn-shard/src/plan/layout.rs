//! Where the elements of one parameter, and of one group of parameters, lie. Pure arithmetic.
//!
//! A parameter of `numel` elements is flattened, padded to a multiple of `world_size` and cut
//! evenly: rank `r` owns elements `[r * shard_numel, (r + 1) * shard_numel)`, the last ranks' tail
//! being padding. No rank owns "the big tensor", and every shard has a length known everywhere.

use burn_shard_comm::{DType, shard_numel};

/// Buffers start their tensors at multiples of this many bytes: one cache line, and enough for
/// any vector register.
pub(crate) const ALIGN_BYTES: usize = 64;

/// What the plan knows of one parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParamSpec {
    /// Module path, for example `encoder.layers.3.linear.weight`. The name all ranks agree on.
    pub path: String,
    /// Full shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether it required a gradient when the module was wrapped. Frozen parameters have groups
    /// of their own.
    pub trainable: bool,
}

impl ParamSpec {
    /// A trainable `f32` parameter.
    #[cfg(test)]
    pub(crate) fn f32(path: &str, shape: &[usize]) -> Self {
        Self {
            path: path.into(),
            shape: shape.to_vec(),
            dtype: DType::F32,
            trainable: true,
        }
    }

    /// Number of elements. The plan has checked that it does not overflow.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the full parameter.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Shape of this parameter's shard, of the same rank `D`.
    ///
    /// A vector's is `[shard_numel]`. That of a matrix keeps its first axis, which layers of Burn ask the
    /// stored tensor for: `[d_0, ceil(d_1 d_2 .. / world_size), 1, ..]`. It counts elements, not
    /// rows: the first `shard_numel` of them are the shard's, the few that remain are zeros.
    #[must_use]
    pub fn shard_shape(&self, world_size: usize) -> Vec<usize> {
        let mut shape = vec![1; self.shape.len()];
        match self.shape.as_slice() {
            [] => {}
            [first, rest @ ..] => {
                let row_numel: usize = rest.iter().product();
                // Rows that are shorter than that would leave ranks without any element.
                if rest.is_empty() || row_numel < world_size {
                    shape[0] = shard_numel(self.numel(), world_size);
                } else {
                    shape[0] = *first;
                    shape[1] = shard_numel(row_numel, world_size);
                }
            }
        }
        shape
    }
}

/// Element offsets of one group's members in the group's two flat buffers.
///
/// *shard buffer*: this rank's shards one after the other. *full buffer*: the parameters one after
/// the other, each padded to `world_size * shard_numel`, so that the shard of any rank is a
/// contiguous run of it. Both keep every tensor aligned to [`ALIGN_BYTES`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupLayout {
    pub(crate) members: Vec<MemberLayout>,
    /// Elements of the shard buffer, alignment gaps included.
    pub(crate) shard_len: usize,
    /// Elements of the full buffer, padding and alignment gaps included.
    pub(crate) full_len: usize,
}

/// One member of a [`GroupLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberLayout {
    pub(crate) numel: usize,
    /// Elements of each rank's shard, padding of the last ones included.
    pub(crate) shard_numel: usize,
    /// Elements of the stored shard: those of [`ParamSpec::shard_shape`].
    pub(crate) slot_numel: usize,
    pub(crate) shard_offset: usize,
    pub(crate) full_offset: usize,
}

impl MemberLayout {
    /// Elements of the full parameter that `rank` owns, padding left out. Empty if all of them lie
    /// before its shard.
    pub(crate) fn owned(&self, rank: usize) -> std::ops::Range<usize> {
        let start = (rank * self.shard_numel).min(self.numel);
        start..((rank + 1) * self.shard_numel).min(self.numel)
    }
}

impl GroupLayout {
    /// Lays out `params`, aligned to `align_bytes` (a power of two) or [`ALIGN_BYTES`], whichever is
    /// more, in elements of `dtype`. `None` if a length overflows `usize`.
    pub(crate) fn new(
        params: &[&ParamSpec],
        dtype: DType,
        align_bytes: usize,
        world_size: usize,
    ) -> Option<Self> {
        let align = align_bytes.max(ALIGN_BYTES) / dtype.size_bytes();
        let mut layout = Self {
            members: Vec::new(),
            shard_len: 0,
            full_len: 0,
        };
        for param in params {
            let numel = param.numel();
            let shard_numel = shard_numel(numel, world_size);
            let slot_numel = param.shard_shape(world_size).iter().product::<usize>();
            layout.members.push(MemberLayout {
                numel,
                shard_numel,
                slot_numel,
                shard_offset: layout.shard_len,
                full_offset: layout.full_len,
            });
            let padded = shard_numel.checked_mul(world_size)?;
            layout.shard_len = layout
                .shard_len
                .checked_add(slot_numel.checked_next_multiple_of(align)?)?;
            layout.full_len = layout
                .full_len
                .checked_add(padded.checked_next_multiple_of(align)?)?;
        }
        layout
            .full_len
            .checked_mul(dtype.size_bytes())
            .map(|_| layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(shape: &[usize]) -> ParamSpec {
        ParamSpec::f32("p", shape)
    }

    #[test]
    fn shards_cover_every_element_once_whatever_the_size() {
        for world_size in 1..=9 {
            for numel in (0..70).chain([97, 1009, 1 << 31, (1 << 33) + 7, (1 << 40) + 1]) {
                let layout =
                    GroupLayout::new(&[&spec(&[numel])], DType::F32, 1, world_size).unwrap();
                let member = layout.members[0];
                let mut next = 0;
                for rank in 0..world_size {
                    let owned = member.owned(rank);
                    assert_eq!(owned.start, next, "numel {numel} world_size {world_size}");
                    assert!(owned.len() <= member.shard_numel);
                    next = owned.end;
                }
                assert_eq!(next, numel);
                // Even: padding is less than one element per rank.
                assert!(member.shard_numel * world_size < numel + world_size);
            }
        }
    }

    #[test]
    fn members_never_overlap_and_start_aligned() {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            for world_size in 1..=5 {
                let specs = [0, 1, 2, 15, 16, 17, 0, 255, 1021, 3].map(|numel| spec(&[numel]));
                let matrices = [[7, 15], [1, 3], [5, 1], [0, 4]].map(|shape| spec(&shape));
                let params: Vec<&ParamSpec> = specs.iter().chain(&matrices).collect();
                let layout = GroupLayout::new(&params, dtype, 1, world_size).unwrap();
                let (mut shard_end, mut full_end) = (0, 0);
                for member in &layout.members {
                    assert!(member.shard_offset >= shard_end && member.full_offset >= full_end);
                    assert_eq!(member.shard_offset * dtype.size_bytes() % ALIGN_BYTES, 0);
                    assert_eq!(member.full_offset * dtype.size_bytes() % ALIGN_BYTES, 0);
                    assert!(member.slot_numel >= member.shard_numel);
                    shard_end = member.shard_offset + member.slot_numel;
                    full_end = member.full_offset + member.shard_numel * world_size;
                }
                assert!(shard_end <= layout.shard_len && full_end <= layout.full_len);
            }
        }
    }

    #[test]
    fn sizes_beyond_32_bits_keep_their_offsets_and_overflow_is_noticed() {
        let (first, second) = (spec(&[(1 << 32) + 3]), spec(&[(1 << 33) + 1]));
        let layout = GroupLayout::new(&[&first, &second], DType::F32, 1, 3).unwrap();
        assert_eq!(layout.members[0].shard_numel, 1_431_655_767);
        assert_eq!(layout.members[1].full_offset, 4_294_967_312);
        assert_eq!(layout.members[1].owned(2).end, (1 << 33) + 1);
        let huge = spec(&[usize::MAX / 2]);
        assert_eq!(GroupLayout::new(&[&huge], DType::F32, 1, 2), None);
    }

    #[test]
    fn a_shard_keeps_the_rank_and_the_first_axis_of_its_tensor() {
        assert_eq!(spec(&[7, 15]).shard_shape(2), [7, 8]);
        assert_eq!(spec(&[8, 4, 3, 3]).shard_shape(3), [8, 12, 1, 1]);
        assert_eq!(spec(&[9]).shard_shape(2), [5]);
        assert_eq!(spec(&[1]).shard_shape(4), [1]);
        assert_eq!(spec(&[0, 3]).shard_shape(2), [0, 2]);
        assert_eq!(spec(&[3, 0]).shard_shape(4), [0, 1]);
        assert_eq!(spec(&[9, 2]).shard_shape(4), [5, 1]);
        assert_eq!(spec(&[]).shard_shape(4), [0usize; 0]);
    }
}
