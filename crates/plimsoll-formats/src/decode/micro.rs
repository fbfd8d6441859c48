//! Small floats with one byte of scale per group: MXFP4, NVFP4 and MXFP8 as MLX and gpt-oss store them.
//!
//! Formats as in the OCP microscaling specification. 4-bit codes (E2M1) stay codes. 8-bit codes (E4M3) have more digits than an integer
//! kernel takes, and become floats.

use crate::encoding::{QuantLayout, ScaleKind};
use crate::row::RowBuf;

/// Decodes a row of E2M1 codes, the low nibble first, and its scales.
pub(crate) fn fp4(layout: QuantLayout, codes: &[u8], scales: &[u8], out: &mut RowBuf) {
    out.begin(Some(layout));
    out.codes.extend(codes.iter().flat_map(|byte| [byte & 0x0F, byte >> 4]));
    for (group, &scale) in scales.iter().enumerate() {
        if layout.scales == ScaleKind::E8m0Half {
            out.push_scale_e8m0(scale);
            continue;
        }
        out.push_scale_ue4m3(scale & 0x7F);
        if scale >= 0x80 {
            // The packed scale has no sign. The sign goes into the upper bit of each code.
            out.codes[group * layout.group..][..layout.group].iter_mut().for_each(|code| *code ^= 8);
        }
    }
}

/// Decodes a row of E4M3 numbers and the exponents of their groups of 32.
pub(crate) fn fp8(codes: &[u8], exponents: &[u8], out: &mut RowBuf) {
    out.begin(None);
    for (codes, &e) in codes.chunks(32).zip(exponents) {
        let scale = (f32::from(e) - 127.0).exp2();
        out.values.extend(codes.iter().map(|&code| e4m3(code) * scale));
    }
}

/// The value of an E4M3 number.
fn e4m3(code: u8) -> f32 {
    if code & 0x7F == 0x7F {
        return f32::NAN;
    }
    crate::e4m3::value(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::codebooks::E2M1_BOOK;

    #[test]
    fn small_floats_have_the_values_of_their_specification() {
        // Zero, the smallest subnormal, one, the largest, and two negative numbers.
        assert_eq!([0, 1, 0x38, 0x7E, 0xB8, 0xFE].map(e4m3), [0.0, 1.0 / 512.0, 1.0, 448.0, -1.0, -448.0]);
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
        let mut row = RowBuf::new();
        fp8(&[0x38; 64], &[127, 130], &mut row);
        assert_eq!((row.values[31], row.values[32]), (1.0, 8.0));
    }

    #[test]
    fn the_sign_of_a_scale_becomes_that_of_its_codes() {
        let (book, zero) = E2M1_BOOK;
        let layout = QuantLayout {
            code_bits: 4,
            group: 16,
            zero,
            scales: ScaleKind::Ue4m3Half,
            offset: false,
            codebook: Some(book),
        };
        let codes: [u8; 16] =
            [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE];
        let mut row = RowBuf::new();
        fp4(layout, &codes, &[0x38, 0xB8], &mut row);
        let mut values = [0.0; 32];
        row.dequantize(&mut values);
        let want = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        assert_eq!(values[..8], want);
        assert_eq!(values[24..], want);
        assert_eq!(values[16..24], want.map(|value| -value));
    }
}
