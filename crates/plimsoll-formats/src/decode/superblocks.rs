//! The K-quants of GGUF: blocks of 256 elements with a binary16 super-scale and small integer scales per group.
//!
//! Layouts as in ggml's `ggml-common.h`. The codes of a block are interleaved in runs of 32 (or 64) elements. One run of bytes has the bits
//! of several runs of elements. The decoded codes are in element order.

use super::word;
use crate::row::RowBuf;

/// Q2_K: 16 bytes of scale and minimum nibbles, 64 bytes of 2-bit codes, `d`, `dmin`. Groups of 16.
pub(crate) fn q2_k(block: &[u8], out: &mut RowBuf) {
    out.sc.extend(block[..16].iter().map(|byte| (byte & 0x0F) as i8));
    out.m.extend(block[..16].iter().map(|byte| byte >> 4));
    for run in block[16..80].chunks_exact(32) {
        for shift in [0, 2, 4, 6] {
            out.codes.extend(run.iter().map(|byte| byte >> shift & 3));
        }
    }
    out.d.push(word(block, 80));
    out.dmin.push(word(block, 82));
}

/// Q3_K: 32 bytes of high bits, 64 bytes of low 2 bits, 12 bytes of 6-bit scales, `d`. Groups of 16, zero is 4.
pub(crate) fn q3_k(block: &[u8], out: &mut RowBuf) {
    let (high, low) = (&block[..32], &block[32..96]);
    for (half, run) in low.chunks_exact(32).enumerate() {
        for quarter in 0..4 {
            let bit = half * 4 + quarter;
            out.codes
                .extend(run.iter().zip(high).map(|(low, high)| (low >> (2 * quarter) & 3) | (high >> bit & 1) << 2));
        }
    }
    let packed = &block[96..108];
    out.sc.extend((0..16).map(|g| {
        // Eight bytes hold the low nibbles, first of groups 0-7, then of 8-15; four bytes the upper two bits.
        let low = packed[g % 8] >> (4 * (g / 8)) & 0x0F;
        let high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
        (low | high << 4) as i8 - 32
    }));
    out.d.push(word(block, 108));
}

/// Q4_K: `d`, `dmin`, 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles. Groups of 32.
pub(crate) fn q4_k(block: &[u8], out: &mut RowBuf) {
    push_super_header(block, out);
    for run in block[16..144].chunks_exact(32) {
        out.codes.extend(run.iter().map(|byte| byte & 0x0F));
        out.codes.extend(run.iter().map(|byte| byte >> 4));
    }
}

/// Q5_K: the header of Q4_K, 32 bytes of fifth bits, 128 bytes of nibbles. Groups of 32.
pub(crate) fn q5_k(block: &[u8], out: &mut RowBuf) {
    push_super_header(block, out);
    let high = &block[16..48];
    for (pair, run) in block[48..176].chunks_exact(32).enumerate() {
        for (nibble, bit) in [(0, 2 * pair), (4, 2 * pair + 1)] {
            out.codes.extend(run.iter().zip(high).map(|(low, high)| (low >> nibble & 0x0F) | (high >> bit & 1) << 4));
        }
    }
}

/// Q6_K: 128 bytes of low nibbles, 64 bytes of high 2 bits, 16 signed scales, `d`. Groups of 16, zero is 32.
pub(crate) fn q6_k(block: &[u8], out: &mut RowBuf) {
    let (low, high) = (&block[..128], &block[128..192]);
    for half in 0..2 {
        let low = &low[half * 64..half * 64 + 64];
        let high = &high[half * 32..half * 32 + 32];
        for quarter in 0..4 {
            let run = &low[quarter % 2 * 32..quarter % 2 * 32 + 32];
            let nibble = 4 * (quarter / 2);
            out.codes.extend(
                run.iter().zip(high).map(|(low, high)| (low >> nibble & 0x0F) | (high >> (2 * quarter) & 3) << 4),
            );
        }
    }
    out.sc.extend(block[192..208].iter().map(|&byte| byte as i8));
    out.d.push(word(block, 208));
}

/// Decodes the first 16 bytes of Q4_K and Q5_K: `d`, `dmin`, and eight 6-bit scales and minimums in 12 bytes.
fn push_super_header(block: &[u8], out: &mut RowBuf) {
    out.d.push(word(block, 0));
    out.dmin.push(word(block, 2));
    let (scales, mins, mixed) = (&block[4..8], &block[8..12], &block[12..16]);
    // Groups 0-3 are in the low six bits. Groups 4-7 have their nibbles in `mixed`, and their upper two bits above groups 0-3.
    out.sc.extend(scales.iter().map(|byte| (byte & 0x3F) as i8));
    out.sc.extend(mixed.iter().zip(scales).map(|(mixed, byte)| ((mixed & 0x0F) | (byte >> 2 & 0x30)) as i8));
    out.m.extend(mins.iter().map(|byte| byte & 0x3F));
    out.m.extend(mixed.iter().zip(mins).map(|(mixed, byte)| (mixed >> 4) | (byte >> 2 & 0x30)));
}
