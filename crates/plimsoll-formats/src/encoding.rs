//! How a tensor's numbers are stored: the vocabulary shared by the readers, the planner and the packers.
//!
//! Types only. The bytes behind them are decoded in `decode`.

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
    /// Small unsigned codes with a scale, and perhaps an offset, per group.
    Quant(QuantLayout),
}

/// How one row of a quantized tensor decodes: `value = scale[g] * (code - zero) + offset[g]`.
///
/// All of it is f32 arithmetic in that order, with one rounding per operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantLayout {
    /// True width of a code in bits, 2 to 8.
    pub code_bits: u8,
    /// Elements that share a scale along a row: 16, 32, 64 or 128.
    pub group: usize,
    /// The code that means zero; 0 when an offset does that work.
    pub zero: u8,
    /// What form the scales take.
    pub scales: ScaleKind,
    /// Whether groups carry an offset.
    pub offset: bool,
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
    /// The tensor encoding of this type.
    pub fn encoding(self) -> Encoding {
        match self {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::Bf16 => Encoding::BF16,
        }
    }
}
