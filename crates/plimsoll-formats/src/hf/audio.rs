//! `audio_config` of a Qwen3-Omni thinker → its tower, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation_of, token};
use crate::audio::Audio;
use crate::config::ModelConfig;
use crate::error::FormatError;

/// The class or `model_type` of the whole model, of its thinker, or of the thinker's language model.
pub(super) fn is(name: &str) -> bool {
    matches!(
        name,
        "Qwen3OmniMoeForConditionalGeneration"
            | "qwen3_omni_moe"
            | "Qwen3OmniMoeThinkerForConditionalGeneration"
            | "qwen3_omni_moe_thinker"
            | "qwen3_omni_moe_text"
    )
}

/// The token that ends a turn. Generation in this family ends with it unless the configuration names other tokens.
const TURN_END: u32 = 151_645;

/// Adds the tower to the configuration of the text model, where there is one. `name` is the class or `model_type`.
pub(super) fn add(config: &mut ModelConfig, top: &Lookup, name: &str) -> Result<(), FormatError> {
    if !is(name) && !top.str("model_type")?.is_some_and(is) {
        return Ok(());
    }
    if config.eos_token_ids.is_empty() {
        config.eos_token_ids = vec![token(top, "im_end_token_id", TURN_END)?];
    }
    let Some(audio) = top.object("audio_config")? else { return Ok(()) };
    let or = |key: &str, default: usize| audio.size(key).map(|size| size.unwrap_or(default));
    let out = audio.size("output_dim")?;
    if out.is_some_and(|out| out != config.hidden_size) {
        let (out, hidden) = (out.unwrap_or_default(), config.hidden_size);
        return Err(FormatError::Config(format!("an audio tower of width {out} for a model of width {hidden}")));
    }
    if audio.bool("scale_embedding")? == Some(true) {
        // transformers reads it and ignores it, so there is no reference for such a checkpoint.
        return Err(FormatError::Unsupported("scale_embedding".to_owned()));
    }
    config.audio = Some(Audio {
        depth: or("encoder_layers", 32)?,
        hidden_size: or("d_model", 1280)?,
        heads: or("encoder_attention_heads", 20)?,
        intermediate_size: or("encoder_ffn_dim", 5120)?,
        act: activation_of(audio.str("activation_function")?.unwrap_or("gelu"))?,
        bands: or("num_mel_bins", 128)?,
        channels: or("downsample_hidden_size", 480)?,
        half_window: or("n_window", 50)?,
        attention_window: or("n_window_infer", 800)?,
        placeholder: token(top, "audio_token_id", 151_646)?,
    });
    Ok(())
}
