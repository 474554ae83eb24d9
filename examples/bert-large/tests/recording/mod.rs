//! The files PyTorch left, as tensors and models.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use bert_large::config::BertConfig;
use bert_large::model::{BertForPreTraining, Input, Targets};
use bert_large::weights;
use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use burn::tensor::Gradients;
use safetensors::SafeTensors;

pub(crate) const STEPS: usize = 20;
pub(crate) const ROWS: usize = 8;
const LENGTH: usize = 16;

pub(crate) struct Recording {
    data: BTreeMap<String, Vec<i32>>,
    losses: serde_json::Value,
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixture")
        .join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap()
}

impl Recording {
    pub(crate) fn open() -> Self {
        let bytes = read("data.safetensors");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensors().into_iter().map(|(name, tensor)| {
            let values = tensor.data().as_chunks::<4>().0;
            (
                name,
                values
                    .iter()
                    .map(|bytes| i32::from_le_bytes(*bytes))
                    .collect(),
            )
        });
        Self {
            data: data.collect(),
            losses: serde_json::from_slice(&read("losses.json")).unwrap(),
        }
    }

    /// Float tensors of a file, flattened, by Hugging Face name.
    pub(crate) fn tensors(name: &str) -> BTreeMap<String, Vec<f32>> {
        let bytes = read(&format!("{name}.safetensors"));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, tensor)| {
            let values = tensor.data().as_chunks::<4>().0;
            (
                name,
                values
                    .iter()
                    .map(|bytes| f32::from_le_bytes(*bytes))
                    .collect(),
            )
        });
        tensors.collect()
    }

    /// The mean loss of every step of a run.
    pub(crate) fn losses(&self, run: &str) -> Vec<f64> {
        let losses = self.losses["losses"][run]["mean"].as_array().unwrap();
        losses.iter().map(|loss| loss.as_f64().unwrap()).collect()
    }

    pub(crate) fn initial_model(&self, device: &Device) -> BertForPreTraining {
        let model = BertForPreTraining::new(&BertConfig::fixture(), device);
        weights::load(model, &path("initial.safetensors")).unwrap()
    }

    /// Some rows of a step of the data set with this prefix (`""` or `"uneven."`).
    pub(crate) fn batch(
        &self,
        prefix: &str,
        step: usize,
        rows: Range<usize>,
        device: &Device,
    ) -> (Input, Targets) {
        let count = rows.len();
        let of = |name: &str| -> Vec<i64> {
            let start = (step * ROWS + rows.start) * LENGTH;
            let values = &self.data[&format!("{prefix}{name}")][start..start + count * LENGTH];
            values.iter().map(|&value| i64::from(value)).collect()
        };
        let int = |values: Vec<i64>| {
            Tensor::<2, Int>::from_data(TensorData::new(values, [count, LENGTH]), device)
        };
        let (positions, labels): (Vec<i64>, Vec<i64>) = (0..)
            .zip(of("labels"))
            .filter(|(_, label)| *label >= 0)
            .unzip();
        let masked = labels.len();
        let flat = |values: Vec<i64>| Tensor::<1, Int>::from_data(&values[..], device);
        let input = Input {
            ids: int(of("input_ids")),
            token_types: int(of("token_type_ids")),
            padding: int(of("attention_mask")).equal_scalar(0),
        };
        let targets = Targets {
            positions: flat(positions),
            labels: flat(labels),
            masked,
            next_sentence: Tensor::zeros([count], device),
        };
        (input, targets)
    }
}

/// Visits parameters under their Hugging Face names, in the layout of a checkpoint.
struct Named<'a> {
    path: Vec<String>,
    linear: Vec<bool>,
    gradients: Option<&'a Gradients>,
    found: BTreeMap<String, TensorData>,
}

impl ModuleVisitor for Named<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_owned());
        self.linear.push(container_type == "Struct:Linear");
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.linear.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = match self.gradients {
            Some(gradients) => param
                .base()
                .grad(gradients)
                .expect("should have a gradient"),
            None => param.val().inner(),
        };
        let value = if D == 2 && self.linear.contains(&true) {
            value.transpose()
        } else {
            value
        };
        let name = weights::hugging_face_name(&self.path.join("."));
        self.found.insert(name, value.into_data());
    }
}

fn named(model: &impl Module, gradients: Option<&Gradients>) -> BTreeMap<String, TensorData> {
    let (path, linear, found) = Default::default();
    let mut visitor = Named {
        path,
        linear,
        gradients,
        found,
    };
    model.visit(&mut visitor);
    visitor.found
}

pub(crate) fn weights(model: &impl Module) -> BTreeMap<String, TensorData> {
    named(model, None)
}

pub(crate) fn gradients(
    model: &impl Module,
    gradients: &Gradients,
) -> BTreeMap<String, TensorData> {
    named(model, Some(gradients))
}

pub(crate) fn assert_close(name: &str, found: &TensorData, expected: &[f32], tolerance: f32) {
    let found = found.try_to_vec::<f32>().unwrap();
    assert_eq!(found.len(), expected.len(), "{name}");
    let worst = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(
        worst < tolerance,
        "{name}: off by {worst:e}, at most {tolerance:e} allowed"
    );
}
