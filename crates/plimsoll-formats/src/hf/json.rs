//! Bounded access to small JSON files: size checked before reading, keys fetched with their type.
//!
//! Only for configuration files. `safetensors` parses the heads of weight files without building a tree.

use crate::error::FormatError;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// Largest configuration file in bytes. Real files have kilobytes, and hundreds of them with per-layer overrides.
const CONFIG_BYTES_MAX: u64 = 2 << 20;

/// Reads a whole file of at most `limit` bytes.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, FormatError> {
    let file = std::fs::File::open(path).map_err(FormatError::io(path))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(FormatError::io(path))?;
    if bytes.len() as u64 > limit {
        return Err(FormatError::Config(format!("{} is longer than {limit} bytes", path.display())));
    }
    Ok(bytes)
}

/// Reads a configuration file, which must hold an object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, FormatError> {
    let bytes = read_bounded(path, CONFIG_BYTES_MAX)?;
    parse_object(&bytes).map_err(|error| FormatError::Config(format!("{}: {error}", path.display())))
}

/// Parses the object in a JSON text, which may have Python's infinities.
pub(super) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, serde_json::Error> {
    serde_json::from_slice(bytes).or_else(|error| match without_infinities(bytes) {
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|_| error),
        None => Err(error),
    })
}

/// Reads a configuration file, which must hold a list.
pub(super) fn read_array(path: &Path) -> Result<Vec<Value>, FormatError> {
    let bytes = read_bounded(path, CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|error| FormatError::Config(format!("{}: {error}", path.display())))
}

/// Returns the text with null in place of the numbers that Python writes and JSON lacks, outside of strings. None if there are no such
/// numbers.
fn without_infinities(bytes: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut at, mut quoted) = (Vec::with_capacity(bytes.len()), 0, false);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let number = ["-Infinity", "Infinity", "NaN"].iter().find(|number| rest.starts_with(number.as_bytes()));
        if let Some(number) = number.filter(|_| !quoted) {
            out.extend_from_slice(b"null");
            at += number.len();
            continue;
        }
        let taken = if quoted && rest[0] == b'\\' { 2.min(rest.len()) } else { 1 };
        quoted ^= rest[0] == b'"';
        out.extend_from_slice(&rest[..taken]);
        at += taken;
    }
    (out != bytes).then_some(out)
}

/// An object, and the object around it for keys that the inner one lacks or holds null for.
#[derive(Clone, Copy)]
pub(crate) struct Lookup<'a> {
    pub(super) inner: &'a Map<String, Value>,
    pub(super) outer: Option<&'a Map<String, Value>>,
}

impl<'a> Lookup<'a> {
    /// The value of a key. A null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        let here = self.inner.get(key).filter(|value| !value.is_null());
        here.or_else(|| self.outer?.get(key).filter(|value| !value.is_null()))
    }

    /// Whether the object itself lacks a key: an explicit null switches a value off, and an absent key means the default.
    pub(crate) fn lacks(&self, key: &str) -> bool {
        !self.inner.contains_key(key)
    }

    /// The keys of the object itself.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.inner.keys().map(String::as_str)
    }

    /// A non-negative integer.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, FormatError> {
        self.typed(key, "a non-negative integer", |value| whole(value).and_then(|n| usize::try_from(n).ok()))
    }

    /// A number.
    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, FormatError> {
        self.typed(key, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    /// A boolean.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    /// A text.
    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, FormatError> {
        self.typed(key, "a text", Value::as_str)
    }

    /// An object.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Lookup<'a>>, FormatError> {
        self.typed(key, "an object", |value| value.as_object().map(|inner| Lookup { inner, outer: None }))
    }

    /// A required non-negative integer.
    pub(crate) fn need(&self, key: &str) -> Result<usize, FormatError> {
        self.size(key)?.ok_or_else(|| FormatError::Config(format!("{key} is missing")))
    }

    fn typed<T>(
        &self,
        key: &str,
        what: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(FormatError::Config(format!("{key} is not {what}"))),
        }
    }
}

/// Returns a non-negative integer, also from a number like `2.0`.
pub(crate) fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number >= 0.0 && number <= (1u64 << 53) as f64 && number.fract() == 0.0).then_some(number as u64)
    })
}
