//! Looking at cached files without touching them. Nothing here fetches, waits, writes or deletes.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::disk::free_bytes;
use crate::marker::{FileRecord, Marker};
use crate::model_dir::{ModelDir, verify};
use crate::model_ref::ModelRef;
use crate::progress::Progress;
use crate::wanted::Wanted;

/// What was found where a file should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// It was read, and its SHA-256 is the right one.
    Intact,
    /// It was not read; size and time are as they were when its sum was right.
    AsVerified,
    /// It was not read; size or time are not as they were.
    Changed,
    /// It is not there.
    Missing,
    /// It is not what it should be, in words.
    Damaged(String),
}

/// One file of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileCheck {
    /// Where it should be.
    pub path: PathBuf,
    /// The size it should have.
    pub bytes: u64,
    /// What is there.
    pub state: FileState,
}

impl Cache {
    /// What [`resolve`](crate::resolve) would answer without fetching anything: a local path, or that of files which are as they were
    /// when they were verified, judged by size and time.
    #[must_use]
    pub fn ready(&self, model: &ModelRef) -> Option<PathBuf> {
        match model {
            ModelRef::GgufFile(path) | ModelRef::Directory(path) => Some(path.clone()),
            _ => self.dir_of(model)?.ready(&model.canonical_name()),
        }
    }

    /// The files of a model of the catalogue or the hub as they lie in the cache. With `read` every byte is read and its sum
    /// compared. A local model has none that anything is known of, nor has a repository that was never pulled.
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

    /// Bytes that may still be written where the cache is, or will be; `None` where the system does not tell.
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
    // A wrong size is told without reading.
    if read || metadata.len() != wanted.bytes {
        return match verify(path, wanted, progress) {
            Ok(_) => FileState::Intact,
            Err(error) => FileState::Damaged(error.to_string()),
        };
    }
    let same = |record: &FileRecord| Some(record.sha256.as_str()) == wanted.sha256 && record.matches(path);
    if record.is_some_and(same) { FileState::AsVerified } else { FileState::Changed }
}
