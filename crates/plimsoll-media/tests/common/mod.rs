//! Shared functions of the media tests.

use std::path::PathBuf;

/// Reads a file of `tests/fixtures/media`.
pub fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/media");
    std::fs::read(folder.join(name)).unwrap()
}
