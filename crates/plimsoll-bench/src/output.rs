//! Results for the user: lines on standard output and files in JSON.

use std::fmt::Arguments;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints one line. The command line decides what a failed write means.
pub type Print = fn(Arguments<'_>);

/// Writes a report to a file.
pub fn write_json(path: &Path, report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(report)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
