//! GLM-4 (0414), dense, and GLM-4.5 (Air): half of each head is rotated. The dense model has norms before and after each half of a layer.
//! The other has a mixture of experts with a sigmoid router.
//!
//! Reference: transformers, `modeling_glm4.py` and `modeling_glm4_moe.py`; llama.cpp, `glm4` and `glm4moe`.

use super::{Defaults, Family, experts};
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::variant::Norms;

pub(super) const DENSE: Family = Family {
    name: "GLM-4",
    classes: &["Glm4ForCausalLM", "Glm4Model", "glm4"],
    gguf: &["glm4"],
    defaults: Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        max_context: 131_072,
        partial: Some(0.5),
        eps: 1.5625e-7,
        ..Defaults::LLAMA
    },
    from_hf: |json, config| {
        config.attention_bias = json.bool("attention_bias")?.unwrap_or(true);
        config.attention_output_bias = false;
        around(config);
        Ok(())
    },
    from_gguf: |_, config| {
        around(config);
        Ok(())
    },
    hf_names: &[
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("post_attention_layernorm", "pre_feedforward_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    ],
    gguf_names: &[("ffn_norm", "pre_feedforward_layernorm"), ("ffn_up", "mlp.gate_up_proj")],
};

pub(super) const MOE: Family = Family {
    name: "GLM-4.5",
    classes: &["Glm4MoeForCausalLM", "Glm4MoeModel", "glm4_moe"],
    gguf: &["glm4moe"],
    defaults: Defaults {
        kv_heads: Some(8),
        max_context: 131_072,
        partial: Some(0.5),
        eps: 1e-5,
        draft_head: true,
        ..Defaults::LLAMA
    },
    from_hf: |json, config| {
        config.attention_output_bias = false;
        config.qk_norm = json.bool("use_qk_norm")?.unwrap_or(false);
        experts_of_hf(json, config)
    },
    from_gguf: |keys, config| experts::of_gguf(keys, config, 1),
    hf_names: &[("mlp.shared_experts", "mlp.shared_expert")],
    gguf_names: &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")],
};

fn around(config: &mut ModelConfig) {
    config.rope_interleaved = true;
    config.variant.norms = Norms::Around;
    config.variant.fused_gate_up = true;
}

fn experts_of_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let (width, first) = (or("moe_intermediate_size", 1408)?, or("first_k_dense_replace", 1)?);
    let routing = Routing {
        groups: or("n_group", 1)?,
        top_groups: or("topk_group", 1)?,
        scale: json.f32("routed_scaling_factor")?.unwrap_or(1.0),
        ..experts::routing()
    };
    config.experts = Some(Experts {
        count: or("n_routed_experts", 128)?,
        top_k: or("num_experts_per_tok", 8)?,
        width,
        shared_width: width * or("n_shared_experts", 1)?,
        renormalise: json.bool("norm_topk_prob")?.unwrap_or(true),
        routing,
        alternating: false,
        biases: false,
        layers: (0..config.layers).map(|layer| layer >= first).collect(),
    });
    Ok(())
}
