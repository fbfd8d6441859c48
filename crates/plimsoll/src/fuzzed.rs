//! This crate's parsers of foreign text, exported for `plimsoll-fuzz` only.

use std::path::Path;

pub use plimsoll_bench::events::Events;

/// How many models a file of models lists.
///
/// # Errors
/// What is wrong with it, in words.
pub fn models(file: &Path) -> Result<usize, String> {
    crate::models_file::read(file, &[]).map(|models| models.len()).map_err(|error| format!("{error:#}"))
}
