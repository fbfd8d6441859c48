//! The encoders of a Gemma 4 checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation_of, side, token};
use crate::activation::Activation;
use crate::audio::{Audio, AudioKind, Conformer};
use crate::error::{FormatError, quote};
use crate::vision::{Gemma4, MediaTokens, Vision, VisionKind};

/// Base of the rotary frequencies of every published encoder.
const THETA: f32 = 100.0;
/// Epsilon of every norm of every published encoder.
const EPS: f32 = 1e-6;
/// The upper limit of masked scores: below it their softmax shares are 0.
const MASKED: f32 = -1e5;

/// Whether this is a class or `model_type` of Gemma 4.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Gemma4ForConditionalGeneration" | "gemma4")
}

/// Whether this is a class or `model_type` of Gemma 4 Unified.
pub(super) fn is_unified(name: &str) -> bool {
    matches!(name, "Gemma4UnifiedForConditionalGeneration" | "gemma4_unified")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup, text: &Lookup) -> Result<Vision, FormatError> {
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let flag = |key: &str| vision.bool(key).map(|flag| flag.unwrap_or(false));
    let (hidden_size, heads) = (or("hidden_size", 768)?, or("num_attention_heads", 12)?);
    let (kv_heads, head_dim) = (or("num_key_value_heads", 12)?, or("head_dim", 64)?);
    if kv_heads != heads || head_dim.checked_mul(heads) != Some(hidden_size) {
        return Err(FormatError::Unsupported(format!(
            "a vision encoder of {heads} heads and {kv_heads} key heads of {head_dim} elements for a width of {hidden_size}; \
             supported are as many key heads, which fill the width"
        )));
    }
    check_eps(vision, "a vision encoder")?;
    if flag("attention_bias")? {
        return Err(FormatError::Unsupported("attention_bias in a vision encoder".to_owned()));
    }
    if let Some(rope) = vision.object("rope_parameters")? {
        let (kind, theta) = (rope.str("rope_type")?.unwrap_or("axial"), rope.f32("rope_theta")?.unwrap_or(THETA));
        // Published files write "default" for axial frequencies.
        if !["axial", "default"].contains(&kind) || theta != THETA {
            let what =
                format!("rope_type {kind} and rope_theta {theta} in a vision encoder; supported are axial and {THETA}");
            return Err(FormatError::Unsupported(what));
        }
    }
    let sees_ahead = text.str("use_bidirectional_attention")? == Some("vision");
    let encoder = VisionKind::Gemma4(Gemma4 {
        positions: or("position_embedding_size", 10_240)?,
        clipped: flag("use_clipped_linears")?,
        standardize: flag("standardize")?,
        sees_ahead,
        unified: false,
    });
    Ok(Vision {
        depth: or("num_hidden_layers", 16)?,
        hidden_size,
        heads,
        intermediate_size: or("intermediate_size", 3072)?,
        act: activation_of(vision.str("hidden_activation")?.unwrap_or("gelu_pytorch_tanh"))?,
        channels: 3,
        patch: side(vision, "patch_size", 16)?,
        merge: or("pooling_kernel_size", 3)?,
        ..Vision::of_images(encoder, media_tokens(top)?)
    })
}

/// Reads Unified's `vision_config`. A patch is one token.
pub(super) fn read_unified(vision: &Lookup, top: &Lookup, text: &Lookup) -> Result<Vision, FormatError> {
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    check_eps(vision, "a vision part")?;
    let (hidden_size, output) = (or("mm_embed_dim", 3840)?, or("output_proj_dims", 3840)?);
    if output != hidden_size {
        return Err(FormatError::Config(format!("output_proj_dims is {output}, mm_embed_dim {hidden_size}")));
    }
    let encoder = VisionKind::Gemma4(Gemma4 {
        positions: or("mm_posemb_size", 1120)?,
        clipped: false,
        standardize: false,
        // A null means no, an absent key yes.
        sees_ahead: text.lacks("use_bidirectional_attention")
            || text.str("use_bidirectional_attention")? == Some("vision"),
        unified: true,
    });
    let patch = side(vision, "patch_size", 16)?.saturating_mul(or("pooling_kernel_size", 3)?);
    Ok(Vision { hidden_size, patch, ..Vision::of_images(encoder, media_tokens(top)?) })
}

