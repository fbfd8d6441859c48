//! Ministral 3 and the text models of Mistral 3: Llama with queries that grow with their position.
//!
//! Reference: transformers, `modeling_ministral3.py`; llama.cpp, `mistral3`.

use super::{Defaults, Family};
use crate::config::{ModelConfig, RopeScaling};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::variant::QueryGrowth;

pub(super) const FAMILY: Family = Family {
    name: "Ministral 3",
    classes: &["Ministral3ForCausalLM", "Ministral3Model", "ministral3"],
    gguf: &["mistral3"],
    defaults: Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        max_context: 262_144,
        theta: 1_000_000.0,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf,
    hf_names: &[],
    gguf_names: &[],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    config.attention_bias = false;
    config.attention_output_bias = false;
    if let Some(window) = json.size("sliding_window")? {
        config.sliding_window = Some(window);
        config.layer_is_sliding = vec![true; config.layers];
    }
    let Some(rope) = json.object("rope_parameters")?.or(json.object("rope_scaling")?) else { return Ok(()) };
    let Some(beta) = rope.f32("llama_4_scaling_beta")?.filter(|beta| *beta != 0.0) else { return Ok(()) };
    let length = rope.size("original_max_position_embeddings")?;
    let length = length.ok_or_else(|| {
        FormatError::Config("llama_4_scaling_beta needs original_max_position_embeddings beside it".to_owned())
    })?;
    config.variant.query_growth = Some(QueryGrowth { beta, length, offset: 0, unrotated_only: false });
    Ok(())
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    // The converter interleaves the rows of the query and key projections.
    config.rope_interleaved = true;
    let RopeScaling::Yarn(yarn) = &mut config.rope_scaling else { return Ok(()) };
    // YaRN divides two factors for sine and cosine. A file has only the parameter of the second.
    let mscale = |share: f32| 1.0 + 0.1 * share * yarn.factor.ln();
    yarn.attention_factor = mscale(1.0) / mscale(keys.f32("rope.scaling.yarn_log_multiplier").unwrap_or(1.0));
    let beta = keys.f32("attention.temperature_scale").filter(|beta| *beta != 0.0);
    config.variant.query_growth =
        beta.map(|beta| QueryGrowth { beta, length: yarn.original, offset: 0, unrotated_only: false });
    Ok(())
}
