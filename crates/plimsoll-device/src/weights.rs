//! The weight table: a model's declaration, before any byte is read.
//!
//! A model names its tensors once, through [`Declare`]. The result has each weight's place, packing and size: the planner adds them
//! up, the CPU device packs them. Plan and load cannot differ.

mod bytes;
mod declare;
mod file_tables;
mod target;

use std::ops::Range;
use std::sync::Arc;

use plimsoll_formats::Encoding;
use plimsoll_kernels::{ActForm, ActLayout, Bf16Layout, Isa, Packing};
use thiserror::Error;

use crate::buf::Buf;
use crate::kv::ModelShape;
pub use declare::Declare;
pub(crate) use file_tables::{CacheLayout, TAG, WAYS};
pub use file_tables::{FileTable, InFile, TableCacheSize, TableKind, TablePlace};
pub use target::Target;

/// Every weight starts on a cache line.
const ALIGN: usize = 64;

/// Index of a packed matrix in the weight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearId(pub(crate) usize);

impl LinearId {
    /// Returns its index in [`WeightTable::linears`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// Index of an f32 vector in the weight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorId(pub(crate) usize);

impl VectorId {
    /// Returns its index in [`WeightTable::vectors`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// The mapping of the checkpoint's element types to packed ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DtypePolicy {
    /// As stored: no value changes.
    #[default]
    Auto,
    /// Everything as f32, quantized weights dequantized: the reference arithmetic.
    F32,
    /// Floats as bf16 (rounded to nearest even); quantized weights as stored.
    Bf16,
}

impl std::str::FromStr for DtypePolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "f32" | "float32" => Ok(Self::F32),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            _ => Err(format!("unknown weight type '{name}': use auto, f32 or bf16")),
        }
    }
}

/// The arithmetic of linear layers and attention, a server setting. Activations are quantized for packed weights alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeDtype {
    /// Activations of 16 bits, which give the same answers as single precision. Where a matrix unit multiplies bfloat16
    /// (AMX), prompts are computed in bfloat16, several times as fast.
    Auto,
    /// All with activations of 16 bits.
    #[default]
    F32,
    /// All in bfloat16, by layers that can: faster with many requests at once, slower with one. Needs the matrix unit.
    Bf16,
    /// As [`ComputeDtype::Auto`], with activations of 8 bits instead of 16: half the products. Where vectors multiply bfloat16
    /// (AVX-512 BF16), attention of prompts is computed in bfloat16.
    Int8,
}

impl std::str::FromStr for ComputeDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "f32" | "float32" => Ok(Self::F32),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "int8" => Ok(Self::Int8),
            _ => Err(format!("unknown arithmetic '{name}': use auto, f32, bf16 or int8")),
        }
    }
}

/// The rows of a step that layers and attention compute in bfloat16, if they can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bf16Rows {
    /// None.
    #[default]
    None,
    /// Rows of prompts.
    Prompts,
    /// All.
    All,
}

/// The reason why a checkpoint does not fit the model.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeclareError {
    /// A weight is missing.
    #[error("the checkpoint has no tensor '{0}'")]
    Missing(String),
    /// A weight has another shape than the configuration implies.
    #[error("tensor '{name}' has shape {found:?}; the configuration implies {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape the configuration implies.
        expected: Vec<usize>,
    },
    /// No kernel supports this width.
    #[error("tensor '{name}': {reason}")]
    Packing {
        /// The tensor.
        name: String,
        /// The kernels' reason.
        reason: String,
    },
    /// The configuration needs a feature that this architecture's code lacks.
    #[error("{0}")]
    Unsupported(String),
}

/// The rows of a stored matrix that a packed one takes: packed row r of the piece is stored row
/// `first + (r / run) * stride + r % run`. Checkpoints interleave heads, and stack experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPiece {
    /// The first stored row.
    pub first: usize,
    /// Rows of the piece.
    pub rows: usize,
    /// Neighbouring rows that are taken together.
    pub run: usize,
    /// Rows from the start of one run to that of the next.
    pub stride: usize,
}

impl RowPiece {
    /// `rows` neighbouring rows.
    pub fn span(first: usize, rows: usize) -> Self {
        Self { first, rows, run: rows, stride: rows }
    }

    /// Returns the stored row that becomes row `row` of the piece.
    fn stored(&self, row: usize) -> usize {
        self.first + row / self.run * self.stride + row % self.run
    }
}

/// The layout of a packed matrix's elements in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// Stored rows: the rows of the pieces, in order; without pieces all rows.
    Rows(Box<[RowPiece]>),
    /// A packed row is several neighbouring stored rows, side by side: the weights of a convolution with windows that
    /// do not overlap.
    Folded {
        /// Stored rows of a packed one.
        parts: usize,
        /// Channels that are stored side by side for every point of a window (MLX). The packed row has channels before points. 0: the
        /// stored rows already have this order.
        channels_last: usize,
    },
    /// A packed row is a stored column: element i of row r stands in stored row `row + i`, column
    /// `column + r * stride`.
    Turned {
        /// The stored row of the first element.
        row: usize,
        /// The column of the first packed row.
        column: usize,
        /// Columns from one packed row to the next.
        stride: usize,
    },
}

