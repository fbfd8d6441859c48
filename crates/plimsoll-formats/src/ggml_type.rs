//! The tensor types of GGUF that this engine decodes: block sizes and layouts, one row of a table each.
//!
//! The bit layouts themselves are in `decode`.

use crate::decode::{blocks, superblocks};
use crate::encoding::{Encoding, QuantLayout, ScaleKind};
use crate::row::{RowBuf, SUPER};

/// A ggml tensor type of those that are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl GgmlType {
    /// The type of this number in the file, or the name (or number) of one that is not decoded.
    pub(crate) fn from_id(id: u32) -> Result<GgmlType, String> {
        Ok(match id {
            0 => GgmlType::F32,
            1 => GgmlType::F16,
            2 => GgmlType::Q4_0,
            3 => GgmlType::Q4_1,
            6 => GgmlType::Q5_0,
            7 => GgmlType::Q5_1,
            8 => GgmlType::Q8_0,
            10 => GgmlType::Q2K,
            11 => GgmlType::Q3K,
            12 => GgmlType::Q4K,
            13 => GgmlType::Q5K,
            14 => GgmlType::Q6K,
            30 => GgmlType::Bf16,
            _ => return Err(foreign_name(id)),
        })
    }

    /// Elements and bytes of one block.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            GgmlType::F32 => (1, 4),
            GgmlType::F16 | GgmlType::Bf16 => (1, 2),
            GgmlType::Q4_0 => (32, 18),
            GgmlType::Q4_1 => (32, 20),
            GgmlType::Q5_0 => (32, 22),
            GgmlType::Q5_1 => (32, 24),
            GgmlType::Q8_0 => (32, 34),
            GgmlType::Q2K => (SUPER, 84),
            GgmlType::Q3K => (SUPER, 110),
            GgmlType::Q4K => (SUPER, 144),
            GgmlType::Q5K => (SUPER, 176),
            GgmlType::Q6K => (SUPER, 210),
        }
    }

    /// How the numbers are stored, in the crate's vocabulary.
    pub(crate) fn encoding(self) -> Encoding {
        let (code_bits, group, zero, scales, offset) = match self {
            GgmlType::F32 => return Encoding::F32,
            GgmlType::F16 => return Encoding::F16,
            GgmlType::Bf16 => return Encoding::BF16,
            GgmlType::Q4_0 => (4, 32, 8, ScaleKind::F16, false),
            GgmlType::Q4_1 => (4, 32, 0, ScaleKind::F16, true),
            GgmlType::Q5_0 => (5, 32, 16, ScaleKind::F16, false),
            GgmlType::Q5_1 => (5, 32, 0, ScaleKind::F16, true),
            GgmlType::Q8_0 => (8, 32, 128, ScaleKind::F16, false),
            GgmlType::Q2K => (2, 16, 0, ScaleKind::Super, true),
            GgmlType::Q3K => (3, 16, 4, ScaleKind::Super, false),
            GgmlType::Q4K => (4, 32, 0, ScaleKind::Super, true),
            GgmlType::Q5K => (5, 32, 0, ScaleKind::Super, true),
            GgmlType::Q6K => (6, 16, 32, ScaleKind::Super, false),
        };
        Encoding::Quant(QuantLayout { code_bits, group, zero, scales, offset })
    }

    /// The function that decodes one block, or `None` for a float type.
    fn block_decoder(self) -> Option<fn(&[u8], &mut RowBuf)> {
        Some(match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => return None,
            GgmlType::Q4_0 => blocks::q4_0,
            GgmlType::Q4_1 => blocks::q4_1,
            GgmlType::Q5_0 => blocks::q5_0,
            GgmlType::Q5_1 => blocks::q5_1,
            GgmlType::Q8_0 => blocks::q8_0,
            GgmlType::Q2K => superblocks::q2_k,
            GgmlType::Q3K => superblocks::q3_k,
            GgmlType::Q4K => superblocks::q4_k,
            GgmlType::Q5K => superblocks::q5_k,
            GgmlType::Q6K => superblocks::q6_k,
        })
    }

    /// Bytes of a row of `cols` elements, or `None` when that is not a whole number of blocks (or overflows).
    pub(crate) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        if !cols.is_multiple_of(elements) {
            return None;
        }
        (cols / elements).checked_mul(bytes)
    }

    /// Decodes one row of a quantized type; `bytes` holds whole blocks.
    pub(crate) fn decode_row(self, bytes: &[u8], out: &mut RowBuf) {
        let (Encoding::Quant(layout), Some(decode)) = (self.encoding(), self.block_decoder()) else {
            crate::decode::float::decode(self.encoding(), bytes, out);
            return;
        };
        out.begin(Some(layout));
        for block in bytes.chunks_exact(self.block().1) {
            decode(block, out);
        }
    }
}

/// The name of a type that exists but is not decoded, for the error message.
fn foreign_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24..=27 => "an integer type",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return format!("number {id}"),
    };
    name.to_owned()
}
