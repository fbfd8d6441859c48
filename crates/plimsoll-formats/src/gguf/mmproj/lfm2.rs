//! The vision encoder of LFM2-VL in an `mmproj` file: its metadata, and the names of its tensors.
//!
//! Reference: llama.cpp, `conversion/lfm2.py` and `tools/mtmd/models/siglip.cpp`.

use super::Refusal;
use super::parts::{EPS, File, ImageEncoder, Own, SCALE_FACTOR, fits, of_images, siglip_name, table_side, token};
use crate::activation::Activation;
use crate::vision::{Siglip2, Vision, VisionKind};

/// Patches per side of a token, if the file has no value.
const MERGE: usize = 2;

/// Reads the encoder.
pub(super) fn read(file: &File<'_>) -> Result<ImageEncoder, Refusal> {
    let File { keys, tensors, model, config, .. } = file;
    fits(tensors.shape("mm.2.weight")?.first(), config)?;
    of_images(file, &EPS, || {
        let encoder = VisionKind::Siglip2(Siglip2 {
            projector_width: tensors.shape("mm.1.weight")?[0],
            projector_norm: tensors.has("mm.input_norm.weight"),
            projector_bias: tensors.has("mm.1.bias"),
        });
        Ok(Own {
            encoder,
            act: Activation::GeluTanh,
            merge: keys.size(SCALE_FACTOR)?.unwrap_or(MERGE),
            table_side: table_side(tensors)?,
            image: token(model, "<image>")?,
            renamed,
        })
    })
}

/// The canonical name of a tensor.
fn renamed(_: &Vision, swapped: bool, name: &str) -> Option<String> {
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
