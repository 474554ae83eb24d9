//! Fused Adam and AdamW on a device: against the scalar loops, and against `f64`.

#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]
#![allow(
    clippy::print_stdout,
    reason = "how much of a bound is used is worth seeing"
)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "scalars are narrowed as the steps narrow them"
)]

use burn_shard_kernel_checks::{
    Rng, assert_same_bits, download, dtypes, is_exact, on_every_runtime, only_on, rounded, upload,
};
use burn_shard_kernels::cube::{
    AdamBuffers, Dtype, FlatBuffer, StepControl, adam_step, adamw_step,
};
use burn_shard_kernels::{AdamHyper, WeightDecay, merge_ranges, reference};
use cubecl::client::Client;

on_every_runtime!(
    every_length_steps_like_the_scalar_loop,
    a_hundred_steps_stay_within_the_bound_of_f64,
    half_precision_is_rounded_once_on_the_way_in_and_out,
    clipping_and_loss_scale_are_read_from_the_device,
    an_overflow_leaves_everything_as_it_was,
    elements_outside_of_the_ranges_stay,
    padding_of_zeros_stays_zero_in_one_launch_for_all_members,
);
// Flushing of denormals and the result of NaN comparisons are left open on GPUs.
only_on!(cpu: values_that_are_not_ordinary_step_like_the_scalar_loop);

const NUMELS: [usize; 14] = [
    0, 1, 3, 7, 15, 16, 17, 31, 32, 33, 1000, 4099, 65_536, 70_016,
];
const VARIANTS: [(bool, WeightDecay); 5] = [
    (false, WeightDecay::None),
    (false, WeightDecay::L2(0.013)),
    (true, WeightDecay::None),
    (true, WeightDecay::Decoupled(0.0)),
    (true, WeightDecay::Decoupled(0.013)),
];

/// Half an ulp.
const U: f64 = 1.0 / (1u64 << 24) as f64;

fn hyper(weight_decay: WeightDecay) -> AdamHyper {
    AdamHyper {
        weight_decay,
        ..AdamHyper::default()
    }
}

fn learning_rate(time: usize) -> f64 {
    1.0e-3 / 3.0 * (1.0 + 0.1 * time as f64)
}

/// The state of one run on a device and of the scalar loop beside it.
struct Run<'a> {
    client: &'a Client,
    decoupled: bool,
    hyper: AdamHyper,
    device: [FlatBuffer; 3],
    host: [Vec<f32>; 3],
}

impl<'a> Run<'a> {
    fn new(client: &'a Client, (decoupled, decay): (bool, WeightDecay), param: Vec<f32>) -> Self {
        let host = [
            param.clone(),
            // Not read at time 1.
            vec![5.0; param.len()],
            vec![5.0; param.len()],
        ];
        Self {
            client,
            decoupled,
            hyper: hyper(decay),
            device: std::array::from_fn(|i| upload(client, &host[i], Dtype::F32)),
            host,
        }
    }

    fn step_host(&mut self, grad: &[f32], time: usize) {
        let step = if self.decoupled {
            reference::adamw_step
        } else {
            reference::adam_step
        };
        let [param, moment_1, moment_2] = &mut self.host;
        step(
            param,
            grad,
            moment_1,
            moment_2,
            time,
            learning_rate(time),
            &self.hyper,
        );
    }

    fn step_device(
        &self,
        grad: &FlatBuffer,
        copy: Option<&FlatBuffer>,
        control: &StepControl<'_>,
        ranges: &[std::ops::Range<usize>],
        time: usize,
    ) {
        let step = if self.decoupled {
            adamw_step
        } else {
            adam_step
        };
        let buffers = AdamBuffers {
            param: &self.device[0],
            grad,
            moment_1: &self.device[1],
            moment_2: &self.device[2],
            copy,
        };
        step(
            self.client,
            &buffers,
            control,
            ranges,
            time,
            learning_rate(time),
            &self.hyper,
        )
        .unwrap();
    }

