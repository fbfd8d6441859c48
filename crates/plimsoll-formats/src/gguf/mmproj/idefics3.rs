//! The vision encoder of Idefics3 and SmolVLM in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/smolvlm.py` and `tools/mtmd/models/siglip.cpp`.

use super::Refusal;
use super::parts::{Own, Read, SCALE_FACTOR, Tensors, fits, of_images, siglip_name, table_side, token};
use crate::config::ModelConfig;
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::gguf::meta::GgufMeta;
use crate::vision::Tower;

/// Patches per side of a token, where the file does not say it.
const MERGE: usize = 2;

/// Reads the encoder.
pub(super) fn read(keys: &Keys, tensors: &Tensors, model: &GgufMeta, config: &ModelConfig) -> Result<Read, Refusal> {
    fits(tensors.shape("mm.model.fc.weight")?.first(), config)?;
    of_images(keys, tensors, || {
        let (side, merge) = (table_side(tensors)?, keys.size(SCALE_FACTOR)?.unwrap_or(MERGE));
        if merge == 0 || !side.is_multiple_of(merge) {
            let key = keys.path(SCALE_FACTOR);
            return Err(FormatError::Config(format!("{key} is {merge}, which does not divide {side} patches")).into());
        }
        Ok(Own { tower: Tower::Idefics3, merge, table_side: side, image: token(model, "<image>")? })
    })
}

/// The canonical name of a tensor.
pub(super) fn renamed(swapped: bool, name: &str) -> Option<String> {
    match name {
        "mm.model.fc.weight" => Some("visual.projector.proj.weight".to_owned()),
        _ => siglip_name(swapped, name),
    }
}
