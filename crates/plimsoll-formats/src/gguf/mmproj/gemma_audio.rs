//! The audio encoder of Gemma 4 in an `mmproj` file, beside the vision encoder.
//!
//! Reference: llama.cpp, `conversion/gemma.py`, `tools/mtmd/models/gemma4a.cpp`. Values that the file lacks are those of published models:
//! chunks of 12 rows that attend to as many earlier rows, scores capped at 50, a factor of one half on feed-forward parts.

use super::Refusal;
use super::parts::{AudioEncoder, File, token};
use crate::activation::Activation;
use crate::audio::{Audio, AudioKind, Conformer};
use crate::bounds::{DEPTH_MAX, within};
use crate::error::FormatError;

/// Rows that a row attends to, itself included.
const SEEN: usize = 12;
const CAP: f32 = 50.0;
const RESIDUAL: f32 = 0.5;
const BOUND: f32 = 1e10;

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<AudioEncoder, Refusal> {
    let File { keys, tensors, .. } = file;
    let shape = |name: &str, dims: usize| match tensors.shape(name)? {
        shape if shape.len() == dims => Ok(shape),
        shape => Err(FormatError::Gguf(format!("{name} has shape {shape:?}, expected {dims} dimensions"))),
    };
    let channels = [shape("a.conv1d.0.weight", 4)?[0], shape("a.conv1d.1.weight", 4)?[0]];
    let depth = keys.need("block_count")?;
    within("audio layers", depth, DEPTH_MAX)?;
    let audio = Audio {
        depth,
        hidden_size: keys.need("embedding_length")?,
        heads: keys.need("attention.head_count")?,
        intermediate_size: shape("a.blk.0.ffn_up.weight", 2)?[0],
        act: Activation::Silu,
        bands: keys.need("num_mel_bins")?,
        placeholder: token(file.model, "<|audio|>")?,
        encoder: AudioKind::Conformer(Conformer {
            channels,
            taps: shape("a.blk.0.conv_dw.weight", 2)?[1],
            seen: SEEN,
            cap: CAP,
            residual: RESIDUAL,
            bound: BOUND,
            clipped: tensors.has("a.blk.0.attn_q.input_max"),
            output: shape("a.pre_encode.out.weight", 2)?[0],
        }),
    };
    Ok(AudioEncoder { audio, renamed })
}

/// The canonical name of one of the encoder's tensors.
fn renamed(name: &str) -> Option<String> {
    if let Some((layer, rest)) = name.strip_prefix("a.blk.").and_then(|rest| rest.split_once('.')) {
        let (layer, (part, leaf)) = (layer.parse::<usize>().ok()?, rest.rsplit_once('.')?);
        return Some(format!("audio.layers.{layer}.{}", part_of_layer(part, leaf)?));
    }
    let known = match name {
        "a.conv1d.0.weight" => "subsample_conv_projection.layer0.conv.weight",
        "a.conv1d.1.weight" => "subsample_conv_projection.layer1.conv.weight",
        "a.conv1d.0.norm.weight" => "subsample_conv_projection.layer0.norm.weight",
        "a.conv1d.1.norm.weight" => "subsample_conv_projection.layer1.norm.weight",
        "a.input_projection.weight" => "subsample_conv_projection.input_proj_linear.weight",
        "a.pre_encode.out.weight" => "output_proj.weight",
        "a.pre_encode.out.bias" => "output_proj.bias",
        "mm.a.input_projection.weight" => "projector.embedding_projection.weight",
        _ => return None,
    };
    Some(format!("audio.{known}"))
}

fn part_of_layer(part: &str, leaf: &str) -> Option<String> {
    let plain = match part {
        "ffn_norm" => "feed_forward1.pre_layer_norm.weight",
        "ffn_post_norm" => "feed_forward1.post_layer_norm.weight",
        "ffn_norm_1" => "feed_forward2.pre_layer_norm.weight",
        "ffn_post_norm_1" => "feed_forward2.post_layer_norm.weight",
        "attn_pre_norm" => "norm_pre_attn.weight",
        "attn_post_norm" => "norm_post_attn.weight",
        "attn_k_rel" => "self_attn.relative_k_proj.weight",
        // The file stores the factors that the layer would compute from the scales.
        "per_dim_scale" => "self_attn.per_dim_factor",
        // The converter swaps the names of these two tensors.
        "conv_norm" => "lconv1d.pre_layer_norm.weight",
        "norm_conv" => "lconv1d.conv_norm.weight",
        "conv_dw" => "lconv1d.depthwise_conv1d.weight",
        "ln2" => "norm_out.weight",
        _ => "",
    };
    if !plain.is_empty() {
        return (leaf == "weight").then(|| plain.to_owned());
    }
    let linear = match part {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.post",
        "ffn_up" => "feed_forward1.ffw_layer_1",
        "ffn_down" => "feed_forward1.ffw_layer_2",
        "ffn_up_1" => "feed_forward2.ffw_layer_1",
        "ffn_down_1" => "feed_forward2.ffw_layer_2",
        "conv_pw1" => "lconv1d.linear_start",
        "conv_pw2" => "lconv1d.linear_end",
        _ => return None,
    };
    match leaf {
        "weight" => Some(format!("{linear}.linear.weight")),
        "input_min" | "input_max" | "output_min" | "output_max" => Some(format!("{linear}.{leaf}")),
        _ => None,
    }
}
