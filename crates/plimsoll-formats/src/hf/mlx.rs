//! MLX affine group quantization: what `config.json` says of it, and the joining of `X.weight`, `X.scales` and
//! `X.biases` into one quantized tensor `X.weight`.
//!
//! Bits are unpacked in `decode::affine`. Other quantizations of the Hugging Face world are refused by name.

use super::json::Lookup;
use super::names::canonical;
use super::safetensors::{Found, Kind};
use crate::directory::{Entry, Storage};
use crate::encoding::{Dtype, Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::quantization::{GroupQuant, Quantization};
use std::collections::BTreeMap;

impl GroupQuant {
    fn read(object: &Lookup) -> Result<GroupQuant, FormatError> {
        if let Some(mode) = object.str("mode")?
            && mode != "affine"
        {
            return Err(FormatError::Unsupported(format!("quantization mode {}", quote(mode))));
        }
        let (bits, group) = (object.need("bits")?, object.need("group_size")?);
        if !matches!(bits, 2..=6 | 8) || !matches!(group, 32 | 64 | 128) {
            return Err(FormatError::Unsupported(format!("quantization to {bits} bits in groups of {group}")));
        }
        Ok(GroupQuant { bits: bits as u8, group })
    }
}

impl Quantization {
    /// Reads `quantization` (or `quantization_config`). Methods other than MLX's are refused.
    pub(super) fn read(config: &Lookup) -> Result<Option<Quantization>, FormatError> {
        let Some(object) = config.object("quantization")?.or(config.object("quantization_config")?) else {
            return Ok(None);
        };
        if let Some(method) = object.str("quant_method")? {
            return Err(FormatError::Unsupported(format!("quantization method {}", quote(method))));
        }
        let default = GroupQuant::read(&object)?;
        let mut overrides = BTreeMap::new();
        for (name, value) in object.inner {
            let quant = match value {
                serde_json::Value::Bool(false) => None,
                serde_json::Value::Bool(true) => Some(default),
                serde_json::Value::Object(inner) => Some(GroupQuant::read(&Lookup { inner, outer: None })?),
                _ => continue,
            };
            overrides.insert(canonical_module(name), quant);
        }
        Ok(Some(Quantization { default, overrides }))
    }
}

/// The canonical name of a module.
fn canonical_module(name: &str) -> String {
    let mut tensor = canonical(&format!("{name}.weight"));
    tensor.truncate(tensor.len() - ".weight".len());
    tensor
}

/// Gives every decodable tensor its canonical name, joining the three parts of quantized ones. Tensors of other
/// types are left out, unless the text model cannot do without them.
pub(super) fn join(tensors: Vec<Found>, quantization: Option<&Quantization>) -> Result<Vec<Entry>, FormatError> {
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    by_name.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
    let find = |name: &str| {
        let at = by_name.binary_search_by(|&index| tensors[index as usize].name.as_str().cmp(name)).ok()?;
        Some(&tensors[by_name[at] as usize])
    };
    let mut entries = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        match tensor.dtype {
            Kind::Float(encoding) if part_of_quantized(&tensor.name, find).is_none() => {
                entries.push(float_entry(tensor, encoding));
            }
            Kind::Float(_) => {}
            Kind::U32 if tensor.name.ends_with(".weight") && quantization.is_some() => {
                entries.extend(quantization.map(|declared| affine_entry(tensor, declared, find)).transpose()?);
            }
            Kind::U32 | Kind::Other(_) => refuse_if_needed(&tensor.name)?,
        }
    }
    Ok(entries)
}

/// The packed weight that a tensor named `X.scales` or `X.biases` belongs to.
fn part_of_quantized<'a>(name: &str, find: impl Fn(&str) -> Option<&'a Found>) -> Option<&'a Found> {
    let module = name.strip_suffix(".scales").or_else(|| name.strip_suffix(".biases"))?;
    find(&format!("{module}.weight")).filter(|weight| weight.dtype == Kind::U32)
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

/// Joins a packed weight with its scales and biases. Their shapes must agree with each other and with the
/// configuration.
fn affine_entry<'a>(
    weight: &Found,
    declared: &Quantization,
    find: impl Fn(&str) -> Option<&'a Found>,
) -> Result<Entry, FormatError> {
    let wrong = |what: String| FormatError::Safetensors(format!("tensor {}: {what}", quote(&weight.name)));
    let module = weight.name.strip_suffix(".weight").unwrap_or(&weight.name);
    let quant = declared
        .of(&canonical_module(module))
        .ok_or_else(|| wrong("it is packed, but the configuration says that it is not".to_owned()))?;
    let part = |leaf: &str| find(&format!("{module}.{leaf}")).ok_or_else(|| wrong(format!("its {leaf} are missing")));
    let (scales, biases) = (part("scales")?, part("biases")?);
    let dtype = match scales.dtype {
        Kind::Float(Encoding::F32) => Dtype::F32,
        Kind::Float(Encoding::F16) => Dtype::F16,
        Kind::Float(Encoding::BF16) => Dtype::Bf16,
        _ => return Err(wrong("its scales are not floats".to_owned())),
    };
    if biases.dtype != scales.dtype || biases.shape != scales.shape {
        return Err(wrong("its scales and biases differ in type or shape".to_owned()));
    }
    let (Some((words, rows)), Some((groups, scale_rows))) = (weight.shape.split_last(), scales.shape.split_last())
    else {
        return Err(wrong("it has no dimensions".to_owned()));
    };
    let cols = groups.checked_mul(quant.group);
    let bits = words.checked_mul(32);
    if rows != scale_rows || cols.and_then(|cols| cols.checked_mul(quant.bits.into())) != bits {
        return Err(wrong(format!(
            "{:?} words and {:?} scales are not {} bits in groups of {}",
            weight.shape, scales.shape, quant.bits, quant.group
        )));
    }
    let mut shape = rows.to_vec();
    shape.push(groups * quant.group);
    let bytes = [weight, scales, biases].iter().map(|part| part.span.range.len() as u64).sum();
    Ok(Entry {
        name: canonical(&weight.name),
        info: TensorInfo { shape, encoding: Encoding::Quant(quant.layout(dtype)), bytes },
        storage: Storage::Affine {
            codes: weight.span.clone(),
            scales: scales.span.clone(),
            biases: biases.span.clone(),
        },
    })
}
