//! The ternary types of GGUF, blocks of 256 numbers −1, 0 and 1, and the binary one, blocks of 128 numbers −1 and 1. A binary16
//! `d` scales them.
//!
//! Layouts as in ggml's `ggml-common.h`.

use super::word;
use crate::row::RowBuf;

/// TQ1_0: 32 bytes of five digits to base 3 each, 16 such bytes, four bytes of four digits, `d`. The first digit of every byte
/// comes first, then the second of each.
pub(crate) fn tq1_0(block: &[u8], out: &mut RowBuf) {
    for (bytes, digits) in [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            // A byte is a fraction of 256; times 3 its whole part is the digit.
            out.codes.extend(bytes.iter().map(|byte| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8));
            power = power.wrapping_mul(3);
        }
    }
    push_scale(word(block, 52), out);
}

/// TQ2_0: 64 bytes of four 2-bit numbers each, `d`. Runs of 32 bytes hold the first bits of 32 elements, then the next.
pub(crate) fn tq2_0(block: &[u8], out: &mut RowBuf) {
    for run in block[..64].chunks_exact(32) {
        for shift in [0, 2, 4, 6] {
            out.codes.extend(run.iter().map(|byte| byte >> shift & 3));
        }
    }
    push_scale(word(block, 64), out);
}

/// Q1_0: `d`, then 16 bytes with a bit for each number, the lowest first. A set bit is 1, the others are −1: codes 2 and 0.
pub(crate) fn q1_0(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    out.codes.extend(block[2..].iter().flat_map(|byte| (0..8).map(move |bit| 2 * (byte >> bit & 1))));
}

/// One scale for all eight groups.
fn push_scale(d: u16, out: &mut RowBuf) {
    out.d.push(d);
    out.sc.extend([1; 8]);
}
