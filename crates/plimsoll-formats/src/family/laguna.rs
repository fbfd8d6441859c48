//! Laguna: the number of query heads differs between layers. Most layers slide, with other rotary parameters. Queries and keys are normed,
//! a softplus gates the result of attention, and a mixture of experts has a sigmoid router.
//!
//! Reference: transformers, `modeling_laguna.py`.

use super::{Defaults, Family, experts};
use crate::bounds::wrong;
use crate::config::{Experts, ModelConfig, Routing};
use crate::error::{FormatError, quote};
use crate::hf::json::{Lookup, whole};
use crate::hf::values::{per_layer, window};
use crate::variant::{LayerHeads, OutputGate};

const WINDOW: usize = 512;
/// Share of a head that global layers rotate, if the configuration has no `rope_parameters`.
const GLOBAL_SHARE: f32 = 0.5;

pub(super) const FAMILY: Family = Family {
    name: "Laguna",
    classes: &["LagunaForCausalLM", "LagunaModel", "laguna"],
    gguf: &[],
    defaults: Defaults {
        heads: Some(48),
        kv_heads: Some(8),
        head_dim: Some(128),
        vocab_size: Some(100_352),
        intermediate: Some(8192),
        max_context: 131_072,
        theta: 500_000.0,
        local_theta: Some(10_000.0),
        partial: Some(1.0),
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf: |_, _| Ok(()),
    hf_names: &[
        ("self_attn.g_proj", "self_attn.gate_proj"),
        ("mlp.shared_experts", "mlp.shared_expert"),
        ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    ],
    gguf_names: &[],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    refuse_others(json)?;
    let size = json.size("sliding_window")?.unwrap_or(WINDOW);
    window(json, config, Some(size), |layers| vec![false; layers])?;
    config.qk_norm = true;
    config.variant.output_gate = Some(gate(json)?);
    if let Some(list) = json.get("num_attention_heads_per_layer") {
        let sizes = list.as_array().map(|list| list.iter().map(whole).collect::<Option<Vec<_>>>());
        let sizes = sizes.flatten().filter(|sizes| sizes.len() == config.layers);
        let Some(sizes) = sizes else {
            return wrong(format!("num_attention_heads_per_layer is not a list of {} numbers", config.layers));
        };
        config.variant.query_heads = sizes.iter().map(|heads| *heads as usize).collect();
        config.heads = config.variant.query_heads.iter().copied().max().unwrap_or(config.heads);
    }
    rotation(json, config)?;
    experts_of_hf(json, config)
}

/// Refuses keys that change the results in this code, or in the code that some checkpoints contain.
fn refuse_others(json: &Lookup) -> Result<(), FormatError> {
    for (key, only) in
        [("moe_apply_router_weight_on_input", false), ("swa_attention_sink_enabled", false), ("norm_topk_prob", true)]
    {
        if json.bool(key)?.is_some_and(|value| value != only) {
            return Err(FormatError::Unsupported(format!("{key}: {}; supported is {only}", !only)));
        }
    }
    for key in ["rope_scaling", "swa_rope_parameters"] {
        if json.get(key).is_some() {
            return Err(FormatError::Unsupported(format!(
                "{key}; use rope_parameters with an entry for each layer type"
            )));
        }
    }
    Ok(())
}

/// Reads whether the gate is one per head or one per element.
fn gate(json: &Lookup) -> Result<OutputGate, FormatError> {
    let value = json.get("gating");
    let kind = match value.and_then(|value| value.as_str()) {
        Some(kind) => kind,
        None if value.is_none_or(|value| value.as_bool() == Some(true)) => "per-head",
        None => {
            let value = value.map(ToString::to_string).unwrap_or_default();
            let supported = "supported are true, per-head and per-element";
            return Err(FormatError::Unsupported(format!("gating {}; {supported}", quote(&value))));
        }
    };
    let listed = json.get("gating_types").map(|list| list.as_array().map(Vec::as_slice).unwrap_or_default());
    if listed.is_some_and(|list| list.is_empty() || list.iter().any(|one| one.as_str() != Some(kind))) {
        return Err(FormatError::Unsupported(format!("gating_types that differ; supported is {kind} in every layer")));
    }
    match kind {
        "per-head" => Ok(OutputGate::Softplus { per_head: true }),
        "per-element" => Ok(OutputGate::Softplus { per_head: false }),
        other => {
            Err(FormatError::Unsupported(format!("gating {}; supported are per-head and per-element", quote(other))))
        }
    }
}

/// Sets the rotated elements for each kind of layer. Bases and scaling have already been read from the same objects.
fn rotation(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let parameters = json.object("rope_parameters")?;
    if parameters.is_none() && json.get("rope_theta").is_some() {
        return Err(FormatError::Unsupported("rope_theta without rope_parameters for each layer type".to_owned()));
    }
    let width = |sliding: bool| {
        let kind = if sliding { "sliding_attention" } else { "full_attention" };
        let share = match &parameters {
            None if sliding => 1.0,
            None => GLOBAL_SHARE,
            // The configuration may omit the parameters of a kind that no layer has.
            Some(_) if !config.layer_is_sliding.contains(&sliding) => 1.0,
            Some(parameters) => {
                let missing = |key: &str| FormatError::Config(format!("rope_parameters: {key} is missing"));
                let own = parameters.object(kind)?.ok_or_else(|| missing(kind))?;
                own.f32("rope_theta")?.ok_or_else(|| missing(&format!("rope_theta of {kind}")))?;
                own.f32("partial_rotary_factor")?.unwrap_or(1.0)
            }
        };
        match share > 0.0 && share <= 1.0 {
            true => Ok((config.head_dim as f64 * f64::from(share)) as usize),
            false => wrong(format!("partial_rotary_factor: {share}, allowed are numbers above 0 and up to 1")),
        }
    };
    let (local, global) = (width(true)?, width(false)?);
    let ModelConfig { kv_heads, head_dim, .. } = *config;
    config.rotary_dim = local;
    config.variant.global_heads = Some(LayerHeads { kv_heads, head_dim, rotary_dim: global, values_are_keys: false });
    config.variant.local_rope = true;
    Ok(())
}

fn experts_of_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let layers = match json.get("mlp_layer_types") {
        Some(kinds) => per_layer(kinds, config.layers, |kind| match kind {
            "sparse" => Some(true),
            "dense" => Some(false),
            _ => None,
        })?,
        None => (0..config.layers).map(|layer| layer > 0).collect(),
    };
    if !layers.contains(&true) {
        return Ok(());
    }
    let routing = Routing {
        scale: json.f32("moe_routed_scaling_factor")?.unwrap_or(1.0),
        logit_softcap: json.f32("moe_router_logit_softcapping")?.filter(|cap| *cap > 0.0),
        ..experts::routing()
    };
    config.experts = Some(Experts {
        count: or("num_experts", 256)?,
        top_k: or("num_experts_per_tok", 8)?,
        width: or("moe_intermediate_size", 512)?,
        shared_width: or("shared_expert_intermediate_size", 512)?,
        renormalise: true,
        routing,
        alternating: false,
        biases: false,
        layers,
    });
    Ok(())
}
