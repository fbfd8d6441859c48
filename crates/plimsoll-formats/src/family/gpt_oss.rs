//! gpt-oss: sliding windows in every other layer, a sink for each head, biases on all projections, a mixture of experts with a clamped
//! gate.
//!
//! Reference: transformers, `modeling_gpt_oss.py`; llama.cpp, `gpt-oss`.

use super::{Defaults, Family};
use crate::activation::Activation;
use crate::config::{Experts, ModelConfig, RopeScaling, Routing, YarnScaling};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::window;

/// The interval of global layers, if the configuration does not list the layers.
const INTERVAL: usize = 2;
/// The gate's constants in `Activation::ClampedSwish`.
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 7.0;
/// The YaRN parameters that transformers assumes if the configuration has none.
const YARN_FACTOR: f32 = 32.0;
const YARN_ORIGINAL: usize = 4096;

pub(super) const FAMILY: Family = Family {
    name: "gpt-oss",
    classes: &["GptOssForCausalLM", "GptOssModel", "gpt_oss"],
    gguf: &["gpt-oss"],
    defaults: Defaults {
        heads: Some(64),
        kv_heads: Some(8),
        head_dim: Some(64),
        vocab_size: Some(201_088),
        max_context: 131_072,
        theta: 150_000.0,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf,
    hf_names: &[
        ("self_attn.sinks", "self_attn.sinks.weight"),
        ("mlp.router", "mlp.gate"),
        ("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj.bias"),
        ("mlp.experts.down_proj_bias", "mlp.experts.down_proj.bias"),
    ],
    gguf_names: &[("attn_sinks", "self_attn.sinks")],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    for (key, only) in [("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)] {
        if let Some(value) = json.f32(key)?.filter(|value| *value != only) {
            return Err(FormatError::Unsupported(format!("{key}: {value}; supported is {only}")));
        }
    }
    let biased = json.bool("attention_bias")?.unwrap_or(true);
    (config.attention_bias, config.attention_output_bias) = (biased, biased);
    if json.object("rope_parameters")?.is_none() && json.object("rope_scaling")?.is_none() {
        config.rope_scaling = RopeScaling::Yarn(YarnScaling {
            factor: YARN_FACTOR,
            original: YARN_ORIGINAL,
            attention_factor: 1.0 + 0.1 * YARN_FACTOR.ln(),
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
        });
    }
    let count = match json.size("num_local_experts")? {
        Some(count) => count,
        None => json.need("num_experts")?,
    };
    let top_k = match json.size("num_experts_per_tok")? {
        Some(top_k) => top_k,
        None => json.size("experts_per_token")?.unwrap_or(4),
    };
    experts(config, count, top_k, config.intermediate_size);
    let size = json.size("sliding_window")?.or(json.lacks("sliding_window").then_some(128));
    window(json, config, size, |layers| (1..=layers).map(|layer| layer % INTERVAL != 0).collect())
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    if let RopeScaling::Yarn(yarn) = &mut config.rope_scaling {
        // Published configurations have this value; metadata has none.
        yarn.truncate = false;
    }
    let width = keys.need("expert_feed_forward_length")?;
    experts(config, keys.need("expert_count")?, keys.need("expert_used_count")?, width);
    config.sliding_window = Some(keys.need("attention.sliding_window")?);
    config.layer_is_sliding = keys.sliding_layers(config.layers, INTERVAL)?;
    Ok(())
}

fn experts(config: &mut ModelConfig, count: usize, top_k: usize, width: usize) {
    config.variant.sinks = true;
    config.hidden_act = Activation::ClampedSwish;
    config.experts = Some(Experts {
        count,
        top_k,
        width,
        shared_width: 0,
        // The softmax over the chosen experts alone equals the softmax over all, divided by the sum of the chosen.
        renormalise: true,
        routing: Routing::default(),
        alternating: true,
        biases: true,
        layers: vec![true; config.layers],
    });
}
