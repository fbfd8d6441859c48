//! The encoder of an InternVL checkpoint in the form of transformers, with its defaults. `intern_chat` translates the original form.

use super::json::Lookup;
use super::values::{activation, check_layer_norm_eps, check_projector, side, token};
use crate::error::{FormatError, quote};
use crate::vision::{Intern, MediaTokens, Vision, VisionKind};

/// Whether this is a class or `model_type` of InternVL.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "InternVLForConditionalGeneration" | "internvl")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    refuse(vision, top)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let flag = |key: &str, default: bool| vision.bool(key).map(|flag| flag.unwrap_or(default));
    let rms_norm = match vision.str("norm_type")?.unwrap_or("layer_norm") {
        "layer_norm" => false,
        "rms_norm" => true,
        other => return Err(FormatError::Unsupported(format!("norm_type {}", quote(other)))),
    };
    let (image, patch) = (side(vision, "image_size", 448)?, side(vision, "patch_size", 14)?);
    if patch == 0 || !image.is_multiple_of(patch) {
        return Err(FormatError::Config(format!("patches of {patch} pixels do not divide tiles of {image}")));
    }
    let merge = 1.0 / top.f32("downsample_ratio")?.unwrap_or(0.5);
    if !(1.0..=16.0).contains(&merge) || merge.fract() != 0.0 || !(image / patch).is_multiple_of(merge as usize) {
        return Err(FormatError::Config(format!("downsample_ratio: blocks of {merge} patches do not fill a tile")));
    }
    // A frame of a video has the same token as an image.
    let context = token(top, "image_token_id", 151_667)?;
    let encoder = VisionKind::Intern(Intern {
        rms_norm,
        qk_norm: flag("use_qk_norm", false)?,
        attention_bias: flag("attention_bias", false)?,
        last_norm: !flag("use_mean_pooling", true)?,
        tiles: None,
    });
    Ok(Vision {
        depth: or("num_hidden_layers", 24)?,
        hidden_size: or("hidden_size", 1024)?,
        heads: or("num_attention_heads", 16)?,
        intermediate_size: or("intermediate_size", 4096)?,
        act: activation(vision, "gelu")?,
        channels: or("num_channels", 3)?,
        patch,
        merge: merge as usize,
        table_side: image / patch,
        ..Vision::of_images(encoder, MediaTokens { image: context, video: context })
    })
}

/// Refuses features that this encoder does not support.
fn refuse(vision: &Lookup, top: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    if vision.bool("use_absolute_position_embeddings")? == Some(false) {
        return unsupported("use_absolute_position_embeddings: false".to_owned());
    }
    check_layer_norm_eps(vision)?;
    check_projector(top)?;
    match top.str("vision_feature_select_strategy")?.unwrap_or("default") {
        "default" => Ok(()),
        other => unsupported(format!("vision_feature_select_strategy {}", quote(other))),
    }
}
