//! A Gated DeltaNet layer: projections, a short causal convolution, the gated delta rule over a state matrix per head, a gated norm, and
//! the output projection.
//!
//! Reference: transformers, `modeling_qwen3_next.py` and `modeling_qwen3_5.py` (Yang, Kautz, Hatamizadeh 2024).

use plimsoll_device::{
    Activation, Buf, Change, Declare, DeclareError, Device, DeviceError, GatedDelta, Input, LinearId, Mode, RowPiece,
    StateShape, StepInput, VectorId,
};
use plimsoll_formats::{Architecture, DeltaNet, ModelConfig};

/// Weights of one Gated DeltaNet layer.
pub struct DeltaBlock {
    qkv: LinearId,
    z: LinearId,
    b: LinearId,
    a: LinearId,
    norm: VectorId,
    out: LinearId,
    spec: GatedDelta,
    gate: Activation,
    eps: f32,
}

/// The shape of one sequence's state in `layers` recurrent layers.
pub fn state_shape(delta: &DeltaNet, layers: usize) -> StateShape {
    StateShape {
        layers,
        conv_channels: channels(delta),
        conv_history: delta.taps - 1,
        heads: delta.value_heads,
        key_dim: delta.key_dim,
        value_dim: delta.value_dim,
        ngrams: None,
    }
}

/// Channels of the convolution: queries, keys and values.
fn channels(delta: &DeltaNet) -> usize {
    2 * delta.key_width() + delta.value_width()
}

impl DeltaBlock {
    /// Declares `{prefix}.linear_attn.*`; `index` counts recurrent layers.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        index: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("{prefix}.linear_attn");
        let delta = config.delta_net.as_ref().ok_or_else(|| {
            DeclareError::Unsupported(format!("'{prefix}' without the configuration of recurrent layers"))
        })?;
        for (key, width) in [("linear_key_head_dim", delta.key_dim), ("linear_value_head_dim", delta.value_dim)] {
            if !width.is_multiple_of(16) {
                return Err(DeclareError::Unsupported(format!("{key} {width}: it must be a multiple of 16")));
            }
        }
        if delta.taps < 2 {
            return Err(DeclareError::Unsupported(format!(
                "linear_conv_kernel_dim {}: it must be at least 2",
                delta.taps
            )));
        }
        let projections = Projections { prefix: &prefix, delta, hidden: config.hidden_size };
        let joined = config.architecture == Architecture::Qwen3Next;
        let [qkv, z] = projections.qkv_z(joined, declare)?;
        let [b, a] = projections.b_a(joined, declare)?;
        Ok(Self {
            qkv,
            z,
            b,
            a,
            norm: declare.vector(&format!("{prefix}.norm.weight"), delta.value_dim, 0.0)?,
            out: declare.linear(&format!("{prefix}.out_proj.weight"), config.hidden_size, delta.value_width())?,
            spec: GatedDelta {
                layer: index,
                key_heads: delta.key_heads,
                value_heads: delta.value_heads,
                key_dim: delta.key_dim,
                value_dim: delta.value_dim,
                tiled: delta.tiled,
                conv: declare.conv_taps(&format!("{prefix}.conv1d.weight"), channels(delta), delta.taps)?,
                taps: delta.taps,
                a_log: match declare.has(&format!("{prefix}.A")) {
                    true => declare.changed_vector(&format!("{prefix}.A"), delta.value_heads, Change::LogOfNegated)?,
                    false => declare.vector(&format!("{prefix}.A_log"), delta.value_heads, 0.0)?,
                },
                dt_bias: declare.vector(&format!("{prefix}.dt_bias"), delta.value_heads, 0.0)?,
            },
            gate: match config.variant.qwen4.as_ref().is_some_and(|qwen4| qwen4.sigmoid_gate) {
                true => Activation::Sigmoid,
                false => Activation::Silu,
            },
            eps: config.norm_eps,
        })
    }

    /// `out (+)= layer(x)`. The state moves from slot to slot as `step` requires.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        out: Buf,
        mode: Mode,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, x) = (device.mark(), input.x);
        let spec = &self.spec;
        let values = spec.value_heads * spec.value_dim;
        let qkv = device.temp(x.rows, 2 * spec.key_heads * spec.key_dim + values)?;
        let z = device.temp(x.rows, values)?;
        let b = device.temp(x.rows, spec.value_heads)?;
        let a = device.temp(x.rows, spec.value_heads)?;
        let layers = [(self.qkv, qkv), (self.z, z), (self.b, b), (self.a, a)];
        device.linear_rows(input, &layers, Mode::Store, step.bf16_rows)?;
        let mixed = device.temp(x.rows, values)?;
        device.gated_delta(spec, mixed, qkv, a, b, step)?;
        let heads = mixed.reshape(spec.value_dim);
        device.rms_norm(heads, heads, self.norm, self.eps);
        device.glu(z, mixed, self.gate);
        device.linear_rows(z.into(), &[(self.out, out)], mode, step.bf16_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// The projections into a layer. Qwen3-Next joins them, interleaved by key head; Qwen 3.5 stores them separately.
struct Projections<'a> {
    prefix: &'a str,
    delta: &'a DeltaNet,
    hidden: usize,
}

impl Projections<'_> {
    /// Declares queries, keys and values as one matrix, and the output's gate.
    fn qkv_z(&self, joined: bool, declare: &mut Declare<'_>) -> Result<[LinearId; 2], DeclareError> {
        let (delta, hidden) = (self.delta, self.hidden);
        let (keys, values) = (delta.key_width(), delta.value_width());
        let name = |leaf: &str| format!("{}.{leaf}.weight", self.prefix);
        // llama.cpp's converter splits the joined tensor.
        if !joined || declare.has(&name("in_proj_qkv")) {
            let qkv = declare.linear(&name("in_proj_qkv"), 2 * keys + values, hidden)?;
            return Ok([qkv, declare.linear(&name("in_proj_z"), values, hidden)?]);
        }
        let (key, value) = (delta.key_dim, values / delta.key_heads);
        let stride = 2 * key + 2 * value;
        let piece = |first, run: usize| RowPiece { first, rows: delta.key_heads * run, run, stride };
        let (name, stored) = (name("in_proj_qkvz"), [2 * keys + 2 * values, hidden]);
        let qkv = [piece(0, key), piece(key, key), piece(2 * key, value)];
        let qkv = declare.linear_rows(&name, &stored, &qkv, hidden)?;
        Ok([qkv, declare.linear_rows(&name, &stored, &[piece(2 * key + value, value)], hidden)?])
    }

    /// Declares the projections to the write strength and to the decay of every value head.
    fn b_a(&self, joined: bool, declare: &mut Declare<'_>) -> Result<[LinearId; 2], DeclareError> {
        let (delta, hidden) = (self.delta, self.hidden);
        let name = |leaf: &str| format!("{}.{leaf}.weight", self.prefix);
        if !joined || declare.has(&name("in_proj_b")) {
            let b = declare.linear(&name("in_proj_b"), delta.value_heads, hidden)?;
            return Ok([b, declare.linear(&name("in_proj_a"), delta.value_heads, hidden)?]);
        }
        let run = delta.value_heads / delta.key_heads;
        let piece = |first| RowPiece { first, rows: delta.value_heads, run, stride: 2 * run };
        let (name, stored) = (name("in_proj_ba"), [2 * delta.value_heads, hidden]);
        let b = declare.linear_rows(&name, &stored, &[piece(0)], hidden)?;
        Ok([b, declare.linear_rows(&name, &stored, &[piece(run)], hidden)?])
    }
}
