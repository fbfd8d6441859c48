//! Parses a JSON object field by field, so that every error names its field and no unknown field goes unnoticed.
//!
//! Values stay borrowed text until a field is taken. Only then is memory allocated, for that field's own type.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::unknown;

/// The most fields of one object. OpenAI's and vLLM's fields together are fewer.
const MAX_FIELDS: usize = 128;

/// The most values inside free-form JSON (messages, tools): each may cost some 100 bytes.
pub(crate) const MAX_NODES: usize = 32_768;

/// The fields of one object that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    /// The object's path in the body: empty, or `messages[2]`.
    path: String,
    left: Vec<(String, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Splits a whole body into its fields.
    pub fn of_body(body: &'a [u8]) -> ApiResult<Self> {
        let text = std::str::from_utf8(body)
            .map_err(|e| ApiError::bad_body(format!("the request body is not UTF-8 after byte {}", e.valid_up_to())))?;
        let Object(left) = serde_json::from_str(text).map_err(|e| {
            ApiError::bad_body(format!("the request body is not a JSON object: {}", quote(&e.to_string())))
        })?;
        Ok(Self { path: String::new(), left })
    }

    /// Splits an object inside the body into its fields.
    pub fn of(path: String, raw: &'a RawValue) -> ApiResult<Self> {
        match serde_json::from_str(raw.get()) {
            Ok(Object(left)) => Ok(Self { path, left }),
            Err(error) => Err(wrong(&path, &error)),
        }
    }

    /// Stands for an absent object.
    pub fn none(path: String) -> Self {
        Self { path, left: Vec::new() }
    }

    /// Returns whether a field is a string.
    pub fn is_text(&self, name: &str) -> bool {
        self.left.iter().any(|(key, raw)| key == name && raw.get().starts_with('"'))
    }

    /// Returns whether a field is this string.
    pub fn is_word(&self, name: &str, word: &str) -> bool {
        let is = |raw: &RawValue| raw.get().strip_prefix('"').and_then(|text| text.strip_suffix('"')) == Some(word);
        self.left.iter().any(|(key, raw)| key == name && is(raw))
    }

    /// Returns the full name of a field, for `param`.
    pub fn param(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// Returns whether a field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.left.iter().any(|(key, raw)| key == name && raw.get() != "null")
    }

    /// Takes a field's JSON text; none when it is absent or null.
    pub fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.left.iter().position(|(key, _)| key == name)?;
        let (_, raw) = self.left.swap_remove(at);
        (raw.get() != "null").then_some(raw)
    }

    /// Takes a field as `T`; none when it is absent or null.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> ApiResult<Option<T>> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        serde_json::from_str(raw.get()).map(Some).map_err(|error| wrong(&self.param(name), &error))
    }

    /// Takes a required field.
    pub fn required<T: Deserialize<'a>>(&mut self, name: &str) -> ApiResult<T> {
        let param = self.param(name);
        self.take(name)?.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))
    }

    /// Takes the JSON text of a required field, with the field's full name.
    pub fn needed(&mut self, name: &str) -> ApiResult<(String, &'a RawValue)> {
        let param = self.param(name);
        let raw = self.raw(name).ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
        Ok((param, raw))
    }

    /// Takes a field as `T` if it holds at most about `nodes_max` values.
    pub fn take_few<T: Deserialize<'a>>(&mut self, name: &str, nodes_max: usize) -> ApiResult<Option<T>> {
        if let Some((_, raw)) = self.left.iter().find(|(key, _)| key == name) {
            check_nodes(&self.param(name), raw.get(), nodes_max)?;
        }
        self.take(name)
    }

    /// Takes a finite number.
    pub fn number(&mut self, name: &str) -> ApiResult<Option<f32>> {
        let Some(value) = self.take::<f64>(name)? else {
            return Ok(None);
        };
        let narrow = value as f32;
        if !narrow.is_finite() {
            return Err(ApiError::invalid(self.param(name), format!("{name} is {value}, which is out of range")));
        }
        Ok(Some(narrow))
    }

    /// Takes free-form JSON, bounded in the number of its values.
    pub fn json(&mut self, name: &str) -> ApiResult<Option<Value>> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let param = self.param(name);
        check_nodes(&param, raw.get(), MAX_NODES)?;
        serde_json::from_str(raw.get()).map(Some).map_err(|error| wrong(&param, &error))
    }

    /// Takes a field that supports only the values `allowed` (JSON texts). The caller need not handle the value
    /// further.
    pub fn only(&mut self, name: &str, allowed: &[&str]) -> ApiResult<()> {
        match self.raw(name) {
            Some(raw) if !allowed.iter().any(|allowed| same(raw.get(), allowed)) => {
                let message = format!("{name} is supported only as {}", allowed.join(" or "));
                Err(ApiError::unsupported(self.param(name), message))
            }
            _ => Ok(()),
        }
    }

    /// Takes OpenAI's `service_tier`. All requests have the same tier on this server; the answer says so, and does not depend on the field.
    pub fn service_tier(&mut self) -> ApiResult<()> {
        self.only("service_tier", &["\"auto\"", "\"default\"", "\"flex\"", "\"scale\"", "\"priority\""])
    }

    /// Takes fields that this server does not support: any value but null is refused with `why`.
    pub fn never(&mut self, names: &[&str], why: &str) -> ApiResult<()> {
        for name in names {
            if self.raw(name).is_some() {
                return Err(ApiError::unsupported(self.param(name), format!("{name} is not supported: {why}")));
            }
        }
        Ok(())
    }

    /// Drops fields without a meaning on this server, whatever their value.
    pub fn hints(&mut self, names: &[&str]) {
        self.left.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// Takes a field under one of two names. Both may be given with the same value.
    pub fn either<T: Deserialize<'a> + PartialEq>(&mut self, name: &str, alias: &str) -> ApiResult<Option<T>> {
        let (own, other) = (self.take::<T>(name)?, self.take::<T>(alias)?);
        match (own, other) {
            (Some(own), Some(other)) if own != other => {
                let (own, param) = (self.param(name), self.param(alias));
                let message = format!("{own} and {param} are two names of one thing and differ; give one of them");
                Err(ApiError::invalid(param, message))
            }
            (own, other) => Ok(own.or(other)),
        }
    }

    /// Returns the names of the fields that are left. A null value is ignored, whatever the field's name.
    fn rest(&self) -> impl Iterator<Item = String> {
        self.left.iter().filter(|(_, raw)| raw.get() != "null").map(|(name, _)| self.param(&quote(name)))
    }

    /// Ends the parsing: a field that is left is refused with `why`.
    pub fn rest_unsupported(self, why: &str) -> ApiResult<()> {
        self.rest().next().map_or(Ok(()), |param| {
            let message = format!("{param} is not supported: {why}");
            Err(ApiError::unsupported(param, message))
        })
    }

    /// Ends the parsing: fields that are left are unknown, and are treated as the server is configured.
    pub fn finish(self) -> ApiResult<()> {
        for param in self.rest() {
            if !unknown::passes(&param) {
                let message = format!("unknown field `{param}`: it would have no effect here");
                return Err(ApiError { code: Some("unknown_field"), ..ApiError::invalid(param, message) });
            }
        }
        Ok(())
    }
}

