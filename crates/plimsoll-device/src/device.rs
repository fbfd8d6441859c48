//! The interface between models and devices: the operations that a model may call.
//!
//! It is a small set of fused operations over views into the step arena. All activations are f32, row-major. A device adds
//! no operation of its own and takes no memory but [`Device::temp`]'s.

mod batch;
mod layers;
mod ngrams;
pub(crate) mod ordered;
mod selected;

use plimsoll_memory::step::{Mark as StackMark, StepOverflow};
use thiserror::Error;

pub use crate::buf::Buf;
use crate::weights::{LinearId, VectorId};
pub use batch::{CANDIDATE_BLOCK, CANDIDATES_MAX, MediaRows, NO_STATE, SeqSpan, StepInput};
pub use layers::{
    Activation, Attention, CausalConv, Encoded, Experts, FeedForward, GatedDelta, Input, Near, Norm, Rotary, Scoring,
    SelectiveScan, Unfold,
};
pub use ngrams::{NgramConv, Ngrams};
pub use selected::Selection;

/// A position in the step arena to return to.
#[derive(Clone, Copy, Debug)]
pub struct Mark(pub(crate) StackMark);

impl From<StackMark> for Mark {
    fn from(mark: StackMark) -> Self {
        Self(mark)
    }
}

impl From<Mark> for StackMark {
    fn from(mark: Mark) -> Self {
        mark.0
    }
}

/// The reason why a step failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// The step needs more workspace than was planned: a bug in the planner, never a request's fault.
    #[error(transparent)]
    Workspace(#[from] StepOverflow),
    /// A step produced non-finite logits: the weights are damaged, or the model's keys and values exceed the range of half precision.
    #[error(
        "the model's logits are not finite numbers: the weights are damaged, or keys and values leave the range of half precision (try --kv-dtype bf16)"
    )]
    NotFinite,
    /// The file that the weights are mapped from was changed since it was checked.
    #[error(
        "the packed weights were changed while they were used, so no answer can be trusted: {0}; restart the server"
    )]
    WeightsChanged(String),
    /// Rows of a table that stays in the model's files could not be read, or a file was changed.
    #[error(
        "a row of a table that stays in the model's file could not be read, so no answer can be trusted: {0}; check the disk, and restart the server"
    )]
    Table(String),
    /// A draft was requested from a model without a draft head, or before any step.
    #[error("there is no draft head to guess with, or no step to go on from")]
    NoDraft,
    /// Images were given to a model without an encoder.
    #[error("this model has no vision encoder")]
    NoEncoder,
    /// A step's upload, dispatches or output are larger than planned: a bug in the planner.
    #[error("a step's {what} on the GPU: {needed} bytes needed, {capacity} planned")]
    Transfer {
        /// Input, dispatches or output.
        what: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes planned.
        capacity: usize,
    },
    /// The GPU or its driver failed.
    #[error("the GPU failed: {0}")]
    Gpu(String),
    /// The caller has cancelled the operation.
    #[error("cancelled")]
    Stopped,
    /// A test injected this failure.
    #[error("injected fault: {0}")]
    Injected(&'static str),
}

/// Whether a linear layer overwrites its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// y = x·Wᵀ (+ bias).
    Store,
    /// y += x·Wᵀ (+ bias): the residual connection.
    Add,
}

/// For each row, its position in time, height and width. A function, so that no list of all positions is needed.
pub type Places<'a> = &'a (dyn Fn(usize) -> [f32; 3] + Sync);

/// For each row, four rows of a table and their shares: an interpolation between four points. A row with share 0 is not read.
pub type Blend<'a> = &'a (dyn Fn(usize) -> [(u32, f32); 4] + Sync);

/// The operations that a model may call. Shapes are given by the buffers; a mismatch is a bug and panics.
pub trait Device {
    /// A matrix of unspecified contents, valid until its scope is released.
    fn temp(&mut self, rows: usize, cols: usize) -> Result<Buf, DeviceError>;

