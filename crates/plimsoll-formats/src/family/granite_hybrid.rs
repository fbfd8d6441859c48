//! Granite 4: Granite's multipliers. Most layers are Mamba-2, the others attention, in most models without rotation. The feed-forward part
//! is a mixture of experts with a shared expert, or the shared expert alone.
//!
//! Reference: transformers, `modeling_granitemoehybrid.py`; llama.cpp, `granitehybrid`.

use super::{Defaults, Family, granite};
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::per_layer;
use crate::variant::{Mamba, Mixer};

pub(super) const FAMILY: Family = Family {
    name: "Granite 4 (hybrid)",
    classes: &["GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel", "granitemoehybrid"],
    gguf: &["granitehybrid"],
    defaults: Defaults { heads: Some(32), vocab_size: Some(32_000), intermediate: Some(11_008), ..Defaults::LLAMA },
    from_hf,
    from_gguf,
    hf_names: &[
        ("shared_mlp.input_linear", "mlp.shared_expert.gate_up_proj"),
        ("shared_mlp.output_linear", "mlp.shared_expert.down_proj"),
        ("block_sparse_moe.router.layer", "mlp.gate"),
        ("block_sparse_moe.router", "mlp.gate"),
        ("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear", "mlp.experts.down_proj"),
        ("block_sparse_moe.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.experts.down_proj", "mlp.experts.down_proj"),
        ("block_sparse_moe.switch_mlp", "mlp.experts"),
    ],
    gguf_names: &[
        ("ssm_in", "mamba.in_proj"),
        ("ssm_conv1d", "mamba.conv1d"),
        ("ssm_a", "mamba.A"),
        ("ssm_d", "mamba.D"),
        ("ssm_dt.bias", "mamba.dt_bias"),
        ("ssm_norm", "mamba.norm"),
        ("ssm_out", "mamba.out_proj"),
        ("ffn_gate", "mlp.shared_expert.gate_proj"),
        ("ffn_up", "mlp.shared_expert.up_proj"),
        ("ffn_down", "mlp.shared_expert.down_proj"),
    ],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    granite::from_hf(json, config)?;
    if json.bool("mamba_proj_bias")? == Some(true) {
        return Err(FormatError::Unsupported("mamba_proj_bias: true; supported is false".to_owned()));
    }
    let key = if json.lacks("layers_block_type") { "layer_types" } else { "layers_block_type" };
    config.variant.mixers = match json.get(key) {
        Some(kinds) => per_layer(kinds, config.layers, |kind| match kind {
            "mamba" | "linear_attention" => Some(Mixer::Mamba),
            "attention" | "full_attention" => Some(Mixer::Attention),
            _ => None,
        })?,
        None => vec![Mixer::Mamba; config.layers],
    };
    config.variant.rotated = vec![json.str("position_embedding_type")? == Some("rope"); config.layers];
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    config.variant.mamba = Some(mamba_of_hf(json, or("mamba_expand", 2)?.saturating_mul(config.hidden_size))?);
    let shared = or("shared_intermediate_size", 1024)?;
    config.variant.fused_gate_up = true;
    match or("num_local_experts", 8)? {
        0 => dense(config, shared),
        count => experts(config, count, or("num_experts_per_tok", 2)?, config.intermediate_size, shared),
    }
    Ok(())
}

/// Reads Mamba-2. All its heads together are `width` wide.
pub(super) fn mamba_of_hf(json: &Lookup, width: usize) -> Result<Mamba, FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let heads = or("mamba_n_heads", 128)?;
    Ok(Mamba {
        heads,
        head_dim: mamba_width(json, heads, width)?,
        state_dim: or("mamba_d_state", 256)?,
        groups: or("mamba_n_groups", 1)?,
        taps: or("mamba_d_conv", 4)?,
        conv_bias: json.bool("mamba_conv_bias")?.unwrap_or(true),
        time_limits: time_limits(json)?,
        norm: true,
        scales: None,
    })
}

