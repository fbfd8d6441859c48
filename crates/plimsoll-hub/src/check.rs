//! Checks of cached files. This module never fetches, waits, writes or deletes.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::disk::free_bytes;
use crate::marker::{FileRecord, Marker};
use crate::model_dir::{ModelDir, verify};
use crate::model_ref::ModelRef;
use crate::progress::Progress;
use crate::wanted::Wanted;

/// The state of a file in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// The file was read, and its SHA-256 is the right one.
    Intact,
    /// The file was not read; size and time are unchanged since its sum was right.
    AsVerified,
    /// The file was not read; size or time have changed.
    Changed,
    /// The file does not exist.
    Missing,
    /// The file has a wrong size or sum, or could not be read; the text says which.
    Damaged(String),
}

/// One file of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileCheck {
    /// Path of the file.
    pub path: PathBuf,
    /// The size it should have.
    pub bytes: u64,
    /// State of the file.
    pub state: FileState,
}

impl Cache {
    /// Returns the path that [`resolve`](crate::resolve) would return without a fetch: a local path, or that of files
    /// unchanged since they were verified, judged by size and time.
    #[must_use]
    pub fn ready(&self, model: &ModelRef) -> Option<PathBuf> {
        match model {
            ModelRef::GgufFile(path) | ModelRef::Directory(path) => Some(path.clone()),
            _ => self.dir_of(model)?.ready(&model.canonical_name()),
        }
    }

    /// Returns the files of a model of the catalogue or the hub in the cache. With `read`, every byte is read and its sum
    /// compared. There are none for a local model, nor for a repository that was never pulled.
    pub fn check(&self, model: &ModelRef, read: bool, progress: &mut dyn Progress) -> Vec<FileCheck> {
        let Some(directory) = self.dir_of(model) else { return Vec::new() };
        let marker = Marker::load(&directory.path);
        let mut look = |wanted: &Wanted<'_>| {
            let path = directory.path.join(wanted.name);
            let state = state(&path, wanted, marker.files.get(wanted.name), read, progress);
            FileCheck { path, bytes: wanted.bytes, state }
        };
        match (model, marker.pull(&model.canonical_name())) {
            (ModelRef::Catalogue(entry), _) => entry.wanted().iter().map(look).collect(),
            (_, Some(pull)) => {
                let records = pull.files.iter().filter_map(|name| Some((name, marker.files.get(name)?)));
                let wanted = records.map(|(name, record)| Wanted {
                    name,
                    bytes: record.bytes,
                    sha256: Some(&record.sha256),
                    blob: None,
                });
                wanted.map(|wanted| look(&wanted)).collect()
            }
            (_, None) => Vec::new(),
        }
    }

    /// Returns the bytes that may still be written in the file system of the cache; `None` if the system does not report them.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        self.root().ancestors().find(|path| path.exists()).and_then(free_bytes)
    }

    fn dir_of(&self, model: &ModelRef) -> Option<ModelDir> {
        match model {
            ModelRef::Catalogue(entry) => Some(self.entry_dir(entry)),
            ModelRef::Hub { repo, .. } => Some(self.repo_dir(repo)),
            ModelRef::GgufFile(_) | ModelRef::Directory(_) => None,
        }
    }
}

fn state(
    path: &Path,
    wanted: &Wanted<'_>,
    record: Option<&FileRecord>,
    read: bool,
    progress: &mut dyn Progress,
) -> FileState {
    let Some(metadata) = fs::metadata(path).ok().filter(Metadata::is_file) else { return FileState::Missing };
    // A wrong size is found without reading.
    if read || metadata.len() != wanted.bytes {
        return match verify(path, wanted, progress) {
            Ok(_) => FileState::Intact,
            Err(error) => FileState::Damaged(error.to_string()),
        };
    }
    let same = |record: &FileRecord| Some(record.sha256.as_str()) == wanted.sha256 && record.matches(path);
    if record.is_some_and(same) { FileState::AsVerified } else { FileState::Changed }
}
