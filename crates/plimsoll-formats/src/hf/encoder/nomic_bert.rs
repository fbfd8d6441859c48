//! nomic-bert: BERT with rotated queries and keys, a gated feed-forward part and no biases in matrices. The second version has biases, no
//! gate, and experts in every other layer.
//!
//! The configuration has two forms: that of transformers, and that of the code in published checkpoints, with keys of GPT-2 (`n_embd`).
//!
//! Reference: transformers, `modeling_nomic_bert.py`; `modeling_hf_nomic_bert.py` beside the checkpoints.

use super::{Family, activation, base, plain, refuse_true, token_types};
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::config::{Experts, ModelConfig, RopeScaling};
use crate::encoder::Encoder;
use crate::encoder_sizes::{Sizes, alternating_experts};
use crate::error::{FormatError, quote};
use crate::hf::json::Lookup;
use crate::hf::rope;

const THETA: f32 = 1000.0;
const POSITIONS: usize = 2048;
/// The published code rounds the width of the feed-forward part up to a multiple of this.
const WIDTH_STEP: usize = 256;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::NomicBert,
    classes: &["NomicBertModel", "NomicBertForSequenceClassification", "nomic_bert"],
    read: |config| if config.lacks("n_embd") { read(config) } else { read_original(config) },
    names: &[
        ("encoder.layers.*.attn.Wqkv", "model.layers.*.self_attn.qkv_proj"),
        ("encoder.layers.*.attn.out_proj", "model.layers.*.self_attn.o_proj"),
        ("encoder.layers.*.mlp.fc11", "model.layers.*.mlp.up_proj"),
        ("encoder.layers.*.mlp.fc12", "model.layers.*.mlp.gate_proj"),
        ("encoder.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("encoder.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
        ("encoder.layers.*.mlp.router.layer", "model.layers.*.mlp.gate"),
        ("encoder.layers.*.mlp.experts.mlp.w1", "model.layers.*.mlp.experts.up_proj.weight"),
        ("encoder.layers.*.mlp.experts.mlp.w2", "model.layers.*.mlp.experts.down_proj.weight"),
        ("encoder.layers.*.mlp.experts.bias", "model.layers.*.mlp.experts.bias"),
        ("encoder.layers.*.norm1", "model.layers.*.post_attention_layernorm"),
        ("encoder.layers.*.norm2", "model.layers.*.post_mlp_layernorm"),
        ("emb_ln", "embeddings.LayerNorm"),
        ("pooler.dense", "classifier.dense"),
        ("classifier", "classifier.out_proj"),
    ],
};

/// Reads the form of transformers.
fn read(config: &Lookup) -> Result<ModelConfig, FormatError> {
    let size = |key: &str, default: usize| Ok::<_, FormatError>(config.size(key)?.unwrap_or(default));
    let sizes = Sizes {
        hidden: size("hidden_size", 768)?,
        layers: size("num_hidden_layers", 12)?,
        heads: size("num_attention_heads", 12)?,
        intermediate: size("intermediate_size", 3072)?,
        vocab: size("vocab_size", 30_528)?,
        max_context: size("max_position_embeddings", POSITIONS)?,
        eps: config.f32("layer_norm_eps")?.unwrap_or(1e-12),
        activation: activation(config, "hidden_act", "silu")?,
    };
    let encoder = Encoder { token_types: token_types(config)?, gated: true, ..plain(config)? };
    let built = base(config, Architecture::NomicBert, &sizes, encoder)?;
    if let Some(head_dim) = config.size("head_dim")?.filter(|head_dim| *head_dim != built.head_dim) {
        let (heads, hidden) = (built.heads, built.hidden_size);
        return Err(FormatError::Unsupported(format!(
            "head_dim {head_dim} with {heads} heads of a hidden size of {hidden}"
        )));
    }
    let parameters = config.object("rope_parameters")?;
    let dynamic = parameters.map(|parameters| parameters.str("rope_type")).transpose()?.flatten() == Some("dynamic");
    let theta = match parameters.filter(|_| dynamic) {
        // Dynamic scaling changes only texts longer than `max_position_embeddings`, and these are refused.
        Some(parameters) => parameters.f32("rope_theta")?.unwrap_or(THETA),
        None => {
            let rope = rope::read(config, (THETA, None), (built.max_context, built.head_dim))?;
            if rope.scaling != RopeScaling::None || rope.partial.is_some_and(|partial| partial != 1.0) {
                return Err(FormatError::Unsupported(
                    "rope_parameters of nomic-bert other than default and dynamic".to_owned(),
                ));
            }
            rope.theta
        }
    };
    Ok(ModelConfig { rope_theta: theta, rope_local_theta: theta, ..built })
}

