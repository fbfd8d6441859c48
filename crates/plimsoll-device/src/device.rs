//! The seam: what a model may ask of a device.
//!
//! A small set of fused operations over views into the step arena. All activations are f32, row-major. A device adds
//! no operation of its own accord and takes no memory but [`Device::temp`]'s.

use plimsoll_memory::step::{Mark as StackMark, StepOverflow};
use thiserror::Error;

use crate::kv::StateShape;
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

    /// Its first rows.
    pub fn first(self, rows: usize) -> Buf {
        assert!(rows <= self.rows, "{rows} of {} rows", self.rows);
        Buf { rows, ..self }
    }

    /// `rows` of its rows, from `first` on.
    pub fn span(self, first: usize, rows: usize) -> Buf {
        assert!(first + rows <= self.rows, "{rows} rows from {first} of {}", self.rows);
        Buf { offset: self.offset + first * self.cols * size_of::<f32>(), rows, ..self }
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
    /// A step produced logits that are not numbers: the weights are broken, or half precision does not reach as far as this model's keys
    /// and values.
    #[error(
        "the model's logits are not finite numbers: the weights are damaged, or keys and values leave the range of half precision (try --kv-dtype bf16)"
    )]
    NotFinite,
    /// A draft was asked for from a model without a draft head, or before any step.
    #[error("there is no draft head to guess with, or no step to go on from")]
    NoDraft,
    /// Pictures were given to a model without a tower.
    #[error("there is no tower to encode pictures with")]
    NoEncoder,
    /// Whoever wanted the result wants it no more.
    #[error("it was stopped")]
    Stopped,
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

/// The activation of a feed-forward layer, gated or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x·sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// x·sigmoid(1.702·x).
    GeluQuick,
    /// tanh(x), without x.
    Tanh,
    /// sigmoid(x), without x: the gate of an attention's output.
    Sigmoid,
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

/// What is done to the heads of queries and keys before they meet: each normalised, where the family does so, then rotated
/// ([`Device::rope`]).
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Weights of the norms ([`Device::rms_norm`]) of a head of queries and one of keys.
    pub norms: Option<[VectorId; 2]>,
    /// Of these norms.
    pub eps: f32,
    /// A row of cosines and sines for every row of the step.
    pub angles: Buf,
    /// Which elements make a pair.
    pub interleaved: bool,
}

/// What one recurrent layer (Gated DeltaNet) does, apart from its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDelta {
    /// Index of the layer's part in a state slot: its number among the recurrent layers.
    pub layer: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, of the state and of the output; a multiple of the key heads.
    pub value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Weights of the causal convolution: `taps` of channel 0 (the oldest input's first), of channel 1, …
    pub conv: VectorId,
    /// Inputs that the convolution sees, the row's own included.
    pub taps: usize,
    /// Whether value head v is served by key head `v % key_heads`; otherwise by `v / (value_heads / key_heads)`.
    pub tiled: bool,
    /// Logarithm of the decay's rate, one a value head.
    pub a_log: VectorId,
    /// Bias of the decay's time, one a value head.
    pub dt_bias: VectorId,
}

impl GatedDelta {
    /// The key head that serves a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head / (self.value_heads / self.key_heads),
        }
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The state that the layer keeps, as part of a slot of `layers` such layers.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        StateShape {
            layers,
            conv_channels: self.channels(),
            conv_history: self.taps - 1,
            heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }
}

/// Rows that layers multiply.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// The rows.
    pub x: Buf,
    /// They are made first, if it says of what.
    pub norm: Option<Norm>,
}

impl Input {
    /// Rows that are to be made as [`Device::rms_norm`] would make them.
    pub fn normed(x: Buf, from: Buf, weight: VectorId, eps: f32) -> Self {
        Self { x, norm: Some(Norm { from, weight, eps }) }
    }

    /// Some of the rows.
    pub(crate) fn span(self, first: usize, rows: usize) -> Self {
        let norm = self.norm.map(|norm| Norm { from: norm.from.span(first, rows), ..norm });
        Self { x: self.x.span(first, rows), norm }
    }

