//! Deterministic data with the values that tell roundings and branches apart.

#![allow(clippy::cast_possible_truncation, reason = "small numbers")]
#![allow(dead_code, reason = "each test binary uses its own part of this file")]

/// Values a step must not treat as ordinary: signed zeros, denormals, the largest, infinities, NaN.
pub(crate) const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    f32::from_bits(1),
    -f32::from_bits(0x0040_0000),
    f32::MIN_POSITIVE,
    f32::MAX,
    -f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1.0e-22,
    1.0e20,
];

/// A splitmix64 stream.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [-1, 1), times a power of two in 2^-20..2^4: sums and products do round.
    pub(crate) fn value(&mut self) -> f32 {
        let bits = self.next();
        let mantissa = ((bits >> 40) as f32) / ((1 << 23) as f32) - 1.0;
        mantissa * 2f32.powi((bits % 25) as i32 - 20)
    }

    /// `numel` ordinary values.
    pub(crate) fn values(&mut self, numel: usize) -> Vec<f32> {
        (0..numel).map(|_| self.value()).collect()
    }

    /// `numel` values, every seventh of them special.
    pub(crate) fn values_with_special(&mut self, numel: usize) -> Vec<f32> {
        (0..numel)
            .map(|i| {
                if i % 7 == 3 {
                    SPECIAL[(self.next() % SPECIAL.len() as u64) as usize]
                } else {
                    self.value()
                }
            })
            .collect()
    }
}

/// Asserts equal bits, where any NaN equals any other: Rust leaves its payload open.
#[track_caller]
pub(crate) fn assert_same_bits(what: &str, step: usize, expected: &[f32], got: &[f32]) {
    assert_eq!(expected.len(), got.len(), "{what}: numel at step {step}");
    for (i, (e, g)) in expected.iter().zip(got).enumerate() {
        assert!(
            e.to_bits() == g.to_bits() || (e.is_nan() && g.is_nan()),
            "{what}[{i}] at step {step}: expected {e:e} ({:#010x}), got {g:e} ({:#010x})",
            e.to_bits(),
            g.to_bits(),
        );
    }
}

/// A learning rate that moves as under a schedule and does not fit `f32`; once it is zero.
pub(crate) fn learning_rate(step: usize) -> f64 {
    if step == 7 {
        0.0
    } else {
        1.0e-3 / 3.0 * (1.0 + 0.1 * step as f64)
    }
}
