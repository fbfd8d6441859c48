//! Granite 3 and 4, dense: Llama with multipliers for embeddings, attention scores, residual stream and logits.
//!
//! Reference: transformers, `modeling_granite.py`; llama.cpp, `granite`.

use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;

pub(super) const FAMILY: Family = Family {
    name: "Granite",
    classes: &["GraniteForCausalLM", "GraniteModel", "granite"],
    gguf: &["granite"],
    defaults: Defaults::LLAMA,
    from_hf,
    from_gguf,
    hf_names: &[],
    gguf_names: &[],
};

pub(super) fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let or_one = |key| json.f32(key).map(|value| value.unwrap_or(1.0));
    config.embedding_scale = or_one("embedding_multiplier")?;
    config.query_scale = or_one("attention_multiplier")?;
    config.variant.residual_scale = or_one("residual_multiplier")?;
    config.variant.logit_scale = 1.0 / or_one("logits_scaling")?;
    Ok(())
}

pub(super) fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    // The converter interleaves the rows of the query and key projections.
    config.rope_interleaved = true;
    // A multiplier of 0 counts as absent.
    let scale = |key| keys.f32(key).filter(|scale| *scale != 0.0);
    config.embedding_scale = scale("embedding_scale").unwrap_or(1.0);
    config.variant.residual_scale = scale("residual_scale").unwrap_or(1.0);
    config.variant.logit_scale = 1.0 / scale("logit_scale").unwrap_or(1.0);
    Ok(())
}
