//! The encoder of an Idefics3 or a SmolVLM checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, check_layer_norm_eps, side, token};
use crate::error::FormatError;
use crate::vision::{MediaTokens, Vision, VisionKind, distinct_places};

/// Whether this is a class or `model_type` of Idefics3 or SmolVLM.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Idefics3ForConditionalGeneration" | "idefics3" | "SmolVLMForConditionalGeneration" | "smolvlm")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    check_layer_norm_eps(vision)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let (image, patch) = (side(vision, "image_size", 224)?, side(vision, "patch_size", 32)?);
    let merge = top.size("scale_factor")?.unwrap_or(2);
    // Pixels beyond the last whole patch are not used.
    let table_side = image.checked_div(patch).unwrap_or(0);
    if table_side == 0 || merge == 0 || !table_side.is_multiple_of(merge) {
        return Err(FormatError::Config(format!(
            "scale_factor: {merge}; an image of {image} pixels in patches of {patch} pixels does not divide into such squares"
        )));
    }
    distinct_places(table_side)?;
    let image = token(top, "image_token_id", 128_257)?;
    let encoder = VisionKind::Idefics3;
    Ok(Vision {
        depth: or("num_hidden_layers", 12)?,
        hidden_size: or("hidden_size", 1152)?,
        heads: or("num_attention_heads", 16)?,
        intermediate_size: or("intermediate_size", 3072)?,
        act: activation(vision, "gelu_pytorch_tanh")?,
        channels: or("num_channels", 3)?,
        patch,
        merge,
        table_side,
        // The model treats frames of a video as images; videos themselves are not supported.
        ..Vision::of_images(encoder, MediaTokens { image, video: image })
    })
}
