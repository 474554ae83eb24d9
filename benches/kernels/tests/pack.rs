//! Copy-in and copy-out against a walk over indices on the host.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use burn_shard_kernel_checks::{
    Rng, assert_same_bits, download, dtypes, on_every_runtime, rounded, to_bytes, upload,
};
use burn_shard_kernels::cube::{
    Dtype, FlatBuffer, Slot, Strategy, StridedTensor, pack, unpack, zero,
};
use cubecl::client::Client;

on_every_runtime!(
    tensors_of_any_shape_and_place_reach_their_slots,
    what_was_packed_comes_back,
    bits_survive_a_copy_without_a_cast,
    zeros_are_written_to_a_buffer_and_nowhere_else,
);

const STRATEGIES: [Strategy; 3] = [
    Strategy::PerTensor,
    Strategy::Batched(3),
    Strategy::Batched(16),
];
const UNTOUCHED: f32 = 7.0;

/// Scales, and whether slots are aligned: all for two pairs of dtypes, one for the others, since each
/// case is a few dozen kernels to compile.
fn cases(from: Dtype, to: Dtype) -> &'static [(f32, bool)] {
    let all = &[(0.3, true), (1.0, true), (0.5, false)];
    match (from, to) {
        (Dtype::F32, Dtype::F32 | Dtype::BF16) => all,
        _ => &all[..1],
    }
}