    fn step(&mut self, grad: &[f32], time: usize) {
        let buffer = upload(self.client, grad, Dtype::F32);
        #[allow(
            clippy::single_range_in_vec_init,
            reason = "a list of one range is meant"
        )]
        self.step_device(
            &buffer,
            None,
            &StepControl::default(),
            &[0..grad.len()],
            time,
        );
        self.step_host(grad, time);
    }

    /// Equal bits where the runtime promises them, otherwise what few roundings may make.
    #[track_caller]
    fn check(&self, what: &str) {
        for (name, (device, host)) in ["param", "moment_1", "moment_2"]
            .iter()
            .zip(self.device.iter().zip(&self.host))
        {
            let got = download(self.client, device);
            if is_exact(self.client) {
                assert_same_bits(&format!("{what} {name}"), host, &got);
            } else {
                assert_close(&format!("{what} {name}"), host, &got);
            }
        }
    }
}

/// A few ulps of the largest term: for runtimes that contract, over a few steps.
#[track_caller]
fn assert_close(what: &str, expected: &[f32], got: &[f32]) {
    for (i, (e, g)) in expected.iter().zip(got).enumerate() {
        let tolerance = 64.0 * U as f32 * (e.abs() + 1e-3);
        assert!(
            (e - g).abs() <= tolerance,
            "{what}[{i}]: expected {e:e}, got {g:e}"
        );
    }
}

fn every_length_steps_like_the_scalar_loop(client: &Client) {
    for variant in VARIANTS {
        for numel in NUMELS {
            let mut rng = Rng(numel as u64);
            let mut run = Run::new(client, variant, rng.values(numel));
            for time in 1..=3 {
                run.step(&rng.values(numel), time);
            }
            run.check(&format!("{variant:?} numel {numel}"));
        }
    }
}

#[cfg(feature = "cpu")]
fn values_that_are_not_ordinary_step_like_the_scalar_loop(client: &Client) {
    let special = [
        0.0,
        -0.0,
        f32::from_bits(1),
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::NEG_INFINITY,
        f32::NAN,
        1.0e-22,
        1.0e20,
    ];
    let all: Vec<f32> = special.iter().flat_map(|_| special).collect();
    let grad: Vec<f32> = special.iter().flat_map(|&x| [x; 9]).collect();
    for variant in VARIANTS {
        let mut run = Run::new(client, variant, all.clone());
        for time in 1..=3 {
            run.step(&grad, time);
        }
        run.check(&format!("{variant:?}"));
    }
}

/// Steps in f64 with the scalars of the f32 steps, and beside each value how far roundings may have
/// taken an f32 step from it, to first order: docs/numerics.md.
struct Bounded {
    value: [Vec<f64>; 3],
    error: [Vec<f64>; 3],
}

