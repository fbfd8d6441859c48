//! ModernBERT: norms before each half of a layer, a gated feed-forward part, rotated queries and keys. Most layers attend through a window,
//! and these have another rotary base.
//!
//! Reference: transformers, `modeling_modernbert.py`.

use super::{Family, activation, base, plain};
use crate::architecture::Architecture;
use crate::config::{ModelConfig, RopeScaling};
use crate::encoder::{Classifier, Encoder};
use crate::encoder_sizes::Sizes;
use crate::error::{FormatError, quote};
use crate::hf::json::Lookup;
use crate::hf::rope;
use crate::hf::values::window;

/// Every third layer attends to all positions, if the configuration does not list the layers.
const INTERVAL: usize = 3;
/// Positions of the window, half of them on either side.
const WINDOW: usize = 128;
const THETA: f32 = 160_000.0;
const LOCAL_THETA: f32 = 10_000.0;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::ModernBert,
    classes: &["ModernBertModel", "ModernBertForSequenceClassification", "modernbert"],
    read,
    names: &[
        ("attn.Wqkv", "self_attn.qkv_proj"),
        ("attn.Wo", "self_attn.o_proj"),
        ("mlp.Wi", "mlp.gate_up_proj"),
        ("mlp.Wo", "mlp.down_proj"),
        ("attn_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("embeddings.tok_embeddings", "embeddings.word_embeddings"),
        ("model.embeddings.tok_embeddings", "embeddings.word_embeddings"),
        ("embeddings.norm", "embeddings.LayerNorm"),
        ("model.embeddings.norm", "embeddings.LayerNorm"),
        ("final_norm", "model.norm"),
        ("model.final_norm", "model.norm"),
        ("head.dense", "classifier.dense"),
        ("head.norm", "classifier.norm"),
        ("classifier", "classifier.out_proj"),
    ],
};

fn read(config: &Lookup) -> Result<ModelConfig, FormatError> {
    let size = |key: &str, default: usize| Ok::<_, FormatError>(config.size(key)?.unwrap_or(default));
    let flag = |key: &str| Ok::<_, FormatError>(config.bool(key)?.unwrap_or(false));
    let sizes = Sizes {
        hidden: size("hidden_size", 768)?,
        layers: size("num_hidden_layers", 22)?,
        heads: size("num_attention_heads", 12)?,
        intermediate: size("intermediate_size", 1152)?,
        vocab: size("vocab_size", 50_368)?,
        max_context: size("max_position_embeddings", 8192)?,
        eps: config.f32("norm_eps")?.unwrap_or(1e-5),
        activation: activation(config, "hidden_activation", "gelu")?,
    };
    let norm_bias = flag("norm_bias")?;
    let classifier = Classifier {
        mean: mean(config)?,
        activation: activation(config, "classifier_activation", "gelu")?,
        bias: flag("classifier_bias")?,
        norm: true,
    };
    let encoder = Encoder { norms_before: true, norm_bias, gated: true, classifier, ..plain(config)? };
    let mut built = base(config, Architecture::ModernBert, &sizes, encoder)?;
    let interval = size("global_attn_every_n_layers", INTERVAL)?;
    if interval == 0 && config.lacks("layer_types") {
        return Err(FormatError::Config("global_attn_every_n_layers is 0".to_owned()));
    }
    let local = Some(size("local_attention", WINDOW)?);
    window(config, &mut built, local, |layers| (0..layers).map(|layer| layer % interval != 0).collect())?;
    (built.rope_theta, built.rope_local_theta) = thetas(config, built.head_dim)?;
    built.variant.local_rope = true;
    built.variant.fused_qkv = true;
    built.variant.fused_gate_up = true;
    built.attention_bias = flag("attention_bias")?;
    built.attention_output_bias = built.attention_bias;
    built.mlp_bias = flag("mlp_bias")?;
    Ok(built)
}

/// Whether the classifier reads the mean of all positions. Otherwise it reads the first position.
fn mean(config: &Lookup) -> Result<bool, FormatError> {
    match config.str("classifier_pooling")?.unwrap_or("cls") {
        "cls" => Ok(false),
        "mean" => Ok(true),
        other => {
            Err(FormatError::Unsupported(format!("classifier_pooling {}; supported are cls and mean", quote(other))))
        }
    }
}

/// The rotary bases of layers that attend to all positions, and of layers with a window.
fn thetas(config: &Lookup, head_dim: usize) -> Result<(f32, f32), FormatError> {
    // Some versions of transformers replace a null with the base of the other layers.
    if !config.lacks("local_rope_theta") && config.get("local_rope_theta").is_none() {
        return Err(FormatError::Unsupported("local_rope_theta null; supported is a number".to_owned()));
    }
    let of = |key: &str, default: f32| Ok::<_, FormatError>(config.f32(key)?.unwrap_or(default));
    let defaults = (of("global_rope_theta", THETA)?, Some(of("local_rope_theta", LOCAL_THETA)?));
    let rope = rope::read(config, defaults, (head_dim, head_dim))?;
    if rope.scaling != RopeScaling::None || rope.partial.is_some_and(|partial| partial != 1.0) {
        return Err(FormatError::Unsupported("rope_scaling in ModernBERT; supported is none".to_owned()));
    }
    Ok((rope.theta, rope.local_theta))
}
