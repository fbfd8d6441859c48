//! Gemma 3 (text): norms before and after each part, sliding-window layers with their own rotary base.
//!
//! Reference: transformers, `modeling_gemma3.py`. Norm weights are stored around zero in Hugging Face checkpoints (the configuration's
//! `norm_weight_offset` adds the one) and the embedding is scaled by the square root of its width.

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, KvDtype, KvShape, Mode, ModelShape, StepInput,
    VectorId,
};
use plimsoll_formats::{ModelConfig, RopeScaling};

use crate::block::{AttentionBlock, AttentionPlace, Ends, feed_forward, norm};
use crate::rope::rope;
use crate::{Model, Output, Pass};

struct Layer {
    attention_norm: VectorId,
    attention: AttentionBlock,
    after_attention_norm: VectorId,
    feed_forward_norm: VectorId,
    feed_forward: FeedForward,
    after_feed_forward_norm: VectorId,
    sliding: bool,
}

/// A sandwich-norm decoder with global and sliding-window layers.
pub struct Gemma3 {
    ends: Ends,
    layers: Vec<Layer>,
    global_inv_freq: VectorId,
    global_scale: f32,
    local_inv_freq: VectorId,
    eps: f32,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Declares a Gemma 3 checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let config = ModelConfig { qk_norm: true, ..config.clone() };
    let global = rope(config.head_dim, config.rope_theta, &config.rope_scaling);
    let local = rope(config.head_dim, config.rope_local_theta, &RopeScaling::None);
    let ends = Ends::declare(&config, declare)?;
    let layers = (0..config.layers).map(|layer| declare_layer(&config, layer, declare));
    let layers = layers.collect::<Result<_, DeclareError>>()?;
    Ok(Box::new(Gemma3 {
        ends,
        layers,
        global_inv_freq: declare.values(global.inv_freq),
        global_scale: global.scale,
        local_inv_freq: declare.values(local.inv_freq),
        eps: config.norm_eps,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
    }))
}

fn declare_layer(config: &ModelConfig, layer: usize, declare: &mut Declare<'_>) -> Result<Layer, DeclareError> {
    let prefix = format!("model.layers.{layer}");
    let mut norm = |name: &str| norm(config, &format!("{prefix}.{name}.weight"), config.hidden_size, declare);
    let sliding = config.layer_is_sliding.get(layer) == Some(&true);
    let place = AttentionPlace { cache: layer, sliding };
    Ok(Layer {
        attention_norm: norm("input_layernorm")?,
        after_attention_norm: norm("post_attention_layernorm")?,
        feed_forward_norm: norm("pre_feedforward_layernorm")?,
        after_feed_forward_norm: norm("post_feedforward_layernorm")?,
        attention: AttentionBlock::declare(config, &prefix, place, declare)?,
        feed_forward: feed_forward(config, &format!("{prefix}.mlp"), config.intermediate_size, declare)?,
        sliding,
    })
}

impl Gemma3 {
    /// The second half of a layer; the two temporaries have the shape of `x`.
    fn transform(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        x: Buf,
        [normed, part]: [Buf; 2],
        rounded: usize,
    ) -> Result<(), DeviceError> {
        if x.rows == 0 {
            return Ok(());
        }
        let input = Input::normed(normed, x, layer.feed_forward_norm, self.eps);
        device.feed_forward(&layer.feed_forward, input, part, Mode::Store, rounded)?;
        device.rms_norm(part, part, layer.after_feed_forward_norm, self.eps);
        device.add(x, part);
        Ok(())
    }
}

impl Model for Gemma3 {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = self.ends.embed(device, step)?;
        let scope = device.mark();
        let global = device.temp(x.rows, self.head_dim)?;
        device.rope_angles(global, self.global_inv_freq, step.positions, self.global_scale);
        let local = device.temp(x.rows, self.head_dim)?;
        device.rope_angles(local, self.local_inv_freq, step.positions, 1.0);
        Ok(Pass::new(x, scope, [Some(global), Some(local)]))
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        let (i, layer, scope) = (pass.layer, &self.layers[pass.layer], device.mark());
        let angles = pass.angles[usize::from(layer.sliding)].expect("taken when the step began");
        let (rows, cols) = (pass.x.rows, pass.x.cols);
        let (normed, part) = (device.temp(rows, cols)?, device.temp(rows, cols)?);
        let input = Input::normed(normed, pass.x, layer.attention_norm, self.eps);
        layer.attention.forward(device, input, angles, part, Mode::Store, step)?;
        device.rms_norm(part, part, layer.after_attention_norm, self.eps);
        device.add(pass.x, part);
        let mut rounded = step.rounded_rows;
        if i + 1 == self.layers.len() {
            (pass.x, rounded) = self.ends.wanted(device, pass.x, i, step);
        }
        let rows = pass.x.rows;
        self.transform(layer, device, pass.x, [normed.span(0, rows), part.span(0, rows)], rounded)?;
        device.release(scope);
        match pass.passed(device, self.layers.len()) {
            true => self.ends.output(device, pass.x, step).map(Some),
            false => Ok(None),
        }
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let kv = KvShape { layers: self.layers.len(), kv_heads: self.kv_heads, head_dim: self.head_dim, dtype };
        ModelShape { kv, state: None, heads: self.heads, hidden: self.ends.hidden, encoder: None, rounded: false }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