    /// Opens a scope.
    fn mark(&self) -> Mark;

    /// Closes a scope: releases every matrix taken since.
    fn release(&mut self, mark: Mark);

    /// `out[r] = table[tokens[r]] * scale`.
    fn embed(&mut self, out: Buf, table: LinearId, tokens: &[u32], scale: f32);

    /// `x[r] += Σ table[row] * share` over the four rows that `blend` returns for row r, summed first.
    fn add_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>);

    /// `x[r] += table[which(r)]`, for positions that repeat. Rows of the table are as wide as those of `x`.
    fn add_rows(&mut self, x: Buf, table: VectorId, which: &(dyn Fn(usize) -> usize + Sync));

    /// `x[first_row + r] (+)= values[r][from..from + x.cols]` for every row of `values`, each `width` wide. It copies host data (patches,
    /// embeddings of images) into a step. The planner passes no values; it counts all rows of `x` from `first_row` on.
    fn place(&mut self, x: Buf, first_row: usize, values: &[f32], width: usize, from: usize, mode: Mode);

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`; `out` may be `x`.
    fn rms_norm(&mut self, out: Buf, x: Buf, weight: VectorId, eps: f32);

    /// `out[r] = (x[r] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight + bias`; `out` may be `x`.
    fn layer_norm(&mut self, out: Buf, x: Buf, weight: VectorId, bias: VectorId, eps: f32);

    /// Several linear layers over the same input, which is quantized once.
    fn linear(&mut self, x: Buf, layers: &[(LinearId, Buf)], mode: Mode) -> Result<(), DeviceError> {
        self.linear_rows(x.into(), layers, mode, 0)
    }

    /// [`Self::linear`] of rows that may have to be computed first. The last `bf16_rows` rows are computed in bfloat16 by layers that can.
    /// These are the same layers for each row, whatever the other rows are ([`crate::WeightTable::computed_in`]).
    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError>;

    /// `out (+)= down(act(gate(x)) * up(x))`; the last `bf16_rows` rows are computed in bfloat16. The planner, and a device without a
    /// fused operation, carry it out step by step: the bits are the same.
    fn feed_forward(
        &mut self,
        layer: &FeedForward,
        input: Input,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        layer.by_steps(self, input, out, mode, bf16_rows)
    }

    /// The cosines and sines of `positions[r] * inv_freq[i] * 1`, scaled by `scale`: row r is `[cos.., sin..]`.
    fn rope_angles(&mut self, out: Buf, inv_freq: VectorId, positions: &[u32], scale: f32);

    /// [`Self::rope_angles`] of rows with positions in three axes: frequency i takes its position from axis `axes[i]` of the row's place.
    /// For a place with three equal positions the bits are those of `rope_angles`.
    fn rope_angles_by_axis(&mut self, out: Buf, inv_freq: VectorId, axes: &[u8], places: Places<'_>, scale: f32);

    /// Rotates the first `angles.cols` elements of every head of `x` (heads of `head_dim`) by its row's angles; the rest stays.
    /// `interleaved`: pairs are (2i, 2i+1); otherwise (i, i + half), half of the rotated part.
    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, interleaved: bool);

    /// `gate = act(gate) * up`.
    fn glu(&mut self, gate: Buf, up: Buf, act: Activation);

    /// [`Self::glu`] for the layer that multiplies the result next. For the last `bf16_rows` rows the activation needs only the precision
    /// that bf16 keeps.
    fn glu_for(&mut self, _next: LinearId, gate: Buf, up: Buf, act: Activation, _bf16_rows: usize) {
        self.glu(gate, up, act);
    }

    /// `x = act(x)`.
    fn activate(&mut self, x: Buf, act: Activation);

    /// `x[r] *= weight`.
    fn multiply(&mut self, x: Buf, weight: VectorId);

    /// `x[r] *= factor(r)`.
    fn scale_rows(&mut self, x: Buf, factor: &(dyn Fn(usize) -> f32 + Sync));

    /// `x[r] *= by[r]`, one factor a row.
    fn scale_by(&mut self, x: Buf, by: Buf);

    /// `x += y`.
    fn add(&mut self, x: Buf, y: Buf);

    /// Normalises and rotates queries and keys, if `rotary` is given; stores every row's keys and values in the cache; then attends.
    /// `out`, `q` are [rows, heads · width], keys and values [rows, cache heads · width]. Causal: a row attends up to its own position.
    ///
    /// `kv` is none for a layer that reads the keys and values of another layer for the same rows.
    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        out: Buf,
        q: Buf,
        kv: Option<[Buf; 2]>,
        step: &StepInput<'_>,
    );

    /// Attends among the rows of each sequence of this step, before and after, as an encoder does. Shapes are as for
    /// [`Self::attention`], but keys and values are in the workspace for the length of this operation, in the pages that the step
    /// names. Every sequence starts at position 0 and is complete. A row attends to the positions of [`Attention::seen_within`].
    fn attend_within(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError>;

    /// Every row attends to every row of its sequence, in an encoder. `sequences` gives the first row and the rows of each sequence, which
    /// follow one another. Queries, keys and values have as many heads, of any width. Each sequence is computed by itself; its keys
    /// and values are in the workspace meanwhile.
    fn attend_all(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError>;

    /// Local attention: a row attends to itself and to at most `spec.rows - 1` rows before it in its sequence. Scores use the sum of a
    /// row's key and row d of `distances` for a distance of d rows: [`spec.rows` or more, heads · width]. Other shapes and `sequences`
    /// are as for [`Self::attend_all`]; nothing is kept.
    fn attend_near(
        &mut self,
        spec: &Near,
        out: Buf,
        qkv: [Buf; 3],
        distances: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    );

    /// Sparse attention over selected blocks of positions ([`Selection`]). It follows [`Self::attention`], which has normed and rotated
    /// the queries `q` and stored keys and values. `index` has three matrices: the index queries [rows, index heads · width], normed and
    /// rotated; the index keys as projected [rows, width]; and room for the choice [rows, 2 · blocks].
    ///
    /// Every row's index key is stored. The last row of a block has its block's key in place of its own. Rows from
    /// [`Selection::selects_from`] on overwrite their part of `out`. A block's score is the sum over index heads of
    /// relu(query · block key). Of equal scores the lower block is chosen.
    fn attend_selected(&mut self, spec: &Selection, out: Buf, q: Buf, index: [Buf; 3], step: &StepInput<'_>);

    /// Writes the rows of `spec`'s tables for each row's n-grams, side by side: `out` is [rows, heads · width]. `ids` is room for the
    /// numbers of the rows [rows, heads]. The tokens before a sequence's first row come from its slot; the last tokens are left in the
    /// slots that the step names.
    fn embed_ngrams(&mut self, spec: &Ngrams, out: Buf, ids: Buf, step: &StepInput<'_>);

    /// `keys[r] = sigmoid(g) * values[r / n]`, where keys and queries have n streams per row of values, each as wide as values, with
    /// `g = sign(d)·sqrt(max(|d|, 1e-6))` and `d = keys[r] · queries[r] / sqrt(width)`.
    fn gate_streams(&mut self, keys: Buf, queries: Buf, values: Buf);

    /// [`Self::causal_conv`] for a layer that looks up n-grams: dilated, with SiLU, and with its own part of the slots.
    fn ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>);

    /// Convolves each sequence's rows of `x` over time, in place, from the inputs in the sequence's slot on, and leaves the last inputs
    /// in the slots that the step names. With gates, `x` is multiplied with the first before the convolution and with the second after
    /// it; both have its shape.
    fn causal_conv(&mut self, spec: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>);

    /// A recurrent layer. `qkv` [rows, [`GatedDelta::channels`]] goes through the causal convolution and SiLU; queries and keys are
    /// normalised per head. Then each row updates and reads its value heads' states, starting from the sequence's slot and
    /// leaving copies in the slots that the step names. `a` and `b` [rows, value heads] give decay and write strength;
    /// `out` is [rows, value heads · value width].
    ///
    /// With x·rsqrt(Σx² + 1e-6) for queries (times key_dim^-½) and keys, g = −e^a_log · softplus(a + dt_bias), β = sigmoid(b):
    /// S = e^g·S; δ = (v − Sᵀk)·β; S += k⊗δ; out = Sᵀq. `qkv`, `a` and `b` are overwritten.
    fn gated_delta(
        &mut self,
        spec: &GatedDelta,
        out: Buf,
        qkv: Buf,
        a: Buf,
        b: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError>;

    /// A Mamba-2 recurrence. `x` [rows, [`SelectiveScan::channels`]] is the output of the layer's convolution. The first of `gates`
    /// [rows, heads] has the raw time steps `dt`; the second has the same shape and any contents, and both are overwritten. Each row
    /// updates and reads its heads' states, starting from the sequence's slot and leaving copies in the slots that the step names.
    /// `out` is [rows, heads · head width].
    ///
    /// With Δ = softplus(dt + dt_bias) within the limits: S = e^(−e^a_log · Δ)·S + B⊗(Δ·value); out = SᵀC + skip·value.
    fn selective_scan(&mut self, spec: &SelectiveScan, out: Buf, x: Buf, gates: [Buf; 2], step: &StepInput<'_>);

    /// A mixture of experts. Each row takes the `top_k` experts of greatest probability, a softmax over all of its
    /// `router` logits (of equal ones the lower id). `out[r] (+)= Σ weight · down(act(gate x) · up x)`, or without
    /// the factor `up x`, added from the greatest weight down; or with the weight on `x`. `router` [rows, experts] is overwritten.
    /// The size of the workspace does not depend on the chosen experts.
    fn experts(&mut self, spec: &Experts<'_>, out: Buf, x: Buf, router: Buf, mode: Mode) -> Result<(), DeviceError>;

    /// `x[r] += sigmoid(gate[r]) * y[r]`, one gate per row: adds a shared expert.
    fn add_gated(&mut self, x: Buf, y: Buf, gate: Buf);

    /// `out[r][column..column + x.cols] = x[r]`.
    fn put(&mut self, out: Buf, x: Buf, column: usize);

    /// `out[r] = x[r][column..column + out.cols]`.
    fn take(&mut self, out: Buf, x: Buf, column: usize);

    /// Writes the windows of a convolution as rows, so that a linear layer finishes it. `out` has a row for each window, the inner axis
    /// running faster, with columns in the order of a stored kernel: channel, inner tap, outer tap. Points outside the rows
    /// of `x` are 0. The rows of `out` decide how many windows there are along the outer axis.
    fn unfold(&mut self, out: Buf, x: Buf, spec: &Unfold);

    /// `out[i] = x[rows[i]]`.
    fn gather(&mut self, out: Buf, x: Buf, rows: &[u32]);

    /// `out[r][..x.cols] = x[from(r)]`, for an order that is computed.
    fn arrange(&mut self, out: Buf, x: Buf, from: &(dyn Fn(usize) -> usize + Sync));

    /// Moves these rows of `x`, ascending, to its beginning, and returns them; the others are lost.
    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf;

    /// `x = min(max(x, low), high)`. Either bound may be infinite.
    fn clamp(&mut self, x: Buf, low: f32, high: f32);

    /// Writes the `counts[r]` greatest elements of every row r of `x`, the greatest first, equal ones by column. −∞ and NaN are left
    /// out. `out` has two columns, an element and its column in `x`, and the rows of all rows of `x` one after another.
    /// Rows without an element have column −1. `blocks` has a column for every [`CANDIDATE_BLOCK`] of `x`, and any contents.
    fn candidates(&mut self, out: Buf, blocks: Buf, x: Buf, counts: &[u32]);

    /// `x = cap * tanh(x / cap)`.
    fn softcap(&mut self, x: Buf, cap: f32);
}