/// Takes a `cache_control` mark: Anthropic's, which gateways and their clients also put into OpenAI's messages. Returns the minutes that it
/// asks for. Prefixes are always cached, while there is room. At `/v1/messages` a mark pins them, and decides how the prompt's tokens are
/// counted.
pub(crate) fn cache_control(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    let path = fields.param("cache_control");
    let Some(raw) = fields.raw("cache_control") else { return Ok(None) };
    let mut mark = Fields::of(path, raw)?;
    let at = mark.param("type");
    if mark.required::<String>("type")? != "ephemeral" {
        return Err(ApiError::unsupported(at.clone(), format!("{at} must be \"ephemeral\"")));
    }
    let at = mark.param("ttl");
    let minutes = match mark.take::<String>("ttl")?.as_deref() {
        None | Some("5m") => 5,
        Some("1h") => 60,
        Some(other) => {
            return Err(ApiError::unsupported(at.clone(), format!("{at} is `{}`; known are 5m and 1h", quote(other))));
        }
    };
    // Other fields that clients write beside it change no answer.
    Ok(Some(minutes))
}

/// Returns whether two JSON texts, the second a short one, are the same value.
fn same(json: &str, known: &str) -> bool {
    const LONGEST: usize = 256;
    let value = |json| serde_json::from_str::<Value>(json).ok();
    let number = |value: &Value| value.as_f64();
    json == known
        || json.len() <= LONGEST
            && value(json).zip(value(known)).is_some_and(|(json, known)| {
                json == known || number(&json).is_some_and(|it| number(&known) == Some(it))
            })
}

/// Refuses JSON with more than about `nodes_max` values, before any of it becomes a value.
pub(crate) fn check_nodes(param: &str, json: &str, nodes_max: usize) -> ApiResult<()> {
    few(param, nodes(json), nodes_max)
}

