//! Saving, loading, printing, and what else a module holds besides float parameters.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::prelude::*;
use burn::store::ModuleRecord;
use burn::tensor::quantization::{Calibration, QuantScheme};
use burn_shard::{ProcessGroup, ShardedModule, ShardingStrategy};

use crate::common::{assert_bits, device, values};
use crate::pair::{Net, Pair, WIDTH, assert_says, for_all, outcome, small_groups, spawn, x};

fn trained(strategy: ShardingStrategy, group: &ProcessGroup) -> Pair<Net> {
    let pair = Pair::new(Net::new(&device()), small_groups(strategy), group);
    pair.step(|net| net.loss(x(group, 0)))
}

/// A file of this test, on this rank.
fn path(what: &str, pair: &Pair<Net>) -> std::path::PathBuf {
    let group = pair.model.group();
    let name = format!(
        "burn-shard-habits-{}-{what}-{}-{}-{}.bpk",
        std::process::id(),
        pair.model.strategy(),
        group.rank(),
        group.world_size()
    );
    std::env::temp_dir().join(name)
}

#[test]
fn a_wrapped_module_that_is_saved_to_a_file_is_whole_in_it_or_refused_with_the_way_out() {
    for_all(|group, strategy| {
        let pair = trained(strategy, group);
        let path = path("save", &pair);
        let saved = outcome(|| {
            pair.model
                .clone()
                .save_file(&path)
                .map_err(|e| e.to_string())
        });
        match saved {
            Ok(Ok(())) => {
                let loaded = Net::new(&device()).try_load_file(&path);
                // Burn reads the values from the file when they are asked for.
                let loaded = loaded.map(|loaded| values(&loaded));
                let _removed = std::fs::remove_file(&path);
                let loaded = loaded.unwrap_or_else(|error| panic!("{}: {error}", pair.what()));
                assert_bits(&pair.what(), 0, &loaded, &values(&pair.plain));
            }
            Ok(Err(message)) | Err(message) => {
                let _removed = std::fs::remove_file(&path);
                assert_says(&message, &["unsharded"]);
            }
        }
    });
}

#[test]
fn a_record_of_a_wrapped_module_is_whole_or_refused_with_the_way_out() {
    for_all(|group, strategy| {
        let pair = trained(strategy, group);
        match outcome(|| pair.model.clone().into_record()) {
            Err(message) => assert_says(&message, &["unsharded"]),
            Ok(record) => {
                let loaded = Net::new(&device()).try_load_record(record);
                let loaded = loaded.unwrap_or_else(|error| panic!("{}: {error}", pair.what()));
                assert_bits(&pair.what(), 0, &values(&loaded), &values(&pair.plain));
            }
        }
    });
}

/// A record that fits in part: what is loaded of it, all or nothing, and the module trains on as before.
#[test]
fn a_record_of_a_plain_module_is_loaded_as_a_whole_or_refused_and_changes_nothing() {
    for validated in [true, false] {
        for_all(|group, strategy| {
            let mut pair = trained(strategy, group);
            let other = Net::new(&device());
            let bytes = other.clone().into_record().into_bytes().unwrap();
            // Of rank 0, as after reading one file.
            let bytes = group.all_gather_bytes(&bytes).unwrap().swap_remove(0);
            let bytes = burn::tensor::Bytes::from_bytes_vec(bytes);
            let record = ModuleRecord::from_bytes(bytes).unwrap().validate(validated);
            let full = other.load_record(record.clone());
            let loaded = outcome(|| pair.model.clone().try_load_record(record));
            if let Ok(Ok(loaded)) = loaded {
                let loaded = loaded.unsharded();
                assert_bits(&pair.what(), 1, &values(&loaded), &values(&full));
            }
            pair.compare();
            pair = pair.step(|net| net.loss(x(group, 1)));
            pair.compare();
        });
    }
}

#[test]
fn a_record_that_does_not_fit_is_refused_and_changes_nothing() {
    for_all(|group, strategy| {
        let mut pair = trained(strategy, group);
        let mut other = Net::new(&device());
        other.third = LinearConfig::new(WIDTH, WIDTH + 1).init(&device());
        let record = other.into_record();
        let loaded = outcome(|| pair.model.clone().try_load_record(record));
        assert!(
            !matches!(loaded, Ok(Ok(_))),
            "{}: a record of other shapes was loaded",
            pair.what()
        );
        pair.compare();
        pair = pair.step(|net| net.loss(x(group, 1)));
        pair.compare();
    });
}

