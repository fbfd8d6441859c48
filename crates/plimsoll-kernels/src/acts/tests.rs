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
    (block.codes.to_vec(), crate::testing::bits(&floats), ints)
}

proptest! {
    #[test]
    fn codes_are_near_and_sums_are_right(seed: u64, blocks in 1usize..5, magnitude in -30i32..30) {
        let x: Vec<f32> = Random::new(seed).floats(32 * blocks).iter().map(|x| x * 2f32.powi(magnitude)).collect();
        for (x, block) in x.chunks(32).zip(quantize(Isa::detect(), &x)) {
            let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            prop_assert_eq!(block.scale, amax / 127.0);
            for (x, code) in x.iter().zip(block.codes) {
                prop_assert!((x - block.scale * f32::from(code)).abs() <= 0.5001 * block.scale);
            }
            let sum = |codes: &[i8]| codes.iter().map(|c| i32::from(*c)).sum::<i32>();
            prop_assert_eq!(block.minus_sum, -sum(&block.codes));
            prop_assert_eq!(block.minus_half_sums, [-sum(&block.codes[..16]), -sum(&block.codes[16..])]);
            prop_assert_eq!(block.scaled_sum, block.scale * sum(&block.codes) as f32);
            prop_assert_eq!(block.scaled_half_sums[1], block.scale * sum(&block.codes[16..]) as f32);
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
                assert!(blocks[0].scale == 1.0 / 127.0, "{isa}");
                assert!(!blocks[1].scale.is_finite(), "{isa} {bad} at {at}");
                assert!(blocks[1].codes.iter().all(|code| *code >= -127));
            }
        }
    }
}

#[test]
fn tiny_blocks_become_zeros() {
    for isa in isas() {
        let block = quantize(isa, &[1e-38; 32])[0];
        assert_eq!(words(&block), (vec![0; 32], vec![0; 4], vec![0; 3]));
    }
}

#[test]
#[should_panic(expected = "33 activations")]
fn ragged_rows_are_refused() {
    ActLayout { rows: 1, k: 33 }.bytes();
}
