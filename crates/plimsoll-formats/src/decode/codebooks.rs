//! GGUF types whose 4-bit codes are indexes into a codebook of levels.
//!
//! Layouts and codebooks as in ggml's `ggml-common.h`.

use super::blocks::push_nibbles;
use super::word;
use crate::encoding::Codebook;
use crate::row::RowBuf;

/// The codebook of IQ4_NL and IQ4_XS: their values plus the zero point 127.
pub(crate) const IQ4_BOOK: (Codebook, u8) =
    ([0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240], 127);

/// The doubled E2M1 numbers 0, ½, 1, 1½, 2, 3, 4, 6, then their negatives; all plus 12.
pub(crate) const E2M1_BOOK: (Codebook, u8) = ([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], 12);

/// IQ4_NL: `d`, then nibbles as in Q4_0.
pub(crate) fn iq4_nl(block: &[u8], out: &mut RowBuf) {
    out.push_scale_f16(word(block, 0));
    push_nibbles(&block[2..18], &mut out.codes);
}

/// IQ4_XS: `d`, the upper two bits of eight scales, their nibbles, then eight times 16 bytes of nibbles as in Q4_0.
pub(crate) fn iq4_xs(block: &[u8], out: &mut RowBuf) {
    out.d.push(word(block, 0));
    let (high, low) = (word(block, 2), &block[4..8]);
    out.sc.extend((0..8).map(|g| {
        let low = low[g / 2] >> (4 * (g % 2)) & 0x0F;
        let high = (high >> (2 * g)) as u8 & 3;
        (low | high << 4) as i8 - 32
    }));
    for bytes in block[8..136].chunks_exact(16) {
        push_nibbles(bytes, &mut out.codes);
    }
}

/// MXFP4: an exponent, then nibbles as in Q4_0.
pub(crate) fn mxfp4(block: &[u8], out: &mut RowBuf) {
    out.push_scale_e8m0(block[0]);
    push_nibbles(&block[1..17], &mut out.codes);
}

/// NVFP4: four E4M3 scales, then eight bytes for each scale. Their low nibbles are elements 0–7, their high nibbles 8–15.
pub(crate) fn nvfp4(block: &[u8], out: &mut RowBuf) {
    for &scale in &block[..4] {
        // The bits of positive NaN count as 0. The bits of negative NaN count as a number.
        out.push_scale_ue4m3(if scale == 0x7F { 0 } else { scale & 0x7F });
    }
    for bytes in block[4..36].chunks_exact(8) {
        push_nibbles(bytes, &mut out.codes);
    }
}
