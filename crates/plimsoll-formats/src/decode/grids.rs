//! GGUF types that store indexes into a grid. An entry has eight (or four) numbers; signs are stored separately.
//!
//! Layouts as in ggml's `ggml-common.h`. Here every number gets a code: its place among the few values of the grid, and its sign.
//! `grids.bin` has these places, two bits each (four bits in the grids of four), as little-endian words.

use super::word;
use crate::encoding::Codebook;
use crate::row::RowBuf;
use half::f16;

/// The grids, one after the other; made by `tests/fixtures/make.py`.
static GRIDS: &[u8; 2 * (256 + 512 + 1024 + 256 + 512 + 2048)] = include_bytes!("grids.bin");

/// The first word of each grid in [`GRIDS`].
const IQ2_XXS: usize = 0;
const IQ2_XS: usize = IQ2_XXS + 256;
const IQ2_S: usize = IQ2_XS + 512;
const IQ3_XXS: usize = IQ2_S + 1024;
const IQ3_S: usize = IQ3_XXS + 256;
const IQ1: usize = IQ3_S + 512;

/// The values 8, 25 and 43, then their negatives; all plus 43.
pub(crate) const IQ2_BOOK: (Codebook, u8) = ([51, 68, 86, 43, 35, 18, 0, 43, 43, 43, 43, 43, 43, 43, 43, 43], 43);

/// The values 4, 12, 20, 28, 36, 44, 52 and 62, then their negatives; all plus 62.
pub(crate) const IQ3_XXS_BOOK: (Codebook, u8) =
    ([66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0], 62);

/// The odd numbers up to 15, then their negatives; all plus 15.
pub(crate) const IQ3_S_BOOK: (Codebook, u8) = ([16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0], 15);

/// Eight times −1, 0 and 1, plus one; then the same products minus one. All plus 9.
pub(crate) const IQ1_M_BOOK: (Codebook, u8) = ([2, 10, 18, 9, 0, 8, 16, 9, 9, 9, 9, 9, 9, 9, 9, 9], 9);

/// Appends the eight codes of an entry of a grid. A code whose bit in `signs` is set gets bit 2.
fn push_eight(grid: usize, index: usize, signs: u8, codes: &mut Vec<u8>) {
    let places = word(GRIDS, 2 * (grid + index));
    codes.extend((0..8).map(|i| (places >> (2 * i)) as u8 & 3 | (signs >> i & 1) << 2));
}

/// Appends the four codes of an entry of a grid. A code whose bit in `signs` is set gets bit 3.
fn push_four(grid: usize, index: usize, signs: u8, codes: &mut Vec<u8>) {
    let places = word(GRIDS, 2 * (grid + index));
    codes.extend((0..4).map(|i| (places >> (4 * i)) as u8 & 7 | (signs >> i & 1) << 3));
}

/// Returns eight signs from seven stored bits: the number of set signs is even.
fn even_signs(bits: usize) -> u8 {
    let bits = bits as u8 & 0x7F;
    bits | (bits.count_ones() as u8 & 1) << 7
}

/// Appends the super-scale `d`, divided exactly by a power of two.
fn push_d(bits: u16, divisor: f32, out: &mut RowBuf) {
    out.d_f32.push(f16::from_bits(bits).to_f32() / divisor);
}

/// Returns a small scale s as the integer 2s + 1.
fn odd(scale: u8) -> i8 {
    (2 * scale + 1) as i8
}

/// The little-endian 32-bit word at byte `at`.
fn double(bytes: &[u8], at: usize) -> usize {
    usize::from(word(bytes, at)) | usize::from(word(bytes, at + 2)) << 16
}

/// IQ2_XXS: `d`, then for each 32 elements four 8-bit indexes, and 32 bits with four times seven signs and a scale.
pub(crate) fn iq2_xxs(block: &[u8], out: &mut RowBuf) {
    push_d(word(block, 0), 8.0, out);
    for group in block[2..66].chunks_exact(8) {
        let rest = double(group, 4);
        for (j, &index) in group[..4].iter().enumerate() {
            push_eight(IQ2_XXS, index.into(), even_signs(rest >> (7 * j)), &mut out.codes);
        }
        out.sc.push(odd((rest >> 28) as u8));
    }
}

/// IQ2_XS: `d`, 32 words of a 9-bit index and seven signs, 16 nibbles of scales for 16 elements each.
pub(crate) fn iq2_xs(block: &[u8], out: &mut RowBuf) {
    push_d(word(block, 0), 8.0, out);
    for at in (2..66).step_by(2) {
        let both = usize::from(word(block, at));
        push_eight(IQ2_XS, both & 511, even_signs(both >> 9), &mut out.codes);
    }
    push_nibble_scales(&block[66..74], out);
}

