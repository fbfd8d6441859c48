//! Files that only the user may read.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file with the mode 0600, as a whole or not at all: a new file replaces the old one.
///
/// # Errors
/// The file cannot be written; the old one stays.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_added_extension(format!("{}.new", std::process::id()));
    let written = (|| {
        // A leftover of a process with the same ID may have another mode.
        let _ = fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}
