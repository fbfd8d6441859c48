//! The storage formats of a tensor's numbers: types that the readers, the planner and the packers share.
//!
//! This module has types only. Their bytes are decoded in `decode`.

/// Shape, encoding and stored size of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dimensions, outermost first: `[out, in]` for a matrix, `[n]` for a vector.
    pub shape: Vec<usize>,
    /// How each number is stored.
    pub encoding: Encoding,
    /// Bytes that the tensor takes in the file, with its scales and offsets.
    pub bytes: u64,
}

impl TensorInfo {
    /// Number of rows: the product of all dimensions but the last, 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Length of a row in elements: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// How the numbers of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// E4M3 floats of 8 bits, each times the f32 scale of its group along the row.
    F8 {
        /// Elements that share a scale. The last group of a row may have fewer.
        group: usize,
    },
    /// Small unsigned codes with a scale, and perhaps an offset, per group.
    Quant(QuantLayout),
}

/// The level of each code, if the codes are not the levels. Codes of 3 bits use the first eight entries.
pub type Codebook = [u8; 16];

/// The decoding rule of one row of a quantized tensor: `value = scale[g] * (level - zero) + offset[g]`. The level is the code, or the
/// codebook's entry for the code.
///
/// The arithmetic is f32 in that order, with one rounding per operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantLayout {
    /// True width of a code in bits, 2 to 8.
    pub code_bits: u8,
    /// Elements that share a scale along a row. The last group of a row may have fewer.
    pub group: usize,
    /// The level that means zero; 0 if an offset replaces it.
    pub zero: u8,
    /// The form of the scales.
    pub scales: ScaleKind,
    /// Whether groups carry an offset.
    pub offset: bool,
    /// The levels of codes of 3 or 4 bits.
    pub codebook: Option<Codebook>,
}

impl QuantLayout {
    /// The level of a code.
    pub fn level(&self, code: u8) -> u8 {
        self.codebook.map_or(code, |book| book[usize::from(code & 15)])
    }
}

/// The form in which a quantized tensor stores its scales (and offsets).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    /// One binary16 per group.
    F16,
    /// One bfloat16 per group.
    Bf16,
    /// One binary32 per group.
    F32,
    /// Per 256 elements a binary16 `d` (and `dmin` where there is an offset), per group small integers `sc` and `m`:
    /// `scale = d * sc`, `offset = -(dmin * m)`.
    Super,
    /// The same with binary32 `d` and `dmin`.
    SuperF32,
    /// A byte e per group: 2^(e - 128), half of E8M0. The levels of the E2M1 elements are doubled, so that they are integers.
    E8m0Half,
    /// A byte per group: half of an unsigned E4M3 number, since the levels are doubled here too.
    Ue4m3Half,
}

/// A float type that a checkpoint declares for its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// Returns the form of scales of this type.
    pub(crate) fn scales(self) -> ScaleKind {
        match self {
            Dtype::F32 => ScaleKind::F32,
            Dtype::F16 => ScaleKind::F16,
            Dtype::Bf16 => ScaleKind::Bf16,
        }
    }

    /// Returns the encoding of tensors of this type.
    pub fn encoding(self) -> Encoding {
        match self {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::Bf16 => Encoding::BF16,
        }
    }
}
