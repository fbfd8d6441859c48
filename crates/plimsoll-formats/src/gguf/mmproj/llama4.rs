//! The vision encoder of Llama 4 in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/llama4.py` and `tools/mtmd/models/llama4.cpp`. The converter changes no values. The patch embedding is
//! a matrix, so only the metadata has the side of a patch.

use super::Refusal;
use super::parts::{File, ImageEncoder, Own, fits, leaved, of_images, of_layer, scale, side, token};
use crate::activation::Activation;
use crate::error::FormatError;
use crate::vision::{Llama4, Vision, VisionKind};

/// The epsilon of the encoder's norms.
const EPS: [f32; 1] = [1e-5];
/// Patches per side of a token, if the file has no value.
const MERGE: usize = 2;

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    fits(tensors.shape("mm.model.fc.weight")?.first(), config)?;
    let read = of_images(file, &EPS, || {
        let table_side = side(tensors.shape("v.position_embd.weight")?)?;
        Ok(Own {
            encoder: VisionKind::Llama4(Llama4 { projector_width: tensors.shape("mm.model.mlp.1.weight")?[0] }),
            act: Activation::Gelu,
            merge: scale(keys, table_side, MERGE)?,
            table_side,
            image: token(model, "<|patch|>")?,
            renamed,
        })
    })?;
    // Tiles are squares with as many patches as there are positions.
    let (said, is) = (keys.need("image_size")?, read.vision.table_side * read.vision.patch);
    match said == is {
        true => Ok(read),
        false => Err(FormatError::Config(format!("{} is {said}, expected {is}", keys.path("image_size"))).into()),
    }
}

/// The canonical name of a tensor.
fn renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("v.blk.") {
        let (layer, known, leaf) = of_layer(swapped, name)?;
        return Some(format!("visual.model.layers.{layer}.{}", part(known, leaf)?));
    }
    let known = match name {
        "v.class_embd" | "v.class_embd.weight" => "class_embedding",
        "v.patch_embd.weight" => "patch_embedding.linear.weight",
        "v.position_embd" | "v.position_embd.weight" => "positional_embedding_vlm",
        "v.pre_ln.weight" => "layernorm_pre.weight",
        "v.pre_ln.bias" => "layernorm_pre.bias",
        "v.post_ln.weight" => "layernorm_post.weight",
        "v.post_ln.bias" => "layernorm_post.bias",
        "mm.model.mlp.1.weight" => "vision_adapter.mlp.fc1.weight",
        "mm.model.mlp.2.weight" => "vision_adapter.mlp.fc2.weight",
        "mm.model.fc.weight" => "projector.linear_1.weight",
        _ => return None,
    };
    Some(format!("visual.{known}"))
}

fn part(part: &str, leaf: &str) -> Option<String> {
    let part = match part {
        "ln1" => "input_layernorm",
        "ln2" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.o_proj",
        "ffn_up" => "mlp.fc1",
        "ffn_down" => "mlp.fc2",
        _ => return None,
    };
    leaved(part, leaf)
}
