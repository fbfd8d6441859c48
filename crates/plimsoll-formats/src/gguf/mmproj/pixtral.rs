//! The vision encoder of Mistral 3 and Ministral 3 in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/llava.py` and `tools/mtmd/models/pixtral.cpp`. The converter reorders the rows of the query and
//! key projections, so that the numbers of a rotary pair are neighbours.

use super::Refusal;
use super::parts::{File, ImageEncoder, Own, fits, of_images, of_layer, token};
use crate::activation::Activation;
use crate::vision::{Pixtral, Vision, VisionKind};

/// The epsilon of the encoder's norms.
const EPS: [f32; 1] = [1e-5];
/// The embedding of a token of the model's vocabulary, for programs that do not read it from the model.
pub(super) const IMG_BREAK: &str = "v.token_embd.img_break";

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    if !tensors.has("mm.patch_merger.weight") {
        let why =
            "it has no mm.patch_merger.weight, as Pixtral 12B; supported are the encoders of Mistral 3 and Ministral 3";
        return Err(Refusal::Unfit(why.to_owned()));
    }
    fits(tensors.shape("mm.2.weight")?.first(), config)?;
    of_images(file, &EPS, || {
        let silu = keys.meta.bool("clip.use_silu") == Some(true);
        Ok(Own {
            encoder: VisionKind::Pixtral(Pixtral { projector_bias: tensors.has("mm.1.bias"), rope_interleaved: true }),
            act: if silu { Activation::Silu } else { Activation::Gelu },
            merge: keys.size("spatial_merge_size")?.unwrap_or(1),
            table_side: 0,
            image: token(model, "[IMG]")?,
            renamed,
        })
    })
}

/// The canonical name of a tensor.
fn renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("v.blk.") {
        let (layer, known, leaf) = of_layer(swapped, name)?;
        return Some(format!("visual.transformer.layers.{layer}.{}", part(known, leaf)?));
    }
    let known = match name {
        "v.patch_embd.weight" => "patch_conv.weight",
        "v.pre_ln.weight" => "ln_pre.weight",
        "mm.input_norm.weight" => "projector.norm.weight",
        "mm.patch_merger.weight" => "projector.patch_merger.merging_layer.weight",
        "mm.1.weight" => "projector.linear_1.weight",
        "mm.1.bias" => "projector.linear_1.bias",
        "mm.2.weight" => "projector.linear_2.weight",
        "mm.2.bias" => "projector.linear_2.bias",
        _ => return None,
    };
    Some(format!("visual.{known}"))
}

fn part(part: &str, leaf: &str) -> Option<String> {
    let part = match part {
        "ln1" => "attention_norm",
        "ln2" => "ffn_norm",
        "attn_q" => "attention.q_proj",
        "attn_k" => "attention.k_proj",
        "attn_v" => "attention.v_proj",
        "attn_out" => "attention.o_proj",
        "ffn_gate" => "feed_forward.gate_proj",
        "ffn_up" => "feed_forward.up_proj",
        "ffn_down" => "feed_forward.down_proj",
        _ => return None,
    };
    (leaf == "weight").then(|| format!("{part}.weight"))
}
