//! The encoder of an LFM2-VL checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, check_layer_norm_eps, check_projector, side, token};
use crate::error::FormatError;
use crate::vision::{MediaTokens, Siglip2, Vision, VisionKind};

/// Whether this is a class or `model_type` of LFM2-VL. MLX writes the latter with a hyphen in some files.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Lfm2VlForConditionalGeneration" | "lfm2_vl" | "lfm2-vl")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    check_layer_norm_eps(vision)?;
    check_projector(top)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let flag = |key: &str| top.bool(key).map(|flag| flag.unwrap_or(true));
    let positions = or("num_patches", 256)?;
    let table_side = positions.isqrt();
    if table_side * table_side != positions {
        return Err(FormatError::Config(format!("num_patches: {positions} positions are no square")));
    }
    let image = token(top, "image_token_id", token(top, "image_token_index", 396)?)?;
    let encoder = VisionKind::Siglip2(Siglip2 {
        projector_width: top.size("projector_hidden_size")?.unwrap_or(2560),
        projector_norm: flag("projector_use_layernorm")?,
        projector_bias: flag("projector_bias")?,
    });
    Ok(Vision {
        depth: or("num_hidden_layers", 12)?,
        hidden_size: or("hidden_size", 768)?,
        heads: or("num_attention_heads", 12)?,
        intermediate_size: or("intermediate_size", 3072)?,
        act: activation(vision, "gelu_pytorch_tanh")?,
        channels: or("num_channels", 3)?,
        patch: side(vision, "patch_size", 16)?,
        merge: top.size("downsample_factor")?.unwrap_or(2),
        table_side,
        // The model takes no videos.
        ..Vision::of_images(encoder, MediaTokens { image, video: image })
    })
}
