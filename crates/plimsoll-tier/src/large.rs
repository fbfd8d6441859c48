//! A bounded directory of few large files, which several processes map while one of them writes.
//!
//! ```text
//! DIR/lock          locked while a process writes
//! DIR/HEX.file      a file, whole: written under a temporary name, synced, renamed
//! DIR/HEX.used      empty; when the file was last used. The file's own times stay as they are, so a reader sees any change
//! DIR/HEX.tmp       a file that is being written, or that a killed process left: the next writer removes it
//! ```
//!
//! The reader decides what a file means and whether its bytes are right. A removed file stays for the processes that map it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use thiserror::Error;

use crate::Name;
use crate::dir::{DirLock, OpenError, hex, is_private, parse};
use crate::files::{Files, Found, free_bytes};

/// The most files in a directory.
pub const FILES_MAX: usize = 64;
/// Bytes of the disk that must stay free when a file is written.
const FREE_BYTES: u64 = 64 << 20;

/// The reason why a directory cannot be used, or a file was not kept.
#[derive(Debug, Error)]
pub enum KeepError {
    /// Other users can enter the directory.
    #[error("other users can enter {}: they could change what it holds; use chmod 700 on it", .0.display())]
    Exposed(PathBuf),
    /// Another process writes to the directory.
    #[error("another process is writing to {}", .0.display())]
    Busy(PathBuf),
    /// It is larger than the limit of all files together.
    #[error("it takes {bytes} bytes, and the directory may take {limit}")]
    TooLarge {
        /// Bytes of the file.
        bytes: u64,
        /// The bound of the directory.
        limit: u64,
    },
    /// The disk is too full.
    #[error("it takes {bytes} bytes, and the disk has {free} free")]
    NoRoom {
        /// Bytes of the file.
        bytes: u64,
        /// Bytes that are free.
        free: u64,
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

impl From<OpenError> for KeepError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Locked(dir) => Self::Busy(dir),
            OpenError::Exposed(dir) => Self::Exposed(dir),
            OpenError::Io { what, path, error } => Self::Io { what, path, error },
            other => Self::Io { what: "use", path: PathBuf::new(), error: io::Error::other(other) },
        }
    }
}

/// A directory of large files.
pub struct LargeFiles {
    dir: PathBuf,
    bytes: u64,
    files: Box<dyn Files>,
}

