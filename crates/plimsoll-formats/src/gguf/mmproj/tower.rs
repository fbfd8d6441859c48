//! Metadata of an `mmproj` file → the vision encoder's configuration, with the conventions of llama.cpp's converter.
//!
//! Some sizes are read off the tensors, because old files have other numbers in the metadata.

use super::parts::{EPS, File, Read, Tensors, feed_forward, fits, layers, patch, processor, table_side, token};
use super::{Refusal, gemma, idefics3, intern, lfm2, llama4, names, pixtral};
use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::directory::Entry;
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::gguf::meta::{GgufMeta, GgufValue};
use crate::vision::{MediaTokens, RopeSections, Tower, Vision};

/// Reads a family's encoder.
type Reader = fn(&File<'_>) -> Result<Read, Refusal>;

/// One row a type of projector: what reads the encoder, and the architectures of the models that it belongs to.
const PROJECTORS: [(&str, Reader, &[&str]); 10] = [
    ("qwen2vl_merger", |file| qwen(Tower::Qwen2, file), &["qwen2vl"]),
    ("qwen2.5vl_merger", |file| qwen(Tower::Qwen2_5, file), &["qwen2vl"]),
    ("qwen3vl_merger", |file| qwen(Tower::Qwen3, file), &["qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"]),
    ("gemma3", gemma::siglip, &["gemma3"]),
    ("gemma4v", gemma::gemma4, &["gemma4"]),
    ("lfm2", lfm2::read, &["lfm2", "lfm2moe"]),
    ("idefics3", idefics3::read, &["llama"]),
    ("pixtral", pixtral::read, &["llama", "mistral3"]),
    ("llama4", llama4::read, &["llama4"]),
    ("internvl", intern::read, &["qwen2", "qwen3", "qwen3moe", "llama"]),
];

/// Side in pixels of Qwen2.5-VL's windows. Converters do not write it.
const WINDOW: usize = 112;
/// Steps of time to a second of video in every published Qwen2.5-VL. Converters do not write it.
const STEPS_PER_SECOND: u32 = 2;

/// Reads the encoder that `meta` and `entries` describe, for a model of this metadata and configuration.
pub(super) fn read(
    meta: &GgufMeta,
    entries: &[Entry],
    model: &GgufMeta,
    config: &ModelConfig,
) -> Result<Read, Refusal> {
    let read = reader(meta, model)?;
    read(&File { keys: Keys { meta, prefix: "clip.vision" }, tensors: Tensors(entries), model, config })
}

/// Reads the encoder of a Qwen.
fn qwen(tower: Tower, file: &File<'_>) -> Result<Read, Refusal> {
    let File { keys, tensors, model, config } = file;
    fits(tensors.shape("mm.2.weight")?.first(), config)?;
    let (depth, hidden_size) = layers(keys, &EPS)?;
    let (intermediate_size, swapped) = feed_forward(tensors, hidden_size)?;
    let (channels, patch) = patch(keys, tensors)?;
    let (window, full_layers) = if tower == Tower::Qwen2_5 { windows(keys, depth)? } else { (None, Vec::new()) };
    let vision = Vision {
        tower,
        depth,
        hidden_size,
        heads: keys.need("attention.head_count")?,
        intermediate_size,
        act: match (keys.meta.bool("clip.use_silu"), keys.meta.bool("clip.use_gelu")) {
            (Some(true), _) => Activation::Silu,
            (_, Some(true)) => Activation::GeluTanh,
            _ => Activation::GeluQuick,
        },
        channels,
        patch,
        temporal: 2,
        merge: keys.size("spatial_merge_size")?.unwrap_or(2),
        table_side: if tower == Tower::Qwen3 { table_side(tensors)? } else { 0 },
        deepstack: deepstack(keys, depth, model)?,
        window,
        full_layers,
        steps_per_second: (tower == Tower::Qwen2_5).then_some(STEPS_PER_SECOND),
        tokens: MediaTokens { image: token(model, "<|image_pad|>")?, video: token(model, "<|video_pad|>")? },
    };
    let (sections, processor) = (Some(sections(model, tower)?), processor(keys)?);
    Ok(Read { vision, audio: None, sections, processor, swapped, renamed: names::qwen })
}

/// What reads the encoder, if it is of a known type and for this model.
fn reader(meta: &GgufMeta, model: &GgufMeta) -> Result<Reader, Refusal> {
    let known = || PROJECTORS.map(|(name, ..)| name).join(", ");
    if meta.bool("clip.has_vision_encoder") == Some(false) {
        let next = "images need a file with a vision encoder";
        return Err(Refusal::Unfit(format!("it holds no vision encoder (clip.has_vision_encoder is false); {next}")));
    }
    let named = meta.str("clip.vision.projector_type").or(meta.str("clip.projector_type"));
    let Some(name) = named else {
        return Err(FormatError::Gguf("clip.projector_type is missing".to_owned()).into());
    };
    let Some((_, reader, architectures)) = PROJECTORS.iter().find(|(known, ..)| *known == name) else {
        return Err(Refusal::Unfit(format!("clip.projector_type is {}; supported are {}", quote(name), known())));
    };
    let own = model.str("general.architecture").unwrap_or_default();
    match architectures.contains(&own) {
        true => Ok(*reader),
        false => Err(Refusal::Unfit(format!(
            "clip.projector_type {name:?} is for the architectures {}, the model's is {}: use the mmproj file of the same model",
            architectures.join(", "),
            quote(own)
        ))),
    }
}

/// Qwen2.5-VL's windows, and the layers that attend to whole frames all the same: a list, or all but every so many.
fn windows(keys: &Keys, depth: usize) -> Result<(Option<usize>, Vec<usize>), FormatError> {
    let listed = keys.meta.integers(&keys.path("wa_layer_indexes"));
    let full = match listed {
        Some(layers) if layers.len() <= depth => layers.iter().map(|layer| *layer as usize).collect(),
        Some(layers) => {
            return Err(FormatError::Config(format!("wa_layer_indexes: {} layers of {depth}", layers.len())));
        }
        None => match keys.need("n_wa_pattern")? {
            0 => return Ok((None, Vec::new())),
            pattern => (0..depth).filter(|layer| (layer + 1).is_multiple_of(pattern)).collect(),
        },
    };
    Ok((Some(keys.size("window_size")?.unwrap_or(WINDOW)), full))
}

/// The layers whose output goes to the model's first layers, too.
fn deepstack(keys: &Keys, depth: usize, model: &GgufMeta) -> Result<Vec<usize>, Refusal> {
    let key = keys.path("is_deepstack_layers");
    let layers: Vec<usize> = match keys.meta.get(&key) {
        Some(GgufValue::Bools(flags)) if flags.len() == depth => (0..depth).filter(|layer| flags[*layer]).collect(),
        Some(_) => return Err(FormatError::Config(format!("{key} is not a list of {depth} booleans")).into()),
        None => Vec::new(),
    };
    let prefix = model.str("general.architecture").unwrap_or_default();
    let taken = model.u64(&format!("{prefix}.n_deepstack_layers")).unwrap_or(layers.len() as u64);
    match taken == layers.len() as u64 {
        true => Ok(layers),
        false => Err(Refusal::Unfit(format!(
            "it has {} deepstack levels, the model takes {taken}: use the mmproj file of the same model",
            layers.len()
        ))),
    }
}

/// The shares of time, height and width in the model's rotary frequencies; the fourth that llama.cpp has is always empty.
fn sections(model: &GgufMeta, tower: Tower) -> Result<RopeSections, FormatError> {
    let keys = Keys { meta: model, prefix: model.str("general.architecture").unwrap_or_default() };
    let key = keys.path("rope.dimension_sections");
    let wrong = |what: &str| FormatError::Config(format!("{key} {what}; an encoder needs three sizes there"));
    let sizes = model.integers(&key).ok_or_else(|| wrong("is missing or no list of sizes"))?;
    let size = |i: usize| usize::try_from(sizes[i]).unwrap_or(usize::MAX);
    match sizes.len() {
        3 | 4 if sizes[3..].iter().all(|size| *size == 0) => {
            Ok(RopeSections { sizes: [size(0), size(1), size(2)], interleaved: tower == Tower::Qwen3 })
        }
        _ => Err(wrong("does not hold time, height and width alone")),
    }
}
