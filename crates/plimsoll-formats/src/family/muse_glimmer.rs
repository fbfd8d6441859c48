//! Muse Glimmer (text): norms around both halves of a layer, norms without weights for embeddings, queries and keys, a sigmoid gate on the
//! result of attention. Every fourth layer, counted from the last, attends to the whole context and does not rotate.
//!
//! Reference: transformers, `modeling_muse_glimmer.py`.

use super::{Defaults, Family};
use crate::bounds::wrong;
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::hf::values::window;
use crate::variant::{Norms, OutputGate};

/// The interval of layers that are global and do not rotate, counted from the last layer. It applies if the configuration has no lists.
const INTERVAL: usize = 4;
const WINDOW: usize = 2048;
/// The factor on queries after their norm.
const QUERY_FACTOR: f32 = 3.87;
const LOGIT_SCALE: f32 = 0.196_116_14;
const LOGIT_SOFTCAP: f32 = 20.0;
const POST_NORM_EPS: f32 = 1e-8;

pub(super) const FAMILY: Family = Family {
    name: "Muse Glimmer",
    classes: &["MuseGlimmerForConditionalGeneration", "MuseGlimmerTextModel", "muse_glimmer", "muse_glimmer_text"],
    gguf: &[],
    defaults: Defaults {
        heads: Some(32),
        kv_heads: Some(2),
        head_dim: Some(128),
        vocab_size: Some(202_048),
        intermediate: Some(19_968),
        max_context: 131_072,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf: |_, _| Ok(()),
    hf_names: &[],
    gguf_names: &[],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    if let Some(cap) = config.attn_logit_softcap {
        return Err(FormatError::Unsupported(format!(
            "attn_logit_softcapping {cap} of Muse Glimmer; supported is null"
        )));
    }
    let or = |key, default: f32| json.f32(key).map(|number| number.unwrap_or(default));
    config.norm_weight_offset = 1.0;
    config.qk_norm = true;
    config.query_scale *= or("qk_scale_factor", QUERY_FACTOR)?;
    config.final_logit_softcap = Some(or("final_logit_softcapping", LOGIT_SOFTCAP)?);
    let rotated = rotated(json, config)?;
    let variant = &mut config.variant;
    variant.norms = Norms::Around;
    (variant.plain_qk_norm, variant.embedding_norm, variant.plain_final_norm) = (true, true, true);
    variant.post_norm_eps = Some(or("post_norm_eps", POST_NORM_EPS)?);
    variant.output_gate = Some(OutputGate::Sigmoid);
    variant.logit_scale = or("output_multiplier", LOGIT_SCALE)?;
    variant.rotated = rotated;
    window(json, config, Some(json.size("sliding_window")?.unwrap_or(WINDOW)), local)
}

/// Per layer, false for every fourth layer counted from the last.
fn local(layers: usize) -> Vec<bool> {
    (0..layers).rev().map(|behind| !behind.is_multiple_of(INTERVAL)).collect()
}

/// Per layer, whether it rotates: whether its base is not 0. transformers has one base for all layers, so another base is refused.
fn rotated(json: &Lookup, config: &ModelConfig) -> Result<Vec<bool>, FormatError> {
    let Some(list) = json.get("layer_rope_theta") else { return Ok(local(config.layers)) };
    let bases = list.as_array().map(|list| list.iter().map(|base| base.as_f64()).collect::<Option<Vec<_>>>());
    let Some(bases) = bases.flatten().filter(|bases| bases.len() == config.layers) else {
        return wrong(format!("layer_rope_theta is not a list of {} numbers", config.layers));
    };
    let theta = config.rope_theta;
    match bases.iter().find(|base| **base != 0.0 && **base as f32 != theta) {
        Some(base) => {
            Err(FormatError::Unsupported(format!("layer_rope_theta: {base}; supported are 0 and rope_theta, {theta}")))
        }
        None => Ok(bases.iter().map(|base| *base != 0.0).collect()),
    }
}
