//! Metadata keys under the prefix of the architecture.

use super::meta::GgufMeta;
use crate::error::FormatError;

/// Metadata under the prefix of the architecture.
pub(super) struct Keys<'a> {
    pub(super) meta: &'a GgufMeta,
    pub(super) prefix: &'a str,
}

impl Keys<'_> {
    pub(super) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(super) fn f32(&self, key: &str) -> Option<f32> {
        self.meta.f32(&self.path(key))
    }

    /// A size. Some files list it per layer; then all layers must agree.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, FormatError> {
        let path = self.path(key);
        if self.meta.get(&path).is_none() {
            return Ok(None);
        }
        let sizes = self
            .meta
            .integers(&path)
            .ok_or_else(|| FormatError::Config(format!("{path} is not a non-negative integer")))?;
        match sizes.first() {
            Some(first) if sizes.iter().all(|size| size == first) => {
                Ok(Some(usize::try_from(*first).unwrap_or(usize::MAX)))
            }
            _ => Err(FormatError::Unsupported(format!("{path} differs between layers"))),
        }
    }

    pub(super) fn need(&self, key: &str) -> Result<usize, FormatError> {
        self.size(key)?.ok_or_else(|| FormatError::Config(format!("{} is missing", self.path(key))))
    }
}
