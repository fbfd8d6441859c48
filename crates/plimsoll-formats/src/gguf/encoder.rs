//! Text encoders in GGUF files: `bert` (also RoBERTa and XLM-RoBERTa), `nomic-bert`, `nomic-bert-moe` and `modern-bert`.
//!
//! The converter removes the rows of RoBERTa's table before its first position, so that the three BERTs have one layout. Files have no key
//! for the activation. Reference: llama.cpp, its converter and the models' loaders.

use super::keys::Keys;
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::directory::Directory;
use crate::encoder::{Classifier, Dense, DenseLayer, Encoder};
use crate::encoder_sizes::{Sizes, alternating_experts};
use crate::error::FormatError;
use crate::family::Names;

/// Every third layer of ModernBERT attends to all positions, beginning with the first layer.
const INTERVAL: usize = 3;
const MODERN_THETA: f32 = 160_000.0;
const MODERN_LOCAL_THETA: f32 = 10_000.0;

/// Tensors with names that differ from those of decoders.
const NAMES: Names = &[
    ("token_embd_norm", "embeddings.LayerNorm"),
    ("token_embd", "embeddings.word_embeddings"),
    ("token_types", "embeddings.token_type_embeddings"),
    ("position_embd", "embeddings.position_embeddings"),
    ("cls.output", "classifier.out_proj"),
    ("cls.norm", "classifier.norm"),
    ("cls", "classifier.dense"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output_norm", "post_attention_layernorm"),
    ("layer_output_norm", "post_mlp_layernorm"),
];
const MODERN_NAMES: Names =
    &[NAMES[0], NAMES[1], NAMES[4], NAMES[5], NAMES[6], NAMES[7], ("ffn_up", "mlp.gate_up_proj")];

/// The tensor names of an encoder; none for other architectures.
pub(super) fn names(architecture: &Architecture) -> Option<Names> {
    match architecture {
        Architecture::ModernBert => Some(MODERN_NAMES),
        other => other.is_encoder().then_some(NAMES),
    }
}

/// Builds the whole configuration of an encoder.
pub(super) fn build(
    keys: &Keys,
    architecture: Architecture,
    directory: &Directory,
) -> Result<ModelConfig, FormatError> {
    if keys.bool("attention.causal") == Some(true) {
        return Err(FormatError::Unsupported(format!("{} true; supported is false", keys.path("attention.causal"))));
    }
    let rows = |name: &str| directory.get(name).map(|entry| entry.info.rows());
    let has = |part: &str| directory.get(&format!("model.layers.0.{part}")).is_some();
    let eps = ["attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"].map(|key| keys.f32(key));
    let (modern, mixture) = (architecture == Architecture::ModernBert, keys.prefix == "nomic-bert-moe");
    let gated = modern || architecture == Architecture::NomicBert && !mixture;
    let sizes = Sizes {
        hidden: keys.need("embedding_length")?,
        layers: keys.need("block_count")?,
        heads: keys.need("attention.head_count")?,
        intermediate: keys.need("feed_forward_length")?,
        vocab: match rows("embeddings.word_embeddings.weight") {
            Some(rows) => rows,
            None => keys.need("vocab_size")?,
        },
        max_context: keys.need("context_length")?,
        eps: eps[0].or(eps[1]).ok_or_else(|| keys.missing("attention.layer_norm_epsilon"))?,
        activation: if gated && !modern { Activation::Silu } else { Activation::Gelu },
    };
    let encoder = Encoder {
        positions: rows("embeddings.position_embeddings.weight").unwrap_or(0),
        token_types: rows("embeddings.token_type_embeddings.weight").unwrap_or(0),
        labels: rows("classifier.out_proj.weight"),
        gated,
        ..Encoder::PLAIN
    };
    let bert = architecture == Architecture::Bert;
    if bert && encoder.positions < sizes.max_context {
        let (key, rows) = (keys.path("context_length"), encoder.positions);
        return Err(FormatError::Config(format!("{key} is {}, and position_embd has {rows} rows", sizes.max_context)));
    }
    let bias = |name: &str| directory.get(&format!("{name}.bias")).is_some();
    let classifier = Classifier { bias: bias("classifier.dense"), ..Encoder::PLAIN.classifier };
    let encoder = match modern {
        true => Encoder {
            norms_before: true,
            norm_bias: bias("model.norm"),
            // These values are llama.cpp's; the file does not contain them.
            classifier: Classifier { mean: true, activation: Activation::Gelu, norm: true, ..classifier },
            ..encoder
        },
        false => Encoder { classifier, ..encoder },
    };
    check_head(directory, &encoder)?;
    let mut config = sizes.config(architecture, encoder)?;
    config.variant.fused_qkv = has("self_attn.qkv_proj.weight");
    config.attention_bias = has("self_attn.qkv_proj.bias") || has("self_attn.q_proj.bias");
    config.attention_output_bias = has("self_attn.o_proj.bias");
    config.mlp_bias = has("mlp.down_proj.bias");
    if !bert {
        config.rope_theta = keys.f32("rope.freq_base").unwrap_or(if modern { MODERN_THETA } else { 10_000.0 });
        config.rope_local_theta = config.rope_theta;
    }
    if modern {
        windows(keys, &mut config)?;
    }
    if mixture {
        let counts = [keys.need("expert_count")?, keys.need("expert_used_count")?];
        config.experts = Some(alternating_experts(&config, keys.need("moe_every_n_layers")?, counts)?);
        config.variant.ungated = true;
    }
    Ok(config)
}

/// Refuses a classifier without the matrix between BERT's hidden state and the classifier, which llama.cpp's converter leaves out.
fn check_head(directory: &Directory, encoder: &Encoder) -> Result<(), FormatError> {
    match encoder.labels.is_some() && directory.get("classifier.dense.weight").is_none() {
        true => Err(FormatError::Unsupported(
            "a classifier (cls.output) without the matrix before it (cls), which the converter left out; use the model's safetensors"
                .to_owned(),
        )),
        false => Ok(()),
    }
}

/// Adds the dense layers after an encoder's pooling, if the file has their tensors. As in llama.cpp they have no activation and no bias.
pub(super) fn find_dense(keys: &Keys, config: &mut ModelConfig, directory: &Directory) -> Result<(), FormatError> {
    let width = |number| directory.get(&format!("dense.{number}.weight")).map(|entry| entry.info.rows());
    let Some(encoder) = config.encoder.as_mut().filter(|_| width(0).is_some()) else { return Ok(()) };
    let key = keys.path("pooling_type");
    let mean = match keys.meta.u64(&key) {
        Some(1) => true,
        Some(2) => false,
        _ => {
            let what = format!("dense layers where {key} is neither 1 (mean) nor 2 (cls); supported are these two");
            return Err(FormatError::Unsupported(what));
        }
    };
    let layer = |number| width(number).map(|width| DenseLayer { width, bias: false, tanh: false });
    encoder.dense = Some(Dense { mean, layers: [layer(0), layer(1)] });
    Ok(())
}

/// Sets the layers of ModernBERT that attend through a window.
fn windows(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    let (layers, key) = (config.layers, "attention.sliding_window_pattern");
    config.layer_is_sliding = match keys.listed_sliding_layers(layers)? {
        Some(list) => list,
        None => match keys.size(key)?.unwrap_or(INTERVAL) {
            0 => return Err(FormatError::Config(format!("{} is 0", keys.path(key)))),
            interval => (0..layers).map(|layer| !layer.is_multiple_of(interval)).collect(),
        },
    };
    config.sliding_window = Some(keys.need("attention.sliding_window")?);
    config.rope_local_theta = keys.f32("rope.freq_base_swa").unwrap_or(MODERN_LOCAL_THETA);
    config.variant.local_rope = true;
    config.variant.fused_gate_up = true;
    Ok(())
}
