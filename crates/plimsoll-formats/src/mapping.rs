//! A read-only memory map of one file.
//!
//! This module does not interpret the bytes.

use crate::error::FormatError;
#[cfg(unix)]
use crate::guard::Guard;
use memmap2::Mmap;
use std::fs::{File, Metadata};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A whole file mapped read-only.
pub struct Mapping {
    /// Declared first, so that it is dropped before the map.
    #[cfg(unix)]
    guard: Guard,
    map: Mmap,
    path: PathBuf,
    opened: Stamp,
    identity: Option<FileIdentity>,
}

/// The values that show whether a file was changed in place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Device and inode. Another file may have the same name later; its changes do not affect this file.
    identity: (u64, u64),
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    pub(crate) fn of(status: &Metadata) -> Stamp {
        #[cfg(unix)]
        let identity = {
            use std::os::unix::fs::MetadataExt;
            (status.dev(), status.ino())
        };
        #[cfg(not(unix))]
        let identity = (0, 0);
        Stamp { identity, bytes: status.len(), modified: status.modified().ok() }
    }
}

/// Identifies a file and its contents. A program can set the time of modification, but only the system sets the time of the last
/// change: a copy that keeps its dates has another identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// The device and the inode.
    pub inode: (u64, u64),
    /// Length of the file in bytes.
    pub bytes: u64,
    /// When its contents were modified: seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// When its contents or its attributes were changed: seconds and nanoseconds since 1970.
    pub changed: (i64, i64),
}

impl FileIdentity {
    /// Returns the identity of an opened file. None if the system has no inodes. None if the file was changed within [`SETTLED`] before it
    /// was opened, because another change may have the same time.
    fn of(status: &Metadata, opened: SystemTime) -> Option<FileIdentity> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let changed = (status.ctime(), status.ctime_nsec());
            let since = opened.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            let settled = since.checked_sub(SETTLED)?;
            let before = changed < (i64::try_from(settled.as_secs()).ok()?, i64::from(settled.subsec_nanos()));
            before.then(|| FileIdentity {
                inode: (status.dev(), status.ino()),
                bytes: status.len(),
                modified: (status.mtime(), status.mtime_nsec()),
                changed,
            })
        }
        #[cfg(not(unix))]
        {
            let _ = (status, opened);
            None
        }
    }
}

/// The time after which a change has a different timestamp: file systems store times in steps of up to two seconds.
const SETTLED: Duration = Duration::from_secs(2);

impl Mapping {
    /// Maps the file at `path`. An empty file or a directory is refused, since neither can hold a checkpoint.
    ///
    /// # Errors
    /// [`FormatError::Io`], or [`FormatError::NotACheckpoint`].
    pub fn open(path: &Path) -> Result<Mapping, FormatError> {
        let file = File::open(path).map_err(FormatError::io(path))?;
        let status = file.metadata().map_err(FormatError::io(path))?;
        if !status.is_file() || status.len() == 0 {
            return Err(FormatError::NotACheckpoint {
                path: path.to_path_buf(),
                reason: format!("expected a file with contents, found {} bytes", status.len()),
            });
        }
        // SAFETY: the mapping is private to this value and only ever read. A process that writes to the file meanwhile
        // changes what is read, which `unchanged` tells; any bytes are valid bytes. A process that cuts it would make
        // reads fault: the guard puts zeros there.
        let map = unsafe { Mmap::map(&file) }.map_err(FormatError::io(path))?;
        Ok(Mapping {
            #[cfg(unix)]
            guard: Guard::new(&map).map_err(FormatError::io(path))?,
            map,
            path: path.to_path_buf(),
            opened: Stamp::of(&status),
            identity: FileIdentity::of(&status, SystemTime::now()),
        })
    }

    /// The identity of the file when it was opened. None if it was changed just before, or if the system gives none.
    pub(crate) fn identity(&self) -> Option<&FileIdentity> {
        self.identity.as_ref()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The file's stamp when it was opened.
    pub(crate) fn stamp(&self) -> &Stamp {
        &self.opened
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the file was not changed since it was opened, so that all bytes that were read are the original ones.
    ///
    /// # Errors
    /// [`FormatError::Changed`].
    pub fn unchanged(&self) -> Result<(), FormatError> {
        let now = std::fs::metadata(&self.path).ok().map(|status| Stamp::of(&status));
        let now = now.filter(|now| now.identity == self.opened.identity);
        let changed = |reason: String| Err(FormatError::Changed { path: self.path.clone(), reason });
        match now {
            Some(now) if now.bytes != self.opened.bytes => {
                return changed(format!("{} bytes when it was opened, now {}", self.opened.bytes, now.bytes));
            }
            Some(now) if now != self.opened => return changed("it was written to".to_owned()),
            _ => {}
        }
        #[cfg(unix)]
        if self.guard.has_lost() {
            return changed("a part of it could not be read: it was cut, or its disk fails".to_owned());
        }
        Ok(())
    }

    /// Releases the resident pages of `range`. A later read loads their contents from the file again.
    ///
    /// Pages shared with a neighbouring tensor are released too, which costs at most one page read.
    pub(crate) fn release(&self, range: Range<usize>) {
        if range.start >= range.end || range.end > self.map.len() {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: the mapping is file-backed, read-only and never written, so dropping its pages loses
            // nothing: the next access faults the same bytes in from the file. The range lies within the map.
            let advised = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.end - range.start,
                )
            };
            // A kernel that declines the advice keeps clean pages, which it can still reclaim.
            drop(advised);
        }
    }
}
