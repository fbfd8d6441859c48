//! Hyper-connections: several residual streams. Each half of a layer reads a mixture of them and adds its result to them.
//!
//! Reference: transformers, `modular_qwen4_exp.py` (`Qwen4ExpTextGatedResidual`). A row of the residual stream has all streams side by
//! side.

use plimsoll_device::{Activation, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, VectorId};
use plimsoll_formats::{ModelConfig, Qwen4};

/// The shape of residual streams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    /// The number of streams.
    pub count: usize,
    /// Elements of one stream.
    pub width: usize,
    /// A weight of 1 for every element of one stream, for norms whose weights differ by stream.
    pub ones: VectorId,
    /// Epsilon of norms.
    pub eps: f32,
}

impl Streams {
    /// Declares the values that all layers share.
    pub fn declare(config: &ModelConfig, qwen4: &Qwen4, declare: &mut Declare<'_>) -> Self {
        let width = config.hidden_size;
        Self { count: qwen4.streams, width, ones: declare.values(vec![1.0; width]), eps: config.norm_eps }
    }

    /// Elements of all streams.
    pub fn all(&self) -> usize {
        self.count * self.width
    }

    /// Declares the weights of a norm over every stream.
    pub fn norm(&self, config: &ModelConfig, name: &str, declare: &mut Declare<'_>) -> Result<VectorId, DeclareError> {
        declare.vector(name, self.all(), config.norm_weight_offset)
    }

    /// Norms each stream separately; `out` may be `x`.
    pub fn apply_norm(&self, device: &mut dyn Device, out: Buf, x: Buf, weight: VectorId) {
        device.rms_norm(out.reshape(self.width), x.reshape(self.width), self.ones, self.eps);
        device.multiply(out, weight);
    }

    /// `out[r][s] = x[r]` for every stream.
    pub fn spread(&self, device: &mut dyn Device, out: Buf, x: Buf) {
        let count = self.count;
        device.arrange(out.reshape(self.width), x, &|row| row / count);
    }
}

/// The weights that mix the streams before half a layer, and that give each stream's share of the half's result.
pub(crate) struct StreamMixer {
    streams: Streams,
    norm: VectorId,
    down: LinearId,
    up: LinearId,
    /// None for the mixer after the last layer.
    inject: Option<LinearId>,
    rank: usize,
}

impl StreamMixer {
    /// Declares `{prefix}.*`.
    pub fn declare(
        config: &ModelConfig,
        qwen4: &Qwen4,
        (streams, injects): (Streams, bool),
        prefix: &str,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (all, rank) = (streams.all(), qwen4.mixer_rank);
        let name = |leaf: &str| format!("{prefix}.{leaf}.weight");
        Ok(Self {
            streams,
            norm: streams.norm(config, &name("hc_norm"), declare)?,
            down: declare.linear(&name("input_mix_weight_down"), rank, all)?,
            up: declare.linear(&name("input_mix_weight_up"), all, rank)?,
            inject: match injects {
                true => Some(declare.linear(&name("block_inject_weight"), streams.count, all)?),
                false => None,
            },
            rank,
        })
    }

    /// Writes the mixture of the streams `x` to `mixed`, and each stream's share of a result to `shares` [rows, streams].
    pub fn mix(
        &self,
        device: &mut dyn Device,
        x: Buf,
        [mixed, shares]: [Buf; 2],
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let (scope, Streams { count, width, .. }) = (device.mark(), self.streams);
        let each = 1.0 / count as f32;
        let normed = device.temp(x.rows, x.cols)?;
        self.streams.apply_norm(device, normed, x, self.norm);
        let low = device.temp(x.rows, self.rank)?;
        let layers = [(self.down, low), (self.inject.unwrap_or(self.down), shares)];
        let layers = &layers[..if self.inject.is_some() { 2 } else { 1 }];
        device.linear_rows(normed.into(), layers, Mode::Store, bf16_rows)?;
        device.scale_rows(low, &|_| each);
        device.activate(low, Activation::Silu);
        let weights = device.temp(x.rows, x.cols)?;
        device.linear_rows(low.into(), &[(self.up, weights)], Mode::Store, bf16_rows)?;
        device.glu(weights, normed, Activation::Sigmoid);
        device.take(mixed, weights, 0);
        let part = device.temp(x.rows, width)?;
        for stream in 1..count {
            device.take(part, weights, stream * width);
            device.add(mixed, part);
        }
        device.scale_rows(mixed, &|_| each);
        if self.inject.is_some() {
            device.scale_rows(shares, &|_| each);
            device.activate(shares, Activation::Sigmoid);
            device.scale_rows(shares, &|_| 2.0);
        }
        device.release(scope);
        Ok(())
    }

    /// `x[r][s] += shares[r][s] * result[r]`.
    pub fn join(&self, device: &mut dyn Device, x: Buf, result: Buf, shares: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let parts = device.temp(x.rows, x.cols)?;
        self.streams.spread(device, parts, result);
        device.scale_by(parts.reshape(self.streams.width), shares.reshape(1));
        device.add(x, parts);
        device.release(scope);
        Ok(())
    }
}