    /// Makes the rows, if they are not there already.
    pub(crate) fn ready<D: Device + ?Sized>(self, device: &mut D) -> Buf {
        if let Some(Norm { from, weight, eps }) = self.norm {
            device.rms_norm(self.x, from, weight, eps);
        }
        self.x
    }
}

impl From<Buf> for Input {
    fn from(x: Buf) -> Self {
        Self { x, norm: None }
    }
}

/// What rows are made of: `rms_norm(from, weight, eps)`.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Other rows, as many and as wide.
    pub from: Buf,
    /// The norm's weights.
    pub weight: VectorId,
    /// The norm's epsilon.
    pub eps: f32,
}

/// A gated feed-forward layer.
#[derive(Clone, Copy, Debug)]
pub struct FeedForward {
    /// Gate projection.
    pub gate: LinearId,
    /// Up projection, of the same shape.
    pub up: LinearId,
    /// Down projection, back to the width of the input.
    pub down: LinearId,
    /// Outputs of gate and up.
    pub width: usize,
    /// The activation of the gate.
    pub act: Activation,
}

impl FeedForward {
    /// [`Device::feed_forward`] by operations of their own.
    pub(crate) fn by_steps<D: Device + ?Sized>(
        &self,
        device: &mut D,
        input: Input,
        out: Buf,
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        let (scope, rows) = (device.mark(), input.x.rows);
        let (gate, up) = (device.temp(rows, self.width)?, device.temp(rows, self.width)?);
        device.linear_rows(input, &[(self.gate, gate), (self.up, up)], Mode::Store, rounded_rows)?;
        device.glu_for(self.down, gate, up, self.act, rounded_rows);
        device.linear_rows(gate.into(), &[(self.down, out)], mode, rounded_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// A mixture of experts, apart from its data: expert e is `gate[e]`, `up[e]`, `down[e]`.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// Gate projections, all of one shape.
    pub gate: &'a [LinearId],
    /// Up projections, of the same shape.
    pub up: &'a [LinearId],
    /// Down projections, back to the width of the input.
    pub down: &'a [LinearId],
    /// Experts that a row takes.
    pub top_k: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalise: bool,
    /// The activation of the gate.
    pub act: Activation,
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
pub const NO_STATE: u32 = plimsoll_kernels::NO_SLOT;

/// Consecutive rows of a step whose embeddings an encoder has made.
#[derive(Clone, Copy, Debug)]
pub struct MediaRows<'a> {
    /// The first of the rows.
    pub first_row: usize,
    /// Their embeddings, row after row, each as wide as the encoder's output. The planner has none: empty.
    pub values: &'a [f32],
}

/// One step's batch: rows of all sequences, one after another.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepInput<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// The sequences.
    pub seqs: &'a [SeqSpan],
    /// Page ids of all sequences, one after another. For [`Device::attend_within`], which keeps nothing, they count from 0.
    pub pages: &'a [u32],
    /// Token type of each row, for encoders, which tell the texts of a pair apart; empty for all others.
    pub types: &'a [u32],
    /// The rows whose logits are wanted, ascending.
    pub logit_rows: &'a [u32],
    /// For each row the slot that receives the recurrent state after it, or [`NO_STATE`]; empty for models without state.
    /// A sequence's last row always names one. It may be the slot that the sequence starts from; no slot is named twice.
    pub state_out: &'a [u32],
    /// Where each row stands in time, height and width, for models that give pictures a place in all three; empty: its
    /// position, three times. Whole numbers but behind a video whose frames are not whole steps apart.
    pub places: &'a [[f32; 3]],
    /// Rows whose embeddings do not come from their tokens.
    pub media: &'a [MediaRows<'a>],
    /// How many of its last rows linear layers and attention compute in bfloat16, if they can ([`crate::Rounded`]).
    pub rounded_rows: usize,
    /// Whether logits are computed so, too.
    pub rounded_logits: bool,
    /// Whether nobody looks at hidden states but to make logits of them: then the last layer is spared what other rows would become.
    pub only_logits: bool,
}

