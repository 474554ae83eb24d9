//! Collectives on a device's own memory: CubeCL's CPU runtime, whose buffers NCCL's double works on.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_shard::{Local, MemoryKind, Oss, ProcessGroup, ShardedModule, ShardingStrategy};
use burn_shard_nccl::{Event, Memory, NcclCommunicator, NcclError};
use burn_shard_nccl_double::{HostMemory, load};
use common::on_device::{Net, compare};
use common::{Batch, Sometimes};

fn device() -> Device {
    Device::cpu().autodiff()
}

/// Memory of NCCL's double that counts what is staged: copied from or to the host.
#[derive(Debug)]
struct Counting {
    inner: HostMemory,
    staged_bytes: AtomicUsize,
}

// SAFETY: everything is done by another implementation.
unsafe impl Memory for Counting {
    fn device(&self) -> usize {
        self.inner.device()
    }
    fn enter(&self) -> Result<(), NcclError> {
        self.inner.enter()
    }
    fn stream(&self) -> u64 {
        self.inner.stream()
    }
    fn allocate(&self, bytes: usize) -> Result<u64, NcclError> {
        self.inner.allocate(bytes)
    }
    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { self.inner.free(address) }
    }
    fn pin(&self, bytes: usize) -> Result<*mut u8, NcclError> {
        self.inner.pin(bytes)
    }
    unsafe fn unpin(&self, address: *mut u8) {
        // SAFETY: the caller's.
        unsafe { self.inner.unpin(address) }
    }
    unsafe fn upload(&self, from: *const u8, to: u64, bytes: usize) -> Result<(), NcclError> {
        self.staged_bytes.fetch_add(bytes, Relaxed);
        // SAFETY: the caller's.
        unsafe { self.inner.upload(from, to, bytes) }
    }
    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), NcclError> {
        self.staged_bytes.fetch_add(bytes, Relaxed);
        // SAFETY: the caller's.
        unsafe { self.inner.download(from, to, bytes) }
    }
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), NcclError> {
        // SAFETY: the caller's.
        unsafe { self.inner.copy(from, to, bytes) }
    }
    unsafe fn zero(&self, to: u64, bytes: usize) -> Result<(), NcclError> {
        // SAFETY: the caller's.
        unsafe { self.inner.zero(to, bytes) }
    }
    unsafe fn wait_for(&self, other: u64) -> Result<(), NcclError> {
        // SAFETY: the caller's.
        unsafe { self.inner.wait_for(other) }
    }
    unsafe fn hold_up(&self, other: u64) -> Result<(), NcclError> {
        // SAFETY: the caller's.
        unsafe { self.inner.hold_up(other) }
    }
    fn record(&self) -> Result<Box<dyn Event>, NcclError> {
        self.inner.record()
    }
}

/// Runs `f` on ranks over NCCL's double, whose memory says it is on `number`.
fn spawn(world_size: usize, number: usize, f: impl Fn(&ProcessGroup, &Counting) + Sync) {
    let local = Local::new(world_size)
        .threads_per_rank(1)
        .deadline(Duration::from_secs(120));
    local
        .spawn(|control| {
            let memory = Arc::new(Counting {
                inner: HostMemory::new(number),
                staged_bytes: AtomicUsize::new(0),
            });
            let shared: Arc<dyn Memory> = Arc::clone(&memory) as _;
            let nccl = NcclCommunicator::new(&control, Ok(load()), Ok(shared)).unwrap();
            f(&ProcessGroup::new(Arc::new(nccl)), &memory);
        })
        .unwrap();
}

/// Odd lengths, a parameter smaller than the number of ranks, one that is read twice, one that only some
/// ranks use. No matrix product: one takes this runtime a tenth of a second.
#[derive(Module, Debug)]
struct Products {
    weight: Param<Tensor<2>>,
    twice: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    scale: Param<Tensor<1>>,
    sometimes: Param<Tensor<2>>,
}

impl Net for Products {
    fn init(device: &Device) -> Self {
        let matrix = |rows, columns| {
            let values = Tensor::<2>::random([rows, columns], Distribution::Default, device);
            Param::from_tensor(values)
        };
        Self {
            weight: matrix(4, 7),
            twice: matrix(7, 7),
            bias: Param::from_tensor(Tensor::zeros([7], device)),
            scale: Param::from_tensor(Tensor::ones([1], device)),
            sometimes: matrix(3, 7),
        }
    }

