//! A file that a pull must deliver.

/// The required properties of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Its name relative to the model's directory, checked.
    pub(crate) name: &'a str,
    /// Its exact size.
    pub(crate) bytes: u64,
    /// Its SHA-256, if it is known beforehand.
    pub(crate) sha256: Option<&'a str>,
    /// The hub's own name for the content, for files without a SHA-256 at the hub.
    pub(crate) blob: Option<&'a str>,
}