/// One packed matrix.
#[derive(Clone, Debug)]
pub struct LinearDecl {
    /// The tensor it comes from. Shared: the experts of a layer may all come from one.
    pub name: Arc<str>,
    /// The elements of the tensor that it takes.
    pub form: Form,
    /// Shape and packed format.
    pub packing: Packing,
    /// The stored format in the checkpoint.
    pub encoding: Encoding,
    /// Added to every output row.
    pub bias: Option<VectorId>,
    /// For each column the index of its input, where the columns have another order than the input (act-order of GPTQ).
    pub order: Option<VectorId>,
    /// Byte offset in the weight region; 0 for a matrix outside of it.
    pub offset: usize,
    /// Its place, if it stays in the model's files.
    pub in_file: Option<InFile>,
}

impl LinearDecl {
    /// Returns the stored row that becomes row `row` of the packed matrix, for a matrix made of rows.
    pub fn stored_row(&self, row: usize) -> usize {
        let Form::Rows(pieces) = &self.form else { return row };
        let mut first = 0;
        for piece in pieces {
            if row < first + piece.rows {
                return piece.stored(row - first);
            }
            first += piece.rows;
        }
        row
    }
}

/// The change of each element of a stored vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Adds a constant.
    Plus(f32),
    /// x becomes ln(-x): some files store −eʸ where others store y.
    LogOfNegated,
}

impl Change {
    /// The changed element.
    pub(crate) fn of(self, value: f32) -> f32 {
        match self {
            Self::Plus(plus) => value + plus,
            Self::LogOfNegated => (-value).ln(),
        }
    }
}

/// The source of a vector's values.
#[derive(Clone, Debug)]
pub enum VectorSource {
    /// A tensor of the checkpoint.
    Tensor {
        /// The tensor's name.
        name: String,
        /// The first element taken, counted over all rows.
        first: usize,
        /// Elements from one that is taken to the next.
        stride: usize,
        /// The change of each element.
        change: Change,
    },
    /// Computed from the configuration.
    Values(Vec<f32>),
}

/// One f32 vector.
#[derive(Clone, Debug)]
pub struct VectorDecl {
    /// The source of its values.
    pub source: VectorSource,
    /// Elements.
    pub len: usize,
    /// Byte offset in the weight region.
    pub offset: usize,
}

/// All weights of a model, with offsets into one region.
#[derive(Clone, Debug, Default)]
pub struct WeightTable {
    /// The matrices.
    pub linears: Vec<LinearDecl>,
    /// The vectors.
    pub vectors: Vec<VectorDecl>,
    /// Bytes of the region.
    pub bytes: usize,
    /// Sets of neighbouring matrices; each set has one matrix per expert.
    pub experts: Vec<Range<usize>>,
    /// Tables that stay in the model's files.
    file_tables: Vec<FileTable>,
    /// Configured bytes for the caches of these tables' rows ([`WeightTable::with_table_cache`]).
    table_cache: Option<u64>,
    /// Whether quantized weights multiply inputs in f32, which then are not quantized ([`WeightTable::on`]).
    float_inputs: bool,
    /// Whether inputs are quantized for the matrix unit too ([`WeightTable::on`]).
    tiles: bool,
    /// Whether attention can compute in bfloat16, by the matrix unit or by vectors ([`Isa::rounds_attention`]).
    rounds_attention: bool,
    /// Whether inputs are quantized to 8 bits ([`WeightTable::computed_in`]).
    eight_bits: bool,
    /// The rows that are rounded to bf16 instead.
    bf16: Bf16Rows,
}

impl WeightTable {
    /// Returns the table for layers on this instruction set or device. The matrix unit needs more workspace, a GPU less.
    pub fn on(self, target: impl Into<Target>) -> Self {
        let target = target.into();
        let (float_inputs, isa) = (target == Target::Gpu, target.isa());
        let (tiles, rounds_attention) = (isa == Some(Isa::Amx), isa.is_some_and(Isa::rounds_attention));
        Self { float_inputs, tiles, rounds_attention, ..self }
    }

