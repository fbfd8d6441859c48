//! The tower of a Gemma 4 checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation_of, side, token};
use crate::error::FormatError;
use crate::vision::{Gemma4, MediaTokens, Tower, Vision};

/// Base of the rotary frequencies of every published tower.
const THETA: f32 = 100.0;

/// The class, or `model_type`.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Gemma4ForConditionalGeneration" | "gemma4")
}

/// Reads `vision_config` and what stands around it.
pub(super) fn read(vision: &Lookup, top: &Lookup, text: &Lookup) -> Result<Vision, FormatError> {
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let flag = |key: &str| vision.bool(key).map(|flag| flag.unwrap_or(false));
    let (hidden_size, heads) = (or("hidden_size", 768)?, or("num_attention_heads", 12)?);
    let (kv_heads, head_dim) = (or("num_key_value_heads", 12)?, or("head_dim", 64)?);
    if kv_heads != heads || head_dim.checked_mul(heads) != Some(hidden_size) {
        return Err(FormatError::Unsupported(format!(
            "a vision tower of {heads} heads and {kv_heads} key heads of {head_dim} elements for a width of {hidden_size}; \
             supported are as many key heads, which fill the width"
        )));
    }
    if let Some(eps) = vision.f32("rms_norm_eps")?.filter(|eps| *eps != 1e-6) {
        return Err(FormatError::Unsupported(format!("rms_norm_eps {eps} in a vision tower; supported is 1e-6")));
    }
    if flag("attention_bias")? {
        return Err(FormatError::Unsupported("attention_bias in a vision tower".to_owned()));
    }
    if let Some(rope) = vision.object("rope_parameters")? {
        let (kind, theta) = (rope.str("rope_type")?.unwrap_or("axial"), rope.f32("rope_theta")?.unwrap_or(THETA));
        // Published files call the axial frequencies the default ones.
        if !["axial", "default"].contains(&kind) || theta != THETA {
            let what =
                format!("rope_type {kind} and rope_theta {theta} in a vision tower; supported are axial and {THETA}");
            return Err(FormatError::Unsupported(what));
        }
    }
    let sees_ahead = text.str("use_bidirectional_attention")? == Some("vision");
    let tower = Tower::Gemma4(Gemma4 {
        positions: or("position_embedding_size", 10_240)?,
        clipped: flag("use_clipped_linears")?,
        standardize: flag("standardize")?,
        sees_ahead,
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
        ..Vision::of_images(
            tower,
            MediaTokens {
                image: token(top, "image_token_id", 258_880)?,
                video: token(top, "video_token_id", 258_884)?,
            },
        )
    })
}
