//! The choice of the decoder for rows that need only their own bytes.

use crate::decode::{affine, float, micro};
use crate::encoding::{Encoding, QuantLayout};
use crate::ggml_type::GgmlType;
use crate::row::RowBuf;

/// The decoder of a row whose parts are stored row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RowForm {
    /// Floats.
    Float(Encoding),
    /// Blocks of GGUF.
    Blocks(GgmlType),
    /// Codes, scales and biases of MLX.
    Affine(QuantLayout),
    /// Small floats of this encoding, and bytes of scales.
    Micro(Encoding),
}

impl RowForm {
    /// Decodes a row. `part` returns the bytes of one of its parts, by the part's number.
    pub(crate) fn decode<'a>(self, part: impl Fn(usize) -> &'a [u8], out: &mut RowBuf) {
        match self {
            RowForm::Float(encoding) => float::decode(encoding, part(0), out),
            RowForm::Blocks(kind) => kind.decode_row(part(0), out),
            RowForm::Affine(layout) => affine::decode(layout, part(0), part(1), part(2), out),
            RowForm::Micro(Encoding::Quant(layout)) => micro::fp4(layout, part(0), part(1), out),
            RowForm::Micro(_) => micro::fp8(part(0), part(1), out),
        }
    }
}
