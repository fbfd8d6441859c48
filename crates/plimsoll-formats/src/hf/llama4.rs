//! The vision encoder of a Llama 4 checkpoint, with the defaults of transformers.

use super::json::Lookup;
use super::pixtral::check_rope;
use super::values::{check_projector, side, token};
use crate::activation::Activation;
use crate::error::{FormatError, quote};
use crate::vision::{Llama4, MediaTokens, Vision, VisionKind};

/// Whether this is a class or `model_type` of Llama 4.
pub(super) fn is(name: &str) -> bool {
    matches!(name, "Llama4ForConditionalGeneration" | "llama4")
}

/// Reads `vision_config` and the keys around it.
pub(super) fn read(vision: &Lookup, top: &Lookup) -> Result<Vision, FormatError> {
    check_rope(vision)?;
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let hidden_act = vision.str("hidden_act")?.unwrap_or("gelu");
    if hidden_act != "gelu" {
        let problem = format!("hidden_act {} in a vision encoder of Llama 4; supported is gelu", quote(hidden_act));
        return Err(FormatError::Unsupported(problem));
    }
    refuse(vision)?;
    let (image, patch) = (side(vision, "image_size", 448)?, side(vision, "patch_size", 14)?);
    let merge = merge(vision.f32("pixel_shuffle_ratio")?.unwrap_or(0.5))?;
    let table_side = image.checked_div(patch).unwrap_or(0);
    if table_side == 0 || table_side * patch != image || !table_side.is_multiple_of(merge) {
        return Err(FormatError::Config(format!(
            "image_size: {image} pixels do not divide into patches of {patch} pixels and tokens of {merge} by {merge} patches"
        )));
    }
    let (hidden_size, intermediate_size) = (or("hidden_size", 768)?, or("intermediate_size", 5632)?);
    if hidden_size.checked_mul(merge * merge) != Some(intermediate_size) {
        return Err(FormatError::Config(format!(
            "intermediate_size: {intermediate_size}, expected the width of a token's {} patches of {hidden_size}",
            merge * merge
        )));
    }
    let widths = [("projector_input_dim", 4096), ("projector_output_dim", 4096), ("vision_output_dim", 7680)];
    let [input, projector_width, output] = widths.map(|(key, default)| or(key, default));
    let (input, projector_width, output) = (input?, projector_width?, output?);
    if [input, output] != [projector_width; 2] {
        return Err(FormatError::Config(format!(
            "projector_input_dim, projector_output_dim, vision_output_dim: {input}, {projector_width} and {output} are not equal"
        )));
    }
    let image = token(top, "image_token_index", token(top, "image_token_id", 200_092)?)?;
    Ok(Vision {
        depth: or("num_hidden_layers", 34)?,
        hidden_size,
        heads: or("num_attention_heads", 16)?,
        intermediate_size,
        act: Activation::Gelu,
        patch,
        merge,
        table_side,
        // The model takes no videos.
        ..Vision::of_images(VisionKind::Llama4(Llama4 { projector_width }), MediaTokens { image, video: image })
    })
}

/// Refuses features that this encoder does not support.
fn refuse(vision: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    if vision.bool("multi_modal_projector_bias")? == Some(true) {
        return unsupported(
            "multi_modal_projector_bias: true in a vision encoder of Llama 4; supported is false".to_owned(),
        );
    }
    if let Some(eps) = vision.f32("norm_eps")?.filter(|eps| *eps != 1e-5) {
        return unsupported(format!("norm_eps {eps} in a vision encoder of Llama 4; supported is 1e-5"));
    }
    if let Some(channels) = vision.size("num_channels")?.filter(|channels| *channels != 3) {
        return unsupported(format!("num_channels {channels} in a vision encoder of Llama 4; supported is 3"));
    }
    match vision.str("vision_feature_select_strategy")?.unwrap_or("default") {
        "default" => check_projector(vision),
        other => unsupported(format!("vision_feature_select_strategy {}; supported is default", quote(other))),
    }
}

/// Patches per side of a token.
fn merge(ratio: f32) -> Result<usize, FormatError> {
    let merge = (1.0 / ratio).round();
    match (1.0..=16.0).contains(&merge) && merge * ratio == 1.0 {
        true => Ok(merge as usize),
        false => {
            let problem = format!("pixel_shuffle_ratio: {ratio}, expected one divided by a whole number up to 16");
            Err(FormatError::Config(problem))
        }
    }
}
