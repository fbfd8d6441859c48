//! Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention without rotation, or a feed-forward part without a gate,
//! plain or a mixture of experts.
//!
//! Reference: transformers, `modeling_nemotron_h.py`; llama.cpp, `nemotron_h` and `nemotron_h_moe`. transformers bounds the time step of
//! prompts by `time_step_min`, but not that of generated tokens; here it has no bound, as in llama.cpp.

use super::granite_hybrid::{mamba_of_gguf, time_limits};
use super::{Defaults, Family, experts};
use crate::activation::Activation;
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::{activation_of, per_layer};
use crate::variant::{Mamba, Mixer, Norms};

pub(super) const FAMILY: Family = Family {
    name: "Nemotron-H",
    classes: &["NemotronHForCausalLM", "NemotronHModel", "nemotron_h"],
    gguf: &["nemotron_h", "nemotron_h_moe"],
    defaults: Defaults {
        heads: Some(32),
        kv_heads: Some(8),
        head_dim: Some(128),
        vocab_size: Some(131_072),
        intermediate: Some(21_504),
        max_context: 4096,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf,
    hf_names: &[
        ("model.embeddings", "model.embed_tokens"),
        ("model.norm_f", "model.norm"),
        ("norm", "input_layernorm"),
        ("mixer.q_proj", "self_attn.q_proj"),
        ("mixer.k_proj", "self_attn.k_proj"),
        ("mixer.v_proj", "self_attn.v_proj"),
        ("mixer.o_proj", "self_attn.o_proj"),
        ("mixer.up_proj", "mlp.up_proj"),
        ("mixer.down_proj", "mlp.down_proj"),
        ("mixer.gate", "mlp.gate"),
        ("mixer.experts.up_proj", "mlp.experts.up_proj.weight"),
        ("mixer.experts.down_proj", "mlp.experts.down_proj.weight"),
        ("mixer.experts", "mlp.experts"),
        ("mixer.switch_mlp.fc1", "mlp.experts.up_proj"),
        ("mixer.switch_mlp.fc2", "mlp.experts.down_proj"),
        ("mixer.shared_experts", "mlp.shared_expert"),
        ("mixer.fc1_latent_proj", "mlp.fc1_latent_proj"),
        ("mixer.fc2_latent_proj", "mlp.fc2_latent_proj"),
        ("mixer", "mamba"),
    ],
    gguf_names: &[
        ("ssm_in", "mamba.in_proj"),
        ("ssm_conv1d", "mamba.conv1d"),
        ("ssm_a", "mamba.A"),
        ("ssm_d", "mamba.D"),
        ("ssm_dt.bias", "mamba.dt_bias"),
        ("ssm_norm", "mamba.norm"),
        ("ssm_out", "mamba.out_proj"),
        ("ffn_latent_down", "mlp.fc1_latent_proj"),
        ("ffn_latent_up", "mlp.fc2_latent_proj"),
        ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ],
};

/// The kind of a layer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Experts,
}

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    for (key, only) in [("use_bias", false), ("mamba_proj_bias", false)] {
        if json.bool(key)?.is_some_and(|value| value != only) {
            return Err(FormatError::Unsupported(format!("{key}: {}; supported is {only}", !only)));
        }
    }
    let act = activation_of(json.str("mamba_hidden_act")?.unwrap_or("silu"))?;
    if act != Activation::Silu {
        return Err(FormatError::Unsupported(format!("mamba_hidden_act: {act:?}; supported is silu")));
    }
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let either = |key, other, default: usize| match json.size(other)? {
        Some(size) => Ok::<_, FormatError>(size),
        None => or(key, default),
    };
    config.norm_eps = json.f32("layer_norm_epsilon")?.unwrap_or(1e-5);
    config.variant.mamba = Some(Mamba {
        heads: or("mamba_num_heads", 128)?,
        head_dim: or("mamba_head_dim", 64)?,
        state_dim: or("ssm_state_size", 128)?,
        groups: either("n_groups", "mamba_n_groups", 8)?,
        taps: either("conv_kernel", "mamba_d_conv", 4)?,
        conv_bias: json.bool("use_conv_bias")?.unwrap_or(true),
        time_limits: time_limits(json)?,
        norm: true,
        scales: None,
    });
    let kinds = kinds(json, config.layers)?;
    config.hidden_act = activation_of(json.str("mlp_hidden_act")?.unwrap_or("relu2"))?;
    if kinds.contains(&Kind::Experts) {
        config.variant.expert_latent = json.size("moe_latent_size")?;
        config.experts = Some(Experts {
            count: or("n_routed_experts", 8)?,
            top_k: or("num_experts_per_tok", 2)?,
            width: or("moe_intermediate_size", 7688)?,
            shared_width: or("moe_shared_expert_intermediate_size", 7688)?,
            renormalise: json.bool("norm_topk_prob")?.unwrap_or(true),
            routing: Routing {
                groups: or("n_group", 1)?,
                top_groups: or("topk_group", 1)?,
                scale: json.f32("routed_scaling_factor")?.unwrap_or(1.0),
                ..experts::routing()
            },
            alternating: false,
            biases: false,
            layers: kinds.iter().map(|kind| *kind == Kind::Experts).collect(),
        });
    }
    set(config, &kinds);
    Ok(())
}

