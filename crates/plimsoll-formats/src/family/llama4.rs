//! Llama 4 (text): most layers rotate neighbouring elements and attend within chunks. The others attend to the whole context without
//! rotation, and their queries grow with their position. The inputs of experts are multiplied by a sigmoid of the router's logits.
//!
//! GGUF files have no keys for chunks, the growth of queries and norms: llama.cpp assumes the values of the published sizes.
//!
//! Reference: transformers, `modeling_llama4.py`; llama.cpp, `llama4`.

use super::{Defaults, Family, smollm3};
use crate::bounds::wrong;
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::{Lookup, whole};
use crate::hf::values::per_layer;
use crate::variant::{QkNorm, QueryGrowth};
use serde_json::Value;

const CHUNK: usize = 8192;
/// Positions in a step of the growth of queries, and the factor on the logarithm.
const GROWTH: (usize, f32) = (8192, 0.1);
/// Experts of Maverick. Its queries and keys have no norms.
const EXPERTS_MAVERICK: usize = 128;
/// Width of feed-forward parts without experts.
const DENSE_WIDTH: usize = 16_384;

pub(super) const FAMILY: Family = Family {
    name: "Llama 4",
    classes: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Llama4TextModel", "llama4_text", "llama4"],
    gguf: &["llama4"],
    defaults: Defaults {
        heads: Some(40),
        kv_heads: Some(8),
        head_dim: Some(128),
        vocab_size: Some(202_048),
        intermediate: Some(8192),
        max_context: 131_072,
        theta: 500_000.0,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf,
    hf_names: &[("feed_forward.router", "mlp.gate"), ("feed_forward", "mlp")],
    gguf_names: &[],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let layers = config.layers;
    config.rope_interleaved = true;
    // An empty list has no effect.
    let list = json.get("no_rope_layers").filter(|list| list.as_array().is_none_or(|list| !list.is_empty()));
    config.variant.rotated = match list {
        Some(list) => smollm3::listed(list, layers)?,
        None => smollm3::counted(json, layers)?,
    };
    config.qk_norm = json.bool("use_qk_norm")?.unwrap_or(true);
    let variant = &mut config.variant;
    (variant.qk_norm, variant.plain_qk_norm, variant.rotated_qk_norm) = (QkNorm::RotatedHead, true, true);
    variant.query_growth = growth(json)?;
    chunks(json, config)?;
    experts(json, config)
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    let layers = config.layers;
    config.rope_interleaved = true;
    // A window of 0 means that all layers rotate and attend to the whole context.
    let chunk = keys.size("attention.sliding_window")?.unwrap_or(CHUNK);
    let rotated = if chunk == 0 { vec![true; layers] } else { smollm3::rotated_by_default(layers) };
    let count = keys.size("expert_count")?.unwrap_or(0);
    config.qk_norm = count != EXPERTS_MAVERICK;
    let length = keys.size("attention.temperature_length")?.unwrap_or(GROWTH.0);
    let beta = keys.f32("attention.temperature_scale").unwrap_or(GROWTH.1);
    let variant = &mut config.variant;
    (variant.qk_norm, variant.plain_qk_norm, variant.rotated_qk_norm) = (QkNorm::RotatedHead, true, true);
    variant.query_growth = (chunk > 0).then_some(QueryGrowth { beta, length, offset: 1, unrotated_only: true });
    if chunk > 0 {
        config.layer_is_sliding.clone_from(&rotated);
        variant.chunked = rotated.contains(&true);
        config.sliding_window = variant.chunked.then_some(chunk);
    }
    variant.rotated = rotated;
    let step = keys.size("interleave_moe_layer_step")?.unwrap_or(0);
    let with_experts: Vec<bool> = (1..=layers).map(|layer| step > 0 && layer.is_multiple_of(step)).collect();
    if count > 0 && with_experts.contains(&true) {
        let (top_k, width) = (keys.need("expert_used_count")?, keys.need("expert_feed_forward_length")?);
        config.experts = Some(Experts { count, top_k, width, shared_width: width, ..experts_in(with_experts) });
    }
    Ok(())
}

/// Reads the growth of queries in layers that do not rotate. Early configurations have a number in place of the flag.
fn growth(json: &Lookup) -> Result<Option<QueryGrowth>, FormatError> {
    let tuned = match json.get("attn_temperature_tuning") {
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        _ => json.bool("attn_temperature_tuning")?.unwrap_or(true),
    };
    let length = json.size("floor_scale")?.unwrap_or(GROWTH.0);
    let beta = json.f32("attn_scale")?.unwrap_or(GROWTH.1);
    Ok((tuned && beta != 0.0).then_some(QueryGrowth { beta, length, offset: 1, unrotated_only: true }))
}

/// Sets the layers that attend within chunks, and the length of a chunk in positions.
fn chunks(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    // An explicit null means no chunks.
    let size = json.size("attention_chunk_size")?.or(json.lacks("attention_chunk_size").then_some(CHUNK));
    config.layer_is_sliding = match json.get("layer_types") {
        Some(kinds) => per_layer(kinds, config.layers, |kind| match kind {
            "chunked_attention" => Some(true),
            "full_attention" => Some(false),
            _ => None,
        })?,
        None => config.variant.rotated.iter().map(|rotated| *rotated && size.is_some()).collect(),
    };
    let any = config.layer_is_sliding.contains(&true);
    if any && size.is_none() {
        return wrong("layers of chunked_attention without attention_chunk_size".to_owned());
    }
    config.sliding_window = size.filter(|_| any);
    config.variant.chunked = any;
    Ok(())
}

fn experts(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let width = std::mem::replace(&mut config.intermediate_size, or("intermediate_size_mlp", DENSE_WIDTH)?);
    let layers = match json.get("moe_layers") {
        Some(list) => listed(list, config.layers)?,
        None => match or("interleave_moe_layer_step", 1)? {
            0 => return wrong("interleave_moe_layer_step is 0".to_owned()),
            step => (1..=config.layers).map(|layer| layer.is_multiple_of(step)).collect(),
        },
    };
    if !layers.contains(&true) {
        return Ok(());
    }
    config.experts = Some(Experts {
        count: or("num_local_experts", 16)?,
        top_k: or("num_experts_per_tok", 1)?,
        width,
        shared_width: width,
        ..experts_in(layers)
    });
    Ok(())
}

/// Returns the experts' properties that do not depend on sizes.
fn experts_in(layers: Vec<bool>) -> Experts {
    let routing = Routing { sigmoid: true, shared_gate: false, weighs_inputs: true, ..Routing::default() };
    let (count, top_k, width, shared_width) = (0, 0, 0, 0);
    Experts {
        count,
        top_k,
        width,
        shared_width,
        renormalise: false,
        routing,
        alternating: false,
        biases: false,
        layers,
    }
}

/// Per layer, whether its number is in the list.
fn listed(list: &Value, layers: usize) -> Result<Vec<bool>, FormatError> {
    let mut named = vec![false; layers];
    let mut name = |layer: &Value| {
        let place = named.get_mut(usize::try_from(whole(layer)?).ok()?)?;
        *place = true;
        Some(())
    };
    match list.as_array().and_then(|list| list.iter().try_for_each(&mut name)) {
        Some(()) => Ok(named),
        None => wrong(format!("moe_layers is not a list of layers below {layers}")),
    }
}
