//! `quantization_config` of AWQ, GPTQ and AutoRound.

use super::rules::{bits, canonical_module, check_count, expression, group, mistyped, names, refused};
use crate::encoding::Dtype;
use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::quantization::{IntegerQuant, Method, Pattern, Quantization, Scheme};
use serde_json::Value;
use std::collections::BTreeMap;

/// Widths in bits of codes that fill 32-bit words exactly.
const WIDTHS: [u8; 3] = [2, 4, 8];

/// Returns a quantization of linear layers with 16-bit scales and no rules.
fn plain(method: Method, quant: IntegerQuant) -> Quantization {
    Quantization {
        method,
        default: Scheme::Integer(quant),
        experts_only: false,
        embedding: false,
        head: false,
        overrides: BTreeMap::new(),
        rules: Vec::new(),
    }
}

/// Reads AWQ in AutoAWQ's form.
pub(super) fn awq(object: &Lookup) -> Result<Quantization, FormatError> {
    // Newer versions write `format` for `version`.
    for key in ["version", "format"] {
        if let Some(version) = object.str(key)?
            && !version.eq_ignore_ascii_case("gemm")
        {
            let next = "supported is \"gemm\": use a GEMM version of the model, or a GPTQ or GGUF one";
            return Err(refused(key, &format!("{version:?}"), next));
        }
    }
    if object.str("backend")? == Some("llm-awq") {
        return Err(refused("backend", "\"llm-awq\"", "its packing is not supported: use a GEMM version of the model"));
    }
    let quant = IntegerQuant {
        bits: bits(object, &["bits", "w_bit"], &[4])?.unwrap_or(4),
        group: group(object, &["group_size", "q_group_size"])?.unwrap_or(Some(128)),
        symmetric: !object.bool("zero_point")?.unwrap_or(true),
        scales: Some(Dtype::F16),
    };
    let mut quantization = plain(Method::Awq, quant);
    let skipped = names(object, "modules_to_not_convert")?;
    quantization.rules.extend(skipped.iter().map(|name| (Pattern::Contains((*name).to_owned()), None)));
    Ok(quantization)
}

/// Reads GPTQ in the form of AutoGPTQ, GPTQModel and optimum. The tensors, not this configuration, show whether columns are reordered.
pub(super) fn gptq(object: &Lookup) -> Result<Quantization, FormatError> {
    let format = match object.str("checkpoint_format")? {
        Some(format) => Some(("checkpoint_format", format)),
        None => object.str("format")?.map(|format| ("format", format)),
    };
    let zeros_less_one = match format {
        None | Some((_, "" | "gptq")) => true,
        Some((_, "gptq_v2")) => false,
        Some((key, other)) => {
            let next = "supported are \"gptq\" and \"gptq_v2\": save the model in one of these";
            return Err(refused(key, &format!("{other:?}"), next));
        }
    };
    if object.bool("is_marlin_format")? == Some(true) {
        return Err(refused("is_marlin_format", "true", "save the model in the format \"gptq\""));
    }
    if let Some(words) = object.str("pack_dtype")?
        && words != "int32"
    {
        return Err(refused("pack_dtype", &format!("{words:?}"), "supported is \"int32\""));
    }
    let quant = IntegerQuant {
        bits: bits(object, &["bits"], &WIDTHS)?.unwrap_or(4),
        group: group(object, &["group_size"])?.unwrap_or(Some(128)),
        symmetric: object.bool("sym")?.unwrap_or(true),
        scales: Some(Dtype::F16),
    };
    let mut quantization = plain(Method::Gptq { zeros_less_one }, quant);
    quantization.head = object.get("lm_head").and_then(Value::as_bool).unwrap_or(false);
    dynamic(object, quant, &mut quantization)?;
    let skipped = names(object, "modules_to_not_convert")?;
    quantization.rules.extend(skipped.iter().map(|name| (Pattern::Contains((*name).to_owned()), None)));
    only_inside(object, quant, &mut quantization)?;
    Ok(quantization)
}

/// Adds GPTQModel's rules. An expression after `+:` or without a mark changes modules; after `-:` it leaves them in floats.
fn dynamic(object: &Lookup, default: IntegerQuant, quantization: &mut Quantization) -> Result<(), FormatError> {
    let Some(dynamic) = object.object("dynamic")? else { return Ok(()) };
    check_count("dynamic", dynamic.inner.len(), dynamic.inner.len())?;
    for (key, value) in dynamic.inner {
        let own = match key.strip_prefix("-:") {
            Some(_) => None,
            None => Some(Scheme::Integer(changed(default, "dynamic", value)?)),
        };
        let text = key.strip_prefix("-:").or_else(|| key.strip_prefix("+:")).unwrap_or(key);
        quantization.rules.push((expression(text), own));
    }
    Ok(())
}

