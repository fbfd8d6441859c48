//! The weight table: what a model declares, before any byte is read.
//!
//! A model names its tensors once, through [`Declare`]. The result says for each weight where it lies, how it is
//! packed and how large it is: the planner adds it up, the CPU device packs it. Plan and load cannot differ.

mod declare;

use std::sync::Arc;

use plimsoll_formats::Encoding;
use plimsoll_kernels::{ActForm, ActLayout, Bf16Layout, Isa, Packing};
use thiserror::Error;

use crate::kv::ModelShape;
pub use declare::Declare;

/// Every weight starts on a cache line.
const ALIGN: usize = 64;

/// Index of a packed matrix in the weight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearId(pub(crate) usize);

/// Index of an f32 vector in the weight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorId(pub(crate) usize);

/// How the checkpoint's element types become packed ones.
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
            _ => Err(format!("'{name}' is no weight type: use auto, f32 or bf16")),
        }
    }
}

/// The arithmetic of linear layers and attention, as a server is told; activations are quantized for packed weights alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeDtype {
    /// Activations of 16 bits, whose answers are those of single precision; where a matrix unit multiplies bfloat16 (AMX), prompts in that,
    /// several times as fast.
    Auto,
    /// All with activations of 16 bits.
    #[default]
    F32,
    /// All in bfloat16, by layers that can: answers to many are faster, those to one slower. Takes the unit.
    Bf16,
    /// As [`ComputeDtype::Auto`], with activations of 8 bits for 16: half the products. Where vectors multiply bfloat16 (AVX-512 BF16),
    /// prompts' attention in that.
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
            _ => Err(format!("'{name}' is no arithmetic: use auto, f32, bf16 or int8")),
        }
    }
}

/// Which rows of a step layers and attention compute in bfloat16, if they can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounded {
    /// None.
    #[default]
    None,
    /// Those of prompts.
    Prompts,
    /// All.
    All,
}

/// Why a checkpoint does not fit the model.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeclareError {
    /// A weight is not there.
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
    /// No kernel takes this width.
    #[error("tensor '{name}': {reason}")]
    Packing {
        /// The tensor.
        name: String,
        /// The kernels' reason.
        reason: String,
    },
    /// The configuration asks for something this architecture's code does not do.
    #[error("{0}")]
    Unsupported(String),
}

/// Which rows of a stored matrix a packed one takes: packed row r of the piece is stored row
/// `first + (r / run) * stride + r % run`. Checkpoints interleave heads, and stack experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPiece {
    /// The first stored row.
    pub first: usize,
    /// Rows of the piece.
    pub rows: usize,
    /// Neighbouring rows that are taken together.
    pub run: usize,
    /// From the start of one run to that of the next.
    pub stride: usize,
}

impl RowPiece {
    /// `rows` neighbouring rows.
    pub fn span(first: usize, rows: usize) -> Self {
        Self { first, rows, run: rows, stride: rows }
    }

    /// The stored row behind row `row` of the piece.
    fn stored(&self, row: usize) -> usize {
        self.first + row / self.run * self.stride + row % self.run
    }
}

/// How the elements of a packed matrix lie in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// As rows, of which it takes those of the pieces, in order; all of them where there are no pieces.
    Rows(Box<[RowPiece]>),
    /// A packed row is several neighbouring stored ones, side by side: the weights of a convolution whose windows do not overlap.
    Folded {
        /// Stored rows of a packed one.
        parts: usize,
        /// Stored rows are single points of a window with all its channels (MLX): packed, channels come before points.
        channels_last: bool,
    },
    /// A packed row is a stored column: element i of row r stands in stored row `row + i`, column `column + r`.
    Turned {
        /// The stored row of the first element.
        row: usize,
        /// The column of the first packed row.
        column: usize,
    },
}

/// One packed matrix.
#[derive(Clone, Debug)]
pub struct LinearDecl {
    /// The tensor it comes from. Shared: the experts of a layer may all come from one.
    pub name: Arc<str>,
    /// Which elements of the tensor it takes.
    pub form: Form,
    /// Shape and packed format.
    pub packing: Packing,
    /// How the checkpoint stores it.
    pub encoding: Encoding,
    /// Added to every output row.
    pub bias: Option<VectorId>,
    /// Byte offset in the weight region.
    pub offset: usize,
}

impl LinearDecl {
    /// The stored row that becomes row `row` of the packed matrix, where it is made of rows.
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

/// What is done to each element of a stored vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// A constant is added.
    Plus(f32),
    /// x becomes ln(-x): some files store what another form exponentiates and negates.
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

/// Where a vector's values come from.
#[derive(Clone, Debug)]
pub enum VectorSource {
    /// A tensor of the checkpoint.
    Tensor {
        /// The tensor's name.
        name: String,
        /// The first element taken.
        first: usize,
        /// What is done to each element.
        change: Change,
    },
    /// Computed from the configuration.
    Values(Vec<f32>),
}

/// One f32 vector.
#[derive(Clone, Debug)]
pub struct VectorDecl {
    /// Where its values come from.
    pub source: VectorSource,
    /// Elements.
    pub len: usize,
    /// Byte offset in the weight region.
    pub offset: usize,
}

/// Everything a model holds, with offsets into one region.
#[derive(Clone, Debug, Default)]
pub struct WeightTable {
    /// The matrices.
    pub linears: Vec<LinearDecl>,
    /// The vectors.
    pub vectors: Vec<VectorDecl>,
    /// Bytes of the region.
    pub bytes: usize,
    /// Whether inputs are quantized for the matrix unit too ([`WeightTable::on`]).
    tiles: bool,
    /// Whether attention can be rounded, by the unit or by vectors ([`Isa::rounds_attention`]).
    rounds_attention: bool,
    /// Whether they are quantized to 8 bits ([`WeightTable::computed_in`]).
    eight_bits: bool,
    /// Which of them are rounded instead.
    rounded: Rounded,
}

impl WeightTable {
    /// The table for layers that run on this instruction set: with the matrix unit the workspace holds more.
    pub fn on(self, isa: Isa) -> Self {
        Self { tiles: isa == Isa::Amx, rounds_attention: isa.rounds_attention(), ..self }
    }

