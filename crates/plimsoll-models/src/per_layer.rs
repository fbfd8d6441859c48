//! Inputs of a layer besides the residual stream: its part of a token's row in a second table of embeddings, mixed with a projection of the
//! token's embedding (Gemma 4's small sizes).
//!
//! The table is as large as the rest of the model. A step reads one row of it per token, as from the first table, so it may stay in the
//! model's files.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput, VectorId,
};
use plimsoll_formats::ModelConfig;

use crate::block::{activation, norm};

/// The weights that all layers share.
pub struct PerLayerInputs {
    table: LinearId,
    projection: LinearId,
    norm: VectorId,
    /// Elements of one layer's part.
    width: usize,
    layers: usize,
    hidden: usize,
    eps: f32,
    /// The token with the row that is used for positions that an encoder fills, repeated.
    pads: [u32; 64],
}

impl PerLayerInputs {
    /// Declares the weights; none if the family has no per-layer inputs.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Option<Self>, DeclareError> {
        let Some(input) = config.variant.per_layer_input else { return Ok(None) };
        if input.rows < config.vocab_size {
            let (rows, vocab) = (input.rows, config.vocab_size);
            let what = format!(
                "vocab_size_per_layer_input: {rows} rows for a vocabulary of {vocab} tokens; each token needs one"
            );
            return Err(DeclareError::Unsupported(what));
        }
        let (hidden, all) = (config.hidden_size, config.layers * input.width);
        Ok(Some(Self {
            table: declare.token_table("model.embed_tokens_per_layer.weight", input.rows, all)?,
            projection: declare.linear("model.per_layer_model_projection.weight", all, hidden)?,
            norm: norm(config, "model.per_layer_projection_norm.weight", input.width, declare)?,
            width: input.width,
            layers: config.layers,
            hidden,
            eps: config.norm_eps,
            pads: [input.pad; 64],
        }))
    }

    /// Returns the inputs of all layers for every row of `x`, the embeddings of the step's tokens: [rows, layers · width].
    pub fn of_step(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let all = device.temp(x.rows, self.layers * self.width)?;
        let scope = device.mark();
        device.linear_rows(x.into(), &[(self.projection, all)], Mode::Store, step.bf16_rows)?;
        // The projection is scaled by 1/sqrt(hidden) before its norm. A norm cancels a scale, except in its epsilon.
        let parts = all.reshape(self.width);
        device.rms_norm(parts, parts, self.norm, self.eps * self.hidden as f32);
        let rows = device.temp(x.rows, self.layers * self.width)?;
        let scale = (self.width as f32).sqrt();
        device.embed(rows, self.table, step.tokens, scale);
        for media in step.media {
            let end = media.first_row + media.values.len() / self.hidden;
            for first in (media.first_row..end).step_by(self.pads.len()) {
                let pads = &self.pads[..self.pads.len().min(end - first)];
                device.embed(rows.span(first, pads.len()), self.table, pads, scale);
            }
        }
        device.add(all, rows);
        device.scale_rows(all, &|_| std::f32::consts::FRAC_1_SQRT_2);
        device.release(scope);
        Ok(all)
    }
}

/// Weights with which one layer mixes in its part.
pub struct PerLayerBlock {
    gate: LinearId,
    projection: LinearId,
    norm: VectorId,
    width: usize,
    act: Activation,
    eps: f32,
}

impl PerLayerBlock {
    /// Declares `{prefix}.per_layer_*`; none if the family has no per-layer inputs.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        declare: &mut Declare<'_>,
    ) -> Result<Option<Self>, DeclareError> {
        let Some(input) = config.variant.per_layer_input else { return Ok(None) };
        let hidden = config.hidden_size;
        Ok(Some(Self {
            gate: declare.linear(&format!("{prefix}.per_layer_input_gate.weight"), input.width, hidden)?,
            projection: declare.linear(&format!("{prefix}.per_layer_projection.weight"), hidden, input.width)?,
            norm: norm(config, &format!("{prefix}.post_per_layer_input_norm.weight"), hidden, declare)?,
            width: input.width,
            act: activation(config.hidden_act),
            eps: config.norm_eps,
        }))
    }

    /// `x += norm(projection(act(gate(x)) * input))`. `all` has the inputs of all layers; `layer` is the index of this layer's part. `part`
    /// has the shape of `x` and is overwritten. `kept` names the rows of `all` that `x` has, if it does not have all of them.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        (all, layer): (Buf, usize),
        kept: Option<&[u32]>,
        part: Buf,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let input = device.temp(all.rows, self.width)?;
        device.take(input, all, layer * self.width);
        let input = kept.map_or(input, |rows| device.keep_rows(input, rows));
        let gate = device.temp(x.rows, self.width)?;
        device.linear_rows(x.into(), &[(self.gate, gate)], Mode::Store, bf16_rows)?;
        device.glu_for(self.projection, gate, input, self.act, bf16_rows);
        device.linear_rows(gate.into(), &[(self.projection, part)], Mode::Store, bf16_rows)?;
        device.rms_norm(part, part, self.norm, self.eps);
        device.add(x, part);
        device.release(scope);
        Ok(())
    }
}

/// Reads the factor on a layer's result. 1 if there are no weights yet.
pub(crate) fn layer_scalar(prefix: &str, declare: &Declare<'_>) -> Result<f32, DeclareError> {
    Ok(declare.read_values(&format!("{prefix}.layer_scalar"), 1, 1.0)?[0])
}
