//! Quantized activations: error bound, sums, odd values, and agreement of instruction sets.

use proptest::prelude::*;

use super::*;
use crate::testing::{Aligned, Random, isas};

/// Where the `i`-th of words in the order 0, 2, 1, 3 of every four lies.
fn place(i: usize) -> usize {
    i / 4 * 4 + [0, 2, 1, 3][i % 4]
}

/// The blocks of a row, and its numbers for tiles: a plane of each block after the other.
fn quantize_tiles(isa: Isa, x: &[f32]) -> (Vec<ActBlock<2>>, Vec<[f32; BLOCK]>) {
    let layout = ActLayout { rows: 1, k: x.len(), form: ActForm::Tiled };
    let mut buffer = Aligned::new(layout.bytes());
    quantize_acts(isa, layout, x, buffer.bytes_mut());
    let (blocks, tiles) = buffer.bytes().split_at(layout.tiles_at());
    let word = |bytes: [u8; 2]| crate::bf16_to_f32(u16::from_le_bytes(bytes));
    let planes = tiles.as_chunks::<{ 2 * BLOCK }>().0[..2 * x.len() / BLOCK].iter();
    let planes = planes.map(|plane| std::array::from_fn(|i| word([plane[2 * place(i)], plane[2 * place(i) + 1]])));
    // SAFETY: blocks lie there, one after the other, from an aligned address on.
    let block = |i: usize| unsafe { blocks.as_ptr().cast::<ActBlock<2>>().add(i).read() };
    ((0..x.len() / BLOCK).map(block).collect(), planes.collect())
}

fn quantize(isa: Isa, x: &[f32]) -> Vec<ActBlock<2>> {
    quantize_tiles(isa, x).0
}

/// The blocks of a row of bytes.
fn quantize_bytes(isa: Isa, x: &[f32]) -> Vec<ActBlock<1>> {
    let layout = ActLayout { rows: 1, k: x.len(), form: ActForm::Bytes };
    let mut buffer = Aligned::new(layout.bytes());
    quantize_acts(isa, layout, x, buffer.bytes_mut());
    // SAFETY: blocks lie there, one after the other, from an aligned address on.
    (0..x.len() / BLOCK).map(|i| unsafe { buffer.bytes().as_ptr().cast::<ActBlock<1>>().add(i).read() }).collect()
}

/// The numbers of 16 bits of a block of this instruction set.
fn numbers(isa: Isa, block: &ActBlock<2>) -> [i32; BLOCK] {
    let planes = block.planes;
    std::array::from_fn(|i| {
        if isa != Isa::Avx2 {
            return 256 * i32::from(planes[0][i]) + i32::from(planes[1][i]);
        }
        let at = 2 * place(i);
        i16::from_le_bytes([planes[at / BLOCK][at % BLOCK] as u8, planes[at / BLOCK][at % BLOCK + 1] as u8]).into()
    })
}

/// The same, and everything else it holds, floats by their bits.
fn contents(isa: Isa, block: &ActBlock<2>) -> ([i32; BLOCK], Vec<u32>, Vec<i32>) {
    let (_, floats, sums) = words(block);
    (numbers(isa, block), floats, sums)
}

/// Everything a block holds, as it lies there.
fn words<const PLANES: usize>(block: &ActBlock<PLANES>) -> (Vec<i8>, Vec<u32>, Vec<i32>) {
    let floats =
        [block.sums.scale, block.sums.scaled_sum, block.sums.scaled_half_sums[0], block.sums.scaled_half_sums[1]];
    let ints = vec![block.sums.minus_sum, block.sums.minus_half_sums[0], block.sums.minus_half_sums[1]];
    (block.planes.concat(), crate::testing::bits(&floats), ints)
}

/// Expects what is known of a block to be that of its numbers.
fn sums_are_right(known: &ActSums, number: impl Fn(usize) -> i32) -> Result<(), TestCaseError> {
    let sums = [(0..16).map(&number).sum::<i32>(), (16..32).map(&number).sum()];
    prop_assert_eq!(known.minus_sum, -(sums[0] + sums[1]));
    prop_assert_eq!(known.minus_half_sums, sums.map(|sum| -sum));
    prop_assert_eq!(known.scaled_sum, known.scale * (sums[0] + sums[1]) as f32);
    prop_assert_eq!(known.scaled_half_sums, sums.map(|sum| known.scale * sum as f32));
    Ok(())
}

