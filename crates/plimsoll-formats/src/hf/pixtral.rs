//! The encoder of a Mistral 3 or Ministral 3 checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, check_projector, side, token};
use crate::error::{FormatError, quote};
use crate::vision::{MediaTokens, Pixtral, Vision, VisionKind};

/// Whether this is a class or `model_type` of Mistral 3.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Mistral3ForConditionalGeneration" | "mistral3")
}

/// Whether the encoder is Pixtral's.
pub(super) fn has_encoder(vision: &Lookup) -> bool {
    vision.str("model_type").is_ok_and(|kind| kind.unwrap_or("pixtral") == "pixtral")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    check_rope(vision)?;
    check_projector(top)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let (hidden_size, heads) = (or("hidden_size", 1024)?, or("num_attention_heads", 16)?);
    if let Some(head_dim) = vision.size("head_dim")?.filter(|head_dim| head_dim.checked_mul(heads) != Some(hidden_size))
    {
        return Err(FormatError::Unsupported(format!(
            "{heads} vision heads of {head_dim} elements in an encoder of width {hidden_size}; supported are heads that fill it"
        )));
    }
    let image = token(top, "image_token_index", token(top, "image_token_id", 10)?)?;
    let encoder = VisionKind::Pixtral(Pixtral {
        projector_bias: top.bool("multimodal_projector_bias")?.unwrap_or(false),
        rope_interleaved: false,
    });
    Ok(Vision {
        depth: or("num_hidden_layers", 24)?,
        hidden_size,
        heads,
        intermediate_size: or("intermediate_size", 4096)?,
        act: activation(vision, "gelu")?,
        channels: or("num_channels", 3)?,
        patch: side(vision, "patch_size", 14)?,
        merge: top.size("spatial_merge_size")?.unwrap_or(2),
        // The model takes no videos.
        ..Vision::of_images(encoder, MediaTokens { image, video: image })
    })
}

/// Refuses rotary parameters that the encoder does not support.
pub(super) fn check_rope(vision: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    let rope = vision.object("rope_parameters")?;
    let kind = rope.as_ref().map(|rope| rope.str("rope_type")).transpose()?.flatten();
    if let Some(other) = kind.filter(|kind| !["axial", "default"].contains(kind)) {
        return unsupported(format!("rope_type {} in a vision encoder; supported is axial", quote(other)));
    }
    let theta = rope.as_ref().map(|rope| rope.f32("rope_theta")).transpose()?.flatten();
    if let Some(theta) = theta.or(vision.f32("rope_theta")?).filter(|theta| *theta != 10_000.0) {
        return unsupported(format!("rope_theta {theta} in a vision encoder; supported is 10000"));
    }
    Ok(())
}
