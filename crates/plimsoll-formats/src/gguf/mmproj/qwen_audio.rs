//! The audio encoders of the Qwens in an `mmproj` file: their metadata, and the names of their tensors.
//!
//! Reference: llama.cpp, `conversion/qwenvl.py`, `conversion/qwen3vl.py` and `tools/mtmd/models/qwen3a.cpp`. Chunks and windows have the
//! sizes of published models, because the file has none.

use super::Refusal;
use super::parts::{AudioEncoder, File, Tensors, fits, leaved, token};
use crate::activation::Activation;
use crate::audio::{Audio, AudioChunks, AudioKind, AudioTask, AudioWindows};
use crate::bounds::{DEPTH_MAX, within};
use crate::directory::Entry;
use crate::error::FormatError;

/// Sines and cosines of the positions. They are computed, so the file's are not read.
pub(super) const POSITIONS: &str = "a.position_embd.weight";
/// The epsilon of the norms.
const EPS: f32 = 1e-5;
/// Half the spectrogram frames of a chunk of Qwen2.5-Omni, and of a window of the others.
const HALF_CHUNK: usize = 100;
const HALF_WINDOW: usize = 50;
/// Spectrogram frames that attend to each other.
const ATTENTION_WINDOW: usize = 800;

/// Reads the encoder of Qwen2.5-Omni.
pub(super) fn chunks(file: &File<'_>) -> Result<AudioEncoder, Refusal> {
    fits(file.tensors.shape("mm.a.fc.weight")?.first(), file.config)?;
    read(file, AudioKind::Chunks(AudioChunks { half_window: HALF_CHUNK }), "<|AUDIO|>")
}

/// Reads the encoder of Qwen3-Omni or of Qwen3-ASR. Qwen3-ASR has no vision encoder and no experts.
pub(super) fn windows(file: &File<'_>) -> Result<AudioEncoder, Refusal> {
    fits(file.tensors.shape("mm.a.mlp.2.weight")?.first(), file.config)?;
    let transcribes = !file.sees && file.model.str("general.architecture") != Some("qwen3vlmoe");
    let encoder = AudioKind::Windows(AudioWindows {
        channels: file.tensors.shape("a.conv2d.1.weight")?[0],
        half_window: HALF_WINDOW,
        attention_window: ATTENTION_WINDOW,
        task: if transcribes { AudioTask::Transcribe } else { AudioTask::Any },
    });
    read(file, encoder, "<|audio_pad|>")
}

fn read(File { keys, tensors, model, .. }: &File<'_>, encoder: AudioKind, word: &str) -> Result<AudioEncoder, Refusal> {
    let eps = keys.f32("attention.layer_norm_epsilon").unwrap_or(EPS);
    if (eps - EPS).abs() > EPS / 1e3 {
        let key = keys.path("attention.layer_norm_epsilon");
        return Err(Refusal::Unfit(format!("{key} is {eps}; supported is {EPS}")));
    }
    let depth = keys.need("block_count")?;
    within("audio layers", depth, DEPTH_MAX)?;
    let hidden_size = keys.need("embedding_length")?;
    unused_positions(tensors, hidden_size)?;
    let audio = Audio {
        depth,
        hidden_size,
        heads: keys.need("attention.head_count")?,
        intermediate_size: tensors.shape("a.blk.0.ffn_up.weight")?[0],
        act: Activation::Gelu,
        bands: keys.need("num_mel_bins")?,
        placeholder: token(model, word)?,
        encoder,
    };
    Ok(AudioEncoder { audio, renamed })
}

/// Refuses positions of another width: such a file belongs to another model.
fn unused_positions(tensors: &Tensors<'_>, hidden: usize) -> Result<(), FormatError> {
    if !tensors.has(POSITIONS) {
        return Ok(());
    }
    match tensors.shape(POSITIONS)? {
        [_, width] if *width == hidden => Ok(()),
        shape => Err(FormatError::Gguf(format!("{POSITIONS} has shape {shape:?}, expected rows of {hidden}"))),
    }
}

/// Gives the biases of convolutions their shape in transformers: the converter adds dimensions of one.
pub(super) fn shaped(entry: &mut Entry) {
    if entry.name.starts_with("audio.conv") && entry.name.ends_with(".bias") {
        entry.info.shape = vec![entry.info.shape.iter().product()];
    }
}

/// The canonical name of a tensor.
fn renamed(name: &str) -> Option<String> {
    let (module, leaf) = name.rsplit_once('.')?;
    if let Some((layer, part)) = module.strip_prefix("a.blk.").and_then(|rest| rest.split_once('.')) {
        let (layer, part) = (layer.parse::<usize>().ok()?, part_of_layer(part)?);
        return leaved(&format!("audio.layers.{layer}.{part}"), leaf);
    }
    let known = match module {
        "a.conv1d.1" => "conv1",
        "a.conv1d.2" => "conv2",
        "a.conv2d.1" => "conv2d1",
        "a.conv2d.2" => "conv2d2",
        "a.conv2d.3" => "conv2d3",
        "a.conv_out" => "conv_out",
        "a.post_ln" => "ln_post",
        "mm.a.fc" => "proj",
        "mm.a.mlp.1" => "proj1",
        "mm.a.mlp.2" => "proj2",
        _ => return None,
    };
    leaved(&format!("audio.{known}"), leaf)
}

fn part_of_layer(part: &str) -> Option<&'static str> {
    Some(match part {
        "ln1" => "self_attn_layer_norm",
        "ln2" => "final_layer_norm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.out_proj",
        "ffn_up" => "fc1",
        "ffn_down" => "fc2",
        _ => return None,
    })
}
