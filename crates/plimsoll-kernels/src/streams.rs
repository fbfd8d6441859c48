//! The contribution of an n-gram embedding to one residual stream: its value, weighted by a gate from its key and the stream's query.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// Lower bound of the magnitude under the root.
const LEAST: f32 = 1e-6;

/// key = sigmoid(g) · value, with d = (key · query) / √width and g = sign(d) · √max(|d|, 1e-6). Panics if lengths differ.
pub fn gate_stream(isa: Isa, key: &mut [f32], query: &[f32], value: &[f32]) {
    assert!(key.len() == query.len() && key.len() == value.len(), "{} {} {}", key.len(), query.len(), value.len());
    isa.run(GateStream { key, query, value });
}

struct GateStream<'a> {
    key: &'a mut [f32],
    query: &'a [f32],
    value: &'a [f32],
}

impl Kernel for GateStream<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sum = s.zero();
        for (key, query) in self.key.chunks(LANES).zip(self.query.chunks(LANES)) {
            sum = s.fma(s.load_part(key, 0.0), s.load_part(query, 0.0), sum);
        }
        let d = s.sum(sum) / (self.key.len() as f32).sqrt();
        let root = d.abs().max(LEAST).sqrt();
        // The sign of 0 is 0, as in the reference. NaN stays NaN, so that it is noticed.
        let gate = if d == 0.0 || d.is_nan() { d } else { root.copysign(d) };
        let share = math::sigmoid(s, s.splat(gate));
        for (out, value) in self.key.chunks_mut(LANES).zip(self.value.chunks(LANES)) {
            s.store_part(out, s.mul(s.load_part(value, 0.0), share));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, isas};

    #[test]
    fn the_gate_is_the_signed_root_of_the_scaled_product() {
        let mut random = Random::new(5);
        for width in [1, 16, 40, 67] {
            let [key, query, value] = [(); 3].map(|()| random.floats(width));
            let d: f64 = key.iter().zip(&query).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let d = d / (width as f64).sqrt();
            let share = 1.0 / (1.0 + (-d.signum() * d.abs().max(1e-6).sqrt()).exp());
            let mut first: Option<Vec<f32>> = None;
            for isa in isas() {
                let mut out = key.clone();
                gate_stream(isa, &mut out, &query, &value);
                for (out, value) in out.iter().zip(&value) {
                    assert!((f64::from(*out) - share * f64::from(*value)).abs() < 1e-5, "{isa}");
                }
                assert_eq!(bits(&out), bits(first.get_or_insert_with(|| out.clone())), "{isa}");
            }
        }
        let mut still = [0.0; 3];
        gate_stream(Isa::Portable, &mut still, &[0.0; 3], &[2.0; 3]);
        assert_eq!(still, [1.0; 3], "a product of 0 weighs half");
    }
}
