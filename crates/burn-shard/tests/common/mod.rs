//! The oracle: plain data parallelism in a few lines, and models with odd shapes to try it on.
//!
//! It shares nothing with the code under test but the communicator's `all_reduce`.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::cast_precision_loss,
    reason = "helpers of tests, each of which uses a part of them"
)]

pub mod on_device;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_shard::{ProcessGroup, ReduceOp, ShardedModule, ShardingStrategy};

/// Bits of every float parameter by path, in the order of the module.
pub type Bits = Vec<(String, Vec<u32>)>;

pub fn device() -> Device {
    Device::flex().autodiff()
}

pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    tensor.into_data().iter::<f32>().map(f32::to_bits).collect()
}

/// Averages the gradients of a plain model over the ranks, in rank order.
pub struct PlainDp<'a> {
    pub group: &'a ProcessGroup,
    pub gradients: &'a mut GradientsParams,
}

impl ModuleVisitor for PlainDp<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.remove::<D>(param.id);
        let mut used = [u8::from(gradient.is_some())];
        self.group.all_reduce(&mut used, ReduceOp::Max).unwrap();
        if used[0] == 0 {
            return;
        }
        let shape = param.base().dims();
        let device = param.base().without_autodiff().device();
        let gradient = gradient.unwrap_or_else(|| Tensor::zeros(shape, &device));
        let mut values: Vec<f32> = gradient.into_data().iter().collect();
        self.group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        let data = TensorData::new(values, shape);
        self.gradients
            .register(param.id, Tensor::<D>::from_data(data, &device));
    }
}

/// One step of the oracle: backward, average, stock optimizer.
pub fn plain_dp_gradients<M: Module>(
    loss: &Tensor<1>,
    model: &M,
    group: &ProcessGroup,
) -> GradientsParams {
    let mut gradients = GradientsParams::from_grads(loss.backward(), model);
    model.visit(&mut PlainDp {
        group,
        gradients: &mut gradients,
    });
    gradients
}

struct Collect<'a, F> {
    path: Vec<String>,
    out: Bits,
    read: &'a mut F,
}

/// Reads something of each float parameter.
pub trait Read {
    fn read<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Vec<u32>>;
}

impl<F: Read> ModuleVisitor for Collect<'_, F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(bits) = self.read.read(param) {
            self.out.push((self.path.join("."), bits));
        }
    }
}

fn collect<M: Module, F: Read>(module: &M, mut read: F) -> Bits {
    let mut visitor = Collect {
        path: vec![],
        out: vec![],
        read: &mut read,
    };
    module.visit(&mut visitor);
    visitor.out
}

struct Values;

impl Read for Values {
    fn read<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Vec<u32>> {
        Some(bits(param.base()))
    }
}

struct Gradients<'a>(&'a GradientsParams);

impl Read for Gradients<'_> {
    fn read<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Vec<u32>> {
        self.0.get::<D>(param.id).map(bits)
    }
}

struct Ids;

impl Read for Ids {
    fn read<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Vec<u32>> {
        let id = param.id.val();
        #[allow(clippy::cast_possible_truncation, reason = "the two halves")]
        Some(vec![id as u32, (id >> 32) as u32])
    }
}

pub fn values<M: Module>(module: &M) -> Bits {
    collect(module, Values)
}

pub fn gradients<M: Module>(module: &M, gradients: &GradientsParams) -> Bits {
    collect(module, Gradients(gradients))
}

/// Parameter ids by path.
pub fn ids<M: Module>(module: &M) -> Vec<(String, ParamId)> {
    collect(module, Ids)
        .into_iter()
        .map(|(path, half)| (path, (u64::from(half[0]) | u64::from(half[1]) << 32).into()))
        .collect()
}

/// Whether the strategy leaves one parameter, or what `path` names of its state, whole on every rank:
/// `Full` does so with vectors.
pub fn is_whole<M: Module>(model: &ShardedModule<M>, path: &str) -> bool {
    let mut params = model.params().iter();
    let param = params.find(|param| format!("{path}.").starts_with(&format!("{}.", param.path)));
    model.strategy() == ShardingStrategy::Full && param.unwrap().shape.len() <= 1
}