/// Adds optimum's list of the only modules that are quantized.
fn only_inside(object: &Lookup, default: IntegerQuant, quantization: &mut Quantization) -> Result<(), FormatError> {
    let Some(list) = object.get("modules_in_block_to_quantize") else { return Ok(()) };
    let flat: Option<Vec<&Value>> = list.as_array().map(|list| {
        list.iter().flat_map(|part| part.as_array().map_or(vec![part], |inner| inner.iter().collect())).collect()
    });
    let names = flat.and_then(|flat| flat.into_iter().map(Value::as_str).collect::<Option<Vec<&str>>>());
    let names =
        names.ok_or_else(|| mistyped("modules_in_block_to_quantize", "a list of texts, or of lists of them"))?;
    check_count("modules_in_block_to_quantize", names.len(), 0)?;
    for name in names {
        quantization.rules.push((Pattern::Contains(name.to_owned()), Some(Scheme::Integer(default))));
    }
    quantization.rules.push((Pattern::Any, None));
    Ok(())
}

/// Returns the quantization of a module that overrides some of the default's keys.
fn changed(default: IntegerQuant, key: &str, value: &Value) -> Result<IntegerQuant, FormatError> {
    let inner = value.as_object().ok_or_else(|| mistyped(key, "an object of objects"))?;
    let own = Lookup { inner, outer: None };
    Ok(IntegerQuant {
        bits: bits(&own, &["bits"], &WIDTHS)?.unwrap_or(default.bits),
        group: group(&own, &["group_size"])?.unwrap_or(default.group),
        symmetric: own.bool("sym")?.unwrap_or(default.symmetric),
        scales: default.scales,
    })
}

/// Reads AutoRound: the tensors of GPTQ or of AWQ, with other rules.
pub(super) fn auto_round(object: &Lookup) -> Result<Quantization, FormatError> {
    if let Some(kind) = object.str("data_type")?
        && kind != "int"
    {
        return Err(refused("data_type", &format!("{kind:?}"), "supported is \"int\""));
    }
    let format = match object.str("packing_format")? {
        Some(format) => Some(("packing_format", format)),
        None => object.str("backend")?.map(|format| ("backend", format)),
    };
    let (method, widths): (Method, &[u8]) = match format {
        None | Some((_, "auto" | "auto_round:auto_gptq" | "auto_round:gptq")) => {
            (Method::Gptq { zeros_less_one: true }, &WIDTHS)
        }
        Some((_, "auto_round" | "auto_round:gptqmodel")) => (Method::Gptq { zeros_less_one: false }, &WIDTHS),
        Some((_, "auto_round:auto_awq" | "auto_round:awq")) => (Method::Awq, &[4]),
        // Early versions also named a kernel.
        Some((_, old)) if old.starts_with("auto_round:gptq:") => (Method::Gptq { zeros_less_one: true }, &WIDTHS),
        Some((_, old)) if old.starts_with("auto_round:awq:") => (Method::Awq, &[4]),
        Some((key, other)) => {
            let next = "supported are \"auto_round:auto_gptq\", \"auto_round:auto_awq\" and \"auto_round\"";
            return Err(refused(key, &format!("{other:?}"), next));
        }
    };
    let quant = IntegerQuant {
        bits: bits(object, &["bits"], widths)?.unwrap_or(4),
        group: group(object, &["group_size"])?.unwrap_or(Some(128)),
        symmetric: object.bool("sym")?.unwrap_or(true),
        scales: Some(Dtype::F16),
    };
    let mut quantization = plain(method, quant);
    let Some(extra) = object.object("extra_config")? else { return Ok(quantization) };
    let expressions = extra.inner.keys().filter(|name| is_expression(name)).count();
    check_count("extra_config", extra.inner.len(), expressions)?;
    for (name, value) in extra.inner {
        let inner = value.as_object().ok_or_else(|| mistyped("extra_config", "an object of objects"))?;
        let own = Lookup { inner, outer: None };
        let floats = own.size("bits")?.is_some_and(|bits| bits >= 16)
            || own.str("data_type")?.is_some_and(|kind| kind.contains("float"));
        let own = match floats {
            true => None,
            false => Some(Scheme::Integer(changed(quant, "extra_config", value)?)),
        };
        match is_expression(name) {
            true => quantization.rules.push((expression(name), own)),
            false => {
                quantization.head |= name == "lm_head" && own.is_some();
                quantization.overrides.insert(canonical_module(name), own);
            }
        }
    }
    Ok(quantization)
}

/// Whether a key of `extra_config` is an expression, not a name.
fn is_expression(name: &str) -> bool {
    name.contains(['*', '\\', '(', '[', '|', '^', '$', '+', '?'])
}
