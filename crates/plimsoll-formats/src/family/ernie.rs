//! ERNIE 4.5: Llama with rotation of neighbouring elements. Its mixture of experts corrects the router's scores for the choice.
//!
//! Reference: transformers, `modeling_ernie4_5.py` and `modeling_ernie4_5_moe.py`; llama.cpp, `ernie4_5` and `ernie4_5-moe`.

use super::{Defaults, Family};
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::{Lookup, whole};

/// The greatest lower bound on the sum of chosen scores that has no effect on weights.
const NORM_MIN: f32 = 1e-6;

pub(super) const DENSE: Family = Family {
    name: "ERNIE 4.5",
    classes: &["Ernie4_5ForCausalLM", "Ernie4_5Model", "ernie4_5"],
    gguf: &["ernie4_5"],
    defaults: Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        max_context: 131_072,
        theta: 500_000.0,
        eps: 1e-5,
        tied: true,
        ..Defaults::LLAMA
    },
    from_hf: rotation_and_biases,
    from_gguf: |_, config| {
        config.rope_interleaved = true;
        Ok(())
    },
    hf_names: &[],
    gguf_names: &[],
};

pub(super) const MOE: Family = Family {
    name: "ERNIE 4.5 MoE",
    classes: &["Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel", "ernie4_5_moe"],
    gguf: &["ernie4_5-moe"],
    defaults: Defaults { kv_heads: Some(4), head_dim: None, ..DENSE.defaults },
    from_hf: |json, config| {
        rotation_and_biases(json, config)?;
        experts_of_hf(json, config)
    },
    from_gguf: |keys, config| {
        config.rope_interleaved = true;
        experts_of_gguf(keys, config)
    },
    hf_names: &[
        ("mlp.shared_experts", "mlp.shared_expert"),
        ("mlp.moe_statics", "mlp.gate"),
        ("mlp.gate.moe_statics", "mlp.gate"),
    ],
    gguf_names: &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")],
};

fn rotation_and_biases(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    config.rope_interleaved = true;
    let biased = json.bool("use_bias")?.unwrap_or(false);
    (config.attention_bias, config.attention_output_bias, config.mlp_bias) = (biased, biased, biased);
    Ok(())
}

fn experts_of_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    if let Some(least) = json.f32("moe_norm_min")?.filter(|least| *least > NORM_MIN) {
        return Err(FormatError::Unsupported(format!("moe_norm_min: {least}; supported is up to {NORM_MIN}")));
    }
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    // A value of -1 stands for the last layer.
    let last = json.get("moe_layer_end_index").and_then(whole).and_then(|last| usize::try_from(last).ok());
    let last = last.unwrap_or(config.layers.saturating_sub(1));
    let (first, step) = (or("moe_layer_start_index", 1)?, or("moe_layer_interval", 1)?);
    if step == 0 {
        return Err(FormatError::Config("moe_layer_interval is 0".to_owned()));
    }
    let layers = (0..config.layers).map(|layer| (layer + 1) % step == 0 && (first..=last).contains(&layer)).collect();
    let width = or("moe_intermediate_size", 1536)?;
    config.experts = Some(Experts {
        count: or("moe_num_experts", 64)?,
        top_k: or("moe_k", 6)?,
        width,
        shared_width: width * or("moe_num_shared_experts", 2)?,
        ..experts(layers)
    });
    Ok(())
}

fn experts_of_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    let (first, step) =
        (keys.size("leading_dense_block_count")?.unwrap_or(0), keys.size("interleave_moe_layer_step")?.unwrap_or(1));
    let layers = (0..config.layers).map(|layer| layer >= first && (layer + 1).is_multiple_of(step.max(1))).collect();
    config.experts = Some(Experts {
        count: keys.need("expert_count")?,
        top_k: keys.need("expert_used_count")?,
        width: keys.need("expert_feed_forward_length")?,
        shared_width: keys.size("expert_shared_feed_forward_length")?.unwrap_or(0),
        ..experts(layers)
    });
    Ok(())
}

/// Returns the experts' properties that do not depend on sizes.
fn experts(layers: Vec<bool>) -> Experts {
    let routing = Routing { correction: true, shared_gate: false, ..Routing::default() };
    let (count, top_k, width, shared_width) = (0, 0, 0, 0);
    Experts { count, top_k, width, shared_width, renormalise: true, routing, alternating: false, biases: false, layers }
}