/// What this rank should have of each averaged gradient: its shard with zeros as padding, or all.
pub fn own_gradients<M: Module>(full: &Bits, model: &ShardedModule<M>) -> Bits {
    let sharded = matches!(
        model.strategy(),
        ShardingStrategy::Gradients | ShardingStrategy::Full
    );
    let group = model.group();
    let own = |path: &str, values: &Vec<u32>| {
        if !sharded || is_whole(model, path) {
            return values.clone();
        }
        let len = values.len().div_ceil(group.world_size());
        let mut padded = values.clone();
        padded.resize(len * group.world_size(), 0);
        let mut own = padded[group.rank() * len..][..len].to_vec();
        // The shard keeps the first axis, so there may be room for a few elements more.
        let param = model.params().iter().find(|param| param.path == path);
        own.resize(
            param
                .unwrap()
                .shard_shape(group.world_size())
                .iter()
                .product(),
            0,
        );
        own
    };
    full.iter()
        .map(|(path, values)| (path.clone(), own(path, values)))
        .collect()
}

/// The averaged gradients as plain data parallel has them: shards of all ranks put together again. All
/// ranks have to call it.
pub fn gathered_gradients<M: Module>(model: &ShardedModule<M>, grads: &GradientsParams) -> Bits {
    let own = gradients(&**model, grads);
    let sharded = [ShardingStrategy::Gradients, ShardingStrategy::Full];
    if !sharded.contains(&model.strategy()) {
        return own;
    }
    let gather = |(path, own): (String, Vec<u32>)| {
        let spec = model.params().iter().find(|spec| spec.path == path);
        // The shard keeps the first axis, so there may be a few elements more; what is whole is no shard.
        let numel = spec.unwrap().numel();
        let own = if own.len() == numel {
            &own
        } else {
            &own[..numel.div_ceil(model.group().world_size())]
        };
        let bytes: Vec<u8> = own.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let all = model.group().all_gather_bytes(&bytes).unwrap().concat();
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        // Padding comes last. What is whole on every rank is the first rank's, too.
        let full = all.chunks(4).map(word).take(spec.unwrap().numel());
        (path, full.collect())
    };
    own.into_iter().map(gather).collect()
}

/// The stock optimizer's state by `path.name`, in no particular order.
pub fn stock_state<M: Module>(optimizer: &ModuleOptimizer, module: &M) -> Bits {
    let ids = ids(module);
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let mut state: Bits = reader
        .into_tensors()
        .unwrap()
        .into_iter()
        .map(|tensor| {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().unwrap();
            let (id, name) = name.split_once('.').unwrap();
            let (path, _) = ids.iter().find(|(_, p)| p.val().to_string() == id).unwrap();
            let data = TensorData::from_bytes(bytes, shape, dtype);
            let bits = data.iter::<f32>().map(f32::to_bits).collect();
            (format!("{path}.{name}"), bits)
        })
        .collect();
    state.sort();
    state
}

