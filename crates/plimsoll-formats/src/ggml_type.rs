//! The tensor types of GGUF that this engine decodes: block sizes and layouts, one row of a table each.
//!
//! The bit layouts themselves are in `decode`.

use crate::decode::{blocks, codebooks, grids, superblocks, ternary};
use crate::encoding::{Codebook, Encoding, QuantLayout, ScaleKind};
use crate::row::{RowBuf, SUPER};

/// Decodes one block.
type Decoder = fn(&[u8], &mut RowBuf);

/// A row of the table.
struct Row {
    /// The number in the file.
    id: u32,
    name: &'static str,
    /// Elements and bytes of a block.
    block: (usize, usize),
    encoding: Encoding,
    /// None for a float type.
    decoder: Option<Decoder>,
}

const fn float(id: u32, name: &'static str, bytes: usize, encoding: Encoding) -> Row {
    Row { id, name, block: (1, bytes), encoding, decoder: None }
}

const fn quant(id: u32, name: &'static str, block: (usize, usize), layout: QuantLayout, decoder: Decoder) -> Row {
    Row { id, name, block, encoding: Encoding::Quant(layout), decoder: Some(decoder) }
}

/// Returns the layout of codes around a zero point.
const fn around(zero: u8, code_bits: u8, group: usize, scales: ScaleKind) -> QuantLayout {
    QuantLayout { code_bits, group, zero, scales, offset: false, codebook: None }
}

/// Returns the layout of codes with an offset for each group.
const fn offset(code_bits: u8, group: usize, scales: ScaleKind) -> QuantLayout {
    QuantLayout { code_bits, group, zero: 0, scales, offset: true, codebook: None }
}

/// Returns the layout of codes with levels in a codebook.
const fn looked_up((codebook, zero): (Codebook, u8), code_bits: u8, group: usize, scales: ScaleKind) -> QuantLayout {
    QuantLayout { code_bits, group, zero, scales, offset: false, codebook: Some(codebook) }
}

use ScaleKind::{E8m0Half, F16, Super, SuperF32, Ue4m3Half};

static TYPES: [Row; 27] = [
    float(0, "F32", 4, Encoding::F32),
    float(1, "F16", 2, Encoding::F16),
    quant(2, "Q4_0", (32, 18), around(8, 4, 32, F16), blocks::q4_0),
    quant(3, "Q4_1", (32, 20), offset(4, 32, F16), blocks::q4_1),
    quant(6, "Q5_0", (32, 22), around(16, 5, 32, F16), blocks::q5_0),
    quant(7, "Q5_1", (32, 24), offset(5, 32, F16), blocks::q5_1),
    quant(8, "Q8_0", (32, 34), around(128, 8, 32, F16), blocks::q8_0),
    quant(10, "Q2_K", (SUPER, 84), offset(2, 16, Super), superblocks::q2_k),
    quant(11, "Q3_K", (SUPER, 110), around(4, 3, 16, Super), superblocks::q3_k),
    quant(12, "Q4_K", (SUPER, 144), offset(4, 32, Super), superblocks::q4_k),
    quant(13, "Q5_K", (SUPER, 176), offset(5, 32, Super), superblocks::q5_k),
    quant(14, "Q6_K", (SUPER, 210), around(32, 6, 16, Super), superblocks::q6_k),
    quant(16, "IQ2_XXS", (SUPER, 66), looked_up(grids::IQ2_BOOK, 3, 32, SuperF32), grids::iq2_xxs),
    quant(17, "IQ2_XS", (SUPER, 74), looked_up(grids::IQ2_BOOK, 3, 16, SuperF32), grids::iq2_xs),
    quant(18, "IQ3_XXS", (SUPER, 98), looked_up(grids::IQ3_XXS_BOOK, 4, 32, SuperF32), grids::iq3_xxs),
    quant(19, "IQ1_S", (SUPER, 50), offset(2, 32, SuperF32), grids::iq1_s),
    quant(20, "IQ4_NL", (32, 18), looked_up(codebooks::IQ4_BOOK, 4, 32, F16), codebooks::iq4_nl),
    quant(21, "IQ3_S", (SUPER, 110), looked_up(grids::IQ3_S_BOOK, 4, 32, Super), grids::iq3_s),
    quant(22, "IQ2_S", (SUPER, 82), looked_up(grids::IQ2_BOOK, 3, 16, SuperF32), grids::iq2_s),
    quant(23, "IQ4_XS", (SUPER, 136), looked_up(codebooks::IQ4_BOOK, 4, 32, Super), codebooks::iq4_xs),
    quant(29, "IQ1_M", (SUPER, 56), looked_up(grids::IQ1_M_BOOK, 3, 16, SuperF32), grids::iq1_m),
    float(30, "BF16", 2, Encoding::BF16),
    quant(34, "TQ1_0", (SUPER, 54), around(1, 2, 32, Super), ternary::tq1_0),
    quant(35, "TQ2_0", (SUPER, 66), around(1, 2, 32, Super), ternary::tq2_0),
    quant(39, "MXFP4", (32, 17), looked_up(codebooks::E2M1_BOOK, 4, 32, E8m0Half), codebooks::mxfp4),
    quant(40, "NVFP4", (64, 36), looked_up(codebooks::E2M1_BOOK, 4, 16, Ue4m3Half), codebooks::nvfp4),
    quant(41, "Q1_0", (128, 18), around(1, 2, 128, F16), ternary::q1_0),
];

/// A ggml tensor type that this engine decodes: the index of its row in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GgmlType(usize);

impl GgmlType {
    /// Returns the type with this number in the file. The error text names a type that is not decoded.
    pub(crate) fn from_id(id: u32) -> Result<GgmlType, String> {
        TYPES.iter().position(|row| row.id == id).map(GgmlType).ok_or_else(|| {
            let names: Vec<&str> = TYPES.iter().map(|row| row.name).collect();
            format!("{}; types that load are {}", foreign_name(id), names.join(", "))
        })
    }

    fn row(self) -> &'static Row {
        &TYPES[self.0]
    }

    /// Its name in ggml.
    pub(crate) fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements and bytes of one block.
    pub(crate) fn block(self) -> (usize, usize) {
        self.row().block
    }

    /// How the numbers are stored, in the crate's vocabulary.
    pub(crate) fn encoding(self) -> Encoding {
        self.row().encoding
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
        let (Encoding::Quant(layout), Some(decode)) = (self.encoding(), self.row().decoder) else {
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
        24..=27 => "an integer type",
        28 => "F64",
        42 => "Q2_0",
        _ => return format!("number {id}"),
    };
    name.to_owned()
}
