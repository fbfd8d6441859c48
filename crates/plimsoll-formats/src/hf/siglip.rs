//! The encoder of a Gemma 3 checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, check_layer_norm_eps, side, token};
use crate::error::FormatError;
use crate::vision::{MediaTokens, Vision, VisionKind};

/// Whether this is a class or `model_type` of Gemma 3.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Gemma3ForConditionalGeneration" | "gemma3")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    check_layer_norm_eps(vision)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let (image, patch) = (side(vision, "image_size", 224)?, side(vision, "patch_size", 16)?);
    let tokens = top.size("mm_tokens_per_image")?.unwrap_or(256);
    let per_side = image.checked_div(patch).unwrap_or(0);
    let merge = per_side.checked_div(tokens.isqrt()).unwrap_or(0);
    if tokens.isqrt().pow(2) != tokens || merge * tokens.isqrt() != per_side || per_side * patch != image {
        return Err(FormatError::Config(format!(
            "mm_tokens_per_image: {tokens}; an image of {image} pixels in patches of {patch} pixels does not divide into so many equal squares"
        )));
    }
    let image = token(top, "image_token_index", token(top, "image_token_id", 262_144)?)?;
    let encoder = VisionKind::Siglip;
    Ok(Vision {
        depth: or("num_hidden_layers", 12)?,
        hidden_size: or("hidden_size", 768)?,
        heads: or("num_attention_heads", 12)?,
        intermediate_size: or("intermediate_size", 3072)?,
        act: activation(vision, "gelu_pytorch_tanh")?,
        channels: or("num_channels", 3)?,
        patch,
        merge,
        table_side: per_side,
        // The model takes no videos.
        ..Vision::of_images(encoder, MediaTokens { image, video: image })
    })
}
