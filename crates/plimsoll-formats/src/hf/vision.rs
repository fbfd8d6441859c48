//! `vision_config` of a multimodal checkpoint → its encoder, with the defaults of transformers.

use super::audio;
use super::gemma4;
use super::idefics3;
use super::intern;
use super::json::{Lookup, whole};
use super::llama4;
use super::pixtral;
use super::siglip;
use super::siglip2;
use super::values::{activation, side, token};
use crate::activation::Activation;
use crate::bounds::DEPTH_MAX;
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::vision::{MediaTokens, RopeSections, Vision, VisionKind};

/// Values that transformers assumes for absent keys of the encoder.
struct Defaults {
    encoder: VisionKind,
    depth: usize,
    hidden: usize,
    intermediate: usize,
    patch: usize,
    activation: &'static str,
    deepstack: &'static [usize],
    sections: RopeSections,
    tokens: MediaTokens,
}

const QWEN2_TOKENS: MediaTokens = MediaTokens { image: 151_655, video: 151_656 };
const FOLLOWING: RopeSections = RopeSections { sizes: [16, 24, 24], interleaved: false };

/// Returns the defaults of a class or `model_type`. None for a family without image support here; its text model is served.
fn family(name: &str) -> Option<Defaults> {
    let qwen2 = Defaults {
        encoder: VisionKind::Qwen2,
        depth: 32,
        hidden: 1280,
        intermediate: 5120,
        patch: 14,
        activation: "quick_gelu",
        deepstack: &[],
        sections: FOLLOWING,
        tokens: QWEN2_TOKENS,
    };
    let qwen2_5 = Defaults { hidden: 3584, intermediate: 3420, activation: "silu", ..qwen2 };
    let qwen3 = Defaults {
        encoder: VisionKind::Qwen3,
        depth: 27,
        hidden: 1152,
        intermediate: 4304,
        patch: 16,
        activation: "gelu_pytorch_tanh",
        deepstack: &[],
        ..qwen2
    };
    match name {
        "Qwen2VLForConditionalGeneration" | "qwen2_vl" => Some(qwen2),
        "Qwen2_5_VLForConditionalGeneration" | "qwen2_5_vl" => {
            Some(Defaults { encoder: VisionKind::Qwen2_5, ..qwen2_5 })
        }
        name if audio::is_omni2_5(name) => Some(Defaults { encoder: VisionKind::Omni2_5, ..qwen2_5 }),
        "Qwen3VLForConditionalGeneration" | "qwen3_vl" | "Qwen3VLMoeForConditionalGeneration" | "qwen3_vl_moe" => {
            let sections = RopeSections { sizes: [24, 20, 20], interleaved: true };
            Some(Defaults { deepstack: &[8, 16, 24], sections, ..qwen3 })
        }
        "Qwen3_5ForConditionalGeneration"
        | "qwen3_5"
        | "Qwen3_5MoeForConditionalGeneration"
        | "qwen3_5_moe"
        | "Qwen4ExpForConditionalGeneration"
        | "qwen4_exp" => {
            let tokens = MediaTokens { image: 248_056, video: 248_057 };
            Some(Defaults { sections: RopeSections { sizes: [11, 11, 10], interleaved: true }, tokens, ..qwen3 })
        }
        name if audio::is(name) => {
            let sections = RopeSections { sizes: [24, 20, 20], interleaved: true };
            Some(Defaults { encoder: VisionKind::Omni, deepstack: &[8, 16, 24], sections, ..qwen3 })
        }
        _ => None,
    }
}

/// Adds the encoder to the text model's configuration, if there is one. `name` is the class or `model_type`.
pub(super) fn add(config: &mut ModelConfig, top: &Lookup, text: &Lookup, name: &str) -> Result<(), FormatError> {
    let Some(vision) = top.object("vision_config")? else { return Ok(()) };
    if let Some(encoder) = of_own_family(&vision, top, text, name)? {
        config.vision = Some(encoder);
        return Ok(());
    }
    // Without a class, `name` is the text model's `model_type`.
    let defaults = match family(name) {
        Some(defaults) => Some(defaults),
        None => top.str("model_type")?.and_then(family),
    };
    let Some(defaults) = defaults else { return Ok(()) };
    let encoder = read(&vision, top, &defaults)?;
    let out = match defaults.encoder {
        // Qwen2-VL's `hidden_size` is the width of the output.
        VisionKind::Qwen2 => vision.size("hidden_size")?,
        _ => vision.size("out_hidden_size")?,
    };
    if out.is_some_and(|out| out != config.hidden_size) {
        let (out, hidden) = (out.unwrap_or_default(), config.hidden_size);
        return Err(FormatError::Config(format!("a vision encoder of width {out} for a model of width {hidden}")));
    }
    config.rope_sections = Some(sections(text, &defaults)?);
    config.vision = Some(encoder);
    Ok(())
}

