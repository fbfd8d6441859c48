//! Metadata keys under the prefix of the architecture.

use super::meta::{GgufMeta, GgufValue};
use crate::error::FormatError;

/// Metadata under the prefix of the architecture.
pub(crate) struct Keys<'a> {
    pub(crate) meta: &'a GgufMeta,
    pub(crate) prefix: &'a str,
}

impl Keys<'_> {
    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(crate) fn bool(&self, key: &str) -> Option<bool> {
        self.meta.bool(&self.path(key))
    }

    pub(crate) fn f32(&self, key: &str) -> Option<f32> {
        self.meta.f32(&self.path(key))
    }

    /// A size. Some files list it per layer: then all layers must agree. Layers without the part have 0.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, FormatError> {
        let Some(sizes) = self.integers(key)? else { return Ok(None) };
        let size = sizes.iter().copied().max().unwrap_or(0);
        match sizes.iter().all(|each| [0, size].contains(each)) && !sizes.is_empty() {
            true => Ok(Some(usize::try_from(size).unwrap_or(usize::MAX))),
            false => Err(FormatError::Unsupported(format!("{} differs between layers", self.path(key)))),
        }
    }

    /// Per layer of `layers`, whether it has the part that a size describes: whether the size is above 0. A single size applies to all
    /// layers. The list may also have entries of a draft head's layers.
    pub(crate) fn present(&self, key: &str, layers: usize) -> Result<Vec<bool>, FormatError> {
        let sizes = self.integers(key)?.unwrap_or_default();
        match sizes.len() {
            0 | 1 => Ok(vec![true; layers]),
            count if count >= layers => Ok(sizes[..layers].iter().map(|size| *size > 0).collect()),
            count => Err(FormatError::Config(format!("{} has {count} entries for {layers} layers", self.path(key)))),
        }
    }

    /// An integer as a list of one, or a list of integers.
    fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, FormatError> {
        let path = self.path(key);
        if self.meta.get(&path).is_none() {
            return Ok(None);
        }
        let integers = self.meta.integers(&path);
        integers.map(Some).ok_or_else(|| FormatError::Config(format!("{path} is not a non-negative integer")))
    }

    /// A size for each layer, from a list or from one size for all layers.
    pub(crate) fn sizes(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>, FormatError> {
        let path = self.path(key);
        if self.meta.get(&path).is_none() {
            return Ok(None);
        }
        let wrong = || FormatError::Config(format!("{path} is neither a size nor a list of {layers} sizes"));
        let sizes = self.meta.integers(&path).ok_or_else(wrong)?;
        let size = |size: &u64| usize::try_from(*size).unwrap_or(usize::MAX);
        match sizes.len() {
            1 => Ok(Some(vec![size(&sizes[0]); layers])),
            count if count == layers => Ok(Some(sizes.iter().map(size).collect())),
            _ => Err(wrong()),
        }
    }

    pub(crate) fn need(&self, key: &str) -> Result<usize, FormatError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn missing(&self, key: &str) -> FormatError {
        FormatError::Config(format!("{} is missing", self.path(key)))
    }

    /// Per layer, whether it attends through the sliding window, if the file lists the layers.
    pub(crate) fn listed_sliding_layers(&self, layers: usize) -> Result<Option<Vec<bool>>, FormatError> {
        let key = "attention.sliding_window_pattern";
        match self.meta.get(&self.path(key)) {
            Some(GgufValue::Bools(pattern)) if pattern.len() == layers => Ok(Some(pattern.to_vec())),
            Some(GgufValue::Bools(pattern)) => {
                Err(FormatError::Config(format!("{key} has {} entries for {layers} layers", pattern.len())))
            }
            _ => Ok(None),
        }
    }

    /// Per layer, whether it attends through the sliding window: from a list, or from the interval of the other layers.
    pub(crate) fn sliding_layers(&self, layers: usize, default: usize) -> Result<Vec<bool>, FormatError> {
        if let Some(list) = self.listed_sliding_layers(layers)? {
            return Ok(list);
        }
        let key = "attention.sliding_window_pattern";
        match self.size(key)?.unwrap_or(default) {
            0 => Err(FormatError::Config(format!("{key} is 0"))),
            pattern => Ok((1..=layers).map(|layer| layer % pattern != 0).collect()),
        }
    }
}
