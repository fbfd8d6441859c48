//! The user's entries of all sessions: a bounded file with one JSON string a line, which only the user may read.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use crate::private_file;

/// Most entries that are kept.
pub const ENTRIES_MAX: usize = 1000;

/// Most bytes of the file when a session begins, and most bytes that a session adds to it.
const FILE_BYTES_MAX: u64 = 512 << 10;

/// Most bytes of an entry's line; a longer entry is not kept.
const ENTRY_BYTES_MAX: usize = 16 << 10;

/// The file, and the bytes that this session has added to it.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    added: u64,
}

impl History {
    /// Reads the newest entries, oldest first, and shortens a file that has grown too large.
    ///
    /// # Errors
    /// The file cannot be read or shortened.
    pub fn open(path: PathBuf) -> std::io::Result<(Self, Vec<String>)> {
        let (entries, large) = match File::open(&path) {
            Ok(file) => read(file)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (Vec::new(), false),
            Err(error) => return Err(error),
        };
        let history = Self { path, added: 0 };
        if large {
            history.rewrite(&entries)?;
        }
        Ok((history, entries))
    }

    /// Appends an entry as a whole line, because other sessions may append to the same file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, entry: &str) -> std::io::Result<()> {
        let line = line(entry);
        let bytes = line.len() as u64;
        if line.len() > ENTRY_BYTES_MAX || self.added + bytes > FILE_BYTES_MAX {
            return Ok(());
        }
        self.added += bytes;
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        file.write_all(line.as_bytes())
    }

    /// Replaces the file's entries.
    fn rewrite(&self, entries: &[String]) -> std::io::Result<()> {
        private_file::write(&self.path, entries.iter().map(|entry| line(entry)).collect::<String>().as_bytes())
    }
}

fn line(entry: &str) -> String {
    format!("{}\n", serde_json::Value::from(entry))
}

/// Reads the newest entries, and whether the file must be shortened. Lines that are no JSON strings are skipped.
fn read(mut file: File) -> std::io::Result<(Vec<String>, bool)> {
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(FILE_BYTES_MAX / 2)))?;
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let mut entries: Vec<String> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let old = entries.len().saturating_sub(ENTRIES_MAX);
    entries.drain(..old);
    Ok((entries, old > 0 || bytes > FILE_BYTES_MAX / 2))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("plimsoll-history-{name}-{}", std::process::id()))
    }

    #[test]
    fn entries_of_several_lines_are_there_in_the_next_session() {
        let path = path("next");
        let (mut history, entries) = History::open(path.clone()).unwrap();
        assert!(entries.is_empty());
        for entry in ["one", "two\nlines \"quoted\"", "drei ü"] {
            history.add(entry).unwrap();
        }
        history.add(&"x".repeat(ENTRY_BYTES_MAX)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, [fs::read(&path).unwrap(), b"not json\n".to_vec()].concat()).unwrap();
        let (_, entries) = History::open(path.clone()).unwrap();
        assert_eq!(entries, ["one", "two\nlines \"quoted\"", "drei ü"]);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn file_is_bounded_in_lines_and_bytes() {
        let path = path("bounded");
        let line = |i: usize| format!("\"{i:0100}\"\n");
        fs::write(&path, (0..10_000).map(line).collect::<String>()).unwrap();
        let (mut history, entries) = History::open(path.clone()).unwrap();
        assert_eq!((entries.len(), entries.last().unwrap().trim_start_matches('0')), (ENTRIES_MAX, "9999"));
        assert!(fs::metadata(&path).unwrap().len() < FILE_BYTES_MAX / 2);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for _ in 0..200 {
            history.add(&"y".repeat(ENTRY_BYTES_MAX - 3)).unwrap();
        }
        assert!(fs::metadata(&path).unwrap().len() < 2 * FILE_BYTES_MAX, "a session adds no more than its share");
        fs::remove_file(path).unwrap();
    }
}