impl Bounded {
    /// `division` and `root` are what the runtime promises, in units of U.
    fn step(&mut self, grad: &[f32], time: usize, run: &Run<'_>, division: f64, root: f64) {
        let hyper = &run.hyper;
        let lr = f64::from(learning_rate(time) as f32);
        let (beta_1, beta_2) = (f64::from(hyper.beta_1), f64::from(hyper.beta_2));
        let (factor_1, factor_2) = (f64::from(1.0 - hyper.beta_1), f64::from(1.0 - hyper.beta_2));
        let power = |beta: f32| beta.powi(time as i32);
        let c1 = 1.0 - power(hyper.beta_1);
        let c2 = 1.0 - power(hyper.beta_2);
        let first = time == 1;
        for (i, &grad) in grad.iter().enumerate() {
            let [p, m, v] = std::array::from_fn(|k| self.value[k][i]);
            let [ep, em, ev] = std::array::from_fn(|k| self.error[k][i]);
            let (mut g, mut eg) = (f64::from(grad), 0.0);
            if let WeightDecay::L2(penalty) = hyper.weight_decay {
                let penalty = f64::from(penalty);
                g += penalty * p;
                eg = penalty * ep + U * (g.abs() + (penalty * p).abs());
            }
            let (kept_1, kept_2) = if first {
                (0.0, 0.0)
            } else {
                (beta_1 * m, beta_2 * v)
            };
            let (ek_1, ek_2) = if first {
                (0.0, 0.0)
            } else {
                (beta_1 * em, beta_2 * ev)
            };
            let m = kept_1 + factor_1 * g;
            let v = kept_2 + factor_2 * g * g;
            let em = ek_1 + factor_1 * eg + U * (kept_1.abs() + (factor_1 * g).abs() + m.abs());
            let ev =
                ek_2 + 2.0 * factor_2 * g.abs() * eg + U * (kept_2 + 2.0 * factor_2 * g * g + v);
            // sqrt(v + e) - sqrt(v) <= sqrt(e), and e / (2 sqrt(v)) where that is less.
            let spread = |value: f64, error: f64| {
                let by_slope = error / (2.0 * value.sqrt());
                if by_slope.is_nan() {
                    0.0
                } else {
                    by_slope.min(error.sqrt())
                }
            };
            let (update, eu) = if run.decoupled {
                let (mc, vc) = (m / f64::from(c1), v / f64::from(c2));
                let emc = em / f64::from(c1) + division * U * mc.abs();
                let evc = ev / f64::from(c2) + division * U * vc;
                let below = vc.sqrt() + f64::from(hyper.epsilon);
                let eb = spread(vc, evc) + root * U * vc.sqrt() + U * below;
                let update = mc / below;
                (
                    update,
                    (emc + update.abs() * eb) / below + division * U * update.abs(),
                )
            } else {
                let root_2 = c2.sqrt();
                let factor = f64::from(root_2 / c1);
                let above = m * factor;
                let below = v.sqrt() + f64::from(hyper.epsilon * root_2);
                let eb = spread(v, ev) + root * U * v.sqrt() + U * below;
                let update = above / below;
                let ea = em * factor + U * above.abs();
                (
                    update,
                    (ea + update.abs() * eb) / below + division * U * update.abs(),
                )
            };
            let (mut kept, mut ek) = (p, ep);
            if let WeightDecay::Decoupled(decay) = hyper.weight_decay
                && decay != 0.0
            {
                let retained = f64::from((1.0 - learning_rate(time) * f64::from(decay)) as f32);
                kept *= retained;
                ek = ek * retained + U * kept.abs();
            }
            let p = kept - lr * update;
            let ep = ek + lr * eu + U * ((lr * update).abs() + p.abs());
            for (k, (value, error)) in [(p, ep), (m, em), (v, ev)].into_iter().enumerate() {
                self.value[k][i] = value;
                self.error[k][i] = error;
            }
        }
    }
}

fn a_hundred_steps_stay_within_the_bound_of_f64(client: &Client) {
    // WGSL: division 2.5 ulp, square root that of an inverse square root (2 ulp) and a division.
    let (division, root) = if client.name().contains("wgpu") {
        (5.0, 9.0)
    } else {
        (1.0, 1.0)
    };
    let numel = 1009;
    for variant in VARIANTS {
        let mut rng = Rng(7);
        let mut run = Run::new(client, variant, rng.values(numel));
        let mut bounded = Bounded {
            value: std::array::from_fn(|k| run.host[k].iter().map(|&x| f64::from(x)).collect()),
            error: std::array::from_fn(|_| vec![0.0; numel]),
        };
        for time in 1..=100 {
            let grad = rng.values(numel);
            run.step(&grad, time);
            bounded.step(&grad, time, &run, division, root);
        }
        if is_exact(client) {
            run.check(&format!("{variant:?} after 100 steps"));
        }
        let mut worst = 0f64;
        for k in 0..3 {
            for (i, got) in download(client, &run.device[k]).into_iter().enumerate() {
                let (value, bound) = (bounded.value[k][i], bounded.error[k][i]);
                // Squares of roundings, and denormals, come on top.
                let off = (f64::from(got) - value).abs() / (1.01 * bound + 1e-37);
                assert!(
                    off <= 1.0,
                    "{variant:?} buffer {k}[{i}]: {got:e}, {value:e} +- {bound:e}"
                );
                worst = worst.max(off);
            }
        }
        // A bound that nothing comes near would let a wrong step pass.
        assert!(
            worst > 0.05,
            "{variant:?}: the bound is too wide, only {worst} of it is used"
        );
        println!("{} {variant:?}: {worst:.2} of the bound", client.name());
    }
}

