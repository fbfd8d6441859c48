//! Metadata of an `mmproj` file → the encoders' configurations, with the conventions of llama.cpp's converter.
//!
//! Some sizes come from the tensors, because old files have wrong numbers in the metadata.

use super::parts::{
    AudioEncoder, EPS, File, ImageEncoder, Read, Tensors, feed_forward, fits, layers, patch, processor, table_side,
    token,
};
use super::{Refusal, gemma, gemma_audio, idefics3, intern, lfm2, llama4, names, pixtral, qwen_audio};
use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::directory::Entry;
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::gguf::meta::{GgufMeta, GgufValue};
use crate::vision::{MediaTokens, RopeSections, Vision, VisionKind};

/// Reads a family's vision encoder.
type Reader = fn(&File<'_>) -> Result<ImageEncoder, Refusal>;
/// Reads a family's audio encoder.
type AudioReader = fn(&File<'_>) -> Result<AudioEncoder, Refusal>;
/// A type of projector: its name, the function that reads the encoder, and the architectures of its models.
type Row<R> = (&'static str, R, &'static [&'static str]);

/// Vision encoders.
const PROJECTORS: [Row<Reader>; 11] = [
    ("qwen2vl_merger", |file| qwen(VisionKind::Qwen2, file), &["qwen2vl"]),
    (
        "qwen2.5vl_merger",
        |file| qwen(beside(file, "qwen2a", VisionKind::Omni2_5, VisionKind::Qwen2_5), file),
        &["qwen2vl"],
    ),
    ("qwen2.5o", |file| qwen(VisionKind::Omni2_5, file), &["qwen2vl"]),
    (
        "qwen3vl_merger",
        |file| qwen(beside(file, "qwen3a", VisionKind::Omni, VisionKind::Qwen3), file),
        &["qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"],
    ),
    ("gemma3", gemma::siglip, &["gemma3"]),
    ("gemma4v", gemma::gemma4, &["gemma4"]),
    ("lfm2", lfm2::read, &["lfm2", "lfm2moe"]),
    ("idefics3", idefics3::read, &["llama"]),
    ("pixtral", pixtral::read, &["llama", "mistral3"]),
    ("llama4", llama4::read, &["llama4"]),
    ("internvl", intern::read, &["qwen2", "qwen3", "qwen3moe", "llama"]),
];

/// Audio encoders.
const AUDIO_PROJECTORS: [Row<AudioReader>; 4] = [
    ("qwen2.5o", qwen_audio::chunks, &["qwen2vl"]),
    // Qwen2-Audio has the same name, but its architecture is not `qwen2vl`.
    ("qwen2a", qwen_audio::chunks, &["qwen2vl"]),
    ("qwen3a", qwen_audio::windows, &["qwen3vl", "qwen3vlmoe"]),
    ("gemma4a", gemma_audio::read, &["gemma4"]),
];

/// Side of Qwen2.5-VL's windows in pixels. Converters do not write it.
const WINDOW: usize = 112;

/// Reads the encoders that `meta` and `entries` describe, for a model with this metadata and configuration.
pub(super) fn read(
    meta: &GgufMeta,
    entries: &[Entry],
    model: &GgufMeta,
    config: &ModelConfig,
) -> Result<Read, Refusal> {
    let types = Types::of(meta)?;
    let file = |prefix| File {
        keys: Keys { meta, prefix },
        tensors: Tensors(entries),
        model,
        config,
        audio: types.audio.map(|(_, name)| name),
        sees: types.images.is_some(),
    };
    let images = types.images.map(|(key, name)| {
        let known = known(&PROJECTORS, name).ok_or_else(|| unknown(key, name, &PROJECTORS))?;
        for_model(known, key, model)?(&file("clip.vision"))
    });
    let audio = types.audio.map(|(key, name)| match known(&AUDIO_PROJECTORS, name) {
        Some(known) => for_model(known, key, model)?(&file("clip.audio")).map(Some),
        // An audio encoder of an unknown type is left out if there is a vision encoder.
        None if types.images.is_some() => Ok(None),
        None => Err(unknown(key, name, &AUDIO_PROJECTORS)),
    });
    Ok(Read { images: images.transpose()?, audio: audio.transpose()?.flatten() })
}

/// The projector types that a file names, for images and for audio, each with its key.
struct Types<'a> {
    images: Option<(&'static str, &'a str)>,
    audio: Option<(&'static str, &'a str)>,
}

impl<'a> Types<'a> {
    /// Returns the types; at least one is present.
    fn of(meta: &'a GgufMeta) -> Result<Self, Refusal> {
        let [images, audio] = ["clip.has_vision_encoder", "clip.has_audio_encoder"].map(|key| meta.bool(key));
        // The common key's name applies to each encoder without a key of its kind.
        let named = |key: &'static str| meta.str(key).map(|name| (key, name));
        let both = named("clip.projector_type");
        let own = named("clip.audio.projector_type");
        let audio_type = match audio {
            Some(true) => own.or(both),
            Some(false) => None,
            None => own,
        };
        // Converters leave out the key of an encoder that the file lacks. Files of one encoder may have neither key.
        if images.unwrap_or(audio != Some(true)) {
            let images = named("clip.vision.projector_type").or(both);
            let missing = || FormatError::Gguf("clip.projector_type is missing".to_owned());
            return Ok(Types { images: Some(images.ok_or_else(missing)?), audio: audio_type });
        }
        match (audio_type, audio) {
            (Some(_), _) => Ok(Types { images: None, audio: audio_type }),
            (None, Some(true)) => Err(FormatError::Gguf("clip.audio.projector_type is missing".to_owned()).into()),
            _ => {
                let next = "media need a file with an encoder";
                Err(Refusal::Unfit(format!(
                    "it holds no vision encoder (clip.has_vision_encoder is false) and no audio encoder; {next}"
                )))
            }
        }
    }
}

/// The row with this name.
fn known<R: Copy>(table: &[Row<R>], name: &str) -> Option<Row<R>> {
    table.iter().find(|(known, ..)| *known == name).copied()
}

/// The refusal of a projector type that is not in the table.
fn unknown<R>(key: &str, name: &str, table: &[Row<R>]) -> Refusal {
    let supported = table.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(", ");
    Refusal::Unfit(format!("{key} is {}; supported are {supported}", quote(name)))
}

/// Returns the function that reads the encoder, if the encoder is for this model.
fn for_model<R>((name, reader, architectures): Row<R>, key: &str, model: &GgufMeta) -> Result<R, Refusal> {
    let own = model.str("general.architecture").unwrap_or_default();
    match architectures.contains(&own) {
        true => Ok(reader),
        false => Err(Refusal::Unfit(format!(
            "{key} {name:?} is for the architectures {}, the model's is {}: use the mmproj file of the same model",
            architectures.join(", "),
            quote(own)
        ))),
    }
}

/// Returns `with` if the file has an audio encoder of this type, otherwise `alone`.
fn beside(file: &File<'_>, audio: &str, with: VisionKind, alone: VisionKind) -> VisionKind {
    if file.audio == Some(audio) { with } else { alone }
}

/// Time steps per second of video in published models. Converters do not write them.
fn steps_per_second(encoder: VisionKind) -> Option<u32> {
    match encoder {
        VisionKind::Qwen2_5 => Some(2),
        VisionKind::Omni2_5 => Some(25),
        VisionKind::Omni => Some(13),
        _ => None,
    }
}

/// The tokens that stand for images and videos in a prompt.
fn media_tokens(encoder: VisionKind, model: &GgufMeta) -> Result<MediaTokens, Refusal> {
    let [image, video] = match encoder {
        VisionKind::Omni2_5 => ["<|IMAGE|>", "<|VIDEO|>"],
        _ => ["<|image_pad|>", "<|video_pad|>"],
    };
    Ok(MediaTokens { image: token(model, image)?, video: token(model, video)? })
}

/// Reads a Qwen's vision encoder.
fn qwen(encoder: VisionKind, file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    fits(tensors.shape("mm.2.weight")?.first(), config)?;
    let (depth, hidden_size) = layers(keys, &EPS)?;
    let (intermediate_size, swapped) = feed_forward(tensors, hidden_size)?;
    let (channels, patch) = patch(keys, tensors)?;
    let windowed = matches!(encoder, VisionKind::Qwen2_5 | VisionKind::Omni2_5);
    let learned = matches!(encoder, VisionKind::Qwen3 | VisionKind::Omni);
    let (window, full_layers) = if windowed { windows(keys, depth)? } else { (None, Vec::new()) };
    let vision = Vision {
        encoder,
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
        table_side: if learned { table_side(tensors)? } else { 0 },
        deepstack: deepstack(keys, depth, encoder, model)?,
        window,
        full_layers,
        steps_per_second: steps_per_second(encoder),
        tokens: media_tokens(encoder, model)?,
    };
    let (sections, processor) = (Some(sections(model, encoder)?), processor(keys)?);
    Ok(ImageEncoder { vision, sections, processor, swapped, renamed: names::qwen })
}

/// Qwen2.5-VL's windows, and the layers that attend to whole frames even so: from a list, or from their interval.
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

/// The layers with outputs that are also sent to the model's first layers.
fn deepstack(keys: &Keys, depth: usize, encoder: VisionKind, model: &GgufMeta) -> Result<Vec<usize>, Refusal> {
    let key = keys.path("is_deepstack_layers");
    let layers: Vec<usize> = match keys.meta.get(&key) {
        Some(GgufValue::Bools(flags)) if flags.len() == depth => (0..depth).filter(|layer| flags[*layer]).collect(),
        Some(_) => return Err(FormatError::Config(format!("{key} is not a list of {depth} booleans")).into()),
        None => Vec::new(),
    };
    let prefix = model.str("general.architecture").unwrap_or_default();
    let taken = model.u64(&format!("{prefix}.n_deepstack_layers")).unwrap_or(layers.len() as u64);
    // The converter always writes 0 for Qwen3-Omni's text model. The model takes all of the encoder's levels, as in transformers.
    let unsaid = encoder == VisionKind::Omni && taken == 0;
    match unsaid || taken == layers.len() as u64 {
        true => Ok(layers),
        false => Err(Refusal::Unfit(format!(
            "it has {} deepstack levels, the model takes {taken}: use the mmproj file of the same model",
            layers.len()
        ))),
    }
}

/// The shares of time, height and width in the model's rotary frequencies. llama.cpp stores a fourth, which is always empty.
fn sections(model: &GgufMeta, encoder: VisionKind) -> Result<RopeSections, FormatError> {
    let keys = Keys { meta: model, prefix: model.str("general.architecture").unwrap_or_default() };
    let key = keys.path("rope.dimension_sections");
    let wrong = |what: &str| FormatError::Config(format!("{key} {what}; an encoder needs three sizes there"));
    let sizes = model.integers(&key).ok_or_else(|| wrong("is missing or no list of sizes"))?;
    let size = |i: usize| usize::try_from(sizes[i]).unwrap_or(usize::MAX);
    match sizes.len() {
        3 | 4 if sizes[3..].iter().all(|size| *size == 0) => Ok(RopeSections {
            sizes: [size(0), size(1), size(2)],
            interleaved: matches!(encoder, VisionKind::Qwen3 | VisionKind::Omni),
        }),
        _ => Err(wrong("does not hold time, height and width alone")),
    }
}