fn media_tokens(top: &Lookup) -> Result<MediaTokens, FormatError> {
    Ok(MediaTokens { image: token(top, "image_token_id", 258_880)?, video: token(top, "video_token_id", 258_884)? })
}

/// Reads Unified's `audio_config`.
pub(super) fn read_unified_audio(audio: &Lookup, top: &Lookup) -> Result<Audio, FormatError> {
    check_eps(audio, "an audio part")?;
    let samples = audio.size("audio_embed_dim")?.unwrap_or(640);
    Ok(Audio {
        depth: 0,
        hidden_size: samples,
        heads: 1,
        intermediate_size: 0,
        act: Activation::Silu,
        bands: samples,
        placeholder: token(top, "audio_token_id", 258_881)?,
        encoder: AudioKind::Samples,
    })
}

/// Refuses an epsilon that differs from the published encoders'.
fn check_eps(encoder: &Lookup, what: &str) -> Result<(), FormatError> {
    match encoder.f32("rms_norm_eps")?.filter(|eps| *eps != EPS) {
        Some(eps) => Err(FormatError::Unsupported(format!("rms_norm_eps {eps} in {what}; supported is {EPS}"))),
        None => Ok(()),
    }
}

/// Reads `audio_config`.
pub(super) fn read_audio(audio: &Lookup, top: &Lookup) -> Result<Audio, FormatError> {
    let or = |key: &str, default: usize| audio.size(key).map(|size| size.unwrap_or(default));
    let number = |key: &str, default: f32| audio.f32(key).map(|number| number.unwrap_or(default));
    let unsupported = |what: String| Err(FormatError::Unsupported(format!("{what} in an audio encoder")));
    check_eps(audio, "an audio encoder")?;
    let hidden_size = or("hidden_size", 1024)?;
    let channels = match audio.get("subsampling_conv_channels") {
        None => [128, 32],
        Some(value) => match serde_json::from_value(value.clone()) {
            Ok(channels) => channels,
            Err(_) => return unsupported(format!("subsampling_conv_channels {}", quote(&value.to_string()))),
        },
    };
    let (chunk, left, right) =
        (or("attention_chunk_size", 12)?, or("attention_context_left", 13)?, or("attention_context_right", 0)?);
    // The keys of distances are counted from half a chunk, and from the rest of it.
    if right != 0 || left < 2 || !(chunk..=chunk.saturating_add(1)).contains(&left) {
        return unsupported(format!(
            "attention_chunk_size {chunk}, attention_context_left {left}, attention_context_right {right}; supported are as much \
             or one more to the left than a chunk, 2 at least, and nothing to the right"
        ));
    }
    let masked = number("attention_invalid_logits_value", -1e9)?;
    if masked > MASKED {
        return unsupported(format!("attention_invalid_logits_value {masked}; supported are values up to {MASKED}"));
    }
    let encoder = AudioKind::Conformer(Conformer {
        channels,
        taps: or("conv_kernel_size", 5)?,
        seen: left - 1,
        cap: number("attention_logit_cap", 50.0)?,
        residual: number("residual_weight", 0.5)?,
        bound: number("gradient_clipping", 1e10)?,
        clipped: audio.bool("use_clipped_linears")?.unwrap_or(true),
        output: or("output_proj_dims", 1536)?,
    });
    Ok(Audio {
        depth: or("num_hidden_layers", 12)?,
        hidden_size,
        heads: or("num_attention_heads", 8)?,
        intermediate_size: hidden_size.saturating_mul(4),
        act: activation_of(audio.str("hidden_act")?.unwrap_or("silu"))?,
        bands: channels[0],
        placeholder: token(top, "audio_token_id", 258_881)?,
        encoder,
    })
}
