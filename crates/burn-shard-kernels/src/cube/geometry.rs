//! How many elements a unit takes, how wide its vectors are, how many units there are.

use cubecl::client::Client;
use cubecl::prelude::*;

/// Vectors a unit of a CPU walks at once. Long runs are what hides the cost of a unit there; from
/// 1024 on there was no difference.
const CPU_RUN: usize = 4096;
/// Units per core below which a run is cut shorter, so that all cores get some.
const CPU_UNITS_PER_CORE: usize = 4;

/// The launch of a kernel that walks `len` vectors from `start` on, elements apart from each other.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    /// Elements per vector.
    pub(crate) vector: usize,
    /// First vector.
    pub(crate) start: usize,
    /// Number of vectors.
    pub(crate) len: usize,
    /// Vectors per unit: 1 on a GPU, where neighbouring units read neighbouring vectors.
    pub(crate) run: usize,
    pub(crate) cube_dim: CubeDim,
    pub(crate) cube_count: CubeCount,
    pub(crate) address: AddressType,
}

impl Geometry {
    /// The launch for elements `start..start + numel` of buffers whose widest element has
    /// `elem_bytes`.
    pub(crate) fn new(client: &Client, elem_bytes: usize, start: usize, numel: usize) -> Self {
        let vector = vector_width(client, elem_bytes, &[start, numel]);
        Self {
            start: start / vector,
            address: address_type(start.saturating_add(numel)),
            ..Self::whole_vectors(client, vector, numel / vector)
        }
    }

    /// The launch for vectors `0..len` of a given width.
    pub(crate) fn whole_vectors(client: &Client, vector: usize, len: usize) -> Self {
        let run = match cpu_cores(client) {
            Some(cores) => len.div_ceil(cores * CPU_UNITS_PER_CORE).clamp(1, CPU_RUN),
            None => 1,
        };
        let units = len.div_ceil(run);
        let cube_dim = CubeDim::new(client, units.min(u32::MAX as usize));
        Self {
            vector,
            start: 0,
            len,
            run,
            cube_dim,
            cube_count: cubecl::calculate_cube_count_elemwise(client, units, cube_dim),
            address: address_type(len.saturating_mul(vector)),
        }
    }

    pub(crate) fn walk(&self) -> WalkLaunch {
        WalkLaunch::new(self.start, self.len, self.run)
    }
}

pub(crate) fn cpu_cores(client: &Client) -> Option<usize> {
    client
        .properties()
        .hardware
        .num_cpu_cores
        .map(|cores| cores as usize)
}

/// 64-bit indices where any index, or the last unit of a grid that is rounded up, may pass 2^31.
pub(crate) fn address_type(furthest: usize) -> AddressType {
    AddressType::from_len_signed(furthest)
}

/// The widest vector the runtime likes that divides all of `divisors`.
pub(crate) fn vector_width(client: &Client, elem_bytes: usize, divisors: &[usize]) -> usize {
    client
        .io_optimized_vector_sizes(elem_bytes)
        .find(|&width| divisors.iter().all(|divisor| divisor.is_multiple_of(width)))
        .unwrap_or(1)
}

/// The vectors of a kernel's walk.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(crate) struct Walk {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) run: usize,
}