fn half_precision_is_rounded_once_on_the_way_in_and_out(client: &Client) {
    for dtype in dtypes(client) {
        for numel in [1, 17, 4099, 65_536] {
            let mut rng = Rng(numel as u64);
            let variant = (true, WeightDecay::Decoupled(0.013));
            let mut run = Run::new(client, variant, rng.values(numel));
            let copy = upload(client, &vec![9.0; numel], dtype);
            for time in 1..=3 {
                let grad = rounded(&rng.values(numel), dtype);
                let buffer = upload(client, &grad, dtype);
                run.step_device(
                    &buffer,
                    Some(&copy),
                    &StepControl::default(),
                    &[0..numel, numel..numel],
                    time,
                );
                run.step_host(&grad, time);
            }
            run.check(&format!("{dtype:?} numel {numel}"));
            let param = download(client, &run.device[0]);
            assert_same_bits("copy", &rounded(&param, dtype), &download(client, &copy));
        }
        // Moments of the dtype: rounded as they are stored, each step.
        let numel = 4096;
        let mut rng = Rng(3);
        let mut run = Run::new(client, (true, WeightDecay::None), rng.values(numel));
        run.device[1] = upload(client, &run.host[1], dtype);
        run.device[2] = upload(client, &run.host[2], dtype);
        for time in 1..=3 {
            run.step(&rng.values(numel), time);
            for moment in &mut run.host[1..] {
                *moment = rounded(moment, dtype);
            }
            if !is_exact(client) {
                // Half an ulp on the way may be a whole one after rounding, once a step: the next one
                // starts from what the device has.
                for (moment, device) in run.host[1..].iter_mut().zip(&run.device[1..]) {
                    let got = download(client, device);
                    assert_within_an_ulp(&format!("{dtype:?} moment"), dtype, moment, &got);
                    *moment = got;
                }
            }
        }
        run.check(&format!("{dtype:?} moments"));
    }
}

/// One step of `dtype`'s grid beside what [`assert_close`] allows.
#[track_caller]
fn assert_within_an_ulp(what: &str, dtype: Dtype, expected: &[f32], got: &[f32]) {
    let (ulp, smallest) = match dtype {
        Dtype::F32 => (2f32.powi(-23), f32::MIN_POSITIVE),
        Dtype::F16 => (2f32.powi(-10), 2f32.powi(-14)),
        Dtype::BF16 => (2f32.powi(-7), f32::MIN_POSITIVE),
    };
    for (i, (e, g)) in expected.iter().zip(got).enumerate() {
        let tolerance = ulp * e.abs().max(smallest) + 64.0 * U as f32 * (e.abs() + 1e-3);
        assert!(
            (e - g).abs() <= tolerance,
            "{what}[{i}]: expected {e:e}, got {g:e}"
        );
    }
}

fn clipping_and_loss_scale_are_read_from_the_device(client: &Client) {
    let numel = 4099;
    let scalar = |value: f32| upload(client, &[value], Dtype::F32);
    for (clip, scale) in [
        (Some(0.3), None),
        (None, Some(1024.0)),
        (Some(0.7), Some(3.0)),
    ] {
        let mut rng = Rng(11);
        let mut run = Run::new(client, (true, WeightDecay::None), rng.values(numel));
        let (clip_buffer, scale_buffer) = (clip.map(scalar), scale.map(scalar));
        let fine = scalar(0.0);
        for time in 1..=3 {
            let grad = rng.values(numel);
            let buffer = upload(client, &grad, Dtype::F32);
            let control = StepControl {
                clip: clip_buffer.as_ref(),
                loss_scale: scale_buffer.as_ref(),
                found_inf: Some(&fine),
            };
            run.step_device(&buffer, None, &control, &[0..7, 7..numel], time);
            let factor = clip.unwrap_or(1.0) / scale.unwrap_or(1.0);
            let scaled: Vec<f32> = grad.iter().map(|g| g * factor).collect();
            run.step_host(&scaled, time);
        }
        run.check(&format!("clip {clip:?} scale {scale:?}"));
    }
}

