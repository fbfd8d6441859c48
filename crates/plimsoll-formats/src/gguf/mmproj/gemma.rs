//! The vision encoders of Gemma 3 and Gemma 4 in an `mmproj` file: their metadata, and the names of their tensors.
//!
//! Reference: llama.cpp, `conversion/gemma.py`, `tools/mtmd/models/siglip.cpp` and `gemma4v.cpp`.

use super::Refusal;
use super::parts::{
    EPS, File, ImageEncoder, Own, SCALE_FACTOR, fits, of_images, of_layer, scale, siglip_name, table_side, token,
};
use crate::activation::Activation;
use crate::error::FormatError;
use crate::vision::{Gemma4, Vision, VisionKind};

/// Patches per side of a token, if the file has no value.
const MERGE: usize = 4;
const GEMMA4_MERGE: usize = 3;

/// Reads Gemma 3's encoder.
pub(super) fn siglip(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    fits(file.tensors.shape("mm.input_projection.weight")?.last(), file.config)?;
    of_images(file, &EPS, || {
        let table_side = table_side(&file.tensors)?;
        Ok(Own {
            encoder: VisionKind::Siglip,
            act: Activation::GeluTanh,
            merge: scale(&file.keys, table_side, MERGE)?,
            table_side,
            image: token(file.model, "<image_soft_token>")?,
            renamed: siglip_renamed,
        })
    })
}

/// Reads Gemma 4's encoder. Values that the file lacks are those of published models: the activation, and attention among the tokens of an
/// image. The tokens attend to each other in all sizes without per-layer embeddings.
pub(super) fn gemma4(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    fits(tensors.shape("mm.input_projection.weight")?.first(), config)?;
    of_images(file, &EPS, || {
        let table = tensors.shape("v.position_embd.weight")?;
        let &[2, positions, _] = table else {
            return Err(FormatError::Gguf(format!("v.position_embd.weight has shape {table:?}")).into());
        };
        let image = token(model, "<|image|>")?;
        let encoder = VisionKind::Gemma4(Gemma4 {
            positions,
            clipped: tensors.has("v.blk.0.attn_q.input_max"),
            standardize: tensors.has("v.std_bias"),
            sees_ahead: config.variant.per_layer_input.is_none(),
            unified: false,
        });
        Ok(Own {
            encoder,
            act: Activation::GeluTanh,
            merge: keys.size(SCALE_FACTOR)?.unwrap_or(GEMMA4_MERGE),
            table_side: 0,
            image,
            renamed: gemma4_renamed,
        })
    })
}

/// The canonical name of a tensor of Gemma 3.
fn siglip_renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    let known = match name {
        "mm.input_projection.weight" => "mm_input_projection_weight",
        // The file has whole weights, not weights less one.
        "mm.soft_emb_norm.weight" => "soft_emb_norm.weight",
        _ => return siglip_name(swapped, name),
    };
    Some(format!("visual.projector.{known}"))
}

/// The canonical name of a tensor of Gemma 4.
fn gemma4_renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    if let Some(name) = name.strip_prefix("v.blk.") {
        let (layer, part, leaf) = of_layer(swapped, name)?;
        return Some(format!("visual.encoder.layers.{layer}.{}", gemma4_part(part, leaf)?));
    }
    let known = match name {
        "v.patch_embd.weight" => "patch_embedder.input_proj.weight",
        "v.position_embd.weight" => "patch_embedder.position_embedding_table",
        "v.std_bias" => "std_bias",
        "v.std_scale" => "std_scale",
        "mm.input_projection.weight" => "projector.embedding_projection.weight",
        _ => return None,
    };
    Some(format!("visual.{known}"))
}

fn gemma4_part(part: &str, leaf: &str) -> Option<String> {
    let norm = match part {
        "ln1" => Some("input_layernorm"),
        "ln2" => Some("pre_feedforward_layernorm"),
        "attn_post_norm" => Some("post_attention_layernorm"),
        "ffn_post_norm" => Some("post_feedforward_layernorm"),
        "attn_q_norm" => Some("self_attn.q_norm"),
        "attn_k_norm" => Some("self_attn.k_norm"),
        _ => None,
    };
    if let Some(norm) = norm {
        return (leaf == "weight").then(|| format!("{norm}.weight"));
    }
    let linear = match part {
        "attn_q" => "self_attn.q",
        "attn_k" => "self_attn.k",
        "attn_v" => "self_attn.v",
        "attn_out" => "self_attn.o",
        "ffn_gate" => "mlp.gate",
        "ffn_up" => "mlp.up",
        "ffn_down" => "mlp.down",
        _ => return None,
    };
    match leaf {
        "weight" => Some(format!("{linear}_proj.linear.weight")),
        "input_min" | "input_max" | "output_min" | "output_max" => Some(format!("{linear}_proj.{leaf}")),
        _ => None,
    }
}
