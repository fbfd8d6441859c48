//! The files of a directory of blobs, and their paths.

use std::collections::hash_map::RandomState;
use std::fmt::Write;
use std::fs::{File, OpenOptions, TryLockError};
use std::hash::BuildHasher;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use thiserror::Error;

use crate::files::Files;
use crate::{Name, Tag};

/// A saved name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The name's label; `None` if it is encrypted and there is no key.
    pub label: Option<String>,
    /// The tag of its owner.
    pub tag: Tag,
    /// Seconds since 1970 at which it was saved.
    pub created: u64,
    /// Bytes of its data.
    pub data_bytes: usize,
    /// Number of blobs that it pins.
    pub blobs: usize,
    /// The id of its blobs ([`crate::saved_id`]); `None` without blobs.
    pub(crate) id: Option<u64>,
    pub(crate) file: Name,
    pub(crate) file_bytes: u64,
}

/// The reason why a directory cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process uses it.
    #[error("another process uses {}: stop it, or name another directory", .0.display())]
    Locked(PathBuf),
    /// Other users can enter it.
    #[error("other users can read {}: it will hold what is said to the model; use chmod 700 on it", .0.display())]
    Exposed(PathBuf),
    /// Its blobs are encrypted, and there is no key.
    #[error("{} is encrypted: give its key file (--cache-key-file), or remove its files with `plimsoll cache rm {}`", .0.display(), .0.display())]
    NeedsKey(PathBuf),
    /// Its blobs are not encrypted, or were encrypted with another key.
    #[error("the files of {dir} are {how}: name another directory, or remove them with `plimsoll cache rm {dir}`", dir = dir.display())]
    OtherKey {
        /// The directory.
        dir: PathBuf,
        /// How its blobs are encrypted, as text.
        how: &'static str,
    },
    /// The system refused something.
    #[error("{what} {}: {error}", path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The path that it was given.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// A directory that one process uses at a time.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

impl DirLock {
    /// Creates a directory if it does not exist, and locks it.
    ///
    /// # Errors
    /// [`OpenError`] if it is in use, open to other users, or not writable.
    pub fn take(dir: &Path, files: &dyn Files) -> Result<Self, OpenError> {
        files.make_dir(dir).map_err(failed("create", dir))?;
        if !is_private(dir).map_err(failed("look at", dir))? {
            return Err(OpenError::Exposed(dir.to_owned()));
        }
        let path = dir.join("lock");
        let file = open_lock(&path).map_err(failed("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(OpenError::Locked(dir.to_owned())),
            Err(TryLockError::Error(error)) => Err(failed("lock", &path)(error)),
        }
    }
}

/// Returns a function that makes an error of the operation and the path.
pub(crate) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError + use<> {
    let path = path.to_owned();
    move |error| OpenError::Io { what, path, error }
}

/// The folder of the blobs.
pub(crate) const BLOBS: &str = "blobs";

/// The file of a blob.
pub(crate) fn path_of(dir: &Path, name: &Name) -> PathBuf {
    shard_of(dir, name[8]).join(hex(name))
}

/// Returns the file name of a blob's name, in hexadecimal.
pub(crate) fn hex(name: &Name) -> String {
    let mut file = String::with_capacity(64);
    for byte in name {
        let _ = write!(file, "{byte:02x}");
    }
    file
}

/// The folder of the blobs with this ninth byte of the name.
pub(crate) fn shard_of(dir: &Path, shard: u8) -> PathBuf {
    dir.join(BLOBS).join(format!("{shard:02x}"))
}

/// Reads a blob's name from its file name.
pub(crate) fn parse(file: &str) -> Option<Name> {
    let digits = file.as_bytes();
    if digits.len() != 64 || !digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut name = [0; 32];
    for (byte, two) in name.iter_mut().zip(file.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()?;
    }
    Some(name)
}

fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Whether no other user can enter a directory.
pub(crate) fn is_private(dir: &Path) -> io::Result<bool> {
    #[cfg(unix)]
    {
        let permissions = std::fs::metadata(dir)?.permissions();
        Ok(std::os::unix::fs::PermissionsExt::mode(&permissions) & 0o077 == 0)
    }
    #[cfg(not(unix))]
    {
        std::fs::metadata(dir).map(|_| true)
    }
}

/// The directory's random bytes, created at the first use. Blobs named with other bytes are never found again.
pub(crate) fn read_seed(files: &dyn Files, dir: &Path) -> io::Result<[u8; 32]> {
    let (path, mut seed) = (dir.join("seed"), [0; 32]);
    match files.read(&path, &mut [&mut seed]) {
        Ok(32) => return Ok(seed),
        // A disk that fails now can return the seed later: a new seed would lose every blob.
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => {
            return Err(error);
        }
        _ => {}
    }
    // Each state is seeded by the system's random numbers.
    for part in seed.as_chunks_mut::<8>().0 {
        *part = RandomState::new().hash_one(Instant::now()).to_le_bytes();
    }
    replace(files, &path, &[&seed])?;
    Ok(seed)
}

/// Writes a file under a temporary name, and renames it.
pub(crate) fn replace(files: &dyn Files, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let _ = files.remove(&temporary);
    files.write(&temporary, parts)?;
    files.rename(&temporary, path)
}

/// The file with the mark of the directory's encryption key.
pub(crate) fn mark_of(dir: &Path) -> PathBuf {
    dir.join("key")
}

/// The mark of a directory; `None` if its blobs are not encrypted. For a truncated mark it returns zeros, which match no key.
pub(crate) fn read_mark(files: &dyn Files, dir: &Path) -> io::Result<Option<[u8; 32]>> {
    let mut mark = [0; 32];
    match files.read(&mark_of(dir), &mut [&mut mark]) {
        Ok(_) => Ok(Some(mark)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Some([0; 32])),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the mark of a directory without blobs, or removes it.
pub(crate) fn write_mark(files: &dyn Files, dir: &Path, mark: Option<&[u8; 32]>) -> io::Result<()> {
    let path = mark_of(dir);
    let Some(mark) = mark else { return files.remove(&path) };
    replace(files, &path, &[mark])
}
