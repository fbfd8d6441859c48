//! One directory of the cache: its lock, its marker, its partial files, and the checks before a file counts as ready.
//!
//! All writing happens under the lock. Reading a ready model takes no lock: files appear by rename only.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::disk::{install, remove_if_present, replace, sha256_file};
use crate::error::HubError;
use crate::marker::{FileRecord, Marker, Pull};
use crate::names::MARKER_FILE;
use crate::progress::{Progress, still_wanted};
use crate::wanted::Wanted;

/// Time between two attempts to take a lock of another process.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Subdirectory of the files that are not ready.
const PARTIAL_DIRECTORY: &str = ".partial";

/// A directory of the cache that holds one catalogue entry or one repository.
#[derive(Debug, Clone)]
pub(crate) struct ModelDir {
    pub(crate) path: PathBuf,
    /// Path of the lock, outside of the directory. It is never deleted, so that all processes wait for the same file.
    lock_path: PathBuf,
}

/// A lock on a directory, for writing. The system releases it when the process ends in any way.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl ModelDir {
    /// Returns the directory's handle; creates nothing.
    pub(crate) fn new(path: PathBuf, lock_path: PathBuf) -> Self {
        Self { path, lock_path }
    }

    /// Returns the path of a file until it is ready. The tag separates partial files of different sources.
    pub(crate) fn partial(&self, name: &str, tag: &str) -> PathBuf {
        self.path.join(PARTIAL_DIRECTORY).join(format!("{name}.{tag}.part"))
    }

    /// Returns a subdirectory for a helper's temporary files.
    pub(crate) fn scratch(&self, tag: &str) -> PathBuf {
        self.path.join(PARTIAL_DIRECTORY).join(format!("{tag}.tmp"))
    }

    /// Deletes all partial files.
    pub(crate) fn clear_partials(&self) -> Result<(), HubError> {
        let path = self.path.join(PARTIAL_DIRECTORY);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(HubError::io("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Waits for the lock; notes it if another process holds it.
    pub(crate) fn lock(&self, name: &str, progress: &mut dyn Progress) -> Result<Lock, HubError> {
        if let Some(lock) = self.try_lock()? {
            return Ok(lock);
        }
        progress.note(&format!("another process is pulling {name}; waiting for it to finish"));
        loop {
            still_wanted(progress)?;
            sleep(LOOK_EVERY);
            if let Some(lock) = self.try_lock()? {
                return Ok(lock);
            }
        }
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self) -> Result<Option<Lock>, HubError> {
        let file = self.open_lock_file()?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(HubError::io("lock", &self.lock_path)(error)),
        }
    }

    fn open_lock_file(&self) -> Result<File, HubError> {
        if let Some(parent) = self.lock_path.parent() {
            fs::create_dir_all(parent).map_err(HubError::io("create", parent))?;
        }
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.lock_path)
            .map_err(HubError::io("open", &self.lock_path))
    }

    /// Returns the path that answers a request, if all its files are unchanged since they were verified.
    pub(crate) fn ready(&self, request: &str) -> Option<PathBuf> {
        let marker = Marker::load(&self.path);
        let pull = marker.pull(request)?;
        marker.is_intact(&self.path, pull).then(|| self.answer(&pull.path))
    }

    /// Returns the answer of a pull: the directory, or a file in it.
    pub(crate) fn answer(&self, relative: &str) -> PathBuf {
        if relative.is_empty() { self.path.clone() } else { self.path.join(relative) }
    }

    /// Returns as [`ModelDir::ready`], but reads files again that look different. Needs the lock.
    pub(crate) fn recheck(&self, request: &str, progress: &mut dyn Progress) -> Result<Option<PathBuf>, HubError> {
        let mut marker = Marker::load(&self.path);
        let Some(pull) = marker.pull(request).cloned() else {
            return Ok(None);
        };
        for name in &pull.files {
            let Some(record) = marker.files.get(name).cloned() else {
                return Ok(None);
            };
            let wanted =
                Wanted { name, bytes: record.bytes, sha256: Some(&record.sha256), blob: record.blob.as_deref() };
            if !self.has(&mut marker, &wanted, progress)? {
                return Ok(None);
            }
        }
        Ok(Some(self.answer(&pull.path)))
    }

    /// Whether the directory has the wanted file, verified. A file with another size or sum is deleted, and its record
    /// removed. Needs the lock.
    pub(crate) fn has(
        &self,
        marker: &mut Marker,
        wanted: &Wanted<'_>,
        progress: &mut dyn Progress,
    ) -> Result<bool, HubError> {
        let path = self.path.join(wanted.name);
        let record = marker.files.get(wanted.name).filter(|record| {
            record.bytes == wanted.bytes
                && wanted.sha256.is_none_or(|sum| sum == record.sha256)
                && wanted.blob.is_none_or(|blob| Some(blob) == record.blob.as_deref())
        });
        if record.is_some_and(|record| record.matches(&path)) {
            return Ok(true);
        }
        let expected = wanted.sha256.map(str::to_owned);
        let expected = expected.or_else(|| record.map(|record| record.sha256.clone()));
        let present = fs::metadata(&path).is_ok_and(|metadata| metadata.is_file());
        if present && let Some(expected) = expected {
            let wanted = Wanted { sha256: Some(&expected), ..*wanted };
            if let Ok(sum) = verify(&path, &wanted, progress) {
                self.record(marker, &wanted, sum)?;
                return Ok(true);
            }
        }
        if present {
            progress.note(&format!("{} is not what it should be; it is pulled again", path.display()));
            remove_if_present(&path)?;
        }
        if marker.files.contains_key(wanted.name) {
            marker.forget_file(wanted.name);
            self.save(marker)?;
        }
        Ok(false)
    }

    /// Verifies a complete partial file and renames it into place. A file that fails is deleted. Needs the lock.
    pub(crate) fn accept(
        &self,
        marker: &mut Marker,
        partial: &Path,
        wanted: &Wanted<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(), HubError> {
        let sum = match verify(partial, wanted, progress) {
            Ok(sum) => sum,
            Err(error) => {
                remove_if_present(partial)?;
                return Err(error);
            }
        };
        install(partial, &self.path.join(wanted.name))?;
        self.record(marker, wanted, sum)
    }

    fn record(&self, marker: &mut Marker, wanted: &Wanted<'_>, sha256: String) -> Result<(), HubError> {
        let path = self.path.join(wanted.name);
        let record = FileRecord::of(&path, sha256, wanted.blob.map(str::to_owned))?;
        marker.files.insert(wanted.name.to_owned(), record);
        self.save(marker)
    }

    /// Records a completed pull and returns its answer. Needs the lock.
    pub(crate) fn complete(&self, mut marker: Marker, pull: Pull) -> Result<PathBuf, HubError> {
        let answer = self.answer(&pull.path);
        let whole = pull.path.is_empty();
        marker.set_pull(pull);
        // A reader of a directory takes all files in it, also weights of an earlier revision: these are removed. A pull of one file may
        // have undone the pull of the others (see `has`). The others are then kept until the whole is pulled again.
        if whole {
            self.remove_orphans(&mut marker)?;
        }
        self.save(&marker)?;
        Ok(answer)
    }

    /// Deletes the files that no recorded pull needs, and their records; the caller still has to save the marker. A process that has one
    /// open or mapped keeps its content. Needs the lock.
    pub(crate) fn remove_orphans(&self, marker: &mut Marker) -> Result<(), HubError> {
        // Deleted before a marker says so: if the process dies in between, they are still orphans.
        marker.forget_orphans().iter().try_for_each(|name| remove_if_present(&self.path.join(name)))
    }

    /// Returns the bytes of a wanted file that still have to be written, judged by sizes.
    pub(crate) fn missing_bytes(&self, wanted: &Wanted<'_>, tag: &str) -> u64 {
        let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        if size(&self.path.join(wanted.name)) == wanted.bytes {
            return 0;
        }
        let partial = size(&self.partial(wanted.name, tag));
        wanted.bytes.checked_sub(partial).unwrap_or(wanted.bytes)
    }

    /// Writes the marker. Needs the lock.
    pub(crate) fn save(&self, marker: &Marker) -> Result<(), HubError> {
        replace(&self.path.join(MARKER_FILE), &self.partial(MARKER_FILE, "own"), &marker.to_json())
    }
}

/// Checks size and, where known, SHA-256; returns the sum found.
pub(crate) fn verify(path: &Path, wanted: &Wanted<'_>, progress: &mut dyn Progress) -> Result<String, HubError> {
    let actual = fs::metadata(path).map_err(HubError::io("inspect", path))?.len();
    if actual != wanted.bytes {
        return Err(HubError::SizeMismatch { what: wanted.name.to_owned(), expected: wanted.bytes, actual });
    }
    progress.start(&format!("verifying {}", wanted.name), Some(wanted.bytes));
    let sum = sha256_file(path, progress);
    progress.done();
    let sum = sum?;
    match wanted.sha256 {
        Some(expected) if expected != sum => {
            Err(HubError::ChecksumMismatch { what: wanted.name.to_owned(), expected: expected.to_owned(), actual: sum })
        }
        _ => Ok(sum),
    }
}
