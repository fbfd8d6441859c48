//! The seam: what a model may ask of a device.
//!
//! A small set of fused operations over views into the step arena. All activations are f32, row-major. A device adds
//! no operation of its own accord and takes no memory but [`Device::temp`]'s.

use plimsoll_memory::step::{Mark as StackMark, StepOverflow};
use thiserror::Error;

use crate::weights::{LinearId, VectorId};

/// A matrix of f32 in the step arena, row-major. A handle: only the device that gave it can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    /// Byte offset in the step arena.
    pub(crate) offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Buf {
    /// The same elements as rows of another width, for example one row per head.
    pub fn reshape(self, cols: usize) -> Buf {
        let elements = self.rows * self.cols;
        assert_eq!(elements % cols, 0, "{elements} elements in rows of {cols}");
        Buf { rows: elements / cols, cols, ..self }
    }

    /// Bytes of the matrix.
    pub(crate) fn bytes(self) -> usize {
        self.rows * self.cols * size_of::<f32>()
    }
}

/// A position in the step arena to return to.
#[derive(Clone, Copy, Debug)]
pub struct Mark(pub(crate) StackMark);

/// Why a step could not be carried out.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// The step needs more workspace than was planned: a bug in the planner, never a request's fault.
    #[error(transparent)]
    Workspace(#[from] StepOverflow),
    /// A step produced logits that are not numbers: the weights are broken.
    #[error("the model's logits are not finite numbers: the weights are damaged")]
    NotFinite,
    /// A test asked for this failure.
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

/// The activation of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x·sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// What one attention layer does, apart from its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Index of the layer's keys and values in the cache.
    pub layer: usize,
    /// Query heads; a multiple of the cache's heads.
    pub heads: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// A position sees this many positions at most, itself included.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// One sequence's rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpan {
    /// Its first row in the step.
    pub first_row: usize,
    /// How many consecutive rows: 1 while decoding, a chunk while prefilling.
    pub rows: usize,
    /// The position of the first row in the sequence.
    pub start: usize,
    /// Where its page ids begin in [`StepInput::pages`].
    pub pages_at: usize,
    /// How many page ids: enough for `start + rows` positions.
    pub pages: usize,
    /// Attention sees no position before this one: 0, except for a draft head that was not run on the earlier ones.
    pub seen_from: usize,
    /// The state slot that recurrent layers start from; none: the sequence starts here, from zeros.
    pub state: Option<u32>,
}

/// In [`StepInput::state_out`]: the state after this row is not kept.
pub const NO_STATE: u32 = u32::MAX;

/// One step's batch: rows of all sequences, one after another.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// The sequences.
    pub seqs: &'a [SeqSpan],
    /// Page ids of all sequences, one after another.
    pub pages: &'a [u32],
    /// The rows whose logits are wanted, ascending.
    pub logit_rows: &'a [u32],
    /// For each row the slot that receives the recurrent state after it, or [`NO_STATE`]; empty for models without state.
    /// A sequence's last row always names one. It may be the slot that the sequence starts from; no slot is named twice.
    pub state_out: &'a [u32],
}

/// What a model may ask of a device. Shapes are given by the buffers; a mismatch is a bug and panics.
pub trait Device {
    /// A matrix of unspecified contents, valid until its scope is released.
    fn temp(&mut self, rows: usize, cols: usize) -> Result<Buf, DeviceError>;

    /// Opens a scope.
    fn mark(&self) -> Mark;

    /// Closes a scope: every matrix taken since is given back.
    fn release(&mut self, mark: Mark);

    /// `out[r] = table[tokens[r]] * scale`.
    fn embed(&mut self, out: Buf, table: LinearId, tokens: &[u32], scale: f32);

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`; `out` may be `x`.
    fn rms_norm(&mut self, out: Buf, x: Buf, weight: VectorId, eps: f32);

    /// Several linear layers over the same input, which is quantized once.
    fn linear(&mut self, x: Buf, layers: &[(LinearId, Buf)], mode: Mode) -> Result<(), DeviceError>;

    /// The cosines and sines of `positions[r] * inv_freq[i] * 1`, scaled by `scale`: row r is `[cos.., sin..]`.
    fn rope_angles(&mut self, out: Buf, inv_freq: VectorId, positions: &[u32], scale: f32);

    /// Rotates every head of `x` (head width = `angles.cols`) by its row's angles.
    /// `interleaved`: pairs are (2i, 2i+1); otherwise (i, i + half).
    fn rope(&mut self, x: Buf, angles: Buf, interleaved: bool);

    /// `gate = act(gate) * up`.
    fn glu(&mut self, gate: Buf, up: Buf, act: Activation);

    /// `x += y`.
    fn add(&mut self, x: Buf, y: Buf);

    /// Stores keys and values of every row in the cache, then attends: `out`, `q` are [rows, heads · width],
    /// `k`, `v` [rows, cache heads · width]. Causal: a row sees positions up to its own.
    fn attention(&mut self, spec: &Attention, out: Buf, q: Buf, k: Buf, v: Buf, step: &StepInput<'_>);

    /// `out[i] = x[rows[i]]`.
    fn gather(&mut self, out: Buf, x: Buf, rows: &[u32]);

    /// `x = cap * tanh(x / cap)`.
    fn softcap(&mut self, x: Buf, cap: f32);
}