/// Reads the form of the published checkpoints.
fn read_original(config: &Lookup) -> Result<ModelConfig, FormatError> {
    let (activation, gated) = gate_of(config)?;
    refuse(config, gated)?;
    let step = config.size("pad_vocab_size_multiple")?.unwrap_or(1).max(1);
    let positions = config.size("n_positions")?.unwrap_or(POSITIONS);
    // With a scaling factor, texts longer than those of training rotate by other frequencies.
    let trained = config.size("max_trained_positions")?.unwrap_or(POSITIONS);
    let scaled = config.f32("rotary_scaling_factor")?.is_some_and(|factor| factor != 0.0);
    let scaled = scaled || config.object("rope_parameters")?.is_some();
    let sizes = Sizes {
        hidden: config.need("n_embd")?,
        layers: config.need("n_layer")?,
        heads: config.need("n_head")?,
        intermediate: rounded(config.need("n_inner")?, if gated { WIDTH_STEP } else { 1 }),
        vocab: rounded(config.need("vocab_size")?, step),
        max_context: if scaled { positions.min(trained) } else { positions },
        eps: config.f32("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation,
    };
    let token_types = config.size("type_vocab_size")?.unwrap_or(2);
    let encoder = Encoder { token_types, gated, ..plain(config)? };
    if encoder.labels.is_some() {
        return Err(FormatError::Unsupported(
            "a classifier in the original layout of nomic-bert; convert it to the transformers layout".to_owned(),
        ));
    }
    let mut built = base(config, Architecture::NomicBert, &sizes, encoder)?;
    built.rope_theta = config.f32("rotary_emb_base")?.unwrap_or(THETA);
    built.rope_local_theta = built.rope_theta;
    built.variant.fused_qkv = true;
    built.variant.ungated = !gated;
    for bias in [&mut built.attention_bias, &mut built.attention_output_bias, &mut built.mlp_bias] {
        *bias = !gated;
    }
    built.experts = experts(config, &built)?;
    Ok(built)
}

/// Returns `size` rounded up to a multiple of `step`. On overflow `size` is returned, which the bounds refuse later.
fn rounded(size: usize, step: usize) -> usize {
    size.checked_next_multiple_of(step).unwrap_or(size)
}

/// The mixture of experts, if there is one.
fn experts(config: &Lookup, built: &ModelConfig) -> Result<Option<Experts>, FormatError> {
    let every = config.size("moe_every_n_layers")?.unwrap_or(0);
    if every == 0 {
        return Ok(None);
    }
    alternating_experts(built, every, [config.need("num_experts")?, config.need("moe_top_k")?]).map(Some)
}

/// Returns the activation, and whether it is a gate's.
fn gate_of(config: &Lookup) -> Result<(Activation, bool), FormatError> {
    match config.str("activation_function")?.unwrap_or("gelu_new") {
        "swiglu" => Ok((Activation::Silu, true)),
        "geglu" => Ok((Activation::Gelu, true)),
        "gelu" => Ok((Activation::Gelu, false)),
        other => Err(FormatError::Unsupported(format!(
            "activation_function {} of nomic-bert; supported are swiglu, geglu and gelu",
            quote(other)
        ))),
    }
}

/// Refuses features of the original form that this encoder does not support.
fn refuse(config: &Lookup, gated: bool) -> Result<(), FormatError> {
    let unsupported = |what: &str| Err(FormatError::Unsupported(format!("{what} of nomic-bert")));
    for key in [
        "prenorm",
        "parallel_block",
        "parallel_block_tied_norm",
        "causal",
        "use_rms_norm",
        "rotary_emb_interleaved",
        "rotary_head_dim",
        "expert_choice_router",
        "moe_normalize_expert_weights",
    ] {
        refuse_true(config, key)?;
    }
    // In the published code these keys are true when absent.
    for key in ["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"] {
        if config.bool(key)?.unwrap_or(true) == gated {
            return unsupported(&format!("{key} {gated} with this activation_function"));
        }
    }
    if config.f32("rotary_emb_fraction")? != Some(1.0) {
        return unsupported("rotary_emb_fraction other than 1");
    }
    if config.f32("rotary_emb_scale_base")?.is_some() {
        return unsupported("rotary_emb_scale_base");
    }
    let heads = config.size("num_heads_kv")?;
    if heads.is_some() && heads != config.size("n_head")? {
        return unsupported("num_heads_kv other than n_head");
    }
    if config.size("num_shared_experts")?.is_some_and(|count| count > 0) {
        return unsupported("num_shared_experts");
    }
    if gated && config.size("moe_every_n_layers")?.is_some_and(|every| every > 0) {
        return unsupported("moe_every_n_layers with a gate");
    }
    Ok(())
}
