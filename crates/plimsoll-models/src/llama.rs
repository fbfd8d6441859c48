//! Llama and its relatives (Mistral, SmolLM2, …): pre-norm attention and gated feed-forward.
//!
//! Reference: transformers, `modeling_llama.py`. Qwen2 and Qwen3 differ in what they declare (biases, query and key norms), not in what they do,
//! so their files build this same [`Llama`].

use plimsoll_device::{
    Declare, DeclareError, Device, DeviceError, KvDtype, KvShape, Mode, ModelShape, StepInput, VectorId,
};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionBlock, Ends, FeedForward};
use crate::rope::rope;
use crate::{Model, Output};

struct Layer {
    attention_norm: VectorId,
    attention: AttentionBlock,
    feed_forward_norm: VectorId,
    feed_forward: FeedForward,
}

/// A pre-norm decoder with one rotary embedding for all layers.
pub struct Llama {
    ends: Ends,
    layers: Vec<Layer>,
    inv_freq: VectorId,
    rope_scale: f32,
    eps: f32,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Declares a Llama-family checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    Ok(Box::new(Llama::declare(config, declare)?))
}

impl Llama {
    /// Declares every weight of the model.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let mut rope = rope(config.head_dim, config.rope_theta, &config.rope_scaling);
        if let Some(factors) = declare.read_vector("model.rope_freqs")? {
            // GGUF stores Llama 3's rule as one divisor per pair.
            rope.inv_freq.iter_mut().zip(&factors).for_each(|(freq, factor)| *freq /= factor);
        }
        let ends = Ends::declare(config, declare)?;
        let layer = |layer: usize| {
            let mut norm = |name: &str| {
                let name = format!("model.layers.{layer}.{name}.weight");
                declare.vector(&name, config.hidden_size, config.norm_weight_offset)
            };
            Ok(Layer {
                attention_norm: norm("input_layernorm")?,
                feed_forward_norm: norm("post_attention_layernorm")?,
                attention: AttentionBlock::declare(config, layer, declare)?,
                feed_forward: FeedForward::declare(config, layer, declare)?,
            })
        };
        Ok(Self {
            ends,
            layers: (0..config.layers).map(layer).collect::<Result<_, DeclareError>>()?,
            inv_freq: declare.values(rope.inv_freq),
            rope_scale: rope.scale,
            eps: config.norm_eps,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        })
    }
}

impl Model for Llama {
    fn forward(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        let x = self.ends.embed(device, step)?;
        let scope = device.mark();
        let angles = device.temp(x.rows, self.head_dim)?;
        device.rope_angles(angles, self.inv_freq, step.positions, self.rope_scale);
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.layers {
            device.rms_norm(normed, x, layer.attention_norm, self.eps);
            layer.attention.forward(device, normed, angles, x, Mode::Add, step)?;
            device.rms_norm(normed, x, layer.feed_forward_norm, self.eps);
            layer.feed_forward.forward(device, normed, x, Mode::Add)?;
        }
        device.release(scope);
        self.ends.output(device, x, step)
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let kv = KvShape { layers: self.layers.len(), kv_heads: self.kv_heads, head_dim: self.head_dim, dtype };
        ModelShape { kv, state: None, heads: self.heads, hidden: self.ends.hidden }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
