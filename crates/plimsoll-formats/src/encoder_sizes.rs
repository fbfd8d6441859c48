//! The sizes of a text encoder, and the configuration made of them. Both file formats share this code.

use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::bounds::LAYERS_MAX;
use crate::config::{Experts, ModelConfig, RopeScaling, Routing};
use crate::encoder::Encoder;
use crate::error::FormatError;
use crate::variant::Variant;

/// Sizes that every family has, under different names.
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocab: usize,
    pub(crate) max_context: usize,
    pub(crate) eps: f32,
    pub(crate) activation: Activation,
}

/// Returns the experts of nomic-bert: experts in every other layer, the second layer first. Their weights are a softmax over all experts.
pub(crate) fn alternating_experts(
    config: &ModelConfig,
    every: usize,
    [count, top_k]: [usize; 2],
) -> Result<Experts, FormatError> {
    // The published code and llama.cpp choose different layers for any other step.
    if every != 2 {
        return Err(FormatError::Unsupported(format!("moe_every_n_layers {every} of nomic-bert; supported is 2")));
    }
    Ok(Experts {
        count,
        top_k,
        width: config.intermediate_size,
        shared_width: 0,
        renormalise: false,
        routing: Routing::default(),
        alternating: false,
        biases: false,
        layers: (0..config.layers).map(|layer| layer % every == 1).collect(),
    })
}

impl Sizes {
    /// Returns a configuration of these sizes. Layers attend to all positions, rotate nothing and have no biases.
    pub(crate) fn config(&self, architecture: Architecture, encoder: Encoder) -> Result<ModelConfig, FormatError> {
        let Sizes { hidden, layers, heads, .. } = *self;
        let head_dim = hidden.checked_div(heads).unwrap_or(0);
        if head_dim * heads != hidden {
            return Err(FormatError::Config(format!("{heads} heads do not divide a hidden size of {hidden}")));
        }
        if layers > LAYERS_MAX {
            return Err(FormatError::Config(format!("layers: {layers}, allowed are {LAYERS_MAX}")));
        }
        Ok(ModelConfig {
            hidden_size: hidden,
            layers,
            heads,
            kv_heads: heads,
            head_dim,
            // Without rotation, the bounds of a rotated part apply to a whole head.
            rotary_dim: head_dim,
            intermediate_size: self.intermediate,
            experts: None,
            delta_net: None,
            encoder: Some(encoder),
            vision: None,
            audio: None,
            draft_layers: 0,
            attention_gate: false,
            vocab_size: self.vocab,
            norm_eps: self.eps,
            rope_theta: 1.0,
            rope_local_theta: 1.0,
            rope_scaling: RopeScaling::None,
            rope_sections: None,
            rope_interleaved: false,
            max_context: self.max_context,
            sliding_window: None,
            layer_is_sliding: vec![false; layers],
            attention_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            variant: Variant::default(),
            tie_word_embeddings: true,
            hidden_act: self.activation,
            query_scale: (head_dim as f64).powf(-0.5) as f32,
            embedding_scale: 1.0,
            norm_weight_offset: 0.0,
            attn_logit_softcap: None,
            final_logit_softcap: None,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            torch_dtype: None,
            quantization: None,
            architecture,
        })
    }
}
