//! The vision encoder of Idefics3 and SmolVLM in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/smolvlm.py` and `tools/mtmd/models/siglip.cpp`.

use super::Refusal;
use super::parts::{File, ImageEncoder, Own, fits, of_images, scale, siglip_name, table_side, token};
use crate::activation::Activation;
use crate::vision::{Vision, VisionKind, distinct_places};

/// Patches per side of a token, if the file has no value.
const MERGE: usize = 2;
/// The accepted epsilons of the norms. The converter writes the second if the configuration has none. transformers then computes with the
/// first, and so does this encoder.
const EPS: [f32; 2] = [1e-6, 1e-5];

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    fits(file.tensors.shape("mm.model.fc.weight")?.first(), file.config)?;
    of_images(file, &EPS, || {
        let table_side = table_side(&file.tensors)?;
        distinct_places(table_side)?;
        Ok(Own {
            encoder: VisionKind::Idefics3,
            act: Activation::GeluTanh,
            merge: scale(&file.keys, table_side, MERGE)?,
            table_side,
            image: token(file.model, "<image>")?,
            renamed,
        })
    })
}

/// The canonical name of a tensor.
fn renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
    match name {
        "mm.model.fc.weight" => Some("visual.projector.proj.weight".to_owned()),
        _ => siglip_name(swapped, name),
    }
}