proptest! {
    #[test]
    fn codes_are_near_and_sums_are_right(seed: u64, blocks in 1usize..20, magnitude in -30i32..30) {
        let x: Vec<f32> = Random::new(seed).floats(32 * blocks).iter().map(|x| x * 2f32.powi(magnitude)).collect();
        let (blocks, tiles) = quantize_tiles(Isa::detect(), &x);
        for ((x, block), planes) in x.chunks(32).zip(blocks).zip(tiles.chunks(2)) {
            let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            // The least power of two that will do.
            prop_assert!(block.sums.scale.to_bits().trailing_zeros() >= 23);
            prop_assert!(block.sums.scale >= amax / WORD_MAX && block.sums.scale / 2.0 < amax / WORD_MAX);
            let numbers = numbers(Isa::detect(), &block);
            let number = |i: usize| numbers[i];
            for (i, x) in x.iter().enumerate() {
                prop_assert!((x - block.sums.scale * number(i) as f32).abs() <= 0.5 * block.sums.scale);
                let high = (number(i) + 128) >> 8;
                prop_assert_eq!(planes[0][i], block.sums.scale * 256.0 * high as f32);
                prop_assert_eq!(planes[1][i], block.sums.scale * (number(i) - 256 * high) as f32);
            }
            sums_are_right(&block.sums, number)?;
        }
    }

    #[test]
    fn bytes_are_near_and_their_sums_are_right(seed: u64, blocks in 1usize..20, magnitude in -30i32..30) {
        let x: Vec<f32> = Random::new(seed).floats(32 * blocks).iter().map(|x| x * 2f32.powi(magnitude)).collect();
        for (x, block) in x.chunks(32).zip(quantize_bytes(Isa::detect(), &x)) {
            let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            prop_assert_eq!(block.sums.scale, amax / 127.0);
            let number = |i: usize| i32::from(block.planes[0][i]);
            for (i, x) in x.iter().enumerate() {
                prop_assert!((x - block.sums.scale * number(i) as f32).abs() <= 0.5001 * block.sums.scale);
            }
            prop_assert!((0..32).any(|i| number(i).abs() == 127), "all of the range is used");
            sums_are_right(&block.sums, number)?;
        }
    }

    #[test]
    fn instruction_sets_agree(seed: u64, blocks in 1usize..9) {
        let x = Random::new(seed).awkward(32 * blocks);
        let bytes = |isa| quantize_bytes(isa, &x).iter().map(words).collect::<Vec<_>>();
        for isa in isas() {
            prop_assert_eq!(bytes(isa), bytes(Isa::Portable), "{}", isa);
        }
        let all = |isa| {
            let (blocks, tiles) = quantize_tiles(isa, &x);
            let blocks = blocks.iter().map(|block| contents(isa, block));
            (blocks.collect::<Vec<_>>(), crate::testing::bits(tiles.as_flattened()))
        };
        for isa in isas() {
            prop_assert_eq!(&all(isa), &all(Isa::Portable), "{}", isa);
        }
    }
}

#[test]
fn nothing_hides_a_nan_or_an_infinity() {
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2f32.powi(100)] {
            for at in [0, 15, 16, 31] {
                let mut x = vec![1.0; 64];
                x[32 + at] = bad;
                let (blocks, tiles) = quantize_tiles(isa, &x);
                assert!(blocks[0].sums.scale == 2f32.powi(-14), "{isa}");
                assert!(blocks[1].sums.scale.is_nan(), "{isa} {bad} at {at}");
                assert!(tiles[2..].as_flattened().iter().all(|value| value.is_nan()), "{isa} {bad} at {at}");
                let bytes = quantize_bytes(isa, &x);
                assert!(bytes[0].sums.scale == 1.0 / 127.0 && bytes[1].sums.scale.is_nan(), "{isa} {bad} at {at}");
            }
        }
    }
}

#[test]
fn blocks_of_nothing_else_are_quantized_too() {
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [bad; 64];
            x[32..48].fill(1.0);
            let (blocks, tiles) = quantize_tiles(isa, &x);
            assert!(
                blocks.iter().all(|block| block.sums.scale.is_nan() && block.sums.scaled_sum.is_nan()),
                "{isa} {bad}"
            );
            assert!(tiles.as_flattened().iter().all(|value| value.is_nan()), "{isa} {bad}");
        }
    }
}

#[test]
fn tiny_blocks_become_zeros() {
    for isa in isas() {
        let block = quantize(isa, &[1e-31; 32])[0];
        assert_eq!(words(&block), (vec![0; 64], vec![0; 4], vec![0; 3]));
        assert_eq!(words(&quantize_bytes(isa, &[1e-31; 32])[0]), (vec![0; 32], vec![0; 4], vec![0; 3]));
    }
}

#[test]
#[should_panic(expected = "33 activations")]
fn ragged_rows_are_refused() {
    ActLayout { rows: 1, k: 33, form: ActForm::Words }.bytes();
}
