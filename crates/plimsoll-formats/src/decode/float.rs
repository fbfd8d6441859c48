//! Rows of plain floats, widened to f32 without loss.
//!
//! Quantized encodings are decoded elsewhere.

use crate::encoding::Encoding;
use crate::row::RowBuf;
use half::{bf16, f16};

/// Decodes a row of little-endian floats of `encoding` into `out`.
pub(crate) fn decode(encoding: Encoding, bytes: &[u8], out: &mut RowBuf) {
    out.begin(None);
    widen(encoding, bytes, &mut out.values);
}

/// Appends the floats in `bytes`, widened to f32. A quantized encoding and FP8 append nothing.
pub(crate) fn widen(encoding: Encoding, bytes: &[u8], values: &mut Vec<f32>) {
    match encoding {
        Encoding::F32 => values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        Encoding::F16 => values.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
        Encoding::BF16 => values.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        Encoding::F8 { .. } | Encoding::Quant(_) => {}
    }
}
