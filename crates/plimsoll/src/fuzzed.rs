//! This crate's parsers of foreign text, exported for `plimsoll-fuzz` only.

use std::path::Path;

pub use plimsoll_bench::events::Events;

/// Reads a file of `--models` and returns the number of models in it.
///
/// # Errors
/// The message of the first error in the file.
pub fn models(file: &Path) -> Result<usize, String> {
    crate::models_file::read(file, &[]).map(|models| models.len()).map_err(|error| format!("{error:#}"))
}
