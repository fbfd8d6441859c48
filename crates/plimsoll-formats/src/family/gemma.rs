//! Gemma 2 and Gemma 3 (text): norms before and after each half of a layer, sliding windows in most layers, scaled embeddings. Gemma 2 has
//! soft caps on attention scores and logits. Gemma 3 norms queries and keys, and its sliding layers have another rotary base.
//! EmbeddingGemma is a text encoder: a Gemma 3 in which every position attends to earlier and later ones.
//!
//! Reference: transformers, `modeling_gemma2.py` and `modeling_gemma3.py`; llama.cpp, `gemma2` and `gemma3`.

use super::{Defaults, Family};
use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::window;
use crate::variant::Norms;

/// The interval of global layers, if the configuration does not list the layers.
const INTERVAL_2: usize = 2;
const INTERVAL_3: usize = 6;
const WINDOW: usize = 4096;
/// Bounds of the soft caps of Gemma 2.
const ATTENTION_CAP: f32 = 50.0;
const LOGIT_CAP: f32 = 30.0;
/// The rotary base of Gemma 3's sliding layers.
const LOCAL_THETA: f32 = 10_000.0;
/// Layers of the 27B sizes. Only these have a query scale that does not follow from their head width.
const LAYERS_2_27B: usize = 46;
const LAYERS_3_27B: usize = 62;

/// Defaults that both families share.
const DEFAULTS: Defaults = Defaults {
    heads: Some(8),
    kv_heads: Some(4),
    head_dim: Some(256),
    activation: "gelu_pytorch_tanh",
    tied: true,
    ..Defaults::LLAMA
};

pub(super) const GEMMA2: Family = Family {
    name: "Gemma 2",
    classes: &["Gemma2ForCausalLM", "Gemma2Model", "gemma2"],
    gguf: &["gemma2"],
    defaults: Defaults { vocab_size: Some(256_000), max_context: 8192, ..DEFAULTS },
    from_hf: |json, config| {
        common_of_hf(json, config)?;
        if json.lacks("attn_logit_softcapping") {
            config.attn_logit_softcap = Some(ATTENTION_CAP);
        }
        if json.lacks("final_logit_softcapping") {
            config.final_logit_softcap = Some(LOGIT_CAP);
        }
        sliding_of_hf(json, config, INTERVAL_2)
    },
    from_gguf: |keys, config| {
        common_of_gguf(keys, config, LAYERS_2_27B);
        config.attn_logit_softcap = config.attn_logit_softcap.or(Some(ATTENTION_CAP));
        config.final_logit_softcap = config.final_logit_softcap.or(Some(LOGIT_CAP));
        config.sliding_window = Some(keys.size("attention.sliding_window")?.unwrap_or(WINDOW));
        config.layer_is_sliding = keys.sliding_layers(config.layers, INTERVAL_2)?;
        Ok(())
    },
    hf_names: &[],
    gguf_names: NAMES,
};

pub(super) const GEMMA3: Family = Family {
    name: "Gemma 3",
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel", "gemma3", "gemma3_text"],
    gguf: &["gemma3", EMBEDDING],
    defaults: Defaults {
        vocab_size: Some(262_208),
        max_context: 131_072,
        theta: 1_000_000.0,
        local_theta: Some(LOCAL_THETA),
        ..DEFAULTS
    },
    from_hf: |json, config| {
        common_of_hf(json, config)?;
        norms_and_rotation_of_3(config);
        // EmbeddingGemma. Half of its window is on either side.
        if json.bool("use_bidirectional_attention")? == Some(true) {
            config.encoder = Some(Encoder::BIDIRECTIONAL);
        }
        let interval = json.size("sliding_window_pattern")?.or(json.size("_sliding_window_pattern")?);
        if interval == Some(0) && json.lacks("layer_types") {
            return Err(FormatError::Config("sliding_window_pattern is 0".to_owned()));
        }
        sliding_of_hf(json, config, interval.unwrap_or(INTERVAL_3))
    },
    from_gguf: |keys, config| {
        common_of_gguf(keys, config, LAYERS_3_27B);
        config.encoder = is_embedding(keys).then_some(Encoder::BIDIRECTIONAL);
        norms_and_rotation_of_3(config);
        config.rope_local_theta = keys.f32("rope.freq_base_swa").unwrap_or(LOCAL_THETA);
        config.sliding_window = keys.size("attention.sliding_window")?.filter(|&window| window > 0);
        if config.sliding_window.is_some() {
            config.layer_is_sliding = keys.sliding_layers(config.layers, INTERVAL_3)?;
        }
        Ok(())
    },
    hf_names: &[],
    gguf_names: NAMES,
};

/// EmbeddingGemma's architecture in GGUF files.
const EMBEDDING: &str = "gemma-embedding";

/// Whether a GGUF file is an EmbeddingGemma.
pub(crate) fn is_embedding(keys: &Keys) -> bool {
    keys.prefix == EMBEDDING
}

/// Each half of a layer has norms before and after it, so `ffn_norm` is not the norm after attention. EmbeddingGemma's dense layers have
/// the numbers of their folders.
const NAMES: super::Names =
    &[("ffn_norm", "pre_feedforward_layernorm"), ("dense_2", "dense.0"), ("dense_3", "dense.1")];

fn common(config: &mut ModelConfig) {
    config.variant.norms = Norms::Around;
    // Activations are f32 here, so the scale is not rounded to the weights' type. transformers rounds it to bf16 in a model that runs in
    // bf16.
    config.embedding_scale = (config.hidden_size as f64).sqrt() as f32;
}

fn common_of_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    common(config);
    config.norm_weight_offset = 1.0;
    config.query_scale = f64::from(json.f32("query_pre_attn_scalar")?.unwrap_or(256.0)).powf(-0.5) as f32;
    Ok(())
}

/// Sets the values that both families share. `layers_27b` is the number of layers of the 27B size.
fn common_of_gguf(keys: &Keys, config: &mut ModelConfig, layers_27b: usize) {
    common(config);
    config.hidden_act = Activation::GeluTanh;
    let named = keys.f32("attention.scale").is_some_and(|scale| scale != 0.0);
    if config.layers == layers_27b && !named {
        config.query_scale = (config.hidden_size as f64 / config.heads as f64).powf(-0.5) as f32;
    }
}

fn sliding_of_hf(json: &Lookup, config: &mut ModelConfig, interval: usize) -> Result<(), FormatError> {
    let size = json.size("sliding_window")?.or(json.lacks("sliding_window").then_some(WINDOW));
    window(json, config, size, |layers| (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
}

fn norms_and_rotation_of_3(config: &mut ModelConfig) {
    config.qk_norm = true;
    config.variant.local_rope = true;
}