impl StepInput<'_> {
    /// How many of the rows whose logits are wanted, the last ones, are computed in bfloat16.
    pub fn rounded_logit_rows(&self) -> usize {
        let exact = (self.tokens.len() - self.rounded_rows) as u32;
        self.logit_rows.len() - self.logit_rows.partition_point(|row| *row < exact)
    }
}

/// For each row, where it stands in time, height and width. A function, so that nobody must write them all down.
pub type Places<'a> = &'a (dyn Fn(usize) -> [f32; 3] + Sync);

/// For each row, four rows of a table and how much of each: a point between four others. What is 0 is not looked at.
pub type Blend<'a> = &'a (dyn Fn(usize) -> [(u32, f32); 4] + Sync);

/// How [`Device::unfold`] cuts windows out of a plane of two axes, `inner` running faster. Each row of the plane has all channels of
/// one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfold {
    /// Points of the inner axis. Of the outer one there are as many as the rows make.
    pub inner: usize,
    /// Points of a window along the outer and along the inner axis.
    pub taps: [usize; 2],
    /// Points from one window to the next.
    pub step: [usize; 2],
    /// Points by which the first window begins before the plane.
    pub pad: [usize; 2],
}

impl Unfold {
    /// Windows along the inner axis.
    pub fn windows(&self) -> usize {
        (self.inner + 2 * self.pad[1] - self.taps[1]) / self.step[1] + 1
    }
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

