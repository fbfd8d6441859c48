//! A file that a pull must deliver.

/// A file as it must be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Its name relative to the model's directory, checked.
    pub(crate) name: &'a str,
    /// Its exact size.
    pub(crate) bytes: u64,
    /// Its SHA-256, where it is known beforehand.
    pub(crate) sha256: Option<&'a str>,
    /// The hub's own name for the content, for files whose SHA-256 the hub does not tell.
    pub(crate) blob: Option<&'a str>,
}