/// The width of one of `heads` Mamba heads, which are `width` wide together.
fn mamba_width(json: &Lookup, heads: usize, width: usize) -> Result<usize, FormatError> {
    let derived = width.checked_div(heads).unwrap_or(0);
    // The value "auto" means the default too.
    let named = json.get("mamba_d_head").and_then(|value| value.as_str()).is_some();
    let head_dim = if named { derived } else { json.size("mamba_d_head")?.unwrap_or(derived) };
    match head_dim.saturating_mul(heads) == width {
        true => Ok(head_dim),
        false => Err(FormatError::Config(format!("{heads} Mamba heads of {head_dim} are not {width} wide"))),
    }
}

/// Bounds of the time step.
pub(super) fn time_limits(json: &Lookup) -> Result<[f32; 2], FormatError> {
    let Some(limits) = json.get("time_step_limit") else { return Ok([0.0, f32::INFINITY]) };
    let limits = limits.as_array().map(|limits| limits.iter().map(limit).collect::<Vec<_>>());
    match limits.as_deref() {
        Some([Some(least), Some(most)]) => Ok([*least, *most]),
        _ => Err(FormatError::Config("time_step_limit is not a list of two numbers".to_owned())),
    }
}

/// A bound of the time step. JSON has no infinity: transformers writes an object with its name, and Python's own word was replaced with
/// null.
fn limit(value: &serde_json::Value) -> Option<f32> {
    if value.is_null() {
        return Some(f32::INFINITY);
    }
    match value.get("__float__").unwrap_or(value).as_str() {
        Some("Infinity" | "inf") => Some(f32::INFINITY),
        Some(_) => None,
        None => value.as_f64().map(|limit| limit as f32),
    }
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    granite::from_gguf(keys, config)?;
    let attends = keys.present("attention.head_count_kv", config.layers)?;
    let mixer = |attends| if attends { Mixer::Attention } else { Mixer::Mamba };
    config.variant.mixers = attends.into_iter().map(mixer).collect();
    // llama.cpp uses this key, which should tell whether the context was stretched, as the flag of rotation.
    config.variant.rotated = vec![keys.bool("rope.scaling.finetuned").unwrap_or(true); config.layers];
    config.variant.mamba = Some(mamba_of_gguf(keys)?);
    let shared = keys.size("expert_shared_feed_forward_length")?.unwrap_or(config.intermediate_size);
    match keys.size("expert_count")?.unwrap_or(0) {
        0 => dense(config, shared),
        count => experts(config, count, keys.need("expert_used_count")?, config.intermediate_size, shared),
    }
    Ok(())
}

/// The sizes of Mamba-2 layers in GGUF metadata.
pub(super) fn mamba_of_gguf(keys: &Keys) -> Result<Mamba, FormatError> {
    let (heads, width) = (keys.need("ssm.time_step_rank")?, keys.need("ssm.inner_size")?);
    let head_dim = width.checked_div(heads).filter(|dim| dim * heads == width);
    let wrong = || FormatError::Config(format!("ssm.inner_size {width} does not divide into {heads} heads"));
    Ok(Mamba {
        heads,
        head_dim: head_dim.ok_or_else(wrong)?,
        state_dim: keys.need("ssm.state_size")?,
        groups: keys.need("ssm.group_count")?,
        taps: keys.need("ssm.conv_kernel")?,
        conv_bias: true,
        time_limits: [0.0, f32::INFINITY],
        norm: true,
        scales: None,
    })
}

fn dense(config: &mut ModelConfig, width: usize) {
    config.intermediate_size = width;
    config.variant.dense_is_shared = true;
}

fn experts(config: &mut ModelConfig, count: usize, top_k: usize, width: usize, shared_width: usize) {
    config.experts = Some(Experts {
        count,
        top_k,
        width,
        shared_width,
        // The softmax over the chosen experts alone equals the softmax over all, divided by the sum of the chosen.
        renormalise: true,
        routing: Routing { shared_gate: false, ..Routing::default() },
        alternating: false,
        biases: false,
        layers: vec![true; config.layers],
    });
}