    /// `x[r] += Σ table[row] * share` over the four that `blend` gives for row r, summed first.
    fn add_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>);

    /// `x[r] += table[which(r)]`, of a table whose rows are as wide as those of `x`: positions that repeat.
    fn add_rows(&mut self, x: Buf, table: VectorId, which: &(dyn Fn(usize) -> usize + Sync));

    /// `x[first_row + r] (+)= values[r][from..from + x.cols]` for every row of `values`, which are `width` wide: what comes from
    /// outside (patches, embeddings of pictures) enters a step. The planner has no values: empty, and nothing happens.
    fn place(&mut self, x: Buf, first_row: usize, values: &[f32], width: usize, from: usize, mode: Mode);

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`; `out` may be `x`.
    fn rms_norm(&mut self, out: Buf, x: Buf, weight: VectorId, eps: f32);

    /// `out[r] = (x[r] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight + bias`; `out` may be `x`.
    fn layer_norm(&mut self, out: Buf, x: Buf, weight: VectorId, bias: VectorId, eps: f32);

    /// Several linear layers over the same input, which is quantized once.
    fn linear(&mut self, x: Buf, layers: &[(LinearId, Buf)], mode: Mode) -> Result<(), DeviceError> {
        self.linear_rows(x.into(), layers, mode, 0)
    }

    /// The same of rows that may have to be made first; the last `rounded_rows` are computed in bfloat16 by layers that can, if any,
    /// which is the same for each of them, whatever stands beside it ([`crate::WeightTable::computed_in`]).
    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError>;

    /// `out (+)= down(act(gate(x)) * up(x))`; the last `rounded_rows` rows are rounded. The planner takes it step by step, and so does a
    /// device that knows nothing better: the bits are the same.
    fn feed_forward(
        &mut self,
        layer: &FeedForward,
        input: Input,
        out: Buf,
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        layer.by_steps(self, input, out, mode, rounded_rows)
    }

    /// The cosines and sines of `positions[r] * inv_freq[i] * 1`, scaled by `scale`: row r is `[cos.., sin..]`.
    fn rope_angles(&mut self, out: Buf, inv_freq: VectorId, positions: &[u32], scale: f32);

    /// [`Self::rope_angles`] of rows that stand in three axes: frequency i takes its position from axis `axes[i]` of the row's place.
    /// For a place that is the same in all three the bits are those of `rope_angles`.
    fn rope_angles_by_axis(&mut self, out: Buf, inv_freq: VectorId, axes: &[u8], places: Places<'_>, scale: f32);

    /// Rotates the first `angles.cols` elements of every head of `x` (heads of `head_dim`) by its row's angles; the rest stays.
    /// `interleaved`: pairs are (2i, 2i+1); otherwise (i, i + half), half of the rotated part.
    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, interleaved: bool);

    /// `gate = act(gate) * up`.
    fn glu(&mut self, gate: Buf, up: Buf, act: Activation);

    /// The same for the layer that multiplies it next. The activation of the last rows may be taken to as many digits as that layer
    /// leaves of rounded ones.
    fn glu_for(&mut self, _next: LinearId, gate: Buf, up: Buf, act: Activation, _rounded_rows: usize) {
        self.glu(gate, up, act);
    }

    /// `x = act(x)`.
    fn activate(&mut self, x: Buf, act: Activation);

    /// `x[r] *= weight`.
    fn multiply(&mut self, x: Buf, weight: VectorId);

    /// `x += y`.
    fn add(&mut self, x: Buf, y: Buf);

    /// Makes the heads of `q` and `k` ready, if it is said how, stores keys and values of every row in the cache, then attends: `out`,
    /// `q` are [rows, heads · width], `k`, `v` [rows, cache heads · width]. Causal: a row sees positions up to its own.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    );

    /// Attends among the rows of each sequence of this step, before and after, as an encoder does: shapes as for
    /// [`Self::attention`], but keys and values lie in the workspace for the length of this operation, in as many pages as the step
    /// names. Every sequence starts at position 0 and is there as a whole.
    fn attend_within(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError>;

    /// Every row of `q` attends to every row of `k`: one sequence of an encoder, by itself. Queries, keys and values have as many heads,
    /// of any width; keys and values lie in the workspace for the length of this operation.
    fn attend_all(&mut self, spec: &Attention, out: Buf, q: Buf, k: Buf, v: Buf) -> Result<(), DeviceError>;

    /// A recurrent layer: `qkv` [rows, [`GatedDelta::channels`]] goes through the causal convolution and SiLU, queries and keys are
    /// normalised per head, then each row updates and asks its value heads' states, starting from the sequence's slot and
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

    /// A mixture of experts: each row takes the `top_k` experts of greatest probability, a softmax over all of its `router` logits
    /// (of equal ones the lower id); `out[r] (+)= Σ weight · down(act(gate x) · up x)`, added from the greatest weight down.
    /// `router` [rows, experts] is overwritten. The workspace does not depend on who is chosen.
    fn experts(&mut self, spec: &Experts<'_>, out: Buf, x: Buf, router: Buf, mode: Mode) -> Result<(), DeviceError>;

    /// `x[r] += sigmoid(gate[r]) * y[r]`, one gate a row: a shared expert joins.
    fn add_gated(&mut self, x: Buf, y: Buf, gate: Buf);

    /// `out[r][column..column + x.cols] = x[r]`.
    fn put(&mut self, out: Buf, x: Buf, column: usize);

    /// The windows of a convolution as rows, so that a linear layer finishes it: `out` has a row for each window, the inner axis
    /// running faster, with columns in the order of a stored kernel: channel, inner tap, outer tap. What lies outside the rows
    /// of `x` is 0; how many windows there are along the outer axis is what `out` has room for.
    fn unfold(&mut self, out: Buf, x: Buf, spec: &Unfold);

    /// `out[i] = x[rows[i]]`.
    fn gather(&mut self, out: Buf, x: Buf, rows: &[u32]);

    /// Moves these rows of `x`, ascending, to its beginning, and gives them; the others are lost.
    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf;

    /// `x = cap * tanh(x / cap)`.
    fn softcap(&mut self, x: Buf, cap: f32);
}

#[cfg(test)]
mod tests {
    use super::StepInput;

    #[test]
    fn logits_of_rounded_rows_are_counted_from_the_end() {
        let count = |logit_rows: &[u32], rounded_rows| {
            StepInput { tokens: &[0; 10], logit_rows, rounded_rows, ..StepInput::default() }.rounded_logit_rows()
        };
        assert_eq!(count(&[0, 1, 6, 9], 4), 2);
        assert_eq!(count(&[0, 1, 6, 9], 0), 0);
        assert_eq!(count(&[0, 1, 6, 9], 10), 4);
        assert_eq!(count(&[], 5), 0);
    }
}
