//! Latent attention (MLA): DeepSeek-V2-Lite, DeepSeek-V3 and models of its shape (R1, Kimi K2), and GLM-4.7-Flash. The first layers are
//! dense, the others have a mixture of experts with shared experts.
//!
//! Reference: transformers, `modeling_deepseek_v2.py`, `modeling_deepseek_v3.py` and `modeling_glm4_moe_lite.py`; llama.cpp, `deepseek2`.

use super::experts::GATING_SIGMOID;
use super::{Defaults, Family, experts};
use crate::config::{Experts, ModelConfig, RopeScaling, Routing};
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::per_layer;
use crate::variant::Latent;

pub(super) const DEEPSEEK: Family = Family {
    name: "DeepSeek",
    classes: &[
        "DeepseekV2ForCausalLM",
        "DeepseekV2Model",
        "deepseek_v2",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Model",
        "deepseek_v3",
    ],
    gguf: &["deepseek2"],
    defaults: Defaults {
        heads: Some(128),
        vocab_size: Some(129_280),
        intermediate: Some(18_432),
        max_context: 4096,
        latent: true,
        draft_head: true,
        ..Defaults::LLAMA
    },
    from_hf: |json, config| match is_v2(json) {
        true => of_hf(json, config, &V2),
        false => of_hf(json, config, &V3),
    },
    from_gguf,
    hf_names: HF_NAMES,
    gguf_names: &[
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_kv_b", "self_attn.kv_b_proj"),
        ("attn_k_b", "self_attn.k_b_proj"),
        ("attn_v_b", "self_attn.v_b_proj"),
        ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ],
};

pub(super) const GLM_FLASH: Family = Family {
    name: "GLM-4.7-Flash",
    classes: &["Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel", "glm4_moe_lite"],
    // GLM-4.7-Flash's GGUF files have DeepSeek's architecture.
    gguf: &[],
    defaults: Defaults {
        heads: Some(20),
        vocab_size: Some(GLM_VOCABULARY),
        intermediate: Some(10_240),
        max_context: 202_752,
        eps: 1e-5,
        latent: true,
        draft_head: true,
        ..Defaults::LLAMA
    },
    from_hf: |json, config| of_hf(json, config, &GLM),
    from_gguf: |keys, _| Err(keys.missing("kv_lora_rank")),
    hf_names: HF_NAMES,
    gguf_names: &[],
};

/// MLX's files have two matrices with a slice per head, where published files have `kv_b_proj`.
const HF_NAMES: super::Names = &[
    ("mlp.shared_experts", "mlp.shared_expert"),
    ("self_attn.embed_q", "self_attn.k_b_proj"),
    ("self_attn.unembed_out", "self_attn.v_b_proj"),
];

/// Values that a class of transformers assumes.
struct Class {
    latent: Latent,
    experts: usize,
    shared: usize,
    top_k: Option<usize>,
    width: usize,
    first: usize,
    groups: [usize; 2],
    scale: f32,
    /// Whether scores are a softmax, and the chosen experts' weights are not renormalised. Otherwise scores are sigmoids with a correction.
    softmax: bool,
}

const V2: Class = Class {
    latent: Latent { rank: 512, rope_dim: 64, nope_dim: 128, value_dim: 128, query_rank: Some(1536) },
    experts: 64,
    shared: 2,
    top_k: None,
    width: 1407,
    first: 0,
    groups: [1, 1],
    scale: 1.0,
    softmax: true,
};
const V3: Class = Class {
    experts: 256,
    shared: 1,
    top_k: Some(8),
    width: 2048,
    first: 3,
    groups: [8, 4],
    scale: 2.5,
    softmax: false,
    ..V2
};
const GLM: Class = Class {
    latent: Latent { nope_dim: 192, value_dim: 256, query_rank: Some(768), ..V2.latent },
    experts: 64,
    top_k: Some(4),
    width: 1536,
    first: 1,
    groups: [1, 1],
    scale: 1.8,
    ..V3
};

/// The vocabulary size of GLM-4.7-Flash, by which llama.cpp distinguishes its files from DeepSeek's.
const GLM_VOCABULARY: usize = 154_880;
/// llama.cpp's number for the softmax among the gating functions.
const GATING_SOFTMAX: usize = 1;

fn is_v2(json: &Lookup) -> bool {
    let class = json.get("architectures").and_then(|list| list.get(0)?.as_str());
    class
        .or(json.get("model_type").and_then(|kind| kind.as_str()))
        .is_some_and(|name| name.contains("V2") || name == "deepseek_v2")
}

