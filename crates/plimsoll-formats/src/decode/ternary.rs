//! The ternary types of GGUF, in blocks of 256 numbers −1, 0 and 1, and the binary type, in blocks of 128 numbers −1 and 1. A binary16 `d`
//! scales them.
//!
//! Layouts as in ggml's `ggml-common.h`.

use super::word;
use crate::row::RowBuf;

/// TQ1_0: 32 bytes of five base-3 digits each, 16 such bytes, four bytes of four digits, `d`. The first digits of all bytes come first,
/// then the second digits.
pub(crate) fn tq1_0(block: &[u8], out: &mut RowBuf) {
    for (bytes, digits) in [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            // A byte stands for a fraction of 256. The integer part of three times the fraction is the digit.
            out.codes.extend(bytes.iter().map(|byte| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8));
            power = power.wrapping_mul(3);
        }
    }
    push_scale(word(block, 52), out);
}

/// TQ2_0: 64 bytes of four 2-bit numbers each, `d`. A run of 32 bytes has the lowest two bits for 32 elements, the next two bits for the
/// next 32.
pub(crate) fn tq2_0(block: &[u8], out: &mut RowBuf) {
    for run in block[..64].chunks_exact(32) {
        for shift in [0, 2, 4, 6] {
            out.codes.extend(run.iter().map(|byte| byte >> shift & 3));
        }
    }
    push_scale(word(block, 64), out);
}

/// Q1_0: `d`, then 16 bytes with one bit per number, the lowest first. A set bit is 1 (code 2), a clear bit −1 (code 0).
pub(crate) fn q1_0(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    out.codes.extend(block[2..].iter().flat_map(|byte| (0..8).map(move |bit| 2 * (byte >> bit & 1))));
}

/// Appends one scale for all eight groups.
fn push_scale(d: u16, out: &mut RowBuf) {
    out.d.push(d);
    out.sc.extend([1; 8]);
}
