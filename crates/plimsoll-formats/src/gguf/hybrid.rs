//! The GGUF metadata that only mixtures of experts and hybrids have, and the names of their draft heads.
//!
//! Reference: llama.cpp, its converter for the Qwen family and the models' loaders.

use super::keys::Keys;
use super::meta::{GgufMeta, GgufValue};
use crate::architecture::Architecture;
use crate::config::{DeltaNet, Experts, Routing};
use crate::directory::Entry;
use crate::draft_head;
use crate::error::FormatError;

/// Every fourth layer has attention, if the metadata does not list the layers.
const FULL_ATTENTION_INTERVAL: usize = 4;
/// Most layers of a draft head that are accepted here. The check of the whole configuration has a lower limit.
const DRAFT_LAYERS_MAX: usize = 64;

/// The mixture of experts. llama.cpp always renormalises the weights of these families' experts.
pub(super) fn experts(keys: &Keys, architecture: &Architecture, layers: usize) -> Result<Option<Experts>, FormatError> {
    let count = keys.size("expert_count")?.unwrap_or(0);
    if !architecture.has_experts() {
        return match count {
            _ if matches!(architecture, Architecture::Family(_)) => Ok(None),
            0 => Ok(None),
            _ => Err(FormatError::Unsupported(format!("{} with a mixture of experts", keys.path("expert_count")))),
        };
    }
    let width = keys.need("expert_feed_forward_length")?;
    let shared = *architecture != Architecture::Qwen3Moe;
    Ok(Some(Experts {
        count,
        top_k: keys.need("expert_used_count")?,
        width,
        shared_width: if shared { keys.size("expert_shared_feed_forward_length")?.unwrap_or(width) } else { 0 },
        renormalise: true,
        routing: Routing::default(),
        alternating: false,
        biases: false,
        layers: vec![true; layers],
    }))
}

/// The recurrent layers.
pub(super) fn delta_net(
    keys: &Keys,
    architecture: &Architecture,
    layers: usize,
) -> Result<Option<DeltaNet>, FormatError> {
    if !architecture.is_hybrid() {
        return Ok(None);
    }
    let value_heads = keys.need("ssm.time_step_rank")?;
    let inner = keys.need("ssm.inner_size")?;
    let value_dim = inner.checked_div(value_heads).filter(|dim| dim * value_heads == inner);
    let key_heads = keys.need("ssm.group_count")?;
    Ok(Some(DeltaNet {
        key_heads,
        value_heads,
        key_dim: keys.need("ssm.state_size")?,
        value_dim: value_dim.ok_or_else(|| {
            FormatError::Config(format!("ssm.inner_size {inner} does not divide into {value_heads} heads"))
        })?,
        taps: keys.need("ssm.conv_kernel")?,
        tiled: *architecture != Architecture::Qwen3Next && key_heads != value_heads,
        layers: recurrent_layers(keys, layers)?,
    }))
}

/// Per layer, whether it is recurrent: from a list, or from the interval of the other layers.
fn recurrent_layers(keys: &Keys, layers: usize) -> Result<Vec<bool>, FormatError> {
    let key = keys.path("attention.recurrent_layers");
    match keys.meta.get(&key) {
        Some(GgufValue::Bools(list)) if list.len() >= layers => return Ok(list[..layers].to_vec()),
        Some(_) => return Err(FormatError::Config(format!("{key} is not a list of {layers} booleans"))),
        None => {}
    }
    let interval = keys.size("full_attention_interval")?.unwrap_or(FULL_ATTENTION_INTERVAL);
    match interval {
        0 => Err(FormatError::Config(format!("{} is 0", keys.path("full_attention_interval")))),
        _ => Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect()),
    }
}

/// Layers of the draft head.
pub(super) fn draft_layers(meta: &GgufMeta) -> Result<usize, FormatError> {
    let prefix = meta.str("general.architecture").unwrap_or_default();
    let layers = meta.u64(&format!("{prefix}.nextn_predict_layers")).unwrap_or(0);
    usize::try_from(layers)
        .ok()
        .filter(|layers| *layers <= DRAFT_LAYERS_MAX)
        .ok_or_else(|| FormatError::Config(format!("{prefix}.nextn_predict_layers: {layers}")))
}

/// Renames the tensors of the draft head, which the file stores as the blocks after the last layer.
pub(super) fn name_draft_head(meta: &GgufMeta, entries: &mut [Entry]) -> Result<(), FormatError> {
    let prefix = meta.str("general.architecture").unwrap_or_default();
    let (blocks, draft) = (meta.u64(&format!("{prefix}.block_count")), draft_layers(meta)?);
    let Some(first) = blocks.and_then(|blocks| blocks.checked_sub(draft as u64)).filter(|_| draft > 0) else {
        return Ok(());
    };
    draft_head::rename(entries, first, draft);
    Ok(())
}
