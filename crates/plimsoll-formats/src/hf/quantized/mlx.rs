//! MLX's group quantization: the keys in `config.json`, and the joining of `X.weight`, `X.scales` and `X.biases` into one quantized tensor
//! `X.weight`. Modes without biases are joined in `micro`.
//!
//! Bits are unpacked in `decode::affine`.

use super::micro;
use super::rules::canonical_module;
use crate::directory::{Entry, Storage};
use crate::encoding::{Dtype, Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::hf::json::Lookup;
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::quantization::{GroupQuant, Method, Mode, Quantization, Scheme};
use std::collections::BTreeMap;

impl GroupQuant {
    fn read(object: &Lookup) -> Result<GroupQuant, FormatError> {
        let mode = match object.str("mode")? {
            None | Some("affine") => Mode::Affine,
            Some("mxfp4") => Mode::Mxfp4,
            Some("mxfp8") => Mode::Mxfp8,
            Some("nvfp4") => Mode::Nvfp4,
            Some(mode) => {
                let modes = "modes that load are affine, mxfp4, mxfp8 and nvfp4";
                return Err(FormatError::Unsupported(format!("quantization mode {}; {modes}", quote(mode))));
            }
        };
        let (bits, group) = (object.need("bits")?, object.need("group_size")?);
        let known = match mode {
            Mode::Affine => matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128),
            Mode::Mxfp4 => (bits, group) == (4, 32),
            Mode::Mxfp8 => (bits, group) == (8, 32),
            Mode::Nvfp4 | Mode::Nvfp4Scaled => (bits, group) == (4, 16),
        };
        if !known {
            return Err(FormatError::Unsupported(format!("{mode:?} quantization to {bits} bits in groups of {group}")));
        }
        Ok(GroupQuant { bits: bits as u8, group, mode })
    }
}

/// Reads `quantization`, or a `quantization_config` without a method.
pub(super) fn read(object: &Lookup) -> Result<Quantization, FormatError> {
    let default = Scheme::Group(GroupQuant::read(object)?);
    let mut overrides = BTreeMap::new();
    for (name, value) in object.inner {
        let quant = match value {
            serde_json::Value::Bool(false) => None,
            serde_json::Value::Bool(true) => Some(default),
            serde_json::Value::Object(inner) => Some(Scheme::Group(GroupQuant::read(&Lookup { inner, outer: None })?)),
            _ => continue,
        };
        overrides.insert(canonical_module(name), quant);
    }
    Ok(plain(Method::Mlx, default, overrides))
}

/// The quantization of gpt-oss: its configuration lists the modules in floats, which are all except the experts.
pub(super) fn gpt_oss() -> Quantization {
    let experts = Scheme::Group(GroupQuant { bits: 4, group: 32, mode: Mode::Mxfp4 });
    Quantization { experts_only: true, ..plain(Method::Mxfp4, experts, BTreeMap::new()) }
}

fn plain(method: Method, default: Scheme, overrides: BTreeMap<String, Option<Scheme>>) -> Quantization {
    Quantization { method, default, experts_only: false, embedding: true, head: true, overrides, rules: Vec::new() }
}

/// Joins a packed weight with its scales and biases. Their shapes must agree with each other and with the
/// configuration.
pub(super) fn entry<'a>(
    weight: &Found,
    declared: &Quantization,
    find: impl Fn(&str) -> Option<&'a Found>,
) -> Result<Entry, FormatError> {
    let wrong = |what: String| FormatError::Safetensors(format!("tensor {}: {what}", quote(&weight.name)));
    let module = weight.name.strip_suffix(".weight").unwrap_or(&weight.name);
    let Some(Scheme::Group(quant)) = declared.of(&canonical_module(module)) else {
        return Err(wrong("it is packed, but the configuration says that it is not".to_owned()));
    };
    if quant.mode != Mode::Affine {
        return micro::mlx_entry(weight, quant, find);
    }
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
        info: TensorInfo { shape, encoding: quant.encoding(dtype), bytes },
        storage: Storage::Affine {
            codes: weight.span.clone(),
            scales: scales.span.clone(),
            biases: biases.span.clone(),
        },
    })
}