/// A tensor as the host sees it: where in its allocation, and which way.
struct View {
    start: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl View {
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of the allocation in the order of the tensor.
    fn places(&self) -> Vec<usize> {
        (0..self.numel())
            .map(|at| {
                let mut rest = at;
                let mut place = self.start;
                for (&len, &stride) in self.shape.iter().zip(&self.strides).rev() {
                    place += rest % len * stride;
                    rest /= len;
                }
                place
            })
            .collect()
    }
}

fn views() -> Vec<View> {
    let view = |start, shape: &[usize], strides: &[usize]| View {
        start,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    };
    vec![
        view(0, &[64, 64], &[64, 1]),
        view(0, &[77], &[1]),
        view(0, &[], &[]),
        view(0, &[0, 5], &[5, 1]),
        view(0, &[2, 3, 5], &[15, 5, 1]),
        // swap_dims'd
        view(0, &[32, 48], &[1, 32]),
        view(0, &[3, 4, 5], &[1, 15, 3]),
        // rows of a slice: vectors inside, and not
        view(64, &[10, 32], &[64, 1]),
        view(3, &[7, 5], &[11, 1]),
        // a column; every third element
        view(2, &[9, 1], &[8, 1]),
        view(1, &[100], &[3]),
        // contiguous, at odd places
        view(1, &[33], &[1]),
        view(16, &[1000], &[1]),
        view(8, &[8, 2], &[2, 1]),
    ]
}

/// The views that may also be written, and one that repeats a row, which may not.
fn views_to_read() -> Vec<View> {
    let mut views = views();
    views.push(View {
        start: 5,
        shape: vec![6, 10],
        strides: vec![0, 1],
    });
    views
}

/// The slots of the views with `padding` elements each, and one element of nobody between them; the
/// length of the flat buffer.
fn slots(views: &[View], aligned: bool) -> (Vec<Slot>, usize) {
    let mut end = 0;
    let slots = views
        .iter()
        .map(|view| {
            let offset = end;
            let padded_numel = if aligned {
                (view.numel() + 5).next_multiple_of(32)
            } else {
                view.numel() + 2
            };
            end = offset + padded_numel + if aligned { 32 } else { 1 };
            Slot {
                offset,
                padded_numel,
            }
        })
        .collect();
    (slots, end)
}

fn allocation(view: &View) -> usize {
    view.places().into_iter().max().unwrap_or(0) + 1
}

fn tensor(
    client: &Client,
    index: usize,
    view: &View,
    values: &[f32],
    dtype: Dtype,
) -> StridedTensor {
    let mut bytes = to_bytes(values, dtype);
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    let handle = client
        .create_from_slice(&bytes)
        .offset_start((view.start * dtype.size_bytes()) as u64);
    StridedTensor::new(client, index, &handle, &view.shape, &view.strides, dtype).unwrap()
}

fn tensors_of_any_shape_and_place_reach_their_slots(client: &Client) {
    let views = views_to_read();
    for from in dtypes(client) {
        for to in dtypes(client) {
            let mut rng = Rng(1);
            let values: Vec<_> = views
                .iter()
                .map(|view| rounded(&rng.values(allocation(view)), from))
                .collect();
            let tensors: Vec<_> = views
                .iter()
                .zip(&values)
                .enumerate()
                .map(|(i, (view, values))| tensor(client, i, view, values, from))
                .collect();
            for &(scale, aligned) in cases(from, to) {
                let (slots, numel) = slots(&views, aligned);
                let mut expected = vec![UNTOUCHED; numel];
                for ((view, slot), values) in views.iter().zip(&slots).zip(&values) {
                    let slot = &mut expected[slot.offset..slot.offset + slot.padded_numel];
                    slot.fill(0.0);
                    for (to, place) in slot.iter_mut().zip(view.places()) {
                        *to = values[place] * scale;
                    }
                }
                let expected = rounded(&expected, to);
                for strategy in STRATEGIES {
                    let flat = upload(client, &vec![UNTOUCHED; numel], to);
                    pack(client, &tensors, &flat, &slots, scale, strategy).unwrap();
                    let what = format!("{from:?} to {to:?} times {scale}, {strategy:?}");
                    assert_same_bits(&what, &expected, &download(client, &flat));
                }
            }
        }
    }
}

fn what_was_packed_comes_back(client: &Client) {
    let views = views();
    for from in dtypes(client) {
        for to in dtypes(client) {
            for &(scale, aligned) in cases(from, to) {
                let (slots, numel) = slots(&views, aligned);
                let values = rounded(&Rng(2).values(numel), from);
                let flat = upload(client, &values, from);
                for strategy in STRATEGIES {
                    let handles: Vec<_> = views
                        .iter()
                        .map(|view| upload(client, &vec![UNTOUCHED; allocation(view)], to))
                        .collect();
                    let tensors: Vec<_> = views
                        .iter()
                        .zip(&handles)
                        .enumerate()
                        .map(|(i, (view, buffer))| {
                            let start = (view.start * to.size_bytes()) as u64;
                            let handle = buffer.handle().clone().offset_start(start);
                            StridedTensor::new(client, i, &handle, &view.shape, &view.strides, to)
                                .unwrap()
                        })
                        .collect();
                    unpack(client, &flat, &slots, &tensors, scale, strategy).unwrap();
                    for (i, ((view, slot), buffer)) in
                        views.iter().zip(&slots).zip(&handles).enumerate()
                    {
                        let mut expected = vec![UNTOUCHED; allocation(view)];
                        for (at, place) in view.places().into_iter().enumerate() {
                            expected[place] = values[slot.offset + at] * scale;
                        }
                        let what =
                            format!("tensor {i}, {from:?} to {to:?} times {scale}, {strategy:?}");
                        let expected = rounded(&expected, to);
                        assert_same_bits(&what, &expected, &download(client, buffer));
                    }
                }
            }
        }
    }
}

/// NaNs with a payload, and -0: nothing is computed on the way.
fn bits_survive_a_copy_without_a_cast(client: &Client) {
    let bits: Vec<u32> = (0..1000u32)
        .map(|i| 0x7F80_0001 + i * 977)
        .chain([1 << 31, 1])
        .collect();
    let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
    let view = View {
        start: 0,
        shape: vec![bits.len()],
        strides: vec![1],
    };
    let tensor = tensor(client, 0, &view, &values, Dtype::F32);
    let slot = Slot {
        offset: 0,
        padded_numel: bits.len(),
    };
    let flat = upload(client, &vec![UNTOUCHED; bits.len()], Dtype::F32);
    pack(client, &[tensor], &flat, &[slot], 1.0, Strategy::PerTensor).unwrap();
    let got: Vec<u32> = download(client, &flat)
        .iter()
        .map(|x| x.to_bits())
        .collect();
    assert_eq!(got, bits);
}

/// A flat buffer of 8.6 GB, of which only the pages that are touched exist.
#[cfg(feature = "cpu")]
#[test]
fn a_slot_beyond_32_bits_is_reached_and_no_other() {
    let client = burn_shard_kernel_checks::client("cpu");
    let far = (1usize << 32) + 64;
    let numel = 1000;
    let handle = client.empty((far + 1024) * 2);
    let flat = FlatBuffer::new(&client, &handle, 0, far + 1024, Dtype::BF16).unwrap();
    let at = |offset| FlatBuffer::new(&client, &handle, offset, 1024, Dtype::BF16).unwrap();
    let values = rounded(&Rng(4).values(numel), Dtype::BF16);
    let fill = |offset, value: f32| {
        let tensor = StridedTensor::of_flat(&upload(&client, &[value; 1024], Dtype::F32));
        let slot = Slot {
            offset,
            padded_numel: 1024,
        };
        pack(&client, &[tensor], &flat, &[slot], 1.0, Strategy::PerTensor).unwrap();
    };
    // Where 32-bit indices would end up.
    fill(64, UNTOUCHED);
    fill(far, UNTOUCHED);
    let tensor = StridedTensor::of_flat(&upload(&client, &values, Dtype::F32));
    let slot = Slot {
        offset: far,
        padded_numel: 1024,
    };
    for strategy in STRATEGIES {
        let tensors = [
            tensor.clone(),
            StridedTensor::of_flat(&upload(&client, &[], Dtype::F32)),
        ];
        let end = Slot {
            offset: far + 1024,
            padded_numel: 0,
        };
        pack(&client, &tensors, &flat, &[slot, end], 1.0, strategy).unwrap();
        let mut expected = values.clone();
        expected.resize(1024, 0.0);
        assert_same_bits("far", &expected, &download(&client, &at(far)));
        assert_same_bits("near", &[UNTOUCHED; 1024], &download(&client, &at(64)));
        fill(far, UNTOUCHED);
    }
}

fn zeros_are_written_to_a_buffer_and_nowhere_else(client: &Client) {
    let alignment = usize::try_from(client.properties().memory.alignment).unwrap();
    for dtype in dtypes(client) {
        for numel in [0, 1, 15, 16, 17, 4099, 70_016] {
            let start = alignment / dtype.size_bytes();
            let values = vec![UNTOUCHED; start + numel + 5];
            let whole = upload(client, &values, dtype);
            let part = FlatBuffer::new(client, whole.handle(), start, numel, dtype).unwrap();
            zero(client, &part).unwrap();
            let mut expected = values;
            expected[start..start + numel].fill(0.0);
            assert_same_bits("zeros", &expected, &download(client, &whole));
        }
    }
}
