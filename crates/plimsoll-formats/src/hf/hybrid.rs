//! The keys of `config.json` that only mixtures of experts and hybrids have: experts, recurrent layers, partial rotation, the draft head.
//!
//! Defaults are those of transformers' configuration classes. A variant that no model code runs is refused with its key.

use super::json::{Lookup, whole};
use super::values::per_layer;
use crate::architecture::Architecture;
use crate::config::{DeltaNet, Experts, Routing};
use crate::directory::Directory;
use crate::error::FormatError;

/// Every fourth layer of a hybrid has attention, if the configuration does not list the layers.
const FULL_ATTENTION_INTERVAL: usize = 4;

/// Share of a hybrid's head that is rotated, if the configuration has no value.
pub(super) fn partial_rotary(architecture: &Architecture) -> f32 {
    if *architecture == Architecture::Qwen4Exp { 1.0 } else { 0.25 }
}

/// Reads the mixture of experts. `renormalise` is the default for renormalising the experts' weights; none: the router always does.
pub(super) fn experts(
    config: &Lookup,
    architecture: &Architecture,
    renormalise: Option<bool>,
    layers: usize,
) -> Result<Option<Experts>, FormatError> {
    if !architecture.has_experts() {
        return Ok(None);
    }
    let moe = *architecture == Architecture::Qwen3Moe;
    let or = |key, default: usize| config.size(key).map(|size| size.unwrap_or(default));
    let (top_k, count) = match architecture {
        Architecture::Qwen3Moe => (8, 128),
        Architecture::Qwen3Next | Architecture::Qwen4Exp => (10, 512),
        _ => (8, 256),
    };
    let count = match config.size("num_experts")? {
        Some(count) => count,
        None => or("num_local_experts", count)?,
    };
    Ok(Some(Experts {
        count,
        top_k: or("num_experts_per_tok", top_k)?,
        width: or("moe_intermediate_size", if moe { 768 } else { 512 })?,
        shared_width: if moe { 0 } else { or("shared_expert_intermediate_size", 512)? },
        renormalise: match renormalise {
            Some(default) => config.bool("norm_topk_prob")?.unwrap_or(default),
            None => true,
        },
        layers: sparse_layers(config, layers)?,
        routing: Routing::default(),
        alternating: false,
        biases: false,
    }))
}

/// Per layer, whether it has experts: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`.
fn sparse_layers(config: &Lookup, layers: usize) -> Result<Vec<bool>, FormatError> {
    let step = config.size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(FormatError::Config("decoder_sparse_step is 0".to_owned()));
    }
    let mut sparse: Vec<bool> = (1..=layers).map(|layer| layer.is_multiple_of(step)).collect();
    let Some(dense) = config.get("mlp_only_layers") else { return Ok(sparse) };
    let wrong = || FormatError::Config(format!("mlp_only_layers is not a list of layers below {layers}"));
    for layer in dense.as_array().ok_or_else(wrong)? {
        let layer = whole(layer).and_then(|layer| usize::try_from(layer).ok());
        *layer.and_then(|layer| sparse.get_mut(layer)).ok_or_else(wrong)? = false;
    }
    Ok(sparse)
}

/// The recurrent layers.
pub(super) fn delta_net(
    config: &Lookup,
    architecture: &Architecture,
    layers: usize,
) -> Result<Option<DeltaNet>, FormatError> {
    if !architecture.is_hybrid() {
        return Ok(None);
    }
    for (key, only) in [("attn_output_gate", true), ("attention_bias", false)] {
        if config.bool(key)?.is_some_and(|value| value != only) {
            return Err(FormatError::Unsupported(format!("{key}: {}", !only)));
        }
    }
    let or = |key, default: usize| config.size(key).map(|size| size.unwrap_or(default));
    Ok(Some(DeltaNet {
        key_heads: or("linear_num_key_heads", 16)?,
        value_heads: or("linear_num_value_heads", 32)?,
        key_dim: or("linear_key_head_dim", 128)?,
        value_dim: or("linear_value_head_dim", 128)?,
        taps: or("linear_conv_kernel_dim", 4)?,
        tiled: false,
        layers: recurrent_layers(config, architecture, layers)?,
    }))
}

/// Per layer, whether it is recurrent: from `layer_types` or from the interval of the other layers.
fn recurrent_layers(config: &Lookup, architecture: &Architecture, layers: usize) -> Result<Vec<bool>, FormatError> {
    let indexed = *architecture == Architecture::Qwen4Exp;
    let Some(kinds) = config.get("layer_types") else {
        let interval = config.size("full_attention_interval")?.unwrap_or(FULL_ATTENTION_INTERVAL);
        if interval == 0 {
            return Err(FormatError::Config("full_attention_interval is 0".to_owned()));
        }
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    per_layer(kinds, layers, |kind| match kind {
        "linear_attention" => Some(true),
        "full_attention" => Some(false),
        "indexed_attention" if indexed => Some(false),
        _ => None,
    })
}

/// Returns the leading elements of a head that are rotated. Without a default, the family must rotate the whole head.
pub(super) fn rotary_dim(partial: Option<f32>, head_dim: usize, default: Option<f32>) -> Result<usize, FormatError> {
    let share = partial.or(default).unwrap_or(1.0);
    match share {
        1.0 => Ok(head_dim),
        _ if default.is_none() => Err(FormatError::Unsupported("partial_rotary_factor".to_owned())),
        _ if share > 0.0 && share < 1.0 => Ok((head_dim as f64 * f64::from(share)) as usize),
        _ => {
            Err(FormatError::Config(format!("partial_rotary_factor: {share}, allowed are numbers above 0 and up to 1")))
        }
    }
}

/// Layers of the draft head. Qwen3-Next's checkpoints have one that their configuration omits.
pub(super) fn draft_layers(config: &Lookup, architecture: &Architecture) -> Result<usize, FormatError> {
    if !architecture.has_draft_head() {
        return Ok(0);
    }
    if !architecture.is_hybrid() {
        return Ok(config.size("num_nextn_predict_layers")?.unwrap_or(0));
    }
    if config.bool("mtp_use_dedicated_embeddings")? == Some(true) {
        return Err(FormatError::Unsupported("mtp_use_dedicated_embeddings: true".to_owned()));
    }
    let silent = usize::from(*architecture == Architecture::Qwen3Next);
    Ok(config.size("mtp_num_hidden_layers")?.unwrap_or(silent))
}

/// Whether the norm weights include the offset of 1. MLX's converter adds the 1 when it moves the convolution's taps from the last
/// dimension to the one before. So the place of the taps shows it.
pub(super) fn norms_are_shifted(directory: &Directory) -> bool {
    let convolution = directory.iter().find(|entry| entry.name.ends_with(".linear_attn.conv1d.weight"));
    convolution.is_some_and(|entry| entry.info.shape.len() == 3 && entry.info.shape[2] == 1)
}
