//! The vision encoder of LFM2-VL in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/lfm2.py` and `tools/mtmd/models/siglip.cpp`.

use super::Refusal;
use super::parts::{EPS, Own, Read, SCALE_FACTOR, Tensors, fits, of_images, siglip_name, table_side, token};
use crate::config::ModelConfig;
use crate::gguf::keys::Keys;
use crate::gguf::meta::GgufMeta;
use crate::vision::{Siglip2, Tower};

/// Patches per side of a token, where the file does not say it.
const MERGE: usize = 2;

/// The encoder before its file is read.
pub(super) const LFM2: Tower =
    Tower::Siglip2(Siglip2 { projector_width: 0, projector_norm: false, projector_bias: false });

/// Reads the encoder.
pub(super) fn read(keys: &Keys, tensors: &Tensors, model: &GgufMeta, config: &ModelConfig) -> Result<Read, Refusal> {
    fits(tensors.shape("mm.2.weight")?.first(), config)?;
    of_images(keys, tensors, &EPS, || {
        let tower = Tower::Siglip2(Siglip2 {
            projector_width: tensors.shape("mm.1.weight")?[0],
            projector_norm: tensors.has("mm.input_norm.weight"),
            projector_bias: tensors.has("mm.1.bias"),
        });
        let merge = keys.size(SCALE_FACTOR)?.unwrap_or(MERGE);
        Ok(Own { tower, merge, table_side: table_side(tensors)?, image: token(model, "<image>")? })
    })
}

/// The canonical name of a tensor.
pub(super) fn renamed(swapped: bool, name: &str) -> Option<String> {
    let known = match name {
        "mm.input_norm.weight" => "layer_norm.weight",
        "mm.input_norm.bias" => "layer_norm.bias",
        "mm.1.weight" => "linear_1.weight",
        "mm.1.bias" => "linear_1.bias",
        "mm.2.weight" => "linear_2.weight",
        "mm.2.bias" => "linear_2.bias",
        _ => return siglip_name(swapped, name),
    };
    Some(format!("visual.projector.{known}"))
}