    /// Whether the steps run on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.float_inputs
    }

    /// Returns the table for steps with this arithmetic. Without the matrix unit no layer computes in bfloat16. Attention does where
    /// activations have 8 bits and vectors multiply bfloat16.
    pub fn computed_in(self, dtype: ComputeDtype) -> Self {
        let bf16 = match dtype {
            ComputeDtype::Bf16 if self.tiles => Bf16Rows::All,
            ComputeDtype::Auto if self.tiles => Bf16Rows::Prompts,
            ComputeDtype::Int8 if self.rounds_attention => Bf16Rows::Prompts,
            _ => Bf16Rows::None,
        };
        Self { eight_bits: dtype == ComputeDtype::Int8, bf16, ..self }
    }

    /// Returns the table for steps without bf16 rows.
    pub fn full_precision_rows(self) -> Self {
        Self { bf16: Bf16Rows::None, ..self }
    }

    /// Returns the rows that are computed in bfloat16, by layers that can and by attention.
    pub fn bf16(&self) -> Bf16Rows {
        self.bf16
    }

    /// Whether any layer multiplies quantized rows.
    pub fn quantizes(&self) -> bool {
        self.linears.iter().any(|linear| linear.packing.takes_acts())
    }

    /// The shape of a model with these weights.
    pub fn shaped(&self, shape: ModelShape) -> ModelShape {
        ModelShape { bf16: self.bf16 != Bf16Rows::None, ..shape }
    }

    /// Whether a layer of this packing multiplies bf16 rows.
    pub(crate) fn rounds(&self, packing: &Packing) -> bool {
        self.tiles && self.bf16 != Bf16Rows::None && packing.takes_bf16()
    }

    /// Whether a row through a layer of this packing may be a bf16 row: the layer rounds to bf16, or it takes fewer bits than attention.
    pub(crate) fn rounds_rows(&self, packing: &Packing) -> bool {
        self.rounds(packing) || !self.tiles && self.bf16 != Bf16Rows::None && packing.takes_acts()
    }

    /// Returns the bytes for the copies that layers need of an input of `rows` rows of `k`, for any number of bf16 rows.
    pub(crate) fn input_bytes(&self, rows: usize, k: usize, layers: &[(LinearId, Buf)]) -> usize {
        let quantized = self.act_layout(rows, k, layers.iter().map(|(id, _)| id)).map(|layout| layout.bytes());
        if !layers.iter().any(|(id, _)| self.rounds(&self.linear(*id).packing)) {
            return quantized.unwrap_or(0);
        }
        // A bf16 row is no larger than a quantized one. But bf16 rows come in sixteens, and begin on a cache line.
        let bf16 = |rows| Bf16Layout { rows, k }.bytes();
        quantized.map_or_else(|| bf16(rows), |quantized| quantized.next_multiple_of(64) + bf16(1))
    }

    /// Returns the quantized layout of an input of `rows` rows of `k` for these layers; `None` if no layer takes quantized input.
    pub(crate) fn act_layout<'a>(
        &self,
        rows: usize,
        k: usize,
        layers: impl Iterator<Item = &'a LinearId>,
    ) -> Option<ActLayout> {
        let (mut acts, mut tiles) = (false, false);
        for id in layers {
            let packing = &self.linear(*id).packing;
            acts |= packing.takes_acts() && !self.float_inputs;
            tiles |= self.tiles && packing.takes_tiles();
        }
        let form = match (self.eight_bits, tiles) {
            (true, _) => ActForm::Bytes,
            (false, true) => ActForm::Tiled,
            (false, false) => ActForm::Words,
        };
        acts.then_some(ActLayout { rows, k, form })
    }

    /// The ids of all matrices, in order.
    pub fn ids(&self) -> impl Iterator<Item = LinearId> {
        (0..self.linears.len()).map(LinearId)
    }

    /// The declaration behind an id.
    pub fn linear(&self, id: LinearId) -> &LinearDecl {
        &self.linears[id.0]
    }

    /// The declaration behind an id.
    pub fn vector(&self, id: VectorId) -> &VectorDecl {
        &self.vectors[id.0]
    }

    fn place(&mut self, bytes: usize) -> usize {
        let offset = self.bytes;
        self.bytes = (offset + bytes).next_multiple_of(ALIGN);
        offset
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::PackKind;

    use super::*;

    #[test]
    fn pieces_take_rows_apart() {
        // Two heads of [query 2, gate 2]: the gates, then the whole first head.
        let gates = RowPiece { first: 2, rows: 4, run: 2, stride: 4 };
        let decl = LinearDecl {
            name: "w".into(),
            form: Form::Rows([gates, RowPiece::span(0, 4)].into()),
            packing: Packing::new(PackKind::F32, 8, 4).expect("a small matrix"),
            encoding: Encoding::F32,
            bias: None,
            order: None,
            offset: 0,
            in_file: None,
        };
        let rows: Vec<usize> = (0..8).map(|row| decl.stored_row(row)).collect();
        assert_eq!(rows, [2, 3, 6, 7, 0, 1, 2, 3]);
        assert_eq!(LinearDecl { form: Form::Rows(Box::default()), ..decl }.stored_row(5), 5);
    }

    #[test]
    fn stored_values_change_as_asked() {
        assert_eq!(Change::Plus(1.0).of(0.5), 1.5);
        assert_eq!(Change::LogOfNegated.of(-1.0), 0.0);
    }
}