/// Reads the kind of each layer, from a list of texts or from a text with one character per layer.
fn kinds(json: &Lookup, layers: usize) -> Result<Vec<Kind>, FormatError> {
    if let Some(list) = json.get("layers_block_type").or_else(|| json.get("layer_types")) {
        return per_layer(list, layers, |kind| match kind {
            "mamba" | "linear_attention" => Some(Kind::Mamba),
            "attention" | "full_attention" => Some(Kind::Attention),
            "mlp" => Some(Kind::Dense),
            "moe" => Some(Kind::Experts),
            _ => None,
        });
    }
    let pattern = json.str("hybrid_override_pattern")?.unwrap_or_default();
    let of = |kind: char| match kind {
        'M' => Some(Kind::Mamba),
        '*' => Some(Kind::Attention),
        '-' => Some(Kind::Dense),
        'E' => Some(Kind::Experts),
        _ => None,
    };
    let kinds: Option<Vec<Kind>> = pattern.chars().map(of).collect();
    kinds.filter(|kinds| kinds.len() == layers).ok_or_else(|| {
        let pattern = quote(pattern);
        FormatError::Config(format!(
            "hybrid_override_pattern {pattern}: {layers} characters of M, E, * and - are needed"
        ))
    })
}

fn set(config: &mut ModelConfig, kinds: &[Kind]) {
    let mixer = |kind: &Kind| match kind {
        Kind::Mamba => Mixer::Mamba,
        Kind::Attention => Mixer::Attention,
        Kind::Dense | Kind::Experts => Mixer::None,
    };
    let variant = &mut config.variant;
    variant.mixers = kinds.iter().map(mixer).collect();
    variant.transforms = kinds.iter().map(|kind| matches!(kind, Kind::Dense | Kind::Experts)).collect();
    variant.rotated = vec![false; config.layers];
    variant.norms = Norms::Single;
    variant.ungated = true;
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    let attends = keys.present("attention.head_count_kv", config.layers)?;
    let transforms = keys.present("feed_forward_length", config.layers)?;
    let count = keys.size("expert_count")?.unwrap_or(0);
    let kind = |(attends, transforms): (&bool, &bool)| match (attends, transforms) {
        (true, _) => Kind::Attention,
        (false, true) if count > 0 => Kind::Experts,
        (false, true) => Kind::Dense,
        (false, false) => Kind::Mamba,
    };
    let kinds: Vec<Kind> = attends.iter().zip(&transforms).map(kind).collect();
    config.hidden_act = Activation::ReluSquared;
    config.variant.mamba = Some(mamba_of_gguf(keys)?);
    if count > 0 {
        let width = keys.need("expert_feed_forward_length")?;
        config.variant.expert_latent = keys.size("moe_latent_size")?;
        config.experts = Some(Experts {
            count,
            top_k: keys.need("expert_used_count")?,
            width,
            shared_width: keys.need("expert_shared_feed_forward_length")?,
            renormalise: keys.bool("expert_weights_norm").unwrap_or(true),
            routing: experts::routing_of_gguf(keys)?,
            alternating: false,
            biases: false,
            layers: kinds.iter().map(|kind| *kind == Kind::Experts).collect(),
        });
    }
    set(config, &kinds);
    Ok(())
}