fn an_overflow_leaves_everything_as_it_was(client: &Client) {
    let numel = 4099;
    for found in [1.0, f32::NAN] {
        let found = upload(client, &[found], Dtype::F32);
        let mut rng = Rng(11);
        let run = Run::new(
            client,
            (true, WeightDecay::Decoupled(0.1)),
            rng.values(numel),
        );
        let copy = upload(client, &vec![9.0; numel], Dtype::F32);
        let grad = upload(client, &vec![f32::NAN; numel], Dtype::F32);
        let control = StepControl {
            found_inf: Some(&found),
            ..StepControl::default()
        };
        run.step_device(&grad, Some(&copy), &control, &[0..numel, numel..numel], 1);
        run.check("skipped");
        assert_same_bits("copy", &vec![9.0; numel], &download(client, &copy));
    }
}

fn elements_outside_of_the_ranges_stay(client: &Client) {
    let numel = 5000;
    // Aligned, one element, odd, empty, up to the end.
    let ranges = [16..48, 48..49, 50..51, 101..1000, 1024..1024, 2048..numel];
    let mut rng = Rng(5);
    let mut run = Run::new(client, (false, WeightDecay::L2(0.1)), rng.values(numel));
    let before = run.host.clone();
    for time in 1..=3 {
        let grad = rng.values(numel);
        let buffer = upload(client, &grad, Dtype::F32);
        run.step_device(&buffer, None, &StepControl::default(), &ranges, time);
        run.step_host(&grad, time);
    }
    for (stepped, before) in run.host.iter_mut().zip(&before) {
        for (i, value) in stepped.iter_mut().enumerate() {
            if !ranges.iter().any(|range| range.contains(&i)) {
                *value = before[i];
            }
        }
    }
    run.check("ranges");
}

/// Members that follow each other are one range, which gives the bits of a range each.
fn padding_of_zeros_stays_zero_in_one_launch_for_all_members(client: &Client) {
    const ALIGN: usize = 128;
    let numels = [1usize, 127, 128, 129, 1000, 3];
    let (mut ranges, mut numel) = (Vec::new(), 0usize);
    for members in numels {
        ranges.push(numel..numel + members);
        numel = (numel + members).next_multiple_of(ALIGN);
    }
    let merged = merge_ranges(&ranges, ALIGN);
    assert_eq!(merged.len(), 1);
    let mut rng = Rng(5);
    let padded = |values: Vec<f32>| -> Vec<f32> {
        let inside = |i: usize| ranges.iter().any(|range| range.contains(&i));
        let each = values.into_iter().enumerate();
        each.map(|(i, value)| if inside(i) { value } else { 0.0 })
            .collect()
    };
    let param = padded(rng.values(numel));
    for (decoupled, weight_decay) in VARIANTS {
        let results = [&ranges, &merged].map(|ranges| {
            let buffers = [param.clone(), vec![0.0; numel], vec![0.0; numel]]
                .map(|values| upload(client, &values, Dtype::F32));
            for time in 1..=3 {
                let grad = padded(Rng(time as u64).values(numel));
                let grad = upload(client, &grad, Dtype::F32);
                let [param, moment_1, moment_2] = &buffers;
                let buffers = AdamBuffers {
                    param,
                    grad: &grad,
                    moment_1,
                    moment_2,
                    copy: None,
                };
                let step = if decoupled { adamw_step } else { adam_step };
                let control = StepControl::default();
                let hyper = hyper(weight_decay);
                step(client, &buffers, &control, ranges, time, 0.01, &hyper).unwrap();
            }
            buffers.map(|buffer| download(client, &buffer))
        });
        for (apart, together) in results[0].iter().zip(&results[1]) {
            assert_same_bits("together", apart, together);
            let zeros = padded(together.clone());
            assert_same_bits("padding", &zeros, together);
        }
    }
}
