//! Rotary parameters from `config.json`, in the form of transformers 4 (`rope_theta`, `rope_scaling`) and of
//! transformers 5 (`rope_parameters`, flat or one object per layer type).
//!
//! The models compute the frequencies.

use super::json::Lookup;
use crate::bounds::HEAD_DIM_MAX;
use crate::config::{LongRope, RopeScaling, YarnScaling};
use crate::error::{FormatError, quote};

/// Rotary parameters of global and sliding layers.
pub(super) struct Rope {
    pub(super) theta: f32,
    pub(super) local_theta: f32,
    pub(super) scaling: RopeScaling,
    /// Share of a head that is rotated; none if the configuration has no value.
    pub(super) partial: Option<f32>,
}

/// Reads the parameters. `defaults` are the bases of global and sliding layers; without a second one, the first applies to both.
pub(super) fn read(
    config: &Lookup,
    defaults: (f32, Option<f32>),
    (max_context, head_dim): (usize, usize),
) -> Result<Rope, FormatError> {
    let parameters = config.object("rope_parameters")?;
    let nested = match &parameters {
        Some(parameters) => (parameters.object("full_attention")?, parameters.object("sliding_attention")?),
        None => (None, None),
    };
    let full = nested.0.or(parameters);
    // An empty object has no effect.
    let legacy = config.object("rope_scaling")?.filter(|legacy| !legacy.inner.is_empty());
    let theta = number(full, "rope_theta")?.or(number(legacy, "rope_theta")?);
    let mut theta = theta.or(config.f32("rope_theta")?).unwrap_or(defaults.0);
    let local = number(nested.1, "rope_theta")?.or(config.f32("rope_local_base_freq")?);
    if let Some(sliding) = &nested.1
        && scaling(sliding, config, max_context)? != RopeScaling::None
    {
        return Err(FormatError::Unsupported("rope scaling on sliding layers".to_owned()));
    }
    let partial = number(full, "partial_rotary_factor")?.or(number(legacy, "partial_rotary_factor")?);
    let partial = partial.or(config.f32("partial_rotary_factor")?);
    let scaling = match legacy.or(full) {
        Some(parameters) => scaling(&parameters, config, max_context)?,
        None => RopeScaling::None,
    };
    // Proportional scaling contains the share.
    let partial = partial.filter(|_| !matches!(scaling, RopeScaling::Proportional { .. }));
    if let Some(alpha) = ntk_alpha(legacy.or(full))? {
        theta *= alpha.powf(head_dim as f32 / (head_dim.max(3) - 2) as f32);
    }
    Ok(Rope { theta, local_theta: local.or(defaults.1).unwrap_or(theta), scaling, partial })
}

/// A number of an optional object.
fn number(object: Option<Lookup>, key: &str) -> Result<Option<f32>, FormatError> {
    match object {
        Some(object) => object.f32(key),
        None => Ok(None),
    }
}

/// The factor by which NTK scaling with a fixed alpha stretches the base, before its exponent. Checkpoints of Hunyuan name it `dynamic`.
fn ntk_alpha(parameters: Option<Lookup>) -> Result<Option<f32>, FormatError> {
    let Some(parameters) = parameters else { return Ok(None) };
    match kind(&parameters)? {
        "dynamic" => Ok(parameters.f32("alpha")?.filter(|alpha| *alpha != 0.0)),
        _ => Ok(None),
    }
}

/// The name of a scaling, under either of its keys.
fn kind<'a>(parameters: &Lookup<'a>) -> Result<&'a str, FormatError> {
    match parameters.str("rope_type")? {
        Some(kind) => Ok(kind),
        None => Ok(parameters.str("type")?.unwrap_or("default")),
    }
}

/// The scaling that one object of parameters describes.
fn scaling(parameters: &Lookup, config: &Lookup, max_context: usize) -> Result<RopeScaling, FormatError> {
    let kind = kind(parameters)?;
    let need =
        |key: &str| parameters.f32(key)?.ok_or_else(|| FormatError::Config(format!("rope {kind}: {key} is missing")));
    let original = || -> Result<usize, FormatError> {
        let key = "original_max_position_embeddings";
        Ok(config.size(key)?.or(parameters.size(key)?).unwrap_or(max_context))
    };
    match kind {
        // The sections of a rotary embedding do not change the frequencies.
        "default" | "mrope" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: need("factor")? }),
        "proportional" => Ok(RopeScaling::Proportional {
            share: parameters.f32("partial_rotary_factor")?.unwrap_or(1.0),
            factor: parameters.f32("factor")?.unwrap_or(1.0),
        }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low: need("low_freq_factor")?,
            high: need("high_freq_factor")?,
            original: original()?,
        }),
        "yarn" => yarn(parameters, original()?, max_context).map(RopeScaling::Yarn),
        "dynamic" if ntk_alpha(Some(*parameters))?.is_some() => Ok(RopeScaling::None),
        // Without an alpha it changes texts longer than `max_position_embeddings` alone, and these are refused.
        "dynamic" if parameters.f32("factor")?.is_some() && original()? >= max_context => Ok(RopeScaling::None),
        "longrope" | "su" => long(parameters, original()?, max_context).map(RopeScaling::Long),
        other => Err(FormatError::Unsupported(format!("rope type {}", quote(other)))),
    }
}

/// LongRoPE with the defaults of transformers.
fn long(parameters: &Lookup, original: usize, max_context: usize) -> Result<LongRope, FormatError> {
    let long = max_context > original;
    let key = if long { "long_factor" } else { "short_factor" };
    let numbers =
        parameters.get(key).and_then(|list| list.as_array()).filter(|list| (1..=HEAD_DIM_MAX).contains(&list.len()));
    let numbers = numbers.and_then(|list| list.iter().map(|value| value.as_f64().map(|n| n as f32)).collect());
    let factors: Vec<f32> =
        numbers.ok_or_else(|| FormatError::Config(format!("rope longrope: {key} is not a list of numbers")))?;
    let factor = parameters.f32("factor")?.unwrap_or(max_context as f32 / original.max(1) as f32);
    let inferred = if factor > 1.0 { (1.0 + factor.ln() / (original as f32).ln()).sqrt() } else { 1.0 };
    let attention_factor = parameters.f32("attention_factor")?.unwrap_or(inferred);
    Ok(LongRope { factors: factors.into(), long, attention_factor })
}

/// YaRN with the defaults of transformers and a resolved attention factor.
fn yarn(parameters: &Lookup, original: usize, max_context: usize) -> Result<YarnScaling, FormatError> {
    let factor = parameters.f32("factor")?.unwrap_or(max_context as f32 / original as f32);
    let mscale = |scale: f32, mscale: f32| {
        if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
    };
    let inferred = match (parameters.f32("mscale")?, parameters.f32("mscale_all_dim")?) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(factor, one) / mscale(factor, all),
        _ => mscale(factor, 1.0),
    };
    Ok(YarnScaling {
        factor,
        original,
        attention_factor: parameters.f32("attention_factor")?.unwrap_or(inferred),
        beta_fast: parameters.f32("beta_fast")?.filter(|&beta| beta != 0.0).unwrap_or(32.0),
        beta_slow: parameters.f32("beta_slow")?.filter(|&beta| beta != 0.0).unwrap_or(1.0),
        truncate: parameters.bool("truncate")?.unwrap_or(true),
    })
}
