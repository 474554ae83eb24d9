//! What CUDA would run: the kernels as PTX, compiled without a driver, a GPU or CUDA's toolkit.
//!
//! For tests and for reading. `docs/ptx.md` has what an assembler makes of them.

use std::ffi::CStr;
use std::sync::Arc;

use cubecl::ir::features::Features;
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties,
    TargetProperties, VectorSize,
};
use cubecl::prelude::*;
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use cubecl_server::kernel::CubeKernel;

use super::adam::{AdamArgsCompilationArg, AdamVariant, adam_kernel};
use super::buffer::Dtype;
use super::geometry::WalkCompilationArg;
use super::norm::{clip_kernel, finish_kernel, fold_kernel, sum_kernel};
use super::pack::{Direction, PieceCompilationArg, batch_in_kernel, batch_out_kernel, move_kernel};
use super::sgd::{SgdArgsCompilationArg, SgdVariant, sgd_kernel};

/// One kernel, as PTX.
#[derive(Clone, Debug)]
pub struct Ptx {
    /// Which kernel, and what it was compiled for.
    pub name: String,
    /// How many buffers it reads, writes, in vectors of 16 bytes: `f32` in the widest vectors of CUDA.
    pub wide_loads: usize,
    /// Likewise.
    pub wide_stores: usize,
    /// The text.
    pub text: String,
}

/// Compiles each kernel, in the variants that differ in memory traffic, for compute capability
/// `arch` (80 for an A100, 90 for an H100), with 32-bit and with 64-bit indices.
///
/// # Panics
///
/// If CubeCL cannot compile one of them.
#[must_use]
pub fn compile_all(arch: u32) -> Vec<Ptx> {
    let mut all = Vec::new();
    for (address, suffix) in [(AddressType::U32, ""), (AddressType::U64, " 64-bit")] {
        for kernel in kernels(address) {
            all.push(Ptx {
                text: compile(arch, &*kernel.kernel),
                name: kernel.name + suffix,
                wide_loads: kernel.wide_loads,
                wide_stores: kernel.wide_stores,
            });
        }
    }
    all
}

struct Named {
    name: String,
    kernel: Box<dyn CubeKernel>,
    wide_loads: usize,
    wide_stores: usize,
}

fn named(
    name: &str,
    wide_loads: usize,
    wide_stores: usize,
    kernel: impl CubeKernel + 'static,
) -> Named {
    Named {
        name: name.into(),
        kernel: Box::new(kernel),
        wide_loads,
        wide_stores,
    }
}

