//! The metadata and tensors that every `mmproj` file has in the same form.

use super::{Processor, Refusal};
use crate::activation::Activation;
use crate::audio::Audio;
use crate::bounds::{DEPTH_MAX, within};
use crate::config::ModelConfig;
use crate::directory::Entry;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::gguf::meta::GgufMeta;
use crate::vision::{MediaTokens, RopeSections, Vision, VisionKind};

/// The epsilon of the norms of most encoders.
pub(super) const EPS: [f32; 1] = [1e-6];
/// The key of the patches per side of a token, in encoders of single images.
pub(super) const SCALE_FACTOR: &str = "projector.scale_factor";

/// An `mmproj` file, and the model that it is for.
pub(super) struct File<'a> {
    pub(super) keys: Keys<'a>,
    pub(super) tensors: Tensors<'a>,
    pub(super) model: &'a GgufMeta,
    pub(super) config: &'a ModelConfig,
    /// The type of the audio encoder, if the file names one.
    pub(super) audio: Option<&'a str>,
    /// Whether the file has a vision encoder.
    pub(super) sees: bool,
}

/// The encoders in a file: a vision encoder, an audio encoder, or both.
pub(super) struct Read {
    pub(super) images: Option<ImageEncoder>,
    pub(super) audio: Option<AudioEncoder>,
}

/// The audio encoder of a file.
pub(super) struct AudioEncoder {
    pub(super) audio: Audio,
    /// Returns the canonical name of a tensor.
    pub(super) renamed: fn(&str) -> Option<String>,
}

/// The vision encoder of a file.
pub(super) struct ImageEncoder {
    pub(super) vision: Vision,
    /// The sections of the model's positions in time, height and width, if it has them.
    pub(super) sections: Option<RopeSections>,
    pub(super) processor: Processor,
    /// Whether the names of the two feed-forward projections are swapped, as in files of old converters.
    pub(super) swapped: bool,
    /// Returns the canonical name of a tensor from the encoder, `swapped` and the name in the file.
    pub(super) renamed: fn(&Vision, bool, &str) -> Option<String>,
}

/// The differences between encoders of single images.
pub(super) struct Own {
    pub(super) encoder: VisionKind,
    pub(super) act: Activation,
    pub(super) merge: usize,
    pub(super) table_side: usize,
    /// The token that stands for an image.
    pub(super) image: u32,
    /// As in [`ImageEncoder`].
    pub(super) renamed: fn(&Vision, bool, &str) -> Option<String>,
}

/// Checks that the encoder's vectors are as wide as the model's.
pub(super) fn fits(width: Option<&usize>, config: &ModelConfig) -> Result<(), Refusal> {
    let (width, hidden) = (width.copied().unwrap_or(0), config.hidden_size);
    match width == hidden {
        true => Ok(()),
        false => Err(Refusal::Unfit(format!(
            "its vectors have {width} numbers, the model's {hidden}: use the mmproj file of the same model"
        ))),
    }
}

/// Returns the number of layers, and the width of the residual stream. Refuses norms whose epsilon is not in `supported`.
pub(super) fn layers(keys: &Keys, supported: &[f32]) -> Result<(usize, usize), Refusal> {
    let depth = keys.need("block_count")?;
    within("vision layers", depth, DEPTH_MAX)?;
    let eps = keys.f32("attention.layer_norm_epsilon").unwrap_or(supported[0]);
    if supported.iter().all(|known| (eps - known).abs() > known / 1e3) {
        let supported = supported.iter().map(f32::to_string).collect::<Vec<_>>().join(" or ");
        let what = format!("attention.layer_norm_epsilon {eps} in a vision encoder; supported is {supported}");
        return Err(Refusal::Unfit(what));
    }
    Ok((depth, keys.need("embedding_length")?))
}

