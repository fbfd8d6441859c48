//! Parameters of layers, without their data.

use std::ops::Range;

use super::{Buf, Device, DeviceError, Mode};
use crate::kv::StateShape;
use crate::weights::{LinearId, VectorId};

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
    /// min(x, 7)·sigmoid(1.702·min(x, 7)), multiplied with up clamped to ±7, plus 1: the experts of gpt-oss.
    ClampedSwish,
    /// max(x, 0)², of a feed-forward part without a gate: Nemotron-H.
    ReluSquared,
    /// ln(1 + eˣ), without x: the gate of an attention's output.
    Softplus,
}

/// Parameters of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Index of the layer's keys and values in the cache.
    pub layer: usize,
    /// Query heads; a multiple of the cache's heads.
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Most positions that a position attends to, itself included. In an encoder: half as many to either side, and itself.
    pub window: Option<usize>,
    /// The window does not slide: a position attends to the positions from the last multiple of the window on.
    pub chunked: bool,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// A logit for each query head. It takes part in the softmax, and has no value.
    pub sinks: Option<VectorId>,
    /// The sequence begins with an encoder's output; such a layer has no window.
    pub encoded: Option<Encoded>,
    /// Positions from this one on attend to nothing here: [`Device::attend_selected`] selects their positions.
    pub selects_from: Option<usize>,
}

/// The positions that a row attends to in a sequence that begins with an encoder's output. The value is the number of positions of that
/// output, from 0 on. A row of the output attends to itself alone, and nothing reads the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// Self-attention of the decoder: the positions behind the output, up to the row's own.
    Behind(usize),
    /// Cross-attention: all positions of the output.
    Within(usize),
}

impl Attention {
    /// One head of layer 0 that sees the whole context, with plain scores.
    pub const WHOLE: Self = Self {
        layer: 0,
        heads: 1,
        scale: 1.0,
        window: None,
        chunked: false,
        softcap: None,
        sinks: None,
        encoded: None,
        selects_from: None,
    };

    /// Returns the positions from `first` on that `position` attends to in a decoder.
    pub fn seen(&self, position: usize, first: usize) -> Range<usize> {
        if self.selects_from.is_some_and(|from| position >= from) {
            return position..position;
        }
        let end = position + 1;
        let seen = match self.encoded {
            None => self.first_seen(end)..end,
            Some(Encoded::Behind(output) | Encoded::Within(output)) if position < output => position..end,
            Some(Encoded::Behind(output)) => output..end,
            Some(Encoded::Within(output)) => 0..output,
        };
        seen.start.max(first)..seen.end
    }

    /// Returns the first position inside the window of a row with last position `end - 1`.
    pub fn first_seen(&self, end: usize) -> usize {
        match self.window {
            Some(window) if self.chunked => end.saturating_sub(1) / window * window,
            Some(window) => end.saturating_sub(window),
            None => 0,
        }
    }

    /// Returns the positions that `position` attends to in an encoder, of a sequence of `length` positions.
    pub fn seen_within(&self, position: usize, length: usize) -> Range<usize> {
        let reach = self.window.map_or(length, |window| window / 2);
        position.saturating_sub(reach)..length.min(position + reach + 1)
    }
}

/// Parameters of a layer in which a row attends to a few preceding rows ([`Device::attend_near`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Near {
    /// Heads of queries, keys and values.
    pub heads: usize,
    /// Rows that a row attends to, itself included: [`plimsoll_kernels::NEAR_MAX`] at most.
    pub rows: usize,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: f32,
}

/// Preparation of the heads of queries and keys: each is normalised, in families that do so, then rotated ([`Device::rope`]).
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Weights of the norms ([`Device::rms_norm`]) of a head of queries and one of keys.
    pub norms: Option<[VectorId; 2]>,
    /// The epsilon of these norms.
    pub eps: f32,
    /// A row of cosines and sines for every row of the step.
    pub angles: Buf,
    /// Whether pairs are elements (2i, 2i+1); otherwise (i, i + half).
    pub interleaved: bool,
}

/// Parameters of a causal convolution over time. Its state is the last inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConv {
    /// Index of the layer's part in a state slot: its number among the recurrent layers.
    pub layer: usize,
    /// Channels, each convolved by itself.
    pub channels: usize,
    /// Weights: `taps` of channel 0 (the oldest input's first), of channel 1, …
    pub weight: VectorId,
    /// Added to each channel's sum.
    pub bias: Option<VectorId>,
    /// Inputs that the convolution sees, the row's own included.
    pub taps: usize,
    /// Whether SiLU follows.
    pub silu: bool,
}

impl CausalConv {
    /// Returns the state of `layers` layers that consist of such a convolution alone.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        StateShape {
            layers,
            conv_channels: self.channels,
            conv_history: self.taps - 1,
            heads: 0,
            key_dim: 0,
            value_dim: 0,
            ngrams: None,
        }
    }
}