/// Elements per vector: 16 bytes of `f32`.
const VECTOR: usize = 4;

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn kernels(address: AddressType) -> Vec<Named> {
    let settings = || KernelSettings::new(*CubeDim::new_1d(256), ExecutionMode::Unchecked, address);
    let target = || Arc::new(TargetProperties::default());
    let (f32s, bf16s) = (Dtype::F32.elem(), Dtype::BF16.elem());
    let walk = || WalkCompilationArg {
        start: (),
        len: (),
        run: (),
    };
    let adam = |variant, mixed: bool| {
        use ComptimeOptionCompilationArg::{None, Some};
        let low = if mixed { bf16s } else { f32s };
        let args = AdamArgsCompilationArg {
            lr: (),
            beta_1: (),
            beta_2: (),
            factor_1: (),
            factor_2: (),
            correction_1: (),
            correction_2: (),
            epsilon: (),
            decay: (),
        };
        adam_kernel::AdamKernel::new(
            settings(),
            properties(),
            target(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            if mixed { Some(buffer()) } else { None },
            if mixed { Some(buffer()) } else { None },
            if mixed { Some(buffer()) } else { None },
            if mixed { Some(buffer()) } else { None },
            walk(),
            args,
            VECTOR,
            variant,
            [low, f32s, low],
        )
    };
    let variant = |decoupled| AdamVariant {
        first: false,
        decoupled,
        decay: true,
    };
    let sgd = |nesterov| {
        use ComptimeOptionCompilationArg::{None, Some};
        let args = SgdArgsCompilationArg {
            lr: (),
            momentum: (),
            undampened: (),
            penalty: (),
        };
        let variant = SgdVariant {
            first: false,
            momentum: true,
            nesterov,
            decay: true,
        };
        sgd_kernel::SgdKernel::new(
            settings(),
            properties(),
            target(),
            buffer(),
            buffer(),
            Some(buffer()),
            None,
            None,
            None,
            None,
            walk(),
            args,
            VECTOR,
            variant,
            [f32s, f32s, f32s],
        )
    };
    let piece = || PieceCompilationArg {
        base: (),
        flat: (),
        len: (),
        padded: (),
    };
    let moving = |axes: usize, direction, dtypes| {
        move_kernel::MoveKernel::new(
            settings(),
            properties(),
            target(),
            buffer(),
            buffer(),
            std::iter::repeat_n((), axes).collect(),
            std::iter::repeat_n((), axes).collect(),
            piece(),
            (),
            (),
            VECTOR,
            true,
            direction,
            dtypes,
        )
    };
    /// Tensors per launch.
    const BATCH: usize = 8;
    vec![
        named("adam f32", 4, 3, adam(variant(false), false)),
        named("adamw f32", 4, 3, adam(variant(true), false)),
        named(
            "adamw bf16 with copy, clip, scale",
            3,
            3,
            adam(variant(true), true),
        ),
        named("sgd f32", 3, 2, sgd(false)),
        named("sgd nesterov f32", 3, 2, sgd(true)),
        named("pack f32", 1, 1, moving(0, Direction::In, [f32s, f32s])),
        named(
            "pack f32 to bf16",
            1,
            0,
            moving(0, Direction::In, [f32s, bf16s]),
        ),
        named(
            "pack f32, 3 axes",
            1,
            1,
            moving(3, Direction::In, [f32s, f32s]),
        ),
        named("unpack f32", 1, 1, moving(0, Direction::Out, [f32s, f32s])),
        named(
            "unpack bf16 to f32",
            0,
            1,
            moving(0, Direction::Out, [bf16s, f32s]),
        ),
        named(
            "pack 8 tensors f32",
            1,
            1,
            batch_in_kernel::BatchInKernel::new(
                settings(),
                properties(),
                target(),
                std::iter::repeat_with(buffer).take(BATCH).collect(),
                buffer(),
                std::iter::repeat_with(piece).take(BATCH).collect(),
                std::iter::repeat_n((), BATCH + 1).collect(),
                (),
                (),
                VECTOR,
                true,
                [f32s, f32s],
            ),
        ),
        named(
            "unpack 8 tensors f32",
            1,
            1,
            batch_out_kernel::BatchOutKernel::new(
                settings(),
                properties(),
                target(),
                buffer(),
                std::iter::repeat_with(buffer).take(BATCH).collect(),
                std::iter::repeat_with(piece).take(BATCH).collect(),
                std::iter::repeat_n((), BATCH + 1).collect(),
                (),
                (),
                VECTOR,
                true,
                [f32s, f32s],
            ),
        ),
        named(
            "norms f32",
            1,
            0,
            sum_kernel::SumKernel::new(
                settings(),
                properties(),
                target(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                VECTOR,
                false,
                f32s,
            ),
        ),
        named(
            "norms, second pass",
            0,
            0,
            fold_kernel::FoldKernel::new(
                settings(),
                properties(),
                target(),
                buffer(),
                buffer(),
                (),
                (),
                (),
            ),
        ),
        named(
            "norms, last",
            0,
            0,
            finish_kernel::FinishKernel::new(
                settings(),
                properties(),
                target(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
            ),
        ),
        named(
            "clip coefficient",
            0,
            0,
            clip_kernel::ClipKernel::new(
                settings(),
                properties(),
                target(),
                buffer(),
                ComptimeOptionCompilationArg::Some(buffer()),
                buffer(),
                (),
            ),
        ),
    ]
}

/// A device of CUDA, as far as compiling for one asks.
fn properties() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 48 * 1024,
        max_cube_count: (i32::MAX as u32, u32::from(u16::MAX), u32::from(u16::MAX)),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    Arc::new(DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(u64::MAX, 512),
        hardware,
        cubecl::profile::TimingMethod::Device,
        DeviceIdentity {
            name: "none".into(),
            fingerprint: "none".into(),
            physical: None,
        },
    ))
}

fn compile(arch: u32, kernel: &dyn CubeKernel) -> String {
    let mut compiler = PlironCompiler {
        target: LlvmTarget::Nvptx,
    };
    let options = PlironOptions {
        sm_arch: Some(SmArch::new(arch, true)),
        // Of CUDA 12.8: what a driver for it would be given.
        ptx_version: PtxVersion::for_driver(12_080),
        ..PlironOptions::default()
    };
    let artifact = cubecl::Compiler::compile(&mut compiler, kernel.define(), &options)
        .expect("the kernel should compile");
    let PlironArtifact::NvptxCode(module) = artifact else {
        panic!("the compiler should give PTX for this target");
    };
    let bytes: Vec<u8> = module
        .ptx
        .iter()
        .map(|&byte| byte.to_ne_bytes()[0])
        .collect();
    CStr::from_bytes_until_nul(&bytes)
        .expect("PTX should end with a nul")
        .to_string_lossy()
        .into_owned()
}