impl LargeFiles {
    /// Opens a directory, and creates it if it does not exist. Its files take at most `bytes` bytes together.
    ///
    /// # Errors
    /// [`KeepError::Io`], or [`KeepError::Exposed`] if other users can enter it.
    pub fn open(dir: &Path, bytes: u64, files: Box<dyn Files>) -> Result<Self, KeepError> {
        let failed = |what| move |error| KeepError::Io { what, path: dir.to_owned(), error };
        files.make_dir(dir).map_err(failed("create"))?;
        match is_private(dir).map_err(failed("look at"))? {
            true => Ok(Self { dir: dir.to_owned(), bytes, files }),
            false => Err(KeepError::Exposed(dir.to_owned())),
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of a file; `None` if there is no such file.
    pub fn find(&self, name: &Name) -> Option<PathBuf> {
        let path = self.path(name, "file");
        path.is_file().then_some(path)
    }

    /// Notes that a file is used now. Files that were not used for longer are removed before it.
    pub fn used(&self, name: &Name) {
        let path = self.path(name, "used");
        // This fails from the second use on, because the file exists.
        let _ = self.files.write(&path, &[]);
        let _ = self.files.touch(&path, SystemTime::now());
    }

    /// Removes a file.
    pub fn discard(&self, name: &Name) {
        for end in ["file", "used"] {
            let _ = self.files.remove(&self.path(name, end));
        }
    }

    /// Calls `each` with every file: its name, its bytes, and the time of its last use.
    pub fn each(&self, mut each: impl FnMut(&Name, u64, SystemTime)) {
        self.by_use().iter().for_each(|(used, name, bytes)| each(name, *bytes, *used));
    }

    /// Writes a file of these parts. Before that it removes the least recently used files until all files are within the limits.
    ///
    /// # Errors
    /// [`KeepError`]; the directory then has no such file, or the previous one.
    pub fn keep(&self, name: &Name, parts: &[&[u8]]) -> Result<(), KeepError> {
        let _lock = DirLock::take(&self.dir, &*self.files)?;
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |error| KeepError::Io { what, path, error }
        };
        self.remove_leftovers();
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        self.make_room(name, bytes)?;
        let (temporary, path) = (self.path(name, "tmp"), self.path(name, "file"));
        let written = self.files.write(&temporary, parts).and_then(|()| self.files.sync(&temporary));
        let renamed = written.map_err(failed("write", &temporary)).and_then(|()| {
            let named = self.files.rename(&temporary, &path).and_then(|()| self.files.sync(&self.dir));
            named.map_err(failed("rename", &temporary))
        });
        match renamed {
            Ok(()) => self.used(name),
            Err(_) => drop(self.files.remove(&temporary)),
        }
        renamed
    }

    /// Removes the least recently used files until a file of `bytes` bytes fits beside the others.
    fn make_room(&self, name: &Name, bytes: u64) -> Result<(), KeepError> {
        if bytes > self.bytes {
            return Err(KeepError::TooLarge { bytes, limit: self.bytes });
        }
        let mut others = self.by_use();
        others.retain(|(_, other, _)| other != name);
        let (mut taken, mut count) = (others.iter().map(|(.., bytes)| bytes).sum::<u64>(), others.len());
        let mut free = free_bytes(&self.dir).unwrap_or(u64::MAX);
        let needed = bytes.saturating_add(FREE_BYTES);
        if needed > free.saturating_add(taken) {
            return Err(KeepError::NoRoom { bytes, free });
        }
        for (_, other, freed) in &others {
            if taken.saturating_add(bytes) <= self.bytes && count < FILES_MAX && needed <= free {
                break;
            }
            self.discard(other);
            (taken, count, free) = (taken - freed, count - 1, free.saturating_add(*freed));
        }
        Ok(())
    }

    /// Removes temporary files of killed writers, and `.used` files without a file. The caller holds the lock.
    fn remove_leftovers(&self) {
        let mut left = Vec::new();
        let _ = self.files.list(&self.dir, &mut |found| match named(&found.name) {
            Some((_, "tmp")) => left.push(found.name),
            Some((name, "used")) if self.find(&name).is_none() => left.push(found.name),
            _ => {}
        });
        left.iter().for_each(|name| _ = self.files.remove(&self.dir.join(name)));
    }

    /// All files, the least recently used first.
    fn by_use(&self) -> Vec<(SystemTime, Name, u64)> {
        let (mut all, mut uses) = (Vec::new(), Vec::new());
        let _ = self.files.list(&self.dir, &mut |Found { name, bytes, used }| match named(&name) {
            Some((name, "file")) => all.push((used, name, bytes)),
            Some((name, "used")) => uses.push((name, used)),
            _ => {}
        });
        for (used, name, _) in &mut all {
            *used = uses.iter().find(|(other, _)| other == name).map_or(*used, |(_, at)| *at);
        }
        all.sort_unstable();
        all
    }

    fn path(&self, name: &Name, end: &str) -> PathBuf {
        self.dir.join(format!("{}.{end}", hex(name)))
    }
}

/// The name and the extension of one of these files.
fn named(file: &str) -> Option<(Name, &str)> {
    let (stem, end) = file.rsplit_once('.')?;
    Some((parse(stem)?, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::System;

    fn open(dir: &Path, bytes: u64) -> LargeFiles {
        LargeFiles::open(&dir.join("large"), bytes, Box::new(System)).unwrap()
    }

    fn names(files: &LargeFiles) -> Vec<u8> {
        let mut names = Vec::new();
        files.each(|name, _, _| names.push(name[0]));
        names.sort_unstable();
        names
    }

    #[test]
    fn a_file_is_whole_and_readable_by_its_owner_alone() {
        let temp = tempfile::tempdir().unwrap();
        let files = open(temp.path(), 1 << 20);
        assert!(files.find(&[1; 32]).is_none());
        files.keep(&[1; 32], &[b"head", b"body"]).unwrap();
        let path = files.find(&[1; 32]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"headbody");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            std::fs::set_permissions(files.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
            let refused = LargeFiles::open(files.dir(), 1, Box::new(System));
            assert!(matches!(refused, Err(KeepError::Exposed(_))));
        }
        let before = path.metadata().unwrap().modified().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        files.used(&[1; 32]);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), before, "a reader would take it for a change");
        files.discard(&[1; 32]);
        assert!(files.find(&[1; 32]).is_none());
    }

    #[test]
    fn the_least_recently_used_files_make_room() {
        let temp = tempfile::tempdir().unwrap();
        let files = open(temp.path(), 3000);
        for n in 1..=3 {
            files.keep(&[n; 32], &[&[n; 1000]]).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        files.used(&[1; 32]);
        files.keep(&[4; 32], &[&[4; 1000]]).unwrap();
        assert_eq!(names(&files), [1, 3, 4], "the second was not used for longest");
        files.keep(&[4; 32], &[&[5; 1000]]).unwrap();
        assert_eq!(names(&files), [1, 3, 4], "it takes its own place");
        let error = files.keep(&[5; 32], &[&[5; 3001]]).unwrap_err();
        assert!(matches!(error, KeepError::TooLarge { bytes: 3001, limit: 3000 }), "{error}");
        assert_eq!(names(&files), [1, 3, 4]);
        let many = open(temp.path(), 1 << 30);
        (10..10 + FILES_MAX as u8).for_each(|n| many.keep(&[n; 32], &[b"x"]).unwrap());
        assert_eq!(names(&many).len(), FILES_MAX);
    }

    #[test]
    fn one_process_writes_and_what_a_killed_one_left_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let files = open(temp.path(), 1 << 20);
        let left = files.path(&[9; 32], "tmp");
        std::fs::write(&left, "half").unwrap();
        let lock = DirLock::take(files.dir(), &System).unwrap();
        assert!(matches!(files.keep(&[1; 32], &[b"x"]), Err(KeepError::Busy(_))));
        assert!(left.exists(), "its writer may be at work");
        drop(lock);
        files.keep(&[1; 32], &[b"x"]).unwrap();
        assert!(!left.exists());
        assert_eq!(names(&files), [1]);
    }

    /// A disk that is full after half of a file.
    struct Full;

    impl Files for Full {
        fn make_dir(&self, dir: &Path) -> io::Result<()> {
            System.make_dir(dir)
        }
        fn list(&self, dir: &Path, each: &mut dyn FnMut(Found)) -> io::Result<()> {
            System.list(dir, each)
        }
        fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
            let whole = parts.concat();
            System.write(path, &[&whole[..whole.len() / 2]])?;
            Err(io::ErrorKind::StorageFull.into())
        }
        fn read(&self, path: &Path, parts: &mut [&mut [u8]]) -> io::Result<u64> {
            System.read(path, parts)
        }
        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            System.rename(from, to)
        }
        fn remove(&self, path: &Path) -> io::Result<()> {
            System.remove(path)
        }
        fn touch(&self, path: &Path, time: SystemTime) -> io::Result<()> {
            System.touch(path, time)
        }
    }

    #[test]
    fn a_full_disk_leaves_nothing_behind() {
        let temp = tempfile::tempdir().unwrap();
        let files = LargeFiles::open(&temp.path().join("large"), 1 << 20, Box::new(Full)).unwrap();
        let error = files.keep(&[1; 32], &[&[1; 1000]]).unwrap_err();
        assert!(matches!(error, KeepError::Io { .. }) && error.to_string().starts_with("write "), "{error}");
        assert!(files.find(&[1; 32]).is_none());
        let left = std::fs::read_dir(files.dir()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        assert_eq!(left, ["lock"]);
    }
}
