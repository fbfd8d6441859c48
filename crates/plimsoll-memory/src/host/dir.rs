//! A private directory that only this user can have written to; leases are kept in it.
//!
//! All access goes through one directory handle and never follows a symbolic link: other users can have write access to the parent
//! directory. The meaning of the files is not known here.

use rustix::fs::{AtFlags, Dir, Mode, OFlags, RawMode};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// An open directory with mode 0700 that belongs to this user.
#[derive(Debug)]
pub(super) struct PrivateDir {
    fd: OwnedFd,
    path: PathBuf,
}

/// The reason why a directory cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// It could not be created or opened; a symbolic link in its place gives this error too.
    #[error("cannot open {path} as a directory of its own (a symbolic link is not followed): {source}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It belongs to another user.
    #[error("{path} belongs to user {owner}, not to user {user}: refusing to use it")]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner's id.
        owner: u32,
        /// This process's user id.
        user: u32,
    },
    /// Others may read or write it.
    #[error("{path} has mode {mode:o}: refusing to use it, chmod 700 it first")]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: RawMode,
    },
}

impl PrivateDir {
    /// Opens `path`, creating it with mode 0700 if it does not exist; its parent must exist.
    pub(super) fn open(path: &Path) -> Result<Self, DirError> {
        let fail = |errno: Errno| DirError::Open { path: path.to_owned(), source: errno.into() };
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(fail(errno)),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(fail)?;
        let stat = rustix::fs::fstat(&fd).map_err(fail)?;
        let user = rustix::process::geteuid().as_raw();
        if stat.st_uid != user {
            return Err(DirError::Owner { path: path.to_owned(), owner: stat.st_uid, user });
        }
        let mode = Mode::from_raw_mode(stat.st_mode);
        if mode.intersects(Mode::RWXG | Mode::RWXO) {
            return Err(DirError::Mode { path: path.to_owned(), mode: mode.bits() });
        }
        Ok(Self { fd, path: path.to_owned() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file for reading and writing. `create` also makes it, with mode 0600.
    pub(super) fn file(&self, name: &str, create: bool) -> io::Result<File> {
        // NONBLOCK: a pipe under this name must not block the open. The flag has no effect on a regular file.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let flags = if create { flags | OFlags::CREATE } else { flags };
        let file = File::from(rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a regular file")));
        }
        Ok(file)
    }

    /// Whether an open file is still the one under `name`: it can be removed while a process waits for its lock.
    pub(super) fn has(&self, name: &str, file: &File) -> io::Result<bool> {
        let open = rustix::fs::fstat(file)?;
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (open.st_dev, open.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The names in the directory; an error if there are more than `max`.
    pub(super) fn names(&self, max: usize) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd)? {
            if names.len() == max {
                return Err(io::Error::other(format!("{} holds more than {max} files", self.path.display())));
            }
            names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
        }
        Ok(names)
    }

    /// Removes a file; a file that is already gone is no error.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Replaces the content of an open file.
pub(super) fn rewrite(file: &mut File, text: &str) -> io::Result<()> {
    // In place first, cut afterwards: a full disk cannot empty a file that already had its blocks.
    file.rewind()?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

/// Reads an open file from its start, at most `max` bytes.
pub(super) fn content(file: &mut File, max: u64) -> io::Result<String> {
    file.rewind()?;
    let mut text = String::new();
    file.take(max).read_to_string(&mut text)?;
    Ok(text)
}
