//! `quantization_config` of compressed-tensors: groups of targets with one scheme each, and modules left in floats.

use super::nvfp4;
use super::rules::{block, canonical_module, check_count, expression, group, mistyped, names, refused};
use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::quantization::{F8Quant, IntegerQuant, Method, Pattern, Quantization, Scheme};
use std::collections::BTreeMap;

/// The formats that can be read.
const FORMATS: [&str; 6] = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
];
const NEXT: &str =
    "supported are \"pack-quantized\", \"int-quantized\", \"float-quantized\" and \"nvfp4-pack-quantized\"";

/// Reads the configuration. Schemes of activations are ignored: activations are computed at a higher precision.
pub(super) fn read(object: &Lookup) -> Result<Quantization, FormatError> {
    check_format(object, "format")?;
    if object.get("sparsity_config").and_then(|sparsity| sparsity.get("format")?.as_str()).unwrap_or("dense") != "dense"
    {
        return Err(refused("sparsity_config.format", "is not \"dense\"", "use a version that is quantized alone"));
    }
    let groups = object.object("config_groups")?.ok_or_else(|| mistyped("config_groups", "there"))?;
    let mut found: Vec<(Vec<&str>, Scheme)> = Vec::new();
    for (name, value) in groups.inner {
        let what = || mistyped(&format!("config_groups.{name}"), "an object with targets and weights");
        let inner = value.as_object().ok_or_else(what)?;
        let one = Lookup { inner, outer: None };
        check_format(&one, "format")?;
        let Some(weights) = one.object("weights")? else { continue };
        let targets = names(&one, "targets")?;
        check_count("config_groups.targets", targets.len(), targets.iter().filter(|t| t.starts_with("re:")).count())?;
        found.push((targets, scheme(&weights)?));
    }
    let class = |targets: &[&str]| targets.contains(&"Linear");
    let default = found.iter().find(|(targets, _)| class(targets)).or(found.first()).map(|(_, scheme)| *scheme);
    let default = default.ok_or_else(|| mistyped("config_groups", "a list of schemes for weights"))?;
    let mut quantization = Quantization {
        method: Method::CompressedTensors,
        default,
        experts_only: false,
        embedding: false,
        // `Linear` as a target includes the output head.
        head: true,
        overrides: BTreeMap::new(),
        rules: Vec::new(),
    };
    let ignored = names(object, "ignore")?;
    check_count("ignore", ignored.len(), ignored.iter().filter(|name| name.starts_with("re:")).count())?;
    ignored.iter().for_each(|name| quantization.add(name, None));
    for (targets, scheme) in &found {
        targets.iter().filter(|name| **name != "Linear").for_each(|name| quantization.add(name, Some(*scheme)));
    }
    if !found.iter().any(|(targets, _)| class(targets)) {
        quantization.rules.push((Pattern::Any, None));
    }
    Ok(quantization)
}

impl Quantization {
    /// Adds the scheme of one module by name, or of several by `re:` and an expression. The first rule for a name applies.
    fn add(&mut self, name: &str, own: Option<Scheme>) {
        match name.strip_prefix("re:") {
            Some(text) => self.rules.push((expression(text), own)),
            None => {
                self.overrides.entry(canonical_module(name)).or_insert(own);
            }
        }
    }
}

fn check_format(object: &Lookup, key: &str) -> Result<(), FormatError> {
    match object.str(key)? {
        Some(format) if !FORMATS.contains(&format) => Err(refused(key, &format!("{format:?}"), NEXT)),
        _ => Ok(()),
    }
}

/// Reads the scheme of weights.
fn scheme(weights: &Lookup) -> Result<Scheme, FormatError> {
    let wrong = |key: &str, value: &str, next: &str| refused(&format!("config_groups.weights.{key}"), value, next);
    match weights.str("type")?.unwrap_or("int") {
        "int" => {}
        "float" => return floats(weights),
        kind => return Err(wrong("type", &format!("{kind:?}"), "supported are \"int\" and \"float\"")),
    }
    let bits = weights.size("num_bits")?.unwrap_or(8);
    let bits = u8::try_from(bits)
        .ok()
        .filter(|bits| matches!(bits, 2..=6 | 8))
        .ok_or_else(|| wrong("num_bits", &bits.to_string(), "supported are 2, 3, 4, 5, 6 and 8 bits"))?;
    let size = group(weights, &["group_size"])?.flatten();
    let group = match weights.str("strategy")? {
        Some("group") => size,
        Some("channel" | "tensor") => None,
        None if size.is_some() => size,
        None => None,
        Some(other) => {
            return Err(wrong(
                "strategy",
                &format!("{other:?}"),
                "supported are \"group\", \"channel\" and \"tensor\"",
            ));
        }
    };
    let symmetric = weights.bool("symmetric")?.unwrap_or(true);
    Ok(Scheme::Integer(IntegerQuant { bits, group, symmetric, scales: None }))
}

/// Reads the scheme of weights in NVFP4 or FP8.
fn floats(weights: &Lookup) -> Result<Scheme, FormatError> {
    let wrong = |key: &str, value: &str, next: &str| refused(&format!("config_groups.weights.{key}"), value, next);
    let bits = weights.size("num_bits")?.unwrap_or(8);
    let size = group(weights, &["group_size"])?.flatten();
    if (bits, size) == (4, Some(nvfp4::GROUP)) {
        return match weights.bool("symmetric")?.unwrap_or(true) {
            true => Ok(nvfp4::SCHEME),
            false => Err(wrong("symmetric", "false", "NVFP4 is supported without zero points")),
        };
    }
    if bits != 8 {
        let next = "floats of 8 bits are supported here, and of 4 bits in groups of 16";
        return Err(wrong("num_bits", &bits.to_string(), next));
    }
    let block = match weights.str("strategy")? {
        None | Some("channel" | "tensor") => None,
        Some("group") => size.map(|columns| [1, columns]),
        Some("block") => match block(weights, "block_structure")? {
            Some(block) => Some(block),
            None => return Err(mistyped("config_groups.weights.block_structure", "there")),
        },
        Some(other) => {
            let next = "supported are \"tensor\", \"channel\", \"group\" and \"block\"";
            return Err(wrong("strategy", &format!("{other:?}"), next));
        }
    };
    Ok(Scheme::F8(F8Quant { block }))
}