    fn loss(&self, batch: &Batch, device: &Device) -> Tensor<1> {
        let product = |x: Tensor<2>, weight: Tensor<2>| {
            let x: Tensor<3> = x.unsqueeze_dim(2);
            let x: Tensor<3> = (x * weight.unsqueeze()).sum_dim(1);
            x.squeeze_dim::<2>(1)
        };
        let x = batch.tokens.clone().float().to_device(device) / 20.0;
        let x = product(x, self.weight.val()) + self.bias.val().unsqueeze();
        let x = product(x, self.twice.val()).tanh();
        let x = product(x, self.twice.val()) * self.scale.val().unsqueeze();
        let x = match batch.sometimes {
            Sometimes::Used => x + self.sometimes.val(),
            Sometimes::Read => {
                let _unused = self.sometimes.val();
                x
            }
            Sometimes::Unread => x,
        };
        x.square().mean()
    }
}

/// One by one: ranks share the runtime's few threads.
#[test]
fn training_is_plain_data_parallel() {
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9)));
    for strategy in ShardingStrategy::ALL {
        spawn(2, 0, |group, _| {
            compare::<Products, _>(&device(), group, strategy, &sgd, 0.01, true);
        });
    }
    spawn(3, 0, |group, _| {
        let (strategy, adam) = (ShardingStrategy::Full, AdamConfig::new());
        compare::<Products, _>(&device(), group, strategy, &adam, 0.01, true);
    });
}

const WIDTH: usize = 64;

fn step(
    model: ShardedModule<Linear>,
    oss: &mut Oss,
    seen: impl FnOnce(&ShardedModule<Linear>),
) -> ShardedModule<Linear> {
    let x = Tensor::<2>::random([3, WIDTH], Distribution::Default, &device());
    let loss = model.forward(x).square().mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    seen(&model);
    oss.step(0.01, model, gradients)
}

#[test]
fn parameters_and_gradients_do_not_pass_through_the_host() {
    for strategy in ShardingStrategy::ALL {
        spawn(2, 0, |group, memory| {
            let linear = LinearConfig::new(WIDTH, WIDTH).init(&device());
            let mut model = ShardedModule::new(linear, strategy, group).unwrap();
            assert!(model.collectives_in_place());
            let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
            let wrapped = memory.staged_bytes.load(Relaxed);
            assert!(wrapped > WIDTH * WIDTH * 4, "wrapping sends from the host");
            for _ in 0..3 {
                model = step(model, &mut oss, |_| ());
            }
            let staged = memory.staged_bytes.load(Relaxed) - wrapped;
            assert!(
                staged < 1024,
                "{strategy}: {staged} bytes were staged in 3 steps"
            );
        });
    }
}

/// A module that the communicator does not reach is refused on every rank, before anything is sent.
#[test]
fn another_device_than_the_communicators_is_refused() {
    spawn(2, 1, |group, _| {
        let linear = LinearConfig::new(2, 2).init(&device());
        let error = ShardedModule::new(linear, ShardingStrategy::Full, group).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("works on number 1"), "{message}");
        assert!(
            message.contains(&format!("rank {}", group.rank())),
            "{message}"
        );
    });
}

/// Buffers on a device are counted while they live: exactly, since their lengths are known.
#[test]
fn the_ledger_counts_buffers_on_the_device() {
    let whole = (WIDTH * WIDTH + WIDTH) * 4;
    for (strategy, parameters, gradients, moments) in [
        (ShardingStrategy::Replicated, whole, whole, 2 * whole),
        (ShardingStrategy::OptimizerState, whole, whole, whole),
        (ShardingStrategy::Gradients, whole, whole / 2, whole),
    ] {
        spawn(2, 0, |group, _| {
            let linear = LinearConfig::new(WIDTH, WIDTH).init(&device());
            let mut model = ShardedModule::new(linear, strategy, group).unwrap();
            let mut oss = Oss::new(AdamConfig::new(), group).unwrap();
            let live = |model: &ShardedModule<Linear>, kind| {
                // Burn's fusion drops tensors in order with the operations it has queued.
                device().sync().unwrap();
                model.memory().of(kind).live_bytes
            };
            for _ in 0..3 {
                model.reset_memory_peak();
                model = step(model, &mut oss, |model| {
                    let live = live(model, MemoryKind::Gradients);
                    assert_eq!(live, gradients, "{strategy}: gradients");
                });
                let peak = model.memory().of(MemoryKind::Parameters).peak_bytes;
                assert_eq!(peak, parameters, "{strategy}: a step is in place");
                let live = |kind| live(&model, kind);
                assert_eq!(live(MemoryKind::Parameters), parameters, "{strategy}");
                assert_eq!(live(MemoryKind::OptimizerState), moments, "{strategy}");
                assert_eq!(live(MemoryKind::Gradients), 0, "{strategy}");
            }
        });
    }
}
