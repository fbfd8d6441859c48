//! Gives every tensor its canonical name and joins the parts of quantized ones.

use super::tensors::{CODES, Tensors};
use super::{float8, grouped, micro, mlx, nvfp4};
use crate::directory::{Entry, Storage};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::mapping::Mapping;
use crate::quantization::{Method, Quantization};

/// Gives every decodable tensor its canonical name and joins the parts of quantized ones. Tensors of other types are left out, unless the
/// text model needs them.
pub(in crate::hf) fn join(
    tensors: &[Found],
    quantization: Option<&Quantization>,
    files: &[Mapping],
) -> Result<Vec<Entry>, FormatError> {
    let all = Tensors::new(tensors, files);
    let mut entries = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        if all.is_beside_codes(&tensor.name) {
            continue;
        }
        let end = CODES.iter().rev().find(|end| tensor.name.ends_with(**end)).copied().unwrap_or_default();
        let joined = match (tensor.dtype, end, quantization) {
            (Kind::Float(encoding), ..) => float_entry(tensor, encoding),
            (Kind::U32, ".weight", Some(declared)) if declared.method == Method::Mlx => {
                mlx::entry(tensor, declared, |name| all.find(name))?
            }
            (Kind::I32, ".qweight", Some(declared)) => match declared.method {
                Method::Awq => grouped::awq(tensor, declared, &all)?,
                Method::Gptq { zeros_less_one } => grouped::gptq(tensor, declared, &all, zeros_less_one)?,
                Method::Mlx | Method::Mxfp4 | Method::CompressedTensors | Method::F8 => {
                    return Err(undeclared(tensor));
                }
            },
            (Kind::I32, ".weight_packed", Some(declared)) if declared.method == Method::CompressedTensors => {
                grouped::packed(tensor, declared, &all)?
            }
            (Kind::I8, ".weight", Some(declared)) if declared.method == Method::CompressedTensors => {
                grouped::bytes(tensor, declared, &all)?
            }
            (Kind::F8, ".weight", Some(declared))
                if matches!(declared.method, Method::F8 | Method::CompressedTensors) =>
            {
                float8::entry(tensor, declared, &all)?
            }
            (Kind::U8, ".weight", Some(declared)) if declared.method == Method::F8 => nvfp4::modelopt(tensor, &all)?,
            (Kind::U8, ".weight_packed", Some(declared)) if declared.method == Method::CompressedTensors => {
                nvfp4::packed(tensor, &all)?
            }
            (Kind::U8, ..) if tensor.name.ends_with(micro::BLOCKS) => {
                match micro::blocks_entry(tensor, |name| all.find(name)) {
                    Some(entry) => entry?,
                    None => continue,
                }
            }
            (_, ".qweight" | ".weight_packed", _) => return Err(undeclared(tensor)),
            _ => {
                refuse_if_needed(&tensor.name)?;
                continue;
            }
        };
        entries.push(joined);
    }
    Ok(entries)
}

fn undeclared(tensor: &Found) -> FormatError {
    FormatError::Unsupported(format!(
        "tensor {} is packed in a way that quantization_config does not declare; fetch the config.json of the same model",
        quote(&tensor.name)
    ))
}

/// Refuses a weight of the text model in a type that cannot be decoded.
fn refuse_if_needed(name: &str) -> Result<(), FormatError> {
    let canonical = canonical(name);
    let text_model = ["model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp."];
    if canonical.ends_with(".weight") && text_model.iter().any(|prefix| canonical.starts_with(prefix)) {
        return Err(FormatError::Unsupported(format!("the element type of tensor {}", quote(name))));
    }
    Ok(())
}

fn float_entry(tensor: &Found, encoding: Encoding) -> Entry {
    Entry {
        name: canonical(&tensor.name),
        info: TensorInfo { shape: tensor.shape.clone(), encoding, bytes: tensor.span.range.len() as u64 },
        storage: Storage::Float(tensor.span.clone()),
    }
}
