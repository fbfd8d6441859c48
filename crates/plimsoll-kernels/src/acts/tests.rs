//! Quantized activations: error bound, sums, odd values, and agreement of instruction sets.

use proptest::prelude::*;

use super::*;
use crate::testing::{Aligned, Random, isas};

fn quantize(isa: Isa, x: &[f32]) -> Vec<ActBlock> {
    let layout = ActLayout { rows: 1, k: x.len() };
    let mut buffer = Aligned::new(layout.bytes());
    quantize_acts(isa, x, buffer.bytes_mut());
    Acts::new(layout, buffer.bytes()).blocks.to_vec()
}

/// Everything a block holds, floats by their bits.
fn words(block: &ActBlock) -> (Vec<i8>, Vec<u32>, Vec<i32>) {
    let floats = [block.scale, block.scaled_sum, block.scaled_half_sums[0], block.scaled_half_sums[1]];
    let ints = vec![block.minus_sum, block.minus_half_sums[0], block.minus_half_sums[1]];
    ([block.high, block.low].concat(), crate::testing::bits(&floats), ints)
}

proptest! {
    #[test]
    fn codes_are_near_and_sums_are_right(seed: u64, blocks in 1usize..5, magnitude in -30i32..30) {
        let x: Vec<f32> = Random::new(seed).floats(32 * blocks).iter().map(|x| x * 2f32.powi(magnitude)).collect();
        for (x, block) in x.chunks(32).zip(quantize(Isa::detect(), &x)) {
            let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            prop_assert_eq!(block.scale, amax / ACT_MAX);
            let number = |i: usize| 256 * i32::from(block.high[i]) + i32::from(block.low[i]);
            for (i, x) in x.iter().enumerate() {
                // Within half a step, but for the rounding of x · (32639 / amax).
                prop_assert!((x - block.scale * number(i) as f32).abs() <= 0.51 * block.scale);
            }
            let sums = [(0..16).map(number).sum::<i32>(), (16..32).map(number).sum()];
            prop_assert_eq!(block.minus_sum, -(sums[0] + sums[1]));
            prop_assert_eq!(block.minus_half_sums, sums.map(|sum| -sum));
            prop_assert_eq!(block.scaled_sum, block.scale * (sums[0] + sums[1]) as f32);
            prop_assert_eq!(block.scaled_half_sums, sums.map(|sum| block.scale * sum as f32));
        }
    }

    #[test]
    fn instruction_sets_agree(seed: u64, blocks in 1usize..9) {
        let x = Random::new(seed).awkward(32 * blocks);
        let expected: Vec<_> = quantize(Isa::Portable, &x).iter().map(words).collect();
        for isa in isas() {
            let actual: Vec<_> = quantize(isa, &x).iter().map(words).collect();
            prop_assert_eq!(&actual, &expected, "{}", isa);
        }
    }
}

#[test]
fn nothing_hides_a_nan_or_an_infinity() {
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 15, 16, 31] {
                let mut x = vec![1.0; 64];
                x[32 + at] = bad;
                let blocks = quantize(isa, &x);
                assert!(blocks[0].scale == 1.0 / ACT_MAX, "{isa}");
                assert!(!blocks[1].scale.is_finite(), "{isa} {bad} at {at}");
            }
        }
    }
}

#[test]
fn tiny_blocks_become_zeros() {
    for isa in isas() {
        let block = quantize(isa, &[1e-31; 32])[0];
        assert_eq!(words(&block), (vec![0; 64], vec![0; 4], vec![0; 3]));
    }
}

#[test]
#[should_panic(expected = "33 activations")]
fn ragged_rows_are_refused() {
    ActLayout { rows: 1, k: 33 }.bytes();
}