fn of_hf(json: &Lookup, config: &mut ModelConfig, class: &Class) -> Result<(), FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let refused = |key: &str, value: &str, supported: &str| {
        Err(FormatError::Unsupported(format!("{key}: {value}; supported is {supported}")))
    };
    if config.attention_bias || json.bool("attention_bias")? == Some(true) {
        return refused("attention_bias", "true", "false");
    }
    let query_rank = if json.lacks("q_lora_rank") { class.latent.query_rank } else { json.size("q_lora_rank")? };
    let latent = Latent {
        rank: or("kv_lora_rank", class.latent.rank)?,
        rope_dim: or("qk_rope_head_dim", class.latent.rope_dim)?,
        nope_dim: or("qk_nope_head_dim", class.latent.nope_dim)?,
        value_dim: or("v_head_dim", class.latent.value_dim)?,
        query_rank,
    };
    config.rope_interleaved = class.softmax || json.bool("rope_interleave")?.unwrap_or(true);
    let rope = json.object("rope_scaling")?.filter(|rope| rope.keys().next().is_some());
    let rope = rope.or(json.object("rope_parameters")?);
    let all = match rope {
        Some(rope) => rope.f32("mscale_all_dim")?.unwrap_or(0.0),
        None => 0.0,
    };
    attend(config, latent, all);
    let method = json.str("topk_method")?.unwrap_or(if class.softmax { "greedy" } else { "noaux_tc" });
    match (class.softmax, method) {
        (true, "greedy") | (false, "noaux_tc") => {}
        (true, other) => return refused("topk_method", &quote(other), "'greedy'"),
        (false, other) => return refused("topk_method", &quote(other), "'noaux_tc'"),
    }
    if or("moe_layer_freq", 1)? != 1 {
        return refused("moe_layer_freq", &or("moe_layer_freq", 1)?.to_string(), "1");
    }
    let renormalise = json.bool("norm_topk_prob")?.unwrap_or(!class.softmax);
    if class.softmax && renormalise {
        return refused("norm_topk_prob", "true", "false");
    }
    let first = or("first_k_dense_replace", class.first)?;
    let width = or("moe_intermediate_size", class.width)?;
    let groups = [or("n_group", class.groups[0])?, or("topk_group", class.groups[1])?];
    config.experts = Some(Experts {
        count: or("n_routed_experts", class.experts)?,
        top_k: or("num_experts_per_tok", class.top_k.unwrap_or(0))?,
        width,
        shared_width: width.saturating_mul(or("n_shared_experts", class.shared)?),
        renormalise,
        routing: Routing {
            scale: json.f32("routed_scaling_factor")?.unwrap_or(class.scale),
            ..routing(class.softmax, groups)
        },
        alternating: false,
        biases: false,
        layers: match json.get("mlp_layer_types") {
            Some(kinds) => per_layer(kinds, config.layers, |kind| match kind {
                "sparse" => Some(true),
                "dense" => Some(false),
                _ => None,
            })?,
            None => (0..config.layers).map(|layer| layer >= first).collect(),
        },
    });
    Ok(())
}

/// Returns the routing. A softmax router chooses among all experts, without groups.
fn routing(softmax: bool, [groups, top_groups]: [usize; 2]) -> Routing {
    match softmax {
        true => Routing { shared_gate: false, ..Routing::default() },
        false => Routing { groups, top_groups, ..experts::routing() },
    }
}

/// Sets latent attention: all query heads attend to one row a token. `all` is YaRN's `mscale_all_dim`, which scales queries and keys.
fn attend(config: &mut ModelConfig, latent: Latent, all: f32) {
    config.kv_heads = 1;
    config.head_dim = latent.width();
    config.rotary_dim = latent.rope_dim;
    config.attention_bias = false;
    config.attention_output_bias = false;
    config.query_scale = (latent.nope_dim.saturating_add(latent.rope_dim) as f64).powf(-0.5) as f32;
    if let RopeScaling::Yarn(yarn) = &config.rope_scaling
        && all != 0.0
        && yarn.factor > 1.0
    {
        config.query_scale *= (1.0 + 0.1 * all * yarn.factor.ln()).powi(2);
    }
    config.variant.latent = Some(latent);
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    let (rank, rope_dim) = (keys.need("attention.kv_lora_rank")?, keys.need("rope.dimension_count")?);
    // Older files give the widths of heads without the latent row.
    let width = |key: &str, older: &str| match keys.size(key)? {
        Some(width) => Ok(width),
        None => keys.need(older),
    };
    let key_dim = width("attention.key_length_mla", "attention.key_length")?;
    let latent = Latent {
        rank,
        rope_dim,
        nope_dim: key_dim.saturating_sub(rope_dim),
        value_dim: width("attention.value_length_mla", "attention.value_length")?,
        query_rank: keys.size("attention.q_lora_rank")?,
    };
    config.rope_interleaved = true;
    // The converter stores a tenth of `mscale_all_dim`.
    let all = keys.f32("rope.scaling.yarn_log_multiplier").unwrap_or(0.0) / 0.1;
    if let RopeScaling::Yarn(yarn) = &mut config.rope_scaling {
        // Files have one of YaRN's two factors; the other one is equal to it.
        yarn.attention_factor = if all == 0.0 { 1.0 + 0.1 * yarn.factor.ln() } else { 1.0 };
    }
    attend(config, latent, all);
    let glm = config.vocab_size == GLM_VOCABULARY;
    let gating = keys.size("expert_gating_func")?.unwrap_or(if glm { GATING_SIGMOID } else { GATING_SOFTMAX });
    let softmax = match gating {
        GATING_SOFTMAX => true,
        GATING_SIGMOID => false,
        other => {
            let key = keys.path("expert_gating_func");
            return Err(FormatError::Unsupported(format!("{key}: {other}; supported are 1 (softmax) and 2 (sigmoid)")));
        }
    };
    let Routing { groups, top_groups, scale, .. } = experts::routing_of_gguf(keys)?;
    if softmax && groups > 1 {
        let key = keys.path("expert_group_count");
        return Err(FormatError::Unsupported(format!("{key}: {groups} with a softmax; supported is 1")));
    }
    let (width, first) = (keys.need("expert_feed_forward_length")?, keys.need("leading_dense_block_count")?);
    config.experts = Some(Experts {
        count: keys.need("expert_count")?,
        top_k: keys.need("expert_used_count")?,
        width,
        shared_width: width.saturating_mul(keys.size("expert_shared_count")?.unwrap_or(0)),
        renormalise: keys.bool("expert_weights_norm").unwrap_or(false),
        routing: Routing { scale, ..routing(softmax, [groups, top_groups]) },
        alternating: false,
        biases: false,
        layers: (0..config.layers).map(|layer| layer >= first).collect(),
    });
    Ok(())
}
