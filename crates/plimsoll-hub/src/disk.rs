//! Files of the cache: partial files that grow, are synced and then renamed; sums; free room.
//!
//! This module is independent of the files' content and source.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::HubError;
use crate::progress::{Progress, still_wanted};

/// Room left on the disk beside a model, so that a pull never fills it to the last byte.
const SPARE_BYTES: u64 = 16 << 20;

/// A file that is being written and that no other process may use yet.
#[derive(Debug)]
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    /// Bytes in the file, all of them written by this crate in order.
    len: u64,
    /// Bytes of the complete file, for the message of a full disk.
    goal: u64,
}

impl Partial {
    /// Opens or creates the partial file, positioned at its end. A file longer than `goal` is emptied.
    pub(crate) fn open(path: &Path, goal: u64) -> Result<Self, HubError> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(HubError::io("create", parent))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(HubError::io("open", path))?;
        let len = file.metadata().map_err(HubError::io("inspect", path))?.len();
        let mut partial = Self { file, path: path.to_owned(), len, goal };
        if len > goal {
            partial.truncate(0)?;
        }
        Ok(partial)
    }

    /// Bytes present.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Cuts the file to `len` bytes, which must not be more than it has.
    pub(crate) fn truncate(&mut self, len: u64) -> Result<(), HubError> {
        if len < self.len {
            self.file.set_len(len).map_err(HubError::io("truncate", &self.path))?;
            self.len = len;
        }
        Ok(())
    }

    /// Appends bytes. The error of a full disk has the missing and the free bytes.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(|error| self.write_error(error))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Syncs all written bytes, so that they survive a power cut.
    pub(crate) fn sync(&self) -> Result<(), HubError> {
        // Delayed allocation may report a full disk only here.
        self.file.sync_all().map_err(|error| self.write_error(error))
    }

    fn write_error(&self, error: io::Error) -> HubError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let directory = self.path.parent().unwrap_or(&self.path);
                HubError::DiskFull {
                    path: directory.to_owned(),
                    needed: self.goal.saturating_sub(self.len),
                    free: free_bytes(directory),
                }
            }
            _ => HubError::io("write", &self.path)(error),
        }
    }
}

/// Renames a finished, synced file into place and makes the rename itself durable.
pub(crate) fn install(from: &Path, to: &Path) -> Result<(), HubError> {
    let parent = to.parent().unwrap_or(to);
    fs::create_dir_all(parent).map_err(HubError::io("create", parent))?;
    fs::rename(from, to).map_err(HubError::io("rename", from))?;
    // Directories can be synced on Unix only. Elsewhere the system decides how durable the rename is.
    if cfg!(unix) {
        File::open(parent).and_then(|directory| directory.sync_all()).map_err(HubError::io("sync", parent))?;
    }
    Ok(())
}

/// Writes a whole file, synced.
pub(crate) fn write(path: &Path, content: &[u8]) -> Result<(), HubError> {
    remove_if_present(path)?;
    let mut partial = Partial::open(path, content.len() as u64)?;
    partial.append(content)?;
    partial.sync()
}

/// Replaces a small file as a whole: readers see the old content or the new, never a mixture.
pub(crate) fn replace(path: &Path, scratch: &Path, content: &[u8]) -> Result<(), HubError> {
    write(scratch, content)?;
    install(scratch, path)
}

/// Deletes a file; a missing file is no error.
pub(crate) fn remove_if_present(path: &Path) -> Result<(), HubError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Reads a small file of at most `limit` bytes; `None` if it does not exist.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, HubError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HubError::io("open", path)(error)),
    };
    let mut content = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut content).map_err(HubError::io("read", path))?;
    if content.len() as u64 > limit {
        return Err(HubError::TooLarge { what: path.display().to_string(), bytes: content.len() as u64, limit });
    }
    Ok(Some(content))
}

/// Returns the SHA-256 of a file's content on the disk, in lowercase hexadecimal.
pub(crate) fn sha256_file(path: &Path, progress: &mut dyn Progress) -> Result<String, HubError> {
    let mut file = File::open(path).map_err(HubError::io("open", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 18];
    loop {
        still_wanted(progress)?;
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(HubError::io("read", path)(error)),
        };
        hasher.update(&buffer[..read]);
        progress.advance(read as u64);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Fails with [`HubError::DiskFull`] if `directory` cannot take `needed` bytes and stay usable.
pub(crate) fn require_room(directory: &Path, needed: u64) -> Result<(), HubError> {
    match free_bytes(directory) {
        Some(free) if needed > 0 && free < needed.saturating_add(SPARE_BYTES) => {
            Err(HubError::DiskFull { path: directory.to_owned(), needed, free: Some(free) })
        }
        _ => Ok(()),
    }
}

/// Returns the bytes that an unprivileged process may still write in the file system of `path`, if the system reports them.
#[cfg(unix)]
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Returns none, since the free bytes are unknown here: a full disk is then found while writing.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

/// Returns the sum of the sizes of all files below `directory`; a file that vanishes meanwhile counts nothing.
pub(crate) fn tree_bytes(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => tree_bytes(&entry.path()),
            Ok(kind) if kind.is_file() => entry.metadata().map_or(0, |metadata| metadata.len()),
            _ => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Quiet;

    #[test]
    fn the_sum_is_sha256() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        fs::write(&path, b"abc").unwrap();
        assert_eq!(
            sha256_file(&path, &mut Quiet).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_partial_file_grows_is_cut_and_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/x.part");
        let mut partial = Partial::open(&path, 10).unwrap();
        partial.append(b"hello").unwrap();
        partial.truncate(4).unwrap();
        partial.append(b"!").unwrap();
        partial.sync().unwrap();
        drop(partial);
        assert_eq!(fs::read(&path).unwrap(), b"hell!");
        assert_eq!(Partial::open(&path, 10).unwrap().len(), 5);
        // Longer than it may ever become, so it is not a file of this crate.
        assert_eq!(Partial::open(&path, 3).unwrap().len(), 0);
    }

    #[test]
    fn no_room_is_told_in_bytes() {
        let dir = tempfile::tempdir().unwrap();
        require_room(dir.path(), 1).unwrap();
        require_room(dir.path(), 0).unwrap();
        if free_bytes(dir.path()).is_some() {
            let error = require_room(dir.path(), u64::MAX).unwrap_err();
            assert!(matches!(error, HubError::DiskFull { free: Some(_), .. }));
            assert!(error.to_string().contains("18446744.0 TB more needed"), "{error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_disk_that_fills_while_writing_is_told_in_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.part");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut partial = Partial::open(&path, 1_000).unwrap();
        let error = partial.append(b"hello").unwrap_err();
        assert!(matches!(error, HubError::DiskFull { needed: 1_000, .. }), "{error}");
    }

    #[test]
    fn reads_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        assert!(read_bounded(&path, 3).unwrap().is_none());
        fs::write(&path, b"1234").unwrap();
        assert_eq!(read_bounded(&path, 4).unwrap().unwrap(), b"1234");
        assert!(matches!(read_bounded(&path, 3), Err(HubError::TooLarge { .. })));
    }
}