/// Parameters of one recurrent layer (Gated DeltaNet).
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
    /// Whether key head `v % key_heads` serves value head v; otherwise key head `v / (value_heads / key_heads)`.
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

    /// Returns the state of `layers` such layers, as part of a slot.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        StateShape {
            layers,
            conv_channels: self.channels(),
            conv_history: self.taps - 1,
            heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            ngrams: None,
        }
    }
}

/// Parameters of a Mamba-2 recurrence behind a causal convolution. A row of the convolution's result has the values of all heads,
/// then B and C of all groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectiveScan {
    /// Index of the layer's part in a state slot: its number among the recurrent layers.
    pub layer: usize,
    /// Heads, each with a state of `state_dim` × `head_dim`.
    pub heads: usize,
    /// Groups of neighbouring heads that share B and C; divides `heads`.
    pub groups: usize,
    /// Elements of B and of C.
    pub state_dim: usize,
    /// Elements of a head's value.
    pub head_dim: usize,
    /// Logarithm of the decay's rate, one a head.
    pub a_log: VectorId,
    /// Bias of the time step, one a head.
    pub dt_bias: VectorId,
    /// Share of a value that is added to its output, one factor per head.
    pub skip: VectorId,
    /// The least and the greatest time step.
    pub limits: [f32; 2],
}

impl SelectiveScan {
    /// Elements of all values.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: values, B, C.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    /// Returns the state of `layers` such layers with a convolution of `taps` taps.
    pub fn state_shape(&self, layers: usize, taps: usize) -> StateShape {
        StateShape {
            layers,
            conv_channels: self.channels(),
            conv_history: taps - 1,
            heads: self.heads,
            key_dim: self.state_dim,
            value_dim: self.head_dim,
            ngrams: None,
        }
    }
}

/// Input rows of linear layers.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// The rows.
    pub x: Buf,
    /// The norm that computes the rows first, if any.
    pub norm: Option<Norm>,
}

impl Input {
    /// Returns rows that are still to be computed, as [`Device::rms_norm`] does it.
    pub fn normed(x: Buf, from: Buf, weight: VectorId, eps: f32) -> Self {
        Self { x, norm: Some(Norm { from, weight, eps }) }
    }

    /// Some of the rows.
    pub(crate) fn span(self, first: usize, rows: usize) -> Self {
        let norm = self.norm.map(|norm| {
            let shape = |buf: Buf| (buf.rows, buf.cols);
            assert_eq!(shape(norm.from), shape(self.x), "a norm keeps the shape");
            Norm { from: norm.from.span(first, rows), ..norm }
        });
        Self { x: self.x.span(first, rows), norm }
    }

    /// Computes the rows, unless they are there already.
    pub fn ready<D: Device + ?Sized>(self, device: &mut D) -> Buf {
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

/// The source of rows: `rms_norm(from, weight, eps)`.
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
    /// Carries out [`Device::feed_forward`] by separate operations.
    pub(crate) fn by_steps<D: Device + ?Sized>(
        &self,
        device: &mut D,
        input: Input,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let (scope, rows) = (device.mark(), input.x.rows);
        let (gate, up) = (device.temp(rows, self.width)?, device.temp(rows, self.width)?);
        device.linear_rows(input, &[(self.gate, gate), (self.up, up)], Mode::Store, bf16_rows)?;
        device.glu_for(self.down, gate, up, self.act, bf16_rows);
        device.linear_rows(gate.into(), &[(self.down, out)], mode, bf16_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// Parameters of a mixture of experts: expert e is `gate[e]`, `up[e]`, `down[e]`; without a gate, `gate[e]` and `down[e]`.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// Gate projections, all of one shape.
    pub gate: &'a [LinearId],
    /// Up projections, of the same shape. Empty: `down` takes the activation of the gate alone.
    pub up: &'a [LinearId],
    /// Down projections, back to the width of the input.
    pub down: &'a [LinearId],
    /// Experts that a row takes.
    pub top_k: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalise: bool,
    /// The activation of the gate.
    pub act: Activation,
    /// Another scoring than a softmax over all experts.
    pub scoring: Option<Scoring>,
    /// Whether an expert's weight is multiplied onto its input instead of its result. Then gate and up have no biases.
    pub weighs_inputs: bool,
}

/// A router's scoring of experts, where it is no plain softmax ([`plimsoll_kernels::Scoring`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// Scores are sigmoids of the logits; otherwise their softmax.
    pub sigmoid: bool,
    /// Added to the scores for the choice of experts only.
    pub correction: Option<VectorId>,
    /// Groups of neighbouring experts.
    pub groups: usize,
    /// Groups to choose from.
    pub top_groups: usize,
    /// Last factor of all weights.
    pub scale: f32,
    /// Another factor of each expert's weight.
    pub expert_scales: Option<VectorId>,
}

/// Parameters of [`Device::unfold`], which cuts windows out of a plane of two axes, `inner` running faster. Each row of the plane has
/// all channels of one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfold {
    /// Points of the inner axis. The number of rows gives the points of the outer one.
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
