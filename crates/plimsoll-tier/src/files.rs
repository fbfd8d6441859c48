//! The file system as a store uses it: few operations, so that tests can make each of them fail.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::SystemTime;

/// One file of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name, without the directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The time of the last modification: when it was written, or touched.
    pub used: SystemTime,
}

/// The operations of a store on files.
pub trait Files: Send + Sync {
    /// Creates a directory that only its owner can enter; an existing directory stays as it is.
    fn make_dir(&self, dir: &Path) -> io::Result<()>;
    /// Calls `each` with the files of a directory, links and directories left out.
    fn list(&self, dir: &Path, each: &mut dyn FnMut(Found)) -> io::Result<()>;
    /// Writes a new file that only its owner can read. An existing file of this name is an error.
    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()>;
    /// Fills `parts` from the beginning of a file. Returns the length of the file.
    fn read(&self, path: &Path, parts: &mut [&mut [u8]]) -> io::Result<u64>;
    /// Renames a file atomically; a file of the new name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Sets the time at which a file was last used.
    fn touch(&self, path: &Path, time: SystemTime) -> io::Result<()>;
    /// Waits until the written bytes of a file, or the names in a directory, are on the disk.
    fn sync(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

/// The machine's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Files for System {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        match builder.create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    fn list(&self, dir: &Path, each: &mut dyn FnMut(Found)) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            // A file can be removed meanwhile.
            let Ok(metadata) = entry.metadata() else { continue };
            if let (true, Ok(name)) = (metadata.is_file(), entry.file_name().into_string()) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                each(Found { name, bytes: metadata.len(), used });
            }
        }
        Ok(())
    }

    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path)?;
        parts.iter().try_for_each(|part| file.write_all(part))
    }

    fn read(&self, path: &Path, parts: &mut [&mut [u8]]) -> io::Result<u64> {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        parts.iter_mut().try_for_each(|part| file.read_exact(part))?;
        Ok(bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn touch(&self, path: &Path, time: SystemTime) -> io::Result<()> {
        File::options().append(true).open(path)?.set_modified(time)
    }
}

/// Bytes that an unprivileged user can still write to the disk of `dir`; `None` where the system does not tell.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let disk = rustix::fs::statvfs(dir).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}
