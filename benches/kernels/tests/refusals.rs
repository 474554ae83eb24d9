//! What is refused before anything is launched: nothing is written, and the error has both values.

#![cfg(any(feature = "cpu", feature = "wgpu", feature = "cuda"))]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use burn_shard_kernel_checks::{assert_same_bits, download, on_every_runtime, upload};
use burn_shard_kernels::cube::{
    AdamBuffers, Dtype, FlatBuffer, NormBuffers, SgdBuffers, Slot, StepControl, Strategy,
    StridedTensor, adamw_step, clip_coefficient, norms, pack, sgd_step, unpack,
};
use burn_shard_kernels::{AdamHyper, Error, MomentumHyper, SgdHyper};
use cubecl::client::Client;

on_every_runtime!(
    views_have_to_lie_in_their_allocation_and_start_aligned,
    a_refused_step_writes_nothing,
    sgd_wants_a_velocity_exactly_if_there_is_momentum,
    norms_go_to_single_values_apart_from_the_input,
    tensors_have_to_fit_their_slots,
);

fn views_have_to_lie_in_their_allocation_and_start_aligned(client: &Client) {
    let handle = client.empty(4096);
    let alignment = client.properties().memory.alignment;
    let view =
        |offset, numel| FlatBuffer::new(client, &handle, offset, numel, Dtype::F32).map(|_| ());
    assert_eq!(view(0, 1024), Ok(()));
    assert_eq!(view(512, 512), Ok(()));
    for (offset, numel) in [(0, 1025), (1024, 1), (usize::MAX, 1), (0, usize::MAX)] {
        let refusal = Error::OutOfBounds {
            offset,
            numel,
            dtype: "f32",
            available_bytes: 4096,
        };
        assert_eq!(view(offset, numel), Err(refusal));
    }
    let refusal = Error::Misaligned {
        offset_bytes: 4,
        alignment_bytes: alignment,
    };
    assert_eq!(view(1, 1), Err(refusal));
    // A view of a view counts from the allocation.
    let further = handle.clone().offset_start(4);
    let refusal = Error::Misaligned {
        offset_bytes: 8,
        alignment_bytes: alignment,
    };
    assert_eq!(
        FlatBuffer::new(client, &further, 1, 1, Dtype::F32).map(|_| ()),
        Err(refusal)
    );
}

