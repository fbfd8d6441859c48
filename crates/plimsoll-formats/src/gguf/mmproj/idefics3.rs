//! The vision encoder of Idefics3 and SmolVLM in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/smolvlm.py` and `tools/mtmd/models/siglip.cpp`.

use super::Refusal;
use super::parts::{Own, Read, Tensors, fits, of_images, scale, siglip_name, table_side, token};
use crate::config::ModelConfig;
use crate::gguf::keys::Keys;
use crate::gguf::meta::GgufMeta;
use crate::vision::{Tower, distinct_places};

/// Patches per side of a token, where the file does not say it.
const MERGE: usize = 2;
/// The epsilon of the norms. The converter writes the second where the configuration says nothing; transformers computes with the
/// first then, and so does this encoder.
const EPS: [f32; 2] = [1e-6, 1e-5];

/// Reads the encoder.
pub(super) fn read(keys: &Keys, tensors: &Tensors, model: &GgufMeta, config: &ModelConfig) -> Result<Read, Refusal> {
    fits(tensors.shape("mm.model.fc.weight")?.first(), config)?;
    of_images(keys, tensors, &EPS, || {
        let side = table_side(tensors)?;
        distinct_places(side)?;
        let merge = scale(keys, side, MERGE)?;
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
