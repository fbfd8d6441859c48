//! Values that several methods' configurations share: bits, group sizes, names of modules, refusals.

use crate::error::FormatError;
use crate::hf::json::Lookup;
use crate::hf::names::canonical;
use crate::quantization::Pattern;
use regex::RegexBuilder;
use serde_json::Value;

/// Most rules of a configuration, and most names of a list.
const RULES_MAX: usize = 65_536;
/// Most regular expressions among the rules.
const REGEXES_MAX: usize = 1024;
/// Most bytes of one compiled expression.
const REGEX_BYTES_MAX: usize = 1 << 16;

/// The error for an unsupported value, with the next step.
pub(super) fn refused(key: &str, value: &str, next: &str) -> FormatError {
    let value: String = value.chars().take(120).collect();
    FormatError::Unsupported(format!("quantization_config.{key} {value}; {next}"))
}

/// The error for a value of the wrong type.
pub(super) fn mistyped(key: &str, what: &str) -> FormatError {
    FormatError::Config(format!("quantization_config.{key} is not {what}"))
}

/// The width of codes in bits, under any of these keys.
pub(super) fn bits(object: &Lookup, keys: &[&str], allowed: &[u8]) -> Result<Option<u8>, FormatError> {
    for key in keys {
        let Some(bits) = object.size(key)? else { continue };
        let known = u8::try_from(bits).ok().filter(|bits| allowed.contains(bits));
        return known
            .map(Some)
            .ok_or_else(|| refused(key, &bits.to_string(), &format!("supported are {allowed:?} bits")));
    }
    Ok(None)
}

/// The elements of a group, under any of these keys. The inner none stands for a whole row (-1).
pub(super) fn group(object: &Lookup, keys: &[&str]) -> Result<Option<Option<usize>>, FormatError> {
    for key in keys {
        let Some(value) = object.get(key) else { continue };
        return match value.as_i64() {
            Some(-1) => Ok(Some(None)),
            Some(group) if group >= 16 && group % 16 == 0 && group <= 1 << 20 => Ok(Some(Some(group as usize))),
            Some(group) => Err(refused(key, &group.to_string(), "supported are -1 and multiples of 16")),
            None => Err(mistyped(key, "a whole number")),
        };
    }
    Ok(None)
}

/// Rows and columns of a block; none if the key is absent.
pub(super) fn block(object: &Lookup, key: &str) -> Result<Option<[usize; 2]>, FormatError> {
    let Some(value) = object.get(key) else { return Ok(None) };
    let side = |side: &Value| side.as_u64().filter(|side| (1..=1 << 20).contains(side)).map(|side| side as usize);
    let sides = value.as_array().and_then(|sides| sides.iter().map(side).collect::<Option<Vec<usize>>>());
    let sides = sides.and_then(|sides| <[usize; 2]>::try_from(sides).ok());
    sides.map(Some).ok_or_else(|| mistyped(key, "two sizes of a block"))
}

/// A list of texts; empty if the key is absent.
pub(super) fn names<'a>(object: &Lookup<'a>, key: &str) -> Result<Vec<&'a str>, FormatError> {
    let Some(value) = object.get(key) else { return Ok(Vec::new()) };
    let list = value.as_array().filter(|list| list.len() <= RULES_MAX);
    let names = list.and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<&str>>>());
    names.ok_or_else(|| mistyped(key, &format!("a list of at most {RULES_MAX} texts")))
}

/// Refuses more rules than the limits.
pub(super) fn check_count(key: &str, rules: usize, regexes: usize) -> Result<(), FormatError> {
    match rules <= RULES_MAX && regexes <= REGEXES_MAX {
        true => Ok(()),
        false => Err(mistyped(key, &format!("at most {RULES_MAX} rules, {REGEXES_MAX} of them expressions"))),
    }
}

/// A regular expression that matches names from their beginning, as Python's `re.match` does.
pub(super) fn expression(text: &str) -> Pattern {
    let anchored = format!("^(?:{text})");
    // Expressions affect planning only. When weights are loaded, the tensors show which modules are quantized.
    RegexBuilder::new(&anchored).size_limit(REGEX_BYTES_MAX).build().map_or(Pattern::Any, Pattern::Regex)
}

/// The canonical name of a module.
pub(super) fn canonical_module(name: &str) -> String {
    let mut tensor = canonical(&format!("{name}.weight"));
    tensor.truncate(tensor.len() - ".weight".len());
    tensor
}