/// Reads the encoder of a family with a separate module. None for the Qwens, and for families without encoders.
fn of_own_family(vision: &Lookup, top: &Lookup, text: &Lookup, name: &str) -> Result<Option<Vision>, FormatError> {
    let read = match () {
        () if intern::is(name) => intern::read(vision, top),
        () if llama4::is(name) || llama4::is(top.str("model_type")?.unwrap_or_default()) => llama4::read(vision, top),
        () if siglip::is(name) => siglip::read(vision, top),
        () if idefics3::is(name) => idefics3::read(vision, top),
        () if pixtral::is(name) && pixtral::has_encoder(vision) => pixtral::read(vision, top),
        () if siglip2::is(name) || siglip2::is(top.str("model_type")?.unwrap_or_default()) => {
            siglip2::read(vision, top)
        }
        () if gemma4::is(name) => gemma4::read(vision, top, text),
        () if gemma4::is_unified(name) => gemma4::read_unified(vision, top, text),
        () => return Ok(None),
    };
    read.map(Some)
}

fn read(vision: &Lookup, top: &Lookup, defaults: &Defaults) -> Result<Vision, FormatError> {
    let or = |key: &str, default: usize| vision.size(key).map(|size| size.unwrap_or(default));
    let qwen2 = defaults.encoder == VisionKind::Qwen2;
    let hidden_size = or(if qwen2 { "embed_dim" } else { "hidden_size" }, defaults.hidden)?;
    let intermediate_size = match (qwen2, vision.f32("mlp_ratio")?) {
        (true, ratio) => (hidden_size as f32 * ratio.unwrap_or(4.0)) as usize,
        (false, _) => or("intermediate_size", defaults.intermediate)?,
    };
    let positions = match defaults.encoder {
        VisionKind::Qwen3 | VisionKind::Omni => or("num_position_embeddings", 2304)?,
        _ => 0,
    };
    let table_side = positions.isqrt();
    if table_side * table_side != positions {
        return Err(FormatError::Config(format!("num_position_embeddings: {positions} positions are no square")));
    }
    let windows = matches!(defaults.encoder, VisionKind::Qwen2_5 | VisionKind::Omni2_5);
    Ok(Vision {
        encoder: defaults.encoder,
        depth: or("depth", defaults.depth)?,
        hidden_size,
        heads: or("num_heads", 16)?,
        intermediate_size,
        act: act(vision, defaults.activation)?,
        channels: match vision.size("in_channels")? {
            Some(channels) => channels,
            None => or("in_chans", 3)?,
        },
        patch: side(vision, "patch_size", defaults.patch)?,
        temporal: side(vision, "temporal_patch_size", 2)?,
        merge: or("spatial_merge_size", 2)?,
        table_side,
        deepstack: layers(vision, "deepstack_visual_indexes", defaults.deepstack)?,
        window: if windows { Some(or("window_size", 112)?) } else { None },
        full_layers: if windows { layers(vision, "fullatt_block_indexes", &[7, 15, 23, 31])? } else { Vec::new() },
        steps_per_second: match defaults.encoder {
            VisionKind::Qwen2_5 => Some(or("tokens_per_second", 4)?.min(1 << 20) as u32),
            VisionKind::Omni | VisionKind::Omni2_5 => {
                Some(top.size("position_id_per_seconds")?.unwrap_or(25).min(1 << 20) as u32)
            }
            _ => None,
        },
        tokens: MediaTokens {
            image: token(top, "image_token_id", token(top, "image_token_index", defaults.tokens.image)?)?,
            video: token(top, "video_token_id", token(top, "video_token_index", defaults.tokens.video)?)?,
        },
    })
}

fn act(vision: &Lookup, default: &str) -> Result<Activation, FormatError> {
    match vision.str("hidden_act")?.unwrap_or(default) {
        "quick_gelu" => Ok(Activation::GeluQuick),
        _ => activation(vision, default),
    }
}

/// A list of at most `DEPTH_MAX` layers.
fn layers(vision: &Lookup, key: &str, default: &[usize]) -> Result<Vec<usize>, FormatError> {
    let Some(list) = vision.get(key) else { return Ok(default.to_vec()) };
    let layer = |value| whole(value).and_then(|layer| usize::try_from(layer).ok());
    let list = list.as_array().filter(|list| list.len() <= DEPTH_MAX);
    let layers = list.and_then(|list| list.iter().map(layer).collect::<Option<Vec<usize>>>());
    layers.ok_or_else(|| FormatError::Config(format!("{key} is not a short list of layers")))
}

/// `mrope_section` of the text model, from either place of the rotary parameters. As in transformers, the family decides whether the
/// sections take turns.
fn sections(text: &Lookup, defaults: &Defaults) -> Result<RopeSections, FormatError> {
    for place in ["rope_parameters", "rope_scaling"] {
        let Some(given) = text.object(place)?.and_then(|rope| rope.get("mrope_section")) else { continue };
        let size = |value| whole(value).and_then(|size| usize::try_from(size).ok());
        let sizes = given.as_array().and_then(|sizes| sizes.iter().map(size).collect::<Option<Vec<usize>>>());
        let sizes = sizes.and_then(|sizes| <[usize; 3]>::try_from(sizes).ok());
        let sizes =
            sizes.ok_or_else(|| FormatError::Config("mrope_section is not a list of three sizes".to_owned()))?;
        return Ok(RopeSections { sizes, ..defaults.sections });
    }
    Ok(defaults.sections)
}
