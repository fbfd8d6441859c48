//! The simple GGUF blocks: 32 elements with one binary16 scale and perhaps a binary16 minimum.
//!
//! Layouts as in ggml's `ggml-common.h`. The 256-element K-quants are in `superblocks`.

use super::word;
use crate::row::RowBuf;

/// Elements in a simple block.
const BLOCK: usize = 32;

/// Q4_0: `d`, then 16 bytes. Their low nibbles are elements 0–15, their high nibbles are elements 16–31.
pub(crate) fn q4_0(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    push_nibbles(&block[2..18], &mut out.codes);
}

/// Q4_1: `d`, minimum `m`, then nibbles as in Q4_0.
pub(crate) fn q4_1(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    out.push_offset_f16(word(block, 2));
    push_nibbles(&block[4..20], &mut out.codes);
}

/// Q5_0: `d`, 32 fifth bits, then nibbles as in Q4_0.
pub(crate) fn q5_0(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    push_nibbles(&block[6..22], &mut out.codes);
    add_fifth_bits(&block[2..6], &mut out.codes);
}

/// Q5_1: `d`, minimum `m`, 32 fifth bits, then nibbles as in Q4_0.
pub(crate) fn q5_1(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    out.push_offset_f16(word(block, 2));
    push_nibbles(&block[8..24], &mut out.codes);
    add_fifth_bits(&block[4..8], &mut out.codes);
}

/// Q8_0: `d`, then 32 signed bytes, which become unsigned codes around 128.
pub(crate) fn q8_0(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    // Flipping the sign bit of a two's complement byte adds 128.
    out.codes.extend(block[2..34].iter().map(|&byte| byte ^ 0x80));
}

/// Appends the low nibbles, then the high ones.
pub(super) fn push_nibbles(bytes: &[u8], codes: &mut Vec<u8>) {
    codes.extend(bytes.iter().map(|byte| byte & 0x0F));
    codes.extend(bytes.iter().map(|byte| byte >> 4));
}

/// Sets bit 4 of the last 32 codes from a little-endian mask.
fn add_fifth_bits(mask: &[u8], codes: &mut [u8]) {
    let mask = u32::from_le_bytes([mask[0], mask[1], mask[2], mask[3]]);
    let start = codes.len() - BLOCK;
    for (bit, code) in codes[start..].iter_mut().enumerate() {
        *code |= u8::from(mask >> bit & 1 == 1) << 4;
    }
}
