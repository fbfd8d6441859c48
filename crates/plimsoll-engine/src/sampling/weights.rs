//! The weight of a token: its probability relative to the most likely one, as an exact integer number of units.
//!
//! A weight is exp((logit − largest) / temperature), rounded to a multiple of 2⁻⁴³ and kept as an integer. Sums of
//! integers are exact in any order, so "the smallest set that reaches top-p" has one answer. A vocabulary of up to 2²⁰
//! tokens cannot overflow 64 bits. A token less than 2⁻⁴⁴ times as likely as the best has no weight and is never drawn.
//!
//! Not here: truncation, random numbers.

/// Logits that share one maximum and one sum; blocks that cannot matter are skipped.
pub(super) const BLOCK: usize = 64;

/// The weight of the most likely token.
pub(super) const UNITS: u64 = 1 << 43;

/// This many temperatures below the largest logit (44 · ln 2 = 30.5, and some margin) a weight has rounded to nothing.
pub(super) const DEPTH_MAX: f32 = 32.0;

/// e^z for z ≤ 0, to within 2 units in the last place; a NaN and anything below −87 give about 1.6e−38.
///
/// Two-step reduction z = n·ln 2 + r, |r| ≤ ln 2 / 2, then the Taylor polynomial of degree 7 (error below 6e−9). Only
/// additions and multiplications: it vectorises, and every machine computes the same bits.
#[inline(always)]
pub(super) fn exp_neg(z: f32) -> f32 {
    // Adding 1.5 · 2^23 leaves the rounded integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let z = if z > -87.0 { z } else { -87.0 };
    let shifted = z * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (z - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + coefficient;
    }
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000));
    sum * scale
}

/// The bits of 1.5 · 2^52.
const RAISED_BY: u64 = 0x4338_0000_0000_0000;

/// Turns logits of one row into weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weigher {
    /// The largest logit of the row; finite.
    pub max: f32,
    /// Logits below this have no weight: min-p.
    pub floor: f32,
    inverse_temperature: f32,
}

impl Weigher {
    /// A weigher for a row the largest logit of which is `max`.
    pub(super) fn new(max: f32, temperature: f32, min_p: f32) -> Self {
        let floor = if min_p > 0.0 { max + temperature * min_p.ln() } else { f32::NEG_INFINITY };
        Self { max, floor, inverse_temperature: 1.0 / temperature }
    }

    /// Weight of one logit.
    #[inline(always)]
    pub(super) fn weigh(&self, logit: f32) -> u64 {
        raised(self.share(logit)).wrapping_sub(RAISED_BY)
    }

    /// Sum of the weights of some logits.
    pub(super) fn sum(&self, logits: &[f32]) -> u64 {
        let (blocks, rest) = logits.as_chunks::<BLOCK>();
        let whole: u64 = blocks.iter().map(|block| self.sum_block(block)).sum();
        whole + rest.iter().map(|&logit| self.weigh(logit)).sum::<u64>()
    }

    /// Sum of the weights of one block; in two loops, because only then are both vectorised.
    pub(super) fn sum_block(&self, logits: &[f32; BLOCK]) -> u64 {
        let shares = logits.map(|logit| self.share(logit));
        let sum = shares.iter().fold(0_u64, |sum, &share| sum.wrapping_add(raised(share)));
        sum.wrapping_sub(RAISED_BY.wrapping_mul(BLOCK as u64))
    }

    /// Probability of one logit relative to the largest, before rounding.
    #[inline(always)]
    fn share(&self, logit: f32) -> f32 {
        let share = exp_neg((logit - self.max) * self.inverse_temperature);
        if logit >= self.floor { share } else { 0.0 }
    }

    /// Whether a block with this largest logit has no weight at all.
    #[inline]
    pub(super) fn is_nothing(&self, block_max: f32) -> bool {
        // Written so that a NaN counts as nothing.
        !(block_max >= self.floor && (block_max - self.max) * self.inverse_temperature > -DEPTH_MAX)
    }
}

/// Rules out the tokens before `first` if those from there on are more likely together than each of them.
pub(super) fn apply_group(logits: &mut [f32], first: u32) {
    let (each, group) = logits.split_at_mut(logits.len().min(first as usize));
    let (best, highest) = (block_max(each), block_max(group));
    let max = best.max(highest);
    // A row without a number, or with an infinite one, has no probabilities to add up.
    if max.is_finite() && {
        let weigher = Weigher::new(max, 1.0, 0.0);
        weigher.sum(group) > weigher.weigh(best)
    } {
        each.fill(f32::NEG_INFINITY);
    }
}

/// A weight plus [`RAISED_BY`]: the sum with 1.5 · 2^52 has the rounded weight in its low bits. Unlike a conversion to
/// an integer this vectorises everywhere.
#[inline(always)]
fn raised(share: f32) -> u64 {
    (f64::from(share) * UNITS as f64 + f64::from_bits(RAISED_BY)).to_bits()
}

/// Largest of a block, −∞ if it has no number.
#[inline]
pub(super) fn block_max(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (whole, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for sixteen in whole {
        for (lane, &logit) in lanes.iter_mut().zip(sixteen) {
            *lane = larger(*lane, logit);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate_and_stays_in_range() {
        let mut worst = 0.0_f64;
        for i in 0..=8_700_000 {
            let z = -(i as f32) * 1e-5;
            let (got, want) = (f64::from(exp_neg(z)), f64::from(z).exp());
            worst = worst.max((got - want).abs() / want);
        }
        assert!(worst < 2.4e-7, "relative error {worst:e}");
        assert_eq!(exp_neg(0.0), 1.0);
        for z in [-88.0, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert!(exp_neg(z) < 2e-38, "{z}");
        }
    }

    #[test]
    fn sums_are_exact_for_the_largest_vocabulary() {
        let vocab = 1 << 20;
        let weigher = Weigher::new(3.0, 1.0, 0.0);
        assert_eq!(weigher.sum(&vec![3.0; vocab]), UNITS << 20, "all weights are the largest");
        let logits: Vec<f32> = (0..999).map(|i| 3.0 - (i % 977) as f32 * 0.03).collect();
        let one_by_one: u64 = logits.iter().rev().map(|&logit| weigher.weigh(logit)).sum();
        assert_eq!(weigher.sum(&logits), one_by_one);
        let exact: f64 = logits.iter().map(|&logit| (f64::from(logit) - 3.0).exp()).sum();
        assert!((one_by_one as f64 / UNITS as f64 / exact - 1.0).abs() < 1e-7);
    }

    #[test]
    fn nothing_lies_below_the_largest_depth() {
        let weigher = Weigher::new(0.0, 0.5, 0.0);
        assert_eq!(weigher.weigh(-DEPTH_MAX * 0.5), 0);
        assert!(weigher.is_nothing(-DEPTH_MAX * 0.5));
        assert!(!weigher.is_nothing(-1.0));
        assert_eq!((weigher.weigh(0.0), weigher.weigh(f32::NAN), weigher.weigh(f32::NEG_INFINITY)), (UNITS, 0, 0));
        let weigher = Weigher::new(0.0, 1.0, 0.5);
        assert_eq!((weigher.weigh(-0.7), weigher.is_nothing(-0.7)), (0, true));
    }
}
