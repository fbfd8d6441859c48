//! SmolLM3: Llama with layers that do not rotate queries and keys (NoPE).
//!
//! Reference: transformers, `modeling_smollm3.py`; llama.cpp, which has every fourth layer without rotation.

use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::{Lookup, whole};
use crate::hf::values::window;
use serde_json::Value;

/// Every so many layers does not rotate, where the configuration does not say.
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

/// Which layers rotate, by a list with a number for each of them.
pub(super) fn listed(list: &Value, layers: usize) -> Result<Vec<bool>, FormatError> {
    let flags = list.as_array().map(|list| list.iter().map(whole).collect::<Vec<_>>());
    let flags = flags.filter(|flags| flags.len() >= layers && !flags.contains(&None));
    let flags =
        flags.ok_or_else(|| FormatError::Config(format!("no_rope_layers is not a list of {layers} numbers")))?;
    Ok(flags[..layers].iter().map(|flag| *flag != Some(0)).collect())
}

/// Which layers rotate: all but every `no_rope_layer_interval`-th.
pub(super) fn counted(json: &Lookup, layers: usize) -> Result<Vec<bool>, FormatError> {
    let interval = json.size("no_rope_layer_interval")?.unwrap_or(INTERVAL);
    rotated(interval, layers).ok_or_else(|| FormatError::Config("no_rope_layer_interval is 0".into()))
}

/// Which layers rotate where nothing else is said.
pub(super) fn rotated_by_default(layers: usize) -> Vec<bool> {
    rotated(INTERVAL, layers).unwrap_or_default()
}

/// All layers but every `interval`-th.
fn rotated(interval: usize, layers: usize) -> Option<Vec<bool>> {
    (interval > 0).then(|| (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
}