fn few(param: &str, nodes: usize, nodes_max: usize) -> ApiResult<()> {
    if nodes > nodes_max {
        let message = format!("{param} holds about {nodes} JSON values, more than the limit of {nodes_max}");
        return Err(ApiError::invalid(param, message));
    }
    Ok(())
}

/// Arguments of tool calls: JSON in strings. All of them together may hold as many values as other JSON of a request.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    nodes: usize,
}

impl Arguments {
    /// Parses a string into an object. Arguments that are not an object are kept as a string in an object, in the same form as at
    /// `/v1/messages`: the model may have written them in an earlier turn.
    pub fn parse(&mut self, param: &str, text: &str) -> ApiResult<Value> {
        if text.trim().is_empty() {
            return Ok(json!({}));
        }
        self.nodes += nodes(text);
        if self.nodes > MAX_NODES {
            let nodes = self.nodes;
            let message = format!(
                "{param}: the arguments of the calls up to here hold about {nodes} JSON values, more than the limit of {MAX_NODES}"
            );
            return Err(ApiError::invalid(param, message));
        }
        Ok(match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => object,
            _ => no_json(text),
        })
    }
}

/// Wraps arguments that are not JSON in an object.
pub(crate) fn no_json(arguments: &str) -> Value {
    json!({"INVALID_JSON": arguments})
}

/// Returns about how many values JSON holds.
fn nodes(json: &str) -> usize {
    let (mut nodes, mut in_string, mut escaped) = (1usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' | b':' if !in_string => nodes += 1,
            _ => {}
        }
    }
    nodes
}

/// 400 for a value of the wrong type, without the position inside the field.
pub(crate) fn wrong(param: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    let reason = match text.split(" at line ").next().unwrap_or(&text) {
        "recursion limit exceeded" => "values within each other are more than the limit of 127 levels",
        reason => reason,
    };
    let error = ApiError::invalid(param, format!("{param}: {}", quote(reason)));
    ApiError { code: Some("invalid_type"), ..error }
}

/// A string that is borrowed from the body, unless it has escapes.
#[derive(Debug)]
pub(crate) struct Text<'a>(pub Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }

    fn visit_string<E>(self, text: String) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text)))
    }
}

struct Object<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields: Vec<(String, &RawValue)> = Vec::new();
        while let Some((name, raw)) = map.next_entry::<String, &RawValue>()? {
            if fields.len() == MAX_FIELDS {
                return Err(A::Error::custom(format_args!("more than {MAX_FIELDS} fields")));
            }
            if fields.iter().any(|(known, _)| *known == name) {
                return Err(A::Error::custom(format_args!("field `{}` appears twice", quote(&name))));
            }
            fields.push((name, raw));
        }
        Ok(Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_names_its_field() {
        let mut fields = Fields::of_body(br#"{"temperature":"hot","n":null,"x":1e40,"odd":1}"#).unwrap();
        let wrong = fields.take::<f64>("temperature").unwrap_err();
        assert_eq!(wrong.param.as_deref(), Some("temperature"));
        assert!(wrong.message.contains("expected f64"), "{}", wrong.message);
        assert_eq!(fields.take::<u32>("n").unwrap(), None);
        assert!(fields.number("x").unwrap_err().message.contains("out of range"));
        assert_eq!(fields.finish().unwrap_err().param.as_deref(), Some("odd"));
    }

    #[test]
    fn what_is_no_plain_object_is_refused() {
        for bad in [&b"[]"[..], b"", b"{", b"{}x", b"{\"a\":1,\"a\":2}", b"\xff", b"{\"a\":\"\xff\"}", b"\"x\""] {
            assert!(Fields::of_body(bad).is_err(), "{bad:?}");
        }
        let many: Vec<String> = (0..200).map(|i| format!("\"f{i}\":0")).collect();
        assert!(Fields::of_body(format!("{{{}}}", many.join(",")).as_bytes()).is_err());
    }

    #[test]
    fn depth_and_number_of_values_are_bounded() {
        let deep = format!("{{\"m\":{}{}}}", "[".repeat(20_000), "]".repeat(20_000));
        let mut fields = Fields::of_body(deep.as_bytes()).unwrap();
        assert!(fields.json("m").unwrap_err().message.contains("limit of 127 levels"));
        let wide = format!("{{\"m\":[{}0]}}", "0,".repeat(MAX_NODES));
        let mut fields = Fields::of_body(wide.as_bytes()).unwrap();
        assert!(fields.json("m").unwrap_err().message.contains("limit of 32768"));
        let text = format!("{{\"m\":\"{}\"}}", "[,{:\\\"".repeat(MAX_NODES));
        let mut fields = Fields::of_body(text.as_bytes()).unwrap();
        assert!(fields.json("m").is_ok());
    }
}
