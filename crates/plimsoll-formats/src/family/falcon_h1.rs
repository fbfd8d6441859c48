//! Falcon-H1: attention and Mamba-2 side by side in every layer. Factors apply to each part of both, to the feed-forward part, to
//! embeddings and to logits.
//!
//! Reference: transformers, `modeling_falcon_h1.py`; llama.cpp, `falcon-h1`. In a GGUF file the factors are multiplied into the weights.

use super::granite_hybrid::{mamba_of_gguf, mamba_of_hf};
use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::variant::{Mamba, MambaScales, Mixer};

pub(super) const FAMILY: Family = Family {
    name: "Falcon-H1",
    classes: &["FalconH1ForCausalLM", "FalconH1Model", "falcon_h1"],
    gguf: &["falcon-h1"],
    defaults: Defaults {
        heads: Some(32),
        kv_heads: Some(8),
        vocab_size: Some(128_000),
        intermediate: Some(14_336),
        max_context: 8192,
        eps: 1e-5,
        ..Defaults::LLAMA
    },
    from_hf,
    from_gguf: |keys, config| {
        config.variant.mamba = Some(mamba_of_gguf(keys)?);
        config.variant.mixers = vec![Mixer::Parallel; config.layers];
        Ok(())
    },
    hf_names: &[
        ("model.final_layernorm", "model.norm"),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
    ],
    gguf_names: &[
        ("ssm_in", "mamba.in_proj"),
        ("ssm_conv1d", "mamba.conv1d"),
        ("ssm_a", "mamba.A"),
        ("ssm_d", "mamba.D"),
        ("ssm_dt.bias", "mamba.dt_bias"),
        ("ssm_norm", "mamba.norm"),
        ("ssm_out", "mamba.out_proj"),
    ],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    for key in ["mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"] {
        if json.bool(key)? == Some(true) {
            return Err(FormatError::Unsupported(format!("{key}: true; supported is false")));
        }
    }
    let norm = json.bool("mamba_rms_norm")?.unwrap_or(false);
    if norm && json.bool("mamba_norm_before_gate")?.unwrap_or(true) {
        return Err(FormatError::Unsupported("mamba_norm_before_gate: true; supported is false".to_owned()));
    }
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let width = match (json.lacks("mamba_d_ssm"), json.size("mamba_d_ssm")?) {
        (_, Some(width)) => width,
        (true, None) => 1024,
        (false, None) => or("mamba_expand", 2)?.saturating_mul(config.hidden_size),
    };
    let one = |key| json.f32(key).map(|factor| factor.unwrap_or(1.0));
    let parts = factors::<5>(json, "ssm_multipliers")?;
    let input = one("ssm_in_multiplier")?;
    let scales = Some(MambaScales(parts.map(|part| part * input)));
    config.variant.mamba = Some(Mamba { norm, scales, ..mamba_of_hf(json, width)? });
    config.variant.mixers = vec![Mixer::Parallel; config.layers];
    // Scores contain the input's factor twice: through the queries and through the keys.
    let attention = one("attention_in_multiplier")?;
    config.query_scale *= attention * attention * one("key_multiplier")?;
    config.variant.parallel_scales = [attention * one("attention_out_multiplier")?, one("ssm_out_multiplier")?];
    config.variant.mlp_scales = Some(factors(json, "mlp_multipliers")?);
    config.embedding_scale = one("embedding_multiplier")?;
    config.variant.logit_scale = one("lm_head_multiplier")?;
    Ok(())
}

/// A list of `N` factors. All are 1 if the key is absent.
fn factors<const N: usize>(json: &Lookup, key: &str) -> Result<[f32; N], FormatError> {
    let Some(list) = json.get(key) else { return Ok([1.0; N]) };
    let numbers = list.as_array().filter(|list| list.len() == N);
    let numbers = numbers
        .and_then(|list| list.iter().map(|factor| factor.as_f64().map(|n| n as f32)).collect::<Option<Vec<_>>>());
    let wrong = || FormatError::Config(format!("{key} is not a list of {N} numbers"));
    numbers.and_then(|list| list.try_into().ok()).ok_or_else(wrong)
}