fn a_refused_step_writes_nothing(client: &Client) {
    let numel = 64;
    let f32s = |value: f32, numel| upload(client, &vec![value; numel], Dtype::F32);
    let whole = f32s(1.0, 256);
    let part =
        |offset: usize| FlatBuffer::new(client, whole.handle(), offset, numel, Dtype::F32).unwrap();
    let [param, grad, moment_1, moment_2] = [0, 64, 128, 192].map(part);
    let fine = AdamBuffers {
        param: &param,
        grad: &grad,
        moment_1: &moment_1,
        moment_2: &moment_2,
        copy: None,
    };
    let (short, one, two) = (f32s(1.0, 63), f32s(1.0, 1), f32s(1.0, 2));
    let half = FlatBuffer::new(client, whole.handle(), 0, 64, Dtype::F16);
    let step = |buffers: AdamBuffers<'_>,
                control: StepControl<'_>,
                ranges: &[std::ops::Range<usize>],
                hyper: AdamHyper| {
        adamw_step(client, &buffers, &control, ranges, 1, 0.1, &hyper)
    };
    let hyper = AdamHyper::default();
    let none = StepControl::default();
    let all = [0..numel, numel..numel];
    let overlap = |first, second| Error::Overlap { first, second };

    assert_eq!(
        step(
            AdamBuffers {
                grad: &short,
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(Error::NumelMismatch {
            slice: "grad",
            numel: 63,
            param_numel: 64
        })
    );
    assert_eq!(
        step(
            AdamBuffers {
                moment_2: &short,
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(Error::NumelMismatch {
            slice: "moment_2",
            numel: 63,
            param_numel: 64
        })
    );
    assert_eq!(
        step(
            AdamBuffers {
                copy: Some(&short),
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(Error::NumelMismatch {
            slice: "copy",
            numel: 63,
            param_numel: 64
        })
    );
    if Dtype::F16.is_supported(client) {
        let half = &half.unwrap();
        assert_eq!(
            step(
                AdamBuffers {
                    param: half,
                    ..fine
                },
                none,
                &all,
                hyper
            ),
            Err(Error::WrongDtype {
                buffer: "param",
                expected: "f32",
                found: "f16"
            })
        );
        assert_eq!(
            step(
                AdamBuffers {
                    moment_1: half,
                    ..fine
                },
                none,
                &all,
                hyper
            ),
            Err(Error::WrongDtype {
                buffer: "moment_2",
                expected: "f16",
                found: "f32"
            })
        );
    } else {
        let refusal = Error::UnsupportedDtype {
            dtype: "f16",
            runtime: client.name(),
        };
        assert_eq!(half.map(|_| ()), Err(refusal));
    }
    assert_eq!(
        step(
            AdamBuffers {
                moment_1: &param,
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(overlap("param", "moment_1"))
    );
    assert_eq!(
        step(
            AdamBuffers {
                grad: &moment_2,
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(overlap("moment_2", "grad"))
    );
    assert_eq!(
        step(
            AdamBuffers {
                copy: Some(&grad),
                ..fine
            },
            none,
            &all,
            hyper
        ),
        Err(overlap("copy", "grad"))
    );
    let inside = FlatBuffer::new(client, whole.handle(), 32, 1, Dtype::F32).unwrap();
    assert_eq!(
        step(
            fine,
            StepControl {
                clip: Some(&inside),
                ..none
            },
            &all,
            hyper
        ),
        Err(overlap("param", "clip"))
    );
    assert_eq!(
        step(
            fine,
            StepControl {
                found_inf: Some(&two),
                ..none
            },
            &all,
            hyper
        ),
        Err(Error::NotScalar {
            buffer: "found_inf",
            numel: 2
        })
    );
    assert_eq!(
        step(
            fine,
            StepControl {
                loss_scale: Some(&one),
                ..none
            },
            &[0..65, 65..65],
            hyper
        ),
        Err(Error::RangeOutOfBounds {
            start: 0,
            end: 65,
            numel: 64
        })
    );
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = [5..4, 5..6];
    assert_eq!(
        step(fine, none, &reversed, hyper),
        Err(Error::RangeOutOfBounds {
            start: 5,
            end: 4,
            numel: 64
        })
    );
    assert_eq!(
        step(fine, none, &[0..5, 4..6], hyper),
        Err(Error::RangesOverlap {
            start: 4,
            previous_end: 5
        })
    );
    let infinite = AdamHyper {
        epsilon: f32::INFINITY,
        ..hyper
    };
    assert_eq!(
        step(fine, none, &all, infinite),
        Err(Error::NotFinite {
            name: "epsilon",
            value: f64::INFINITY
        })
    );
    assert_same_bits("all", &[1.0; 256], &download(client, &whole));
    step(fine, none, &all, hyper).unwrap();
    assert_ne!(download(client, &param)[0], 1.0);
}

fn sgd_wants_a_velocity_exactly_if_there_is_momentum(client: &Client) {
    let buffer = || upload(client, &[1.0; 8], Dtype::F32);
    let (param, grad, velocity) = (buffer(), buffer(), buffer());
    let step = |velocity, momentum| {
        let buffers = SgdBuffers {
            param: &param,
            grad: &grad,
            velocity,
            copy: None,
        };
        let hyper = SgdHyper {
            momentum,
            ..SgdHyper::default()
        };
        sgd_step(
            client,
            &buffers,
            &StepControl::default(),
            &[0..4, 4..8],
            1,
            0.1,
            &hyper,
        )
    };
    assert_eq!(
        step(None, Some(MomentumHyper::default())),
        Err(Error::MissingVelocity)
    );
    assert_eq!(
        step(Some(&velocity), None),
        Err(Error::UnexpectedVelocity { numel: 8 })
    );
    assert_same_bits("param", &[1.0; 8], &download(client, &param));
}

fn norms_go_to_single_values_apart_from_the_input(client: &Client) {
    let input = upload(client, &[1.0; 64], Dtype::F32);
    let one = || upload(client, &[9.0], Dtype::F32);
    let (a, b, c) = (one(), one(), one());
    let out = NormBuffers {
        sum_of_squares: &a,
        max_abs: &b,
        found_inf: &c,
    };
    let inside = FlatBuffer::new(client, input.handle(), 0, 1, Dtype::F32).unwrap();
    assert_eq!(
        norms(
            client,
            &[&input],
            &NormBuffers {
                max_abs: &inside,
                ..out
            }
        ),
        Err(Error::Overlap {
            first: "max_abs",
            second: "input"
        })
    );
    assert_eq!(
        norms(
            client,
            &[&input],
            &NormBuffers {
                found_inf: &a,
                ..out
            }
        ),
        Err(Error::Overlap {
            first: "sum_of_squares",
            second: "found_inf"
        })
    );
    assert_eq!(
        norms(
            client,
            &[&input],
            &NormBuffers {
                found_inf: &input,
                ..out
            }
        ),
        Err(Error::NotScalar {
            buffer: "found_inf",
            numel: 64
        })
    );
    assert_eq!(
        clip_coefficient(client, &a, None, f32::INFINITY, &b),
        Err(Error::NotFinite {
            name: "max_norm",
            value: f64::INFINITY
        })
    );
    assert_eq!(
        clip_coefficient(client, &a, None, 1.0, &a),
        Err(Error::Overlap {
            first: "out",
            second: "sum_of_squares"
        })
    );
    for scalar in [&a, &b, &c] {
        assert_same_bits("out", &[9.0], &download(client, scalar));
    }
}

fn tensors_have_to_fit_their_slots(client: &Client) {
    let flat = upload(client, &[9.0; 128], Dtype::F32);
    let source = upload(client, &[1.0; 64], Dtype::F32);
    let handle = source.handle();
    let tensor = |shape: &[usize], strides: &[usize]| {
        StridedTensor::new(client, 3, handle, shape, strides, Dtype::F32)
    };
    assert_eq!(
        tensor(&[4, 4], &[4]).map(|_| ()),
        Err(Error::StridesMismatch {
            index: 3,
            axes: 2,
            strides: 1
        })
    );
    assert_eq!(
        tensor(&[4, 17], &[16, 1]).map(|_| ()),
        Err(Error::OutOfBounds {
            offset: 0,
            numel: 65,
            dtype: "f32",
            available_bytes: 256
        })
    );
    let odd = handle.clone().offset_start(2);
    assert_eq!(
        StridedTensor::new(client, 0, &odd, &[1], &[1], Dtype::F32).map(|_| ()),
        Err(Error::Misaligned {
            offset_bytes: 2,
            alignment_bytes: 4
        })
    );
    let whole = tensor(&[64], &[1]).unwrap();
    let slot = |offset, padded_numel| Slot {
        offset,
        padded_numel,
    };
    let packed = |tensors: &[StridedTensor], slots: &[Slot], scale| {
        pack(client, tensors, &flat, slots, scale, Strategy::PerTensor)
    };
    let both = [whole.clone(), whole.clone()];
    assert_eq!(
        packed(&both, &[slot(0, 64)], 1.0),
        Err(Error::SlotCount {
            tensors: 2,
            slots: 1
        })
    );
    assert_eq!(
        packed(&both, &[slot(0, 64), slot(64, 63)], 1.0),
        Err(Error::SlotTooSmall {
            index: 1,
            padded_numel: 63,
            numel: 64
        })
    );
    assert_eq!(
        packed(&both, &[slot(0, 64), slot(65, 64)], 1.0),
        Err(Error::RangeOutOfBounds {
            start: 65,
            end: 129,
            numel: 128
        })
    );
    assert_eq!(
        packed(&both, &[slot(0, 65), slot(64, 64)], 1.0),
        Err(Error::RangesOverlap {
            start: 64,
            previous_end: 65
        })
    );
    assert_eq!(
        packed(&both, &[slot(0, 64), slot(64, 64)], f32::NAN).map_err(|error| error.to_string()),
        Err("scale is NaN, which is not finite in f32".into())
    );
    let inside = StridedTensor::new(client, 0, flat.handle(), &[8], &[16], Dtype::F32).unwrap();
    assert_eq!(
        packed(&[inside], &[slot(120, 8)], 1.0),
        Err(Error::Overlap {
            first: "flat",
            second: "tensor"
        })
    );
    let unpacked = |tensors: &[StridedTensor], slots: &[Slot]| {
        unpack(client, &flat, slots, tensors, 1.0, Strategy::PerTensor)
    };
    let repeated = tensor(&[2, 3], &[0, 1]).unwrap();
    assert_eq!(
        unpacked(&[repeated], &[slot(0, 6)]),
        Err(Error::SelfOverlap { index: 0 })
    );
    assert_eq!(
        unpacked(&both, &[slot(0, 64), slot(64, 64)]),
        Err(Error::Overlap {
            first: "tensor",
            second: "another tensor"
        })
    );
    let three = [slot(0, 40), slot(40, 40), slot(80, 40)];
    let most = client.properties().hardware.max_bindings as usize - 2;
    let strategy = Strategy::Batched(most + 1);
    assert_eq!(
        pack(client, &both, &flat, &three, 1.0, strategy),
        Err(Error::BatchTooLarge {
            tensors: most + 1,
            most,
            runtime: client.name()
        })
    );
    // Neighbours do not overlap, nor does what is empty; the order of the list does not matter.
    let part = |start: usize, numel| {
        let handle = handle.clone().offset_start(start as u64 * 4);
        StridedTensor::new(client, 0, &handle, &[numel], &[1], Dtype::F32).unwrap()
    };
    let overlapping = [part(32, 32), part(0, 16), part(15, 17)];
    assert_eq!(
        unpacked(&overlapping, &three),
        Err(Error::Overlap {
            first: "tensor",
            second: "another tensor"
        })
    );
    assert_same_bits("flat", &[9.0; 128], &download(client, &flat));
    assert_same_bits("source", &[1.0; 64], &download(client, &source));
    let apart = [part(32, 32), part(0, 16), part(16, 16)];
    assert_eq!(unpacked(&apart, &three), Ok(()));
    let empty_inside = [part(32, 32), part(40, 0), part(0, 32)];
    assert_eq!(unpacked(&empty_inside, &three), Ok(()));
    assert_same_bits("source", &[9.0; 64], &download(client, &source));
}

/// Memory of one device means nothing on another: CubeCL's CPU runtime has several.
#[cfg(feature = "cpu")]
#[test]
fn a_buffer_of_another_device_is_refused() {
    use cubecl::device::DeviceId;
    let here = burn_shard_kernel_checks::client("cpu");
    let there = Client::load::<<cubecl::cpu::CpuRuntime as cubecl::__private::Runtime>::Server>(
        DeviceId::new(0, 7),
    );
    let handle = there.empty(64);
    let refusal = FlatBuffer::new(&here, &handle, 0, 4, Dtype::F32).map(|_| ());
    assert_eq!(
        refusal,
        Err(Error::OtherDevice {
            runtime: here.name()
        })
    );
    let theirs = FlatBuffer::new(&there, &handle, 0, 4, Dtype::F32).unwrap();
    let buffers = SgdBuffers {
        param: &theirs,
        grad: &theirs,
        velocity: None,
        copy: None,
    };
    let control = StepControl::default();
    let refusal = sgd_step(
        &here,
        &buffers,
        &control,
        &[0..4, 4..4],
        1,
        0.1,
        &SgdHyper::default(),
    );
    assert_eq!(
        refusal,
        Err(Error::OtherDevice {
            runtime: here.name()
        })
    );
}
