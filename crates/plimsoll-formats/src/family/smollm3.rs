//! SmolLM3: Llama with layers that do not rotate queries and keys (NoPE).
//!
//! Reference: transformers, `modeling_smollm3.py`; llama.cpp, in which every fourth layer does not rotate.

use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::{Lookup, whole};
use crate::hf::values::window;
use serde_json::Value;

/// The interval of layers that do not rotate, if the configuration has no value.
const INTERVAL: usize = 4;

pub(super) const FAMILY: Family = Family {
    name: "SmolLM3",
    classes: &["SmolLM3ForCausalLM", "SmolLM3Model", "smollm3"],
    gguf: &["smollm3"],
    defaults: Defaults { kv_heads: Some(4), max_context: 32_768, theta: 2_000_000.0, tied: true, ..Defaults::LLAMA },
    from_hf,
    from_gguf,
    hf_names: &[],
    gguf_names: &[],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    config.variant.rotated = match json.get("no_rope_layers") {
        Some(list) => listed(list, config.layers)?,
        None => counted(json, config.layers)?,
    };
    if json.bool("use_sliding_window")? == Some(true) {
        let unrotated: Vec<bool> = config.variant.rotated.iter().map(|rotated| !rotated).collect();
        window(json, config, json.size("sliding_window")?, |_| unrotated)?;
    }
    Ok(())
}

fn from_gguf(_: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    // The converter interleaves the rows of the query and key projections.
    config.rope_interleaved = true;
    config.variant.rotated = rotated_by_default(config.layers);
    Ok(())
}

/// Per layer, whether it rotates, from a list of one number per layer.
pub(super) fn listed(list: &Value, layers: usize) -> Result<Vec<bool>, FormatError> {
    let flags = list.as_array().map(|list| list.iter().map(whole).collect::<Vec<_>>());
    let flags = flags.filter(|flags| flags.len() >= layers && !flags.contains(&None));
    let flags =
        flags.ok_or_else(|| FormatError::Config(format!("no_rope_layers is not a list of {layers} numbers")))?;
    Ok(flags[..layers].iter().map(|flag| *flag != Some(0)).collect())
}

/// Per layer, whether it rotates: all but every `no_rope_layer_interval`-th.
pub(super) fn counted(json: &Lookup, layers: usize) -> Result<Vec<bool>, FormatError> {
    let interval = json.size("no_rope_layer_interval")?.unwrap_or(INTERVAL);
    rotated(interval, layers).ok_or_else(|| FormatError::Config("no_rope_layer_interval is 0".into()))
}

/// Per layer, whether it rotates, if the file has no value.
pub(super) fn rotated_by_default(layers: usize) -> Vec<bool> {
    rotated(INTERVAL, layers).unwrap_or_default()
}

/// Per layer, false for every `interval`-th. None for an interval of 0.
fn rotated(interval: usize, layers: usize) -> Option<Vec<bool>> {
    (interval > 0).then(|| (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
}