    /// The table for steps that are computed so; without the matrix unit no layer rounds, but attention does where activations have 8 bits
    /// and vectors multiply bfloat16.
    pub fn computed_in(self, dtype: ComputeDtype) -> Self {
        let rounded = match dtype {
            ComputeDtype::Bf16 if self.tiles => Rounded::All,
            ComputeDtype::Auto if self.tiles => Rounded::Prompts,
            ComputeDtype::Int8 if self.rounds_attention => Rounded::Prompts,
            _ => Rounded::None,
        };
        Self { eight_bits: dtype == ComputeDtype::Int8, rounded, ..self }
    }

    /// The table for steps none of whose rows are rounded.
    pub fn unrounded(self) -> Self {
        Self { rounded: Rounded::None, ..self }
    }

    /// Which rows are computed in bfloat16, by layers that can and by attention.
    pub fn rounded(&self) -> Rounded {
        self.rounded
    }

    /// Whether any layer multiplies quantized rows.
    pub fn quantizes(&self) -> bool {
        self.linears.iter().any(|linear| linear.packing.wants_acts())
    }

    /// The shape of a model with these weights.
    pub fn shaped(&self, shape: ModelShape) -> ModelShape {
        ModelShape { rounded: self.rounded != Rounded::None, ..shape }
    }

    /// Whether a layer of this packing multiplies rounded rows.
    pub(crate) fn rounds(&self, packing: &Packing) -> bool {
        self.tiles && self.rounded != Rounded::None && packing.takes_rounded()
    }

    /// Whether rounding is for a row that passes a layer of this packing: the layer rounds, or it takes fewer bits than attention.
    pub(crate) fn rounds_rows(&self, packing: &Packing) -> bool {
        self.rounds(packing) || !self.tiles && self.rounded != Rounded::None && packing.wants_acts()
    }

    /// Bytes for what layers make of an input of `rows` rows of `k`, however many of these are rounded.
    pub(crate) fn input_bytes<To>(&self, rows: usize, k: usize, layers: &[(LinearId, To)]) -> usize {
        let quantized = self.act_layout(rows, k, layers.iter().map(|(id, _)| id)).map(|layout| layout.bytes());
        if !layers.iter().any(|(id, _)| self.rounds(&self.linear(*id).packing)) {
            return quantized.unwrap_or(0);
        }
        // A rounded row is no larger than a quantized one, but there are always sixteen; and they begin on a cache line.
        let rounded = |rows| Bf16Layout { rows, k }.bytes();
        quantized.map_or_else(|| rounded(rows), |quantized| quantized.next_multiple_of(64) + rounded(1))
    }

    /// How an input of `rows` rows of `k` is quantized for these layers; `None` if none of them wants it.
    pub(crate) fn act_layout<'a>(
        &self,
        rows: usize,
        k: usize,
        layers: impl Iterator<Item = &'a LinearId>,
    ) -> Option<ActLayout> {
        let (mut acts, mut tiles) = (false, false);
        for id in layers {
            let packing = &self.linear(*id).packing;
            acts |= packing.wants_acts();
            tiles |= self.tiles && packing.wants_tiles();
        }
        let form = match (self.eight_bits, tiles) {
            (true, _) => ActForm::Bytes,
            (false, true) => ActForm::Tiled,
            (false, false) => ActForm::Words,
        };
        acts.then_some(ActLayout { rows, k, form })
    }

    /// The declaration behind an id.
    pub fn linear(&self, id: LinearId) -> &LinearDecl {
        &self.linears[id.0]
    }

    /// The declaration behind an id.
    pub fn vector(&self, id: VectorId) -> &VectorDecl {
        &self.vectors[id.0]
    }

    /// Bytes that the table itself takes in the host's heap, estimated from above: a model of many experts has tens of
    /// thousands of entries.
    pub fn host_bytes(&self) -> usize {
        let pieces = |form: &Form| match form {
            Form::Rows(pieces) => size_of_val(&**pieces),
            Form::Folded { .. } | Form::Turned { .. } => 0,
        };
        let linear = |linear: &LinearDecl| size_of::<LinearDecl>() + pieces(&linear.form) + linear.name.len();
        let values = |vector: &VectorDecl| match &vector.source {
            VectorSource::Values(values) => size_of_val(values.as_slice()),
            VectorSource::Tensor { name, .. } => name.len(),
        };
        let vector = |vector: &VectorDecl| size_of::<VectorDecl>() + values(vector);
        // Vectors grow by doubling, and a model keeps the ids of its experts.
        2 * (self.linears.iter().map(linear).sum::<usize>() + self.vectors.iter().map(vector).sum::<usize>())
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
            offset: 0,
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