/// Returns the colours of a pixel, and the side of a patch in pixels.
pub(super) fn patch(keys: &Keys, tensors: &Tensors) -> Result<(usize, usize), FormatError> {
    let patches = tensors.shape("v.patch_embd.weight")?;
    match *patches {
        [_, channels, _, patch] => Ok((channels, patch)),
        // The weight is a matrix, not a convolution, for three colours.
        [_, width] => match keys.need("patch_size")? {
            patch if patch.checked_mul(patch).and_then(|pixels| pixels.checked_mul(3)) == Some(width) => Ok((3, patch)),
            patch => {
                let what = format!("v.patch_embd.weight has {width} columns for patches of {patch} by {patch} pixels");
                Err(FormatError::Config(format!("{what} in three colours")))
            }
        },
        _ => Err(FormatError::Gguf(format!("v.patch_embd.weight has shape {patches:?}"))),
    }
}

/// Reads the preparation of images.
pub(super) fn processor(keys: &Keys) -> Result<Processor, FormatError> {
    Ok(Processor {
        mean: colours(keys, "image_mean")?,
        std: colours(keys, "image_std")?,
        min_pixels: keys.size("image_min_pixels")?.map(|pixels| pixels as u64),
        max_pixels: keys.size("image_max_pixels")?.map(|pixels| pixels as u64),
        longest: keys.size("preproc_image_size")?.map(|pixels| pixels as u64),
        side: keys.size("image_size")?.map(|pixels| pixels as u64),
        tiles: [keys.size("preproc_min_tiles")?, keys.size("preproc_max_tiles")?].map(|tiles| tiles.map(|n| n as u64)),
    })
}

/// The tensors of the file by their names in it.
pub(super) struct Tensors<'a>(pub(super) &'a [Entry]);

impl Tensors<'_> {
    /// Whether the file has a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|entry| entry.name == name)
    }

    /// The shape of a required tensor.
    pub(super) fn shape(&self, name: &str) -> Result<&[usize], FormatError> {
        let entry = self.0.iter().find(|entry| entry.name == name);
        let entry = entry.ok_or_else(|| FormatError::Gguf(format!("tensor {name:?} is missing")))?;
        Ok(&entry.info.shape)
    }
}

/// Returns the width of the feed-forward parts, and whether their names are swapped. Files of Qwen2-VL have another model's width in the
/// metadata.
pub(super) fn feed_forward(tensors: &Tensors, hidden: usize) -> Result<(usize, bool), FormatError> {
    let (up, down) = (tensors.shape("v.blk.0.ffn_up.weight")?, tensors.shape("v.blk.0.ffn_down.weight")?);
    let swapped = down.last() == Some(&hidden) && up.last() != Some(&hidden);
    Ok((if swapped { down[0] } else { up[0] }, swapped))
}

/// Returns the patches per side of a token, which divide `side` patches; `default` if the file has no value.
pub(super) fn scale(keys: &Keys, side: usize, default: usize) -> Result<usize, FormatError> {
    let merge = keys.size(SCALE_FACTOR)?.unwrap_or(default);
    match merge > 0 && side.is_multiple_of(merge) {
        true => Ok(merge),
        false => {
            let key = keys.path(SCALE_FACTOR);
            Err(FormatError::Config(format!("{key} is {merge}, which does not divide {side} patches")))
        }
    }
}

/// Positions per side of the learned table.
pub(super) fn table_side(tensors: &Tensors) -> Result<usize, FormatError> {
    let shape = tensors.shape("v.position_embd.weight")?;
    let positions = shape[0];
    let side = positions.isqrt();
    match side * side == positions {
        true => Ok(side),
        false => Err(FormatError::Config(format!("v.position_embd.weight: {positions} positions are no square"))),
    }
}

/// Three numbers, one for each colour.
fn colours(keys: &Keys, key: &str) -> Result<Option<[f32; 3]>, FormatError> {
    let path = keys.path(key);
    if keys.meta.get(&path).is_none() {
        return Ok(None);
    }
    let numbers = keys.meta.f32s(&path).and_then(|numbers| <[f32; 3]>::try_from(numbers).ok());
    let numbers = numbers.filter(|numbers| numbers.iter().all(|number| number.is_finite()));
    numbers.map(Some).ok_or_else(|| FormatError::Config(format!("{path} is not a list of three numbers")))
}

