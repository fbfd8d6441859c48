//! What layers do, apart from their data.

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
        let norm = self.norm.map(|norm| {
            let shape = |buf: Buf| (buf.rows, buf.cols);
            assert_eq!(shape(norm.from), shape(self.x), "a norm keeps the shape");
            Norm { from: norm.from.span(first, rows), ..norm }
        });
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
