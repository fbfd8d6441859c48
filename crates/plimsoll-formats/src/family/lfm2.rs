//! LFM2 and LFM2.5, dense and with experts: most layers are gated short convolutions, the others attention with norms on each head.
//!
//! Reference: transformers, `modeling_lfm2.py` and `modeling_lfm2_moe.py`; llama.cpp, `lfm2` and `lfm2moe`.

use super::{Defaults, Family, experts};
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::{Lookup, whole};
use crate::hf::values::per_layer;
use crate::variant::Mixer;

/// The tensor names of both families. MLX has `w1` in dense layers and `gate_proj` in a mixture of experts.
const HF_NAMES: super::Names = &[
    ("model.embedding_norm", "model.norm"),
    ("operator_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias"),
    ("feed_forward.experts.*.w1", "mlp.experts.*.gate_proj"),
    ("feed_forward.experts.*.w2", "mlp.experts.*.down_proj"),
    ("feed_forward.experts.*.w3", "mlp.experts.*.up_proj"),
    ("feed_forward.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    ("feed_forward.experts.down_proj", "mlp.experts.down_proj"),
    ("feed_forward.switch_mlp", "mlp.experts"),
    ("feed_forward", "mlp"),
];
const GGUF_NAMES: super::Names = &[
    ("token_embd_norm", "model.norm"),
    ("shortconv", "conv"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
];

const DEFAULTS: Defaults = Defaults {
    heads: Some(32),
    kv_heads: Some(8),
    vocab_size: Some(65_536),
    max_context: 128_000,
    theta: 1_000_000.0,
    eps: 1e-5,
    tied: true,
    ..Defaults::LLAMA
};

pub(super) const DENSE: Family = Family {
    name: "LFM2",
    // The latter two are for LFM2-VL files whose language model has no type.
    classes: &["Lfm2ForCausalLM", "Lfm2Model", "lfm2", "lfm2_vl", "lfm2-vl"],
    gguf: &["lfm2"],
    defaults: Defaults { intermediate: Some(12_288), ..DEFAULTS },
    from_hf: |json, config| {
        common(json, config)?;
        config.intermediate_size = adjusted(json, config.intermediate_size)?;
        mixers(json, config)
    },
    from_gguf: mixers_of_gguf,
    hf_names: HF_NAMES,
    gguf_names: GGUF_NAMES,
};

pub(super) const MOE: Family = Family {
    name: "LFM2-MoE",
    classes: &["Lfm2MoeForCausalLM", "Lfm2MoeModel", "lfm2_moe"],
    gguf: &["lfm2moe"],
    defaults: Defaults { intermediate: Some(7168), ..DEFAULTS },
    from_hf: |json, config| {
        common(json, config)?;
        experts_of_hf(json, config)?;
        mixers(json, config)
    },
    from_gguf: |keys, config| {
        mixers_of_gguf(keys, config)?;
        experts::of_gguf(keys, config, 0)
    },
    hf_names: HF_NAMES,
    gguf_names: GGUF_NAMES,
};

/// Reads the keys that both families share.
fn common(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    if json.bool("conv_bias")? == Some(true) {
        return Err(FormatError::Unsupported("conv_bias: true; supported is false".to_owned()));
    }
    config.norm_eps = json.f32("norm_eps")?.unwrap_or(1e-5);
    config.tie_word_embeddings = json.bool("tie_embedding")?.unwrap_or(config.tie_word_embeddings);
    config.qk_norm = true;
    (config.attention_bias, config.attention_output_bias) = (false, false);
    config.variant.conv_taps = json.size("conv_L_cache")?.unwrap_or(3);
    Ok(())
}

/// The width of the feed-forward part: two thirds of the configured width, times a factor, rounded up to a multiple.
fn adjusted(json: &Lookup, width: usize) -> Result<usize, FormatError> {
    let width = json.size("block_ff_dim")?.unwrap_or(width);
    if !json.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(width);
    }
    let scaled = width.saturating_mul(2) / 3;
    let multiplier = match json.f32("block_ffn_dim_multiplier")? {
        Some(multiplier) => multiplier,
        None if json.lacks("block_ffn_dim_multiplier") => 1.0,
        None => return Ok(scaled),
    };
    let multiple = json.size("block_multiple_of")?.unwrap_or(256).max(1);
    let width = (f64::from(multiplier) * scaled as f64) as usize;
    Ok(width.checked_next_multiple_of(multiple).unwrap_or(usize::MAX))
}

/// Sets the layers with attention: from `layer_types`, from the numbers in `full_attn_idxs`, or all of them.
fn mixers(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let attends = match (json.get("layer_types"), json.get("full_attn_idxs")) {
        (Some(kinds), _) => per_layer(kinds, config.layers, |kind| match kind {
            "full_attention" => Some(true),
            "conv" => Some(false),
            _ => None,
        })?,
        (None, Some(list)) => {
            let listed: Option<Vec<u64>> = list.as_array().and_then(|list| list.iter().map(whole).collect());
            let wrong = || FormatError::Config("full_attn_idxs is not a list of layers".to_owned());
            let listed = listed.ok_or_else(wrong)?;
            (0..config.layers as u64).map(|layer| listed.contains(&layer)).collect()
        }
        (None, None) => vec![true; config.layers],
    };
    set(config, attends);
    Ok(())
}

fn set(config: &mut ModelConfig, attends: Vec<bool>) {
    let mixer = |attends| if attends { Mixer::Attention } else { Mixer::ShortConv };
    config.variant.mixers = attends.into_iter().map(mixer).collect();
}

fn mixers_of_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    config.qk_norm = true;
    if let Some(window) = keys.size("attention.sliding_window")?.filter(|window| *window > 0) {
        let key = keys.path("attention.sliding_window");
        return Err(FormatError::Unsupported(format!("{key}: {window}; supported is attention to the whole context")));
    }
    config.variant.conv_taps = keys.need("shortconv.l_cache")?;
    set(config, keys.present("attention.head_count_kv", config.layers)?);
    Ok(())
}

fn experts_of_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let first = or("num_dense_layers", 2)?;
    config.experts = Some(Experts {
        count: or("num_experts", 32)?,
        top_k: or("num_experts_per_tok", 4)?,
        width: or("moe_intermediate_size", 1792)?,
        shared_width: 0,
        renormalise: json.bool("norm_topk_prob")?.unwrap_or(true),
        routing: Routing {
            correction: json.bool("use_expert_bias")?.unwrap_or(true),
            scale: json.f32("routed_scaling_factor")?.unwrap_or(1.0),
            ..experts::routing()
        },
        alternating: false,
        biases: false,
        layers: (0..config.layers).map(|layer| layer >= first).collect(),
    });
    Ok(())
}