/// The id of a token that stands for media.
pub(super) fn token(model: &GgufMeta, name: &str) -> Result<u32, Refusal> {
    let tokens = model.strings("tokenizer.ggml.tokens");
    let id = tokens.and_then(|tokens| tokens.iter().position(|token| token == name));
    id.and_then(|id| u32::try_from(id).ok())
        .ok_or_else(|| Refusal::Unfit(format!("the model's vocabulary lacks the token {name}, which stands for media")))
}

/// Reads the values that all encoders of single images have, and the family's values from `own`.
pub(super) fn of_images(
    File { keys, tensors, .. }: &File<'_>,
    eps: &[f32],
    own: impl FnOnce() -> Result<Own, Refusal>,
) -> Result<ImageEncoder, Refusal> {
    let (depth, hidden_size) = layers(keys, eps)?;
    let (intermediate_size, swapped) = feed_forward(tensors, hidden_size)?;
    let (channels, patch) = patch(keys, tensors)?;
    let Own { encoder, act, merge, table_side, image, renamed } = own()?;
    let vision = Vision {
        depth,
        hidden_size,
        heads: keys.need("attention.head_count")?,
        intermediate_size,
        act,
        channels,
        patch,
        merge,
        table_side,
        ..Vision::of_images(encoder, MediaTokens { image, video: image })
    };
    Ok(ImageEncoder { vision, sections: None, processor: processor(keys)?, swapped, renamed })
}

/// Splits a name after `v.blk.` into the layer's number, the tensor's part and its leaf. If `swapped`, the names of the two feed-forward
/// projections are exchanged.
pub(super) fn of_layer(swapped: bool, name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.split_once('.')?;
    let (part, leaf) = rest.rsplit_once('.')?;
    let part = match part {
        "ffn_up" if swapped => "ffn_down",
        "ffn_down" if swapped => "ffn_up",
        part => part,
    };
    Some((layer.parse().ok()?, part, leaf))
}

/// The canonical name of a tensor of SigLIP, without its projector.
pub(super) fn siglip_name(swapped: bool, name: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("v.blk.") {
        let (layer, part, leaf) = of_layer(swapped, name)?;
        return Some(format!("visual.encoder.layers.{layer}.{}", siglip_part(part, leaf)?));
    }
    let known = match name {
        "v.patch_embd.weight" => "embeddings.patch_embedding.weight",
        "v.patch_embd.bias" => "embeddings.patch_embedding.bias",
        "v.position_embd.weight" => "embeddings.position_embedding.weight",
        "v.post_ln.weight" => "post_layernorm.weight",
        "v.post_ln.bias" => "post_layernorm.bias",
        _ => return None,
    };
    Some(format!("visual.{known}"))
}

fn siglip_part(part: &str, leaf: &str) -> Option<String> {
    let part = match part {
        "ln1" => "layer_norm1",
        "ln2" => "layer_norm2",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.out_proj",
        "ffn_up" => "mlp.fc1",
        "ffn_down" => "mlp.fc2",
        _ => return None,
    };
    leaved(part, leaf)
}

/// The name of a part's weight or bias.
pub(super) fn leaved(part: &str, leaf: &str) -> Option<String> {
    ["weight", "bias"].contains(&leaf).then(|| format!("{part}.{leaf}"))
}

/// Patches per side of a tile, from the shape of the table of positions, which has one more row for the class row.
pub(super) fn side(shape: &[usize]) -> Result<usize, FormatError> {
    let rows = shape.len().checked_sub(2).map_or(0, |at| shape[at]);
    let side = rows.saturating_sub(1).isqrt();
    match rows == side * side + 1 {
        true => Ok(side),
        false => Err(FormatError::Config(format!(
            "v.position_embd.weight: {rows} rows are no square of positions and a class row"
        ))),
    }
}
