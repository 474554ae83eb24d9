//! What the tests and figures of the CubeCL kernels share: clients, buffers, data.
//!
//! A package of its own, so that kernels are tested without building Burn: the crate of the kernels
//! has Burn among its dev-dependencies, for the parity of the host path.

use burn_shard_kernels::cube::{Dtype, FlatBuffer};
use cubecl::client::Client;
use half::{bf16, f16};

/// Defines, for each runtime this build has, a module with a test for each of `$name`, which gets a
/// client of that runtime.
#[macro_export]
macro_rules! on_every_runtime {
    ($($name:ident),* $(,)?) => {
        #[cfg(feature = "cpu")]
        mod cpu {
            $(#[test] fn $name() { super::$name(&$crate::client("cpu")); })*
        }
        #[cfg(feature = "wgpu")]
        mod wgpu {
            $(#[test] fn $name() { super::$name(&$crate::client("wgpu")); })*
        }
        #[cfg(feature = "cuda")]
        mod cuda {
            $(#[test] #[ignore = "needs 1 GPU"] fn $name() { super::$name(&$crate::client("cuda")); })*
        }
    };
}

/// Defines tests as [`on_every_runtime!`] does, on those runtimes alone that promise what they look at.
#[macro_export]
macro_rules! only_on {
    (cpu: $($name:ident),* $(,)?) => {
        #[cfg(feature = "cpu")]
        mod only_on_cpu {
            $(#[test] fn $name() { super::$name(&$crate::client("cpu")); })*
        }
    };
    (cuda: $($name:ident),* $(,)?) => {
        #[cfg(feature = "cuda")]
        mod only_on_cuda {
            $(#[test] #[ignore = "needs 1 GPU"] fn $name() { super::$name(&$crate::client("cuda")); })*
        }
    };
}

/// A client of the first device of a runtime.
///
/// # Panics
///
/// If the build has no such runtime, or the machine no such device.
#[must_use]
pub fn client(runtime: &str) -> Client {
    let device = match runtime {
        "cpu" => cubecl::Device::cpu(),
        "wgpu" => cubecl::Device::wgpu(cubecl::device::WgpuDeviceKind::DefaultDevice),
        "cuda" => cubecl::Device::cuda(0),
        other => panic!("no runtime is called {other}"),
    };
    device
        .unwrap_or_else(|error| {
            panic!("{runtime}: {error} (wgpu without a GPU: mesa-vulkan-drivers)")
        })
        .client()
}

/// Whether results have the bits of the scalar loops: no contraction, correctly rounded division.
#[must_use]
pub fn is_exact(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

/// The dtypes `client` has buffers of: all, but for WGSL.
///
/// # Panics
///
/// If another runtime lacks one, which its tests would otherwise leave out.
#[must_use]
pub fn dtypes(client: &Client) -> Vec<Dtype> {
    let all = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let dtypes: Vec<_> = all
        .into_iter()
        .filter(|dtype| dtype.is_supported(client))
        .collect();
    assert!(
        dtypes == all || client.name().contains("wgpu"),
        "{} has only {dtypes:?}",
        client.name()
    );
    dtypes
}

/// The bytes of `values` in `dtype`, rounded to the nearest even.
#[must_use]
pub fn to_bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::F16 => {
            let values: Vec<_> = values.iter().copied().map(f16::from_f32).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
        Dtype::BF16 => {
            let values: Vec<_> = values.iter().copied().map(bf16::from_f32).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
    }
}

/// The way back of [`to_bytes`].
#[must_use]
pub fn from_bytes(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytemuck::pod_collect_to_vec(bytes),
        Dtype::F16 => bytemuck::pod_collect_to_vec::<u8, f16>(bytes)
            .into_iter()
            .map(f16::to_f32)
            .collect(),
        Dtype::BF16 => bytemuck::pod_collect_to_vec::<u8, bf16>(bytes)
            .into_iter()
            .map(bf16::to_f32)
            .collect(),
    }
}

/// `values` as `dtype` has them.
#[must_use]
pub fn rounded(values: &[f32], dtype: Dtype) -> Vec<f32> {
    from_bytes(&to_bytes(values, dtype), dtype)
}

/// A buffer of its own for `values`, rounded to `dtype`.
///
/// # Panics
///
/// If the runtime refuses it.
#[must_use]
pub fn upload(client: &Client, values: &[f32], dtype: Dtype) -> FlatBuffer {
    let mut bytes = to_bytes(values, dtype);
    // Nothing is no allocation, and some runtimes want whole words.
    bytes.resize(bytes.len().next_multiple_of(64).max(64), 0);
    let handle = client.create_from_slice(&bytes);
    FlatBuffer::new(client, &handle, 0, values.len(), dtype).expect("a fresh buffer should be fine")
}

/// What a buffer holds.
///
/// # Panics
///
/// If the device fails.
#[must_use]
pub fn download(client: &Client, buffer: &FlatBuffer) -> Vec<f32> {
    let bytes = client
        .read_one(buffer.handle().clone())
        .expect("the device should answer");
    let numel_bytes = buffer.numel() * buffer.dtype().size_bytes();
    from_bytes(&bytes[..numel_bytes], buffer.dtype())
}

/// A splitmix64 stream.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `numel` values uniform in [-1, 1), times a power of two in 2^-12..2^4: sums and products do
    /// round, and squares are normal numbers even in `f32`.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "24 bits and small exponents"
    )]
    pub fn values(&mut self, numel: usize) -> Vec<f32> {
        (0..numel)
            .map(|_| {
                let bits = self.next();
                let mantissa = ((bits >> 40) as u32 as f32) / ((1 << 23) as f32) - 1.0;
                mantissa * 2f32.powi((bits % 17) as i32 - 12)
            })
            .collect()
    }
}

/// Asserts equal bits, where any NaN equals any other.
///
/// # Panics
///
/// If one differs.
#[track_caller]
pub fn assert_same_bits(what: &str, expected: &[f32], got: &[f32]) {
    assert_eq!(expected.len(), got.len(), "{what}: numel");
    for (i, (e, g)) in expected.iter().zip(got).enumerate() {
        assert!(
            e.to_bits() == g.to_bits() || (e.is_nan() && g.is_nan()),
            "{what}[{i}]: expected {e:e} ({:#010x}), got {g:e} ({:#010x})",
            e.to_bits(),
            g.to_bits(),
        );
    }
}