/// IQ2_S: `d`, 32 low bytes of indexes, 32 bytes of signs, 32 times the upper two bits, scales as in IQ2_XS.
pub(crate) fn iq2_s(block: &[u8], out: &mut RowBuf) {
    push_d(word(block, 0), 8.0, out);
    for i in 0..32 {
        let high = block[66 + i / 4] >> (2 * (i % 4)) & 3;
        let index = usize::from(block[2 + i]) | usize::from(high) << 8;
        push_eight(IQ2_S, index, block[34 + i], &mut out.codes);
    }
    push_nibble_scales(&block[74..82], out);
}

/// IQ3_XXS: `d`, 64 8-bit indexes, then for each 32 elements four times seven signs and a scale.
pub(crate) fn iq3_xxs(block: &[u8], out: &mut RowBuf) {
    push_d(word(block, 0), 4.0, out);
    for (g, indexes) in block[2..66].chunks_exact(8).enumerate() {
        let rest = double(block, 66 + 4 * g);
        for (j, pair) in indexes.chunks_exact(2).enumerate() {
            let signs = even_signs(rest >> (7 * j));
            push_four(IQ3_XXS, pair[0].into(), signs, &mut out.codes);
            push_four(IQ3_XXS, pair[1].into(), signs >> 4, &mut out.codes);
        }
        out.sc.push(odd((rest >> 28) as u8));
    }
}

/// IQ3_S: `d`, 64 low bytes of indexes, 64 upper bits, 32 bytes of signs, eight nibbles of scales for 32 elements each.
pub(crate) fn iq3_s(block: &[u8], out: &mut RowBuf) {
    out.d.push(word(block, 0));
    for i in 0..64 {
        let high = block[66 + i / 8] >> (i % 8) & 1;
        let index = usize::from(block[2 + i]) | usize::from(high) << 8;
        push_four(IQ3_S, index, block[74 + i / 2] >> (4 * (i % 2)), &mut out.codes);
    }
    push_nibble_scales(&block[106..110], out);
}

/// IQ1_S: `d`, 32 low bytes of indexes, then for each 32 elements four times the upper three bits, a scale, and a sign. This is the sign of
/// an eighth that is added to all 32 numbers.
pub(crate) fn iq1_s(block: &[u8], out: &mut RowBuf) {
    let d = word(block, 0);
    push_d(d, 1.0, out);
    out.dmin_f32.push(f16::from_bits(d).to_f32() / 8.0);
    for g in 0..8 {
        let high = usize::from(word(block, 34 + 2 * g));
        for j in 0..4 {
            let index = usize::from(block[2 + 4 * g + j]) | (high >> (3 * j) & 7) << 8;
            push_eight(IQ1, index, 0, &mut out.codes);
        }
        let scale = odd((high >> 12) as u8 & 7);
        out.sc.push(scale);
        // A code is its number plus one. The offset subtracts the one and adds or subtracts the eighth.
        out.m.push(scale as u8 * if high & 0x8000 == 0 { 7 } else { 9 });
    }
}

/// IQ1_M: 32 low bytes of indexes, then 32 times their upper three bits and the sign of an eighth. Four words follow: each has four 3-bit
/// scales, for 16 elements each, and in its upper nibble a part of `d`.
pub(crate) fn iq1_m(block: &[u8], out: &mut RowBuf) {
    let words = [48, 50, 52, 54].map(|at| word(block, at));
    let d = words.iter().enumerate().fold(0, |d, (i, word)| d | (word >> 12) << (4 * i));
    push_d(d, 8.0, out);
    for i in 0..32 {
        let high = block[32 + i / 2] >> (4 * (i % 2));
        let index = usize::from(block[i]) | usize::from(high & 7) << 8;
        push_eight(IQ1, index, if high & 8 == 0 { 0 } else { 0xFF }, &mut out.codes);
    }
    out.sc.extend((0..16).map(|g| odd((words[g / 4] >> (3 * (g % 4))) as u8 & 7)));
}

/// Appends scales of one nibble each, the low nibble first.
fn push_nibble_scales(bytes: &[u8], out: &mut RowBuf) {
    out.sc.extend(bytes.iter().flat_map(|byte| [odd(byte & 0x0F), odd(byte >> 4)]));
}