#[track_caller]
pub fn assert_bits(what: &str, step: usize, actual: &Bits, expected: &Bits) {
    let paths = |bits: &Bits| {
        bits.iter()
            .map(|(path, _)| path.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        paths(actual),
        paths(expected),
        "{what}, step {step}: parameters differ"
    );
    for ((path, actual), (_, expected)) in actual.iter().zip(expected) {
        let first = actual.iter().zip(expected).position(|(a, e)| a != e);
        assert!(
            first.is_none() && actual.len() == expected.len(),
            "{what}, step {step}: `{path}` differs first at {first:?} of {} ({} expected)",
            actual.len(),
            expected.len(),
        );
    }
}

/// Sums of a few terms in another order: within a few units in the last place of the largest value. Steps at
/// a rate of 0.1 add up as many of these errors.
#[track_caller]
pub fn assert_near(what: &str, step: usize, actual: &Bits, expected: &Bits) {
    assert_eq!(actual.len(), expected.len(), "{what}, step {step}");
    for ((path, actual), (_, expected)) in actual.iter().zip(expected) {
        let floats =
            |bits: &[u32]| -> Vec<f32> { bits.iter().map(|&b| f32::from_bits(b)).collect() };
        let (actual, expected) = (floats(actual), floats(expected));
        assert_eq!(
            actual.len(),
            expected.len(),
            "{what}, step {step}: `{path}`"
        );
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (a, e) in actual.iter().zip(&expected) {
            let bound = 16.0 * f32::EPSILON * largest * (step + 1) as f32;
            assert!(
                (a - e).abs() <= bound,
                "{what}, step {step}: `{path}`: {a}, not {e}"
            );
        }
    }
}

/// Odd shapes, an embedding tied to the output, a layer called twice, a scalar-like parameter
/// smaller than the number of ranks, an empty one, a frozen one and one that is never used.
#[derive(Module, Debug)]
pub struct OddNet {
    embedding: Embedding,
    input: Linear,
    twice: Linear,
    norm: LayerNorm,
    narrow: Linear,
    scale: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
    empty: Param<Tensor<2>>,
    frozen: Linear,
    unused: Linear,
    sometimes: Linear,
    dropout: Dropout,
}

pub const VOCAB: usize = 19;

impl OddNet {
    pub fn new(device: &Device) -> Self {
        Self::with_dropout(device, 0.0)
    }

    pub fn with_dropout(device: &Device, dropout: f64) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCAB, 7).init(device),
            input: LinearConfig::new(7, 15).init(device),
            twice: LinearConfig::new(15, 15).init(device),
            norm: LayerNormConfig::new(15).init(device),
            narrow: LinearConfig::new(15, 7).with_bias(false).init(device),
            scale: Param::from_tensor(Tensor::ones([1], device)),
            bias: Param::from_tensor(Tensor::zeros([17], device)),
            empty: Param::from_tensor(Tensor::zeros([0, 3], device)),
            frozen: LinearConfig::new(7, 7).init(device).freeze(),
            unused: LinearConfig::new(3, 5).init(device),
            sometimes: LinearConfig::new(7, 7).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        }
    }

    /// Mean cross-entropy of predicting `targets` from `tokens`.
    pub fn loss(&self, batch: &Batch, device: &Device) -> Tensor<1> {
        let [rows, columns] = batch.tokens.dims();
        let x = self
            .embedding
            .forward(batch.tokens.clone().to_device(device));
        let x = self.frozen.forward(x.clone()) + x;
        let x = match batch.sometimes {
            Sometimes::Unread => x,
            Sometimes::Read => {
                let _unused = self.sometimes.forward(x.clone());
                x
            }
            Sometimes::Used => self.sometimes.forward(x.clone()) + x,
        };
        let x = gelu(self.input.forward(x));
        let x = self.twice.forward(gelu(self.twice.forward(x.clone()))) + x;
        let x = self
            .narrow
            .forward(self.dropout.forward(self.norm.forward(x)));
        let x = x * self.scale.val().reshape([1, 1, 1]);
        // Tied: the embedding is read a second time.
        let logits = x
            .reshape([rows * columns, 7])
            .matmul(self.embedding.weight.val().swap_dims(0, 1));
        let bias = Tensor::cat(vec![self.bias.val(), self.scale.val(), self.scale.val()], 0);
        let logits = logits + bias.unsqueeze();
        let log_probabilities = burn::tensor::activation::log_softmax(logits, 1);
        let targets = batch
            .targets
            .clone()
            .to_device(device)
            .reshape([rows * columns, 1]);
        log_probabilities.gather(1, targets).mean().neg()
    }
}

/// Data that differs per rank and step.
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub targets: Tensor<2, Int>,
    /// What this rank does with the layer that only some ranks use.
    pub sometimes: Sometimes,
}

/// How a layer takes part in a step on one rank.
#[derive(Clone, Copy, PartialEq)]
pub enum Sometimes {
    Unread,
    /// Computed, but its output does not reach the loss.
    Read,
    Used,
}

impl Batch {
    /// Under `Full` all ranks must use the same parameters, so that they gather alike.
    pub fn new(rank: usize, step: usize, strategy: ShardingStrategy) -> Self {
        let device = &Device::flex();
        let token = |i: usize| ((i + 3) * (rank * 7 + step * 5 + 11) * 13 % 1009) % VOCAB;
        let ints = |shift: usize| {
            let data: Vec<i64> = (0..12).map(|i| token(i + shift) as i64).collect();
            Tensor::<2, Int>::from_data(TensorData::new(data, [3, 4]), device)
        };
        // On no rank in every third step, on one rank otherwise.
        let sometimes = match (step % 3, rank == step % 2) {
            (0, _) => Sometimes::Unread,
            (1, _) if strategy == ShardingStrategy::Full => Sometimes::Used,
            (_, _) if strategy == ShardingStrategy::Full => Sometimes::Read,
            (_, true) => Sometimes::Used,
            (step, false) => [Sometimes::Unread, Sometimes::Read][step - 1],
        };
        Self {
            tokens: ints(0),
            targets: ints(1),
            sometimes,
        }
    }
}
