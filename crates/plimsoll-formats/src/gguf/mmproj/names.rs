//! Names of an `mmproj` file's tensors → the names in transformers, below `visual.` and `audio.`.

use super::parts::{ImageEncoder, Read};
use super::{Refusal, intern, pixtral, qwen_audio};
use crate::directory::{Entry, Storage};
use crate::error::{FormatError, quote};
use crate::vision::{Vision, VisionKind};

/// The two tensors of the patch embedding: the converter splits the convolution over two frames.
const PATCHES: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];

/// Tensors that are not read: positions are computed, and the vocabulary has the break token's row.
const UNUSED: [&str; 2] = [pixtral::IMG_BREAK, qwen_audio::POSITIONS];

/// A family's names in transformers for the parts of a layer and of a merger.
struct Spelling {
    up: &'static str,
    down: &'static str,
    merger_norm: &'static str,
    merger: [&'static str; 2],
    /// The mergers of inner layers.
    deepstack: &'static str,
}

fn spelling(encoder: VisionKind) -> Spelling {
    let qwen2 = Spelling {
        up: "mlp.fc1",
        down: "mlp.fc2",
        merger_norm: "ln_q",
        merger: ["mlp.0", "mlp.2"],
        deepstack: "merger_list",
    };
    let qwen3 = Spelling { up: "mlp.linear_fc1", down: "mlp.linear_fc2", ..qwen2 };
    match encoder {
        VisionKind::Qwen2_5 | VisionKind::Omni2_5 => Spelling { up: "mlp.up_proj", down: "mlp.down_proj", ..qwen2 },
        VisionKind::Omni => qwen3,
        VisionKind::Qwen3 => Spelling {
            merger_norm: "norm",
            merger: ["linear_fc1", "linear_fc2"],
            deepstack: "deepstack_merger_list",
            ..qwen3
        },
        _ => qwen2,
    }
}

/// Returns the encoders' tensors by canonical name. Tensors of an audio encoder of an unknown type are left out.
pub(super) fn canonical(read: &Read, entries: Vec<Entry>) -> Result<Vec<Entry>, Refusal> {
    let frames = read.images.as_ref().map_or(1, |images| images.vision.temporal);
    let mut named = Vec::with_capacity(entries.len());
    let mut patches = [None, None];
    for mut entry in entries {
        let frame = PATCHES.iter().position(|name| *name == entry.name);
        if let Some(frame) = frame.filter(|_| frames == PATCHES.len()) {
            patches[frame] = Some(entry);
            continue;
        }
        let is_audio = entry.name.starts_with("a.") || entry.name.starts_with("mm.a.");
        if is_audio && read.audio.is_none() || UNUSED.contains(&entry.name.as_str()) {
            continue;
        }
        let Some(name) = renamed(read, is_audio, &entry.name) else {
            let what = format!("tensor {} in an encoder of this type; fetch another mmproj file", quote(&entry.name));
            return Err(FormatError::Unsupported(what).into());
        };
        entry.name = name;
        intern::shaped(&mut entry);
        qwen_audio::shaped(&mut entry);
        named.push(entry);
    }
    if frames != PATCHES.len() {
        return Ok(named);
    }
    match patches {
        [Some(first), Some(second)] => named.push(joined(first, second)?),
        patches => {
            let missing = PATCHES.iter().zip(patches).find(|(_, entry)| entry.is_none()).map_or("", |(name, _)| name);
            return Err(FormatError::Gguf(format!("tensor {missing:?} is missing")).into());
        }
    }
    Ok(named)
}

/// The canonical name of a tensor of one of the encoders.
fn renamed(read: &Read, is_audio: bool, name: &str) -> Option<String> {
    if is_audio {
        return (read.audio.as_ref()?.renamed)(name);
    }
    let ImageEncoder { vision, swapped, renamed, .. } = read.images.as_ref()?;
    renamed(vision, *swapped, name)
}

/// Returns one weight of shape [out, channels, 2, height, width] from its two frames.
fn joined(first: Entry, second: Entry) -> Result<Entry, FormatError> {
    let wrong = |what: String| FormatError::Gguf(format!("tensor {:?}: {what}", PATCHES[1]));
    let (a, b) = (&first.info, &second.info);
    if a.shape != b.shape || a.encoding != b.encoding {
        return Err(wrong(format!(
            "{:?} in shape {:?}, its twin {:?} in shape {:?}",
            b.encoding, b.shape, a.encoding, a.shape
        )));
    }
    let (Storage::Float(even), Storage::Float(odd)) = (&first.storage, &second.storage) else {
        return Err(FormatError::Unsupported(format!(
            "tensor {:?} is quantized; use an mmproj file in F16",
            PATCHES[0]
        )));
    };
    let [out, channels, height, width] = a.shape[..] else {
        return Err(wrong(format!("shape {:?}, expected four dimensions", a.shape)));
    };
    let storage = Storage::Turns { parts: [even.clone(), odd.clone()], run: height };
    let mut info = first.info.clone();
    info.shape = vec![out, channels, 2, height, width];
    info.bytes += b.bytes;
    Ok(Entry { name: "visual.patch_embed.proj.weight".to_owned(), info, storage })
}

/// The canonical name of a tensor of a Qwen's encoder.
pub(super) fn qwen(vision: &Vision, swapped: bool, name: &str) -> Option<String> {
    let (module, leaf) = name.rsplit_once('.').filter(|(_, leaf)| ["weight", "bias"].contains(leaf))?;
    let Spelling { up, down, merger_norm, merger, deepstack } = spelling(vision.encoder);
    let (up, down) = if swapped { (down, up) } else { (up, down) };
    if let Some((layer, part)) = module.strip_prefix("v.blk.").and_then(|rest| rest.split_once('.')) {
        let layer: usize = layer.parse().ok()?;
        let part = match part {
            "ln1" => "norm1",
            "ln2" => "norm2",
            "attn_qkv" => "attn.qkv",
            "attn_q" => "attn.q",
            "attn_k" => "attn.k",
            "attn_v" => "attn.v",
            "attn_out" => "attn.proj",
            "ffn_up" => up,
            "ffn_down" => down,
            "ffn_gate" if matches!(vision.encoder, VisionKind::Qwen2_5 | VisionKind::Omni2_5) => "mlp.gate_proj",
            _ => return None,
        };
        return Some(format!("visual.blocks.{layer}.{part}.{leaf}"));
    }
    if let Some((layer, part)) = module.strip_prefix("v.deepstack.").and_then(|rest| rest.split_once('.')) {
        let layer: usize = layer.parse().ok()?;
        let level = vision.deepstack.iter().position(|known| *known == layer)?;
        let part = match part {
            "norm" => merger_norm,
            "fc1" => merger[0],
            "fc2" => merger[1],
            _ => return None,
        };
        return Some(format!("visual.{deepstack}.{level}.{part}.{leaf}"));
    }
    let part = match module {
        "v.patch_embd" if vision.table_side > 0 => "patch_embed.proj".to_owned(),
        "v.position_embd" if vision.table_side > 0 => "pos_embed".to_owned(),
        "v.post_ln" => format!("merger.{merger_norm}"),
        "mm.0" => format!("merger.{}", merger[0]),
        "mm.2" => format!("merger.{}", merger[1]),
        _ => return None,
    };
    Some(format!("visual.{part}.{leaf}"))
}
