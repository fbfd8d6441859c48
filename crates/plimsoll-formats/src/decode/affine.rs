//! MLX affine quantization: codes as one little-endian bit stream per row, scale and bias per group as floats.
//!
//! A code may straddle two bytes (and two 32-bit words) if its width is 3, 5 or 6. MLX fills words from their low end and words are
//! little-endian, so the row's bytes are one bit stream.

use super::float;
use crate::encoding::{Encoding, QuantLayout, ScaleKind};
use crate::row::RowBuf;

/// Decodes one row from its packed codes, scales and biases, each a whole row's bytes.
pub(crate) fn decode(layout: QuantLayout, codes: &[u8], scales: &[u8], biases: &[u8], out: &mut RowBuf) {
    out.begin(Some(layout));
    unpack(codes, u32::from(layout.code_bits), &mut out.codes);
    let encoding = match layout.scales {
        ScaleKind::F16 => Encoding::F16,
        ScaleKind::Bf16 => Encoding::BF16,
        _ => Encoding::F32,
    };
    float::widen(encoding, scales, &mut out.scale);
    float::widen(encoding, biases, &mut out.offset);
    if encoding != Encoding::F32 {
        out.scale_bits.extend(scales.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
        out.offset_bits.extend(biases.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
    }
}

/// Appends the codes of a bit stream. `packed` holds whole words, so 8 codes always end on a byte boundary.
pub(crate) fn unpack(packed: &[u8], bits: u32, codes: &mut Vec<u8>) {
    let mask = (1u64 << bits) - 1;
    for chunk in packed.chunks(bits as usize) {
        // Eight codes of `bits` bits are exactly `bits` bytes.
        let mut stream = [0u8; 8];
        stream[..chunk.len()].copy_from_slice(chunk);
        let stream = u64::from_le_bytes(stream);
        let count = chunk.len() as u32 * 8 / bits;
        codes.extend((0..count).map(|i| (stream >> (i * bits) & mask) as u8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn straddling_codes_come_out_in_order() {
        for bits in [2u32, 3, 4, 5, 6, 8] {
            let want: Vec<u8> = (0..64u32).map(|i| (i * 37 % (1 << bits)) as u8).collect();
            let mut stream = vec![0u8; 64 * bits as usize / 8];
            for (i, &code) in want.iter().enumerate() {
                for bit in 0..bits as usize {
                    let at = i * bits as usize + bit;
                    stream[at / 8] |= (code >> bit & 1) << (at % 8);
                }
            }
            let mut got = Vec::new();
            unpack(&stream, bits, &mut got);
            assert_eq!(got, want, "{bits} bits");
        }
    }
}
