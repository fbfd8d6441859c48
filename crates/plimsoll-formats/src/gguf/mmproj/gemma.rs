//! The vision encoders of Gemma 3 and Gemma 4 in an `mmproj` file: their metadata, and the names of their tensors.
//!
//! Reference: llama.cpp, `conversion/gemma.py`, `tools/mtmd/models/siglip.cpp` and `gemma4v.cpp`.

use super::Refusal;
use super::parts::{Read, Tensors, feed_forward, fits, layers, patch, processor, table_side, token};
use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::gguf::meta::GgufMeta;
use crate::vision::{Gemma4, MediaTokens, Tower, Vision};

/// Patches per side of a token, where the file does not say it.
const MERGE: usize = 4;
const GEMMA4_MERGE: usize = 3;
/// The key of that number.
const SCALE_FACTOR: &str = "projector.scale_factor";

/// Gemma 4 before its file is read.
pub(super) const GEMMA4: Tower =
    Tower::Gemma4(Gemma4 { positions: 0, clipped: false, standardize: false, sees_ahead: false });

/// Whether the encoder is one of these.
pub(super) fn is(tower: Tower) -> bool {
    matches!(tower, Tower::Siglip | Tower::Gemma4(_))
}

/// What differs between the encoders.
struct Own {
    tower: Tower,
    merge: usize,
    table_side: usize,
    /// The token that stands for an image.
    image: u32,
}

/// Reads Gemma 3's encoder.
pub(super) fn siglip(keys: &Keys, tensors: &Tensors, model: &GgufMeta, config: &ModelConfig) -> Result<Read, Refusal> {
    fits(tensors.shape("mm.input_projection.weight")?.last(), config)?;
    read(keys, tensors, || {
        let (side, merge) = (table_side(tensors)?, keys.size(SCALE_FACTOR)?.unwrap_or(MERGE));
        if merge == 0 || !side.is_multiple_of(merge) {
            let key = keys.path(SCALE_FACTOR);
            return Err(FormatError::Config(format!("{key} is {merge}, which does not divide {side} patches")).into());
        }
        Ok(Own { tower: Tower::Siglip, merge, table_side: side, image: token(model, "<image_soft_token>")? })
    })
}

/// Reads Gemma 4's encoder. What the file does not hold is that of published models: the activation, and that the tokens of an image
/// see each other in all sizes but those with an embedding for each layer.
pub(super) fn gemma4(keys: &Keys, tensors: &Tensors, model: &GgufMeta, config: &ModelConfig) -> Result<Read, Refusal> {
    fits(tensors.shape("mm.input_projection.weight")?.first(), config)?;
    read(keys, tensors, || {
        let table = tensors.shape("v.position_embd.weight")?;
        let &[2, positions, _] = table else {
            return Err(FormatError::Gguf(format!("v.position_embd.weight has shape {table:?}")).into());
        };
        let image = token(model, "<|image|>")?;
        let tower = Tower::Gemma4(Gemma4 {
            positions,
            clipped: tensors.has("v.blk.0.attn_q.input_max"),
            standardize: tensors.has("v.std_bias"),
            sees_ahead: config.variant.per_layer_input.is_none(),
        });
        Ok(Own { tower, merge: keys.size(SCALE_FACTOR)?.unwrap_or(GEMMA4_MERGE), table_side: 0, image })
    })
}

/// Reads what both have alike, and `own` of the one.
fn read(keys: &Keys, tensors: &Tensors, own: impl FnOnce() -> Result<Own, Refusal>) -> Result<Read, Refusal> {
    let (depth, hidden_size) = layers(keys)?;
    let (intermediate_size, swapped) = feed_forward(tensors, hidden_size)?;
    let (channels, patch) = patch(tensors)?;
    let Own { tower, merge, table_side, image } = own()?;
    let vision = Vision {
        tower,
        depth,
        hidden_size,
        heads: keys.need("attention.head_count")?,
        intermediate_size,
        act: Activation::GeluTanh,
        channels,
        patch,
        temporal: 1,
        merge,
        table_side,
        deepstack: Vec::new(),
        window: None,
        full_layers: Vec::new(),
        steps_per_second: None,
        tokens: MediaTokens { image, video: image },
    };
    Ok(Read { vision, sections: None, processor: processor(keys)?, swapped })
}

/// The canonical name of a tensor.
pub(super) fn renamed(tower: Tower, swapped: bool, name: &str) -> Option<String> {
    let is_siglip = tower == Tower::Siglip;
    if let Some((layer, rest)) = name.strip_prefix("v.blk.").and_then(|rest| rest.split_once('.')) {
        let layer: usize = layer.parse().ok()?;
        let (part, leaf) = rest.rsplit_once('.')?;
        let part = match part {
            "ffn_up" if swapped => "ffn_down",
            "ffn_down" if swapped => "ffn_up",
            part => part,
        };
        let part = if is_siglip { siglip_part(part, leaf)? } else { gemma4_part(part, leaf)? };
        return Some(format!("visual.encoder.layers.{layer}.{part}"));
    }
    let known = match (name, is_siglip) {
        ("v.patch_embd.weight", true) => "embeddings.patch_embedding.weight",
        ("v.patch_embd.bias", true) => "embeddings.patch_embedding.bias",
        ("v.position_embd.weight", true) => "embeddings.position_embedding.weight",
        ("v.post_ln.weight", true) => "post_layernorm.weight",
        ("v.post_ln.bias", true) => "post_layernorm.bias",
        ("mm.input_projection.weight", true) => "projector.mm_input_projection_weight",
        // Its weights are whole here, not less one.
        ("mm.soft_emb_norm.weight", true) => "projector.soft_emb_norm.weight",
        ("v.patch_embd.weight", false) => "patch_embedder.input_proj.weight",
        ("v.position_embd.weight", false) => "patch_embedder.position_embedding_table",
        ("v.std_bias", false) => "std_bias",
        ("v.std_scale", false) => "std_scale",
        ("mm.input_projection.weight", false) => "projector.embedding_projection.weight",
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
    ["weight", "bias"].contains(&leaf).then(|| format!("{part}.{leaf}"))
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