/// A layer that is stored otherwise than it is used: its record is mapped when it is saved, and loaded.
#[test]
fn a_column_major_layer_is_saved_and_loaded_as_the_plain_one() {
    for_all(|group, strategy| {
        let config = || LinearConfig::new(WIDTH, WIDTH + 3).with_layout(LinearLayout::Col);
        let layer = config().init(&device());
        let _read = values(&layer);
        // Burn 0.22.1 loads such a record into a layer that was not read yet, and into no other.
        let plain = config().init(&device());
        let model = ShardedModule::<Linear>::new(layer, small_groups(strategy), group).unwrap();
        let record = model.unsharded().into_record();
        let loaded = plain.load_record(record);
        assert_eq!(loaded.weight.val().dims(), [WIDTH, WIDTH + 3]);
        assert_bits("loaded", 0, &values(&loaded), &values(&model.unsharded()));
    });
}

#[test]
fn a_wrapped_module_is_displayed_with_full_shapes_and_counts() {
    for_all(|group, strategy| {
        let pair = trained(strategy, group);
        let (own, plain) = (pair.model.to_string(), pair.plain.to_string());
        for line in plain.lines().map(str::trim) {
            assert!(
                own.contains(line),
                "{}: `{line}` should be in {own}",
                pair.what()
            );
        }
        assert_eq!(pair.model.num_params(), pair.plain.num_params());
    });
}

#[test]
fn a_quantized_parameter_is_refused_by_name() {
    for strategy in ShardingStrategy::ALL {
        for error in spawn(2, |group| {
            let mut net = Net::new(&device());
            let mut quantizer = quantizer();
            net.second = net.second.quantize_weights(&mut quantizer);
            let wrapped = ShardedModule::new(net, small_groups(strategy), group);
            wrapped.map(|_| ()).unwrap_err().to_string()
        }) {
            assert_says(&error, &["`second.weight`", "cannot be sharded"]);
        }
    }
}

fn quantizer() -> burn::module::Quantizer {
    burn::module::Quantizer::new(Calibration::MinMax, QuantScheme::default())
}

#[test]
fn quantizing_a_wrapped_module_is_refused_by_name_and_leaves_it_as_it_was() {
    for strategy in ShardingStrategy::ALL {
        spawn(2, |group| {
            let mut pair = trained(strategy, group);
            let message = outcome(|| pair.model.clone().quantize_weights(&mut quantizer()));
            let message = message
                .map(|_| ())
                .expect_err("it cannot be trained any more");
            assert_says(&message, &["`first.weight`", "("]);
            pair = pair.step(|net| net.loss(x(group, 1)));
            pair.compare();
        });
    }
}

/// Integers, flags and running statistics beside what is sharded.
#[derive(Module, Debug)]
struct Mixed {
    input: Linear,
    norm: BatchNorm,
    counts: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let counts = Tensor::from_ints([1, 0, 2, 1, 0, 3], device);
        let mask = Tensor::from_data([true, false, true, true, false, true], device);
        Self {
            input: LinearConfig::new(WIDTH, WIDTH).init(device),
            norm: BatchNormConfig::new(WIDTH).init(device),
            counts: Param::initialized(ParamId::new(), counts),
            mask: Param::initialized(ParamId::new(), mask),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.norm.forward(self.input.forward(x));
        let x = x * self.counts.val().float().unsqueeze();
        let mask = self.mask.val().unsqueeze::<2>().expand(x.shape());
        x.mask_fill(mask, 0.5).powi_scalar(2).mean()
    }
}

#[test]
fn a_module_with_integers_flags_and_running_statistics_equals_the_plain_one() {
    for_all(|group, strategy| {
        let wrapped = Mixed::new(&device());
        // Another one: clones share their running statistics in Burn.
        let mut pair = Pair::new(wrapped, small_groups(strategy), group);
        let plain = Mixed::new(&device());
        pair.plain = plain.load_record(pair.model.unsharded().into_record());
        for step in 0..3 {
            let loss = |net: &Mixed| net.loss(x(group, step));
            let (own, expected) = (loss(&pair.model), loss(&pair.plain));
            let grads = own.backward();
            let grads = burn::optim::GradientsParams::from_grads(grads, &pair.model);
            let expected = crate::common::plain_dp_gradients(&expected, &pair.plain, group);
            pair.model = pair.oss.step(0.1, pair.model, grads);
            pair.plain = pair.stock.step(0.1, pair.plain, expected);
            let full = pair.model.unsharded();
            assert_bits(
                &pair.what(),
                step,
                &values(&full),
                &values(&pair.plain.valid()),
            );
        }
    });
}
