//! The vision encoder of InternVL in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/internvl.py` and `tools/mtmd/models/internvl.cpp`. The file does not name the kind of norms: norms
//! with a bias are layer norms.

use super::Refusal;
use super::parts::{EPS, File, ImageEncoder, Own, fits, leaved, of_images, of_layer, scale, side, token};
use crate::activation::Activation;
use crate::directory::Entry;
use crate::vision::{Intern, Vision, VisionKind};

/// Patches per side of a token, if the file has no value.
const MERGE: usize = 2;
/// The class row's embedding, and the embeddings of the positions, the class row's first.
const CLASS: &str = "visual.embeddings.cls_token";
const POSITIONS: &str = "visual.embeddings.position_embeddings";

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    fits(tensors.shape("mm.model.mlp.3.weight")?.first(), config)?;
    of_images(file, &EPS, || {
        let table_side = side(tensors.shape("v.position_embd.weight")?)?;
        let intern = Intern {
            rms_norm: !tensors.has("v.blk.0.ln1.bias"),
            qk_norm: tensors.has("v.blk.0.attn_q_norm.weight"),
            attention_bias: tensors.has("v.blk.0.attn_q.bias"),
            last_norm: tensors.has("v.post_ln.weight"),
            tiles: None,
        };
        Ok(Own {
            encoder: VisionKind::Intern(intern),
            act: if keys.meta.bool("clip.use_silu") == Some(true) { Activation::Silu } else { Activation::Gelu },
            merge: scale(keys, table_side, MERGE)?,
            table_side,
            image: token(model, "<IMG_CONTEXT>")?,
            renamed,
        })
    })
}

/// Gives the embeddings their shape in transformers: converters may leave out dimensions of one.
pub(super) fn shaped(entry: &mut Entry) {
    if [CLASS, POSITIONS].contains(&entry.name.as_str()) {
        let width = entry.info.shape.last().copied().unwrap_or(0);
        let rows = entry.info.shape.iter().product::<usize>() / width.max(1);
        entry.info.shape = vec![1, rows, width];
    }
}

/// The canonical name of a tensor.
fn renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("v.blk.") {
        let (layer, known, leaf) = of_layer(swapped, name)?;
        return Some(format!("visual.encoder.layer.{layer}.{}", part(known, leaf)?));
    }
    let known = match name {
        "v.class_embd" | "v.class_embd.weight" => return Some(CLASS.to_owned()),
        "v.position_embd.weight" => return Some(POSITIONS.to_owned()),
        "v.patch_embd.weight" => "embeddings.patch_embeddings.projection.weight",
        "v.patch_embd.bias" => "embeddings.patch_embeddings.projection.bias",
        "v.post_ln.weight" => "layernorm.weight",
        "v.post_ln.bias" => "layernorm.bias",
        "mm.model.mlp.0.weight" => "projector.layer_norm.weight",
        "mm.model.mlp.0.bias" => "projector.layer_norm.bias",
        "mm.model.mlp.1.weight" => "projector.linear_1.weight",
        "mm.model.mlp.1.bias" => "projector.linear_1.bias",
        "mm.model.mlp.3.weight" => "projector.linear_2.weight",
        "mm.model.mlp.3.bias" => "projector.linear_2.bias",
        _ => return None,
    };
    Some(format!("visual.{known}"))
}

fn part(part: &str, leaf: &str) -> Option<String> {
    let part = match part {
        "ls1" if leaf == "weight" => return Some("lambda_1".to_owned()),
        "ls2" if leaf == "weight" => return Some("lambda_2".to_owned()),
        "ln1" => "layernorm_before",
        "ln2" => "layernorm_after",
        "attn_q" => "attention.q_proj",
        "attn_k" => "attention.k_proj",
        "attn_v" => "attention.v_proj",
        "attn_q_norm" => "attention.q_norm",
        "attn_k_norm" => "attention.k_norm",
        "attn_out" => "attention.projection_layer",
        "ffn_up" => "mlp.fc1",
        "ffn_down" => "mlp.fc2",
        _ => return None,
    };
    leaved(part, leaf)
}
