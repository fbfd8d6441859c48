//! The tower of an LFM2-VL checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, side, token};
use crate::error::{FormatError, quote};
use crate::vision::{MediaTokens, Siglip2, Tower, Vision};

/// The class, or `model_type`; MLX has written the latter with a hyphen.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Lfm2VlForConditionalGeneration" | "lfm2_vl" | "lfm2-vl")
}

/// Reads `vision_config` and what stands around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    refuse(vision, top)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let flag = |key: &str| top.bool(key).map(|flag| flag.unwrap_or(true));
    let positions = or("num_patches", 256)?;
    let table_side = positions.isqrt();
    if table_side * table_side != positions {
        return Err(FormatError::Config(format!("num_patches: {positions} positions are no square")));
    }
    let image = token(top, "image_token_id", token(top, "image_token_index", 396)?)?;
    Ok(Vision {
        tower: Tower::Siglip2(Siglip2 {
            projector_width: top.size("projector_hidden_size")?.unwrap_or(2560),
            projector_norm: flag("projector_use_layernorm")?,
            projector_bias: flag("projector_bias")?,
        }),
        depth: or("num_hidden_layers", 12)?,
        hidden_size: or("hidden_size", 768)?,
        heads: or("num_attention_heads", 12)?,
        intermediate_size: or("intermediate_size", 3072)?,
        act: activation(vision, "gelu_pytorch_tanh")?,
        channels: or("num_channels", 3)?,
        patch: side(vision, "patch_size", 16)?,
        temporal: 1,
        merge: top.size("downsample_factor")?.unwrap_or(2),
        table_side,
        deepstack: Vec::new(),
        window: None,
        full_layers: Vec::new(),
        steps_per_second: None,
        // There are no videos.
        tokens: MediaTokens { image, video: image },
    })
}

/// What no code here does.
fn refuse(vision: &Lookup, top: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    if let Some(eps) = vision.f32("layer_norm_eps")?.filter(|eps| *eps != 1e-6) {
        return unsupported(format!("layer_norm_eps {eps} in a vision tower; supported is 1e-6"));
    }
    if top.get("vision_feature_layer").is_some_and(|layer| layer.as_i64() != Some(-1)) {
        return unsupported("vision_feature_layer other than -1".to_owned());
    }
    match top.str("projector_hidden_act")?.unwrap_or("gelu") {
        "gelu" => Ok(()),
        other => unsupported(format!("projector_hidden_act {}; supported is gelu", quote(other))),
    }
}
