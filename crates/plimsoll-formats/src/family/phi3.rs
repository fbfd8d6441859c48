//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, a share of each head rotated, LongRoPE, a window in all layers.
//!
//! Reference: transformers, `modeling_phi3.py`; llama.cpp's converter for the names.

use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;

pub(super) const FAMILY: Family = Family {
    name: "Phi-3",
    classes: &["Phi3ForCausalLM", "Phi3Model", "phi3"],
    gguf: &["phi3"],
    defaults: Defaults { max_context: 4096, eps: 1e-5, partial: Some(1.0), ..Defaults::LLAMA },
    from_hf,
    from_gguf,
    hf_names: &[],
    gguf_names: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
};

fn from_hf(json: &Lookup, config: &mut ModelConfig) -> Result<(), FormatError> {
    fused(config, json.size("sliding_window")?);
    Ok(())
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    fused(config, keys.size("attention.sliding_window")?.filter(|window| *window > 0));
    Ok(())
}

fn fused(config: &mut ModelConfig, window: Option<usize>) {
    config.attention_bias = false;
    config.attention_output_bias = false;
    config.variant.fused_qkv = true;
    config.variant.fused_gate_up = true;
    config.sliding_window = window;
    config.layer_is_sliding = vec![window.is_some(); config.layers];
}
