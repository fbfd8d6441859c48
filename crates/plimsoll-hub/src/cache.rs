//! The directory of pulled models: its layout, the list of models, and their removal. Module `pull` pulls.
//!
//! ```text
//! <cache>/catalogue/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf     a model of the catalogue
//! <cache>/catalogue/smollm2/plimsoll.json                       verified files and their times, see `marker`
//! <cache>/hf/Qwen/Qwen2.5-0.5B/config.json, ...                 a repository of the hub
//! <cache>/.../.partial/                                         files that are not ready
//! <cache>/locks/                                                one empty file for each model
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use crate::disk::tree_bytes;
use crate::entry::Entry;
use crate::error::HubError;
use crate::marker::Marker;
use crate::model_dir::ModelDir;
use crate::model_ref::ModelRef;

const CATALOGUE_DIRECTORY: &str = "catalogue";
const HUB_DIRECTORY: &str = "hf";
const LOCK_DIRECTORY: &str = "locks";

/// A directory of pulled models. Several processes may use it at once.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// The name for [`resolve`](crate::resolve) and [`Cache::remove`].
    pub name: String,
    /// The path that [`resolve`](crate::resolve) returns for that name: a `.gguf` file or a directory.
    pub path: PathBuf,
    /// Size of its files on disk.
    pub bytes: u64,
    /// Whether all its files are unchanged since their sums were checked, judged by size and time.
    pub verified: bool,
    /// Its source, for display.
    pub source: String,
}

impl Cache {
    /// Returns the user's cache: `PLIMSOLL_CACHE`, else `plimsoll` below `XDG_CACHE_HOME`, else below `~/.cache`. It creates
    /// no directory.
    ///
    /// # Errors
    ///
    /// [`HubError::NoCacheLocation`] if no variable is set; [`HubError::Io`] if the working directory is gone and the
    /// variable is relative.
    pub fn default_location() -> Result<Self, HubError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let root = variable("PLIMSOLL_CACHE")
            .map(PathBuf::from)
            .or_else(|| variable("XDG_CACHE_HOME").map(|base| Path::new(&base).join("plimsoll")))
            .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache/plimsoll")))
            .ok_or(HubError::NoCacheLocation)?;
        Self::at(&root)
    }

    /// Returns a cache in a directory of the caller's choice, which need not exist yet.
    ///
    /// # Errors
    ///
    /// [`HubError::Io`] if `root` is relative and the working directory is gone.
    pub fn at(root: &Path) -> Result<Self, HubError> {
        let root = std::path::absolute(root).map_err(HubError::io("locate", root))?;
        Ok(Self { root })
    }

    /// The cache's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of a catalogue entry.
    pub(crate) fn entry_dir(&self, entry: &Entry) -> ModelDir {
        ModelDir::new(
            self.root.join(CATALOGUE_DIRECTORY).join(entry.name),
            self.lock_path(&format!("{CATALOGUE_DIRECTORY}--{}", entry.name)),
        )
    }

    /// The directory of a repository, `org/repo`, checked.
    pub(crate) fn repo_dir(&self, repo: &str) -> ModelDir {
        ModelDir::new(
            self.root.join(HUB_DIRECTORY).join(repo),
            self.lock_path(&format!("{HUB_DIRECTORY}--{}", repo.replace('/', "--"))),
        )
    }

    fn lock_path(&self, key: &str) -> PathBuf {
        self.root.join(LOCK_DIRECTORY).join(format!("{key}.lock"))
    }

    /// All models in the cache, by name. An absent or unreadable cache has none.
    #[must_use]
    pub fn list(&self) -> Vec<CachedModel> {
        let mut directories = subdirectories(&self.root.join(CATALOGUE_DIRECTORY));
        for organisation in subdirectories(&self.root.join(HUB_DIRECTORY)) {
            directories.extend(subdirectories(&organisation));
        }
        let mut models: Vec<_> =
            directories.into_iter().flat_map(|path| models_in(&ModelDir::new(path, PathBuf::new()))).collect();
        models.sort_by(|a, b| a.name.cmp(&b.name));
        models
    }

    /// Removes a model by its name in [`Cache::list`], with its partial files; returns the bytes
    /// freed. Files of another pull of the same repository stay. A process that has mapped a removed file
    /// keeps its content until it unmaps the file.
    ///
    /// # Errors
    ///
    /// [`HubError::NotCached`] if there is nothing to remove, [`HubError::Busy`] while another process pulls it, the errors of
    /// [`ModelRef::parse`] for `name`, and [`HubError::Io`].
    pub fn remove(&self, name: &str) -> Result<u64, HubError> {
        let model = ModelRef::parse(name)?;
        let request = model.canonical_name();
        let not_cached = || HubError::NotCached { name: request.clone(), cache: self.root.clone() };
        let directory = match &model {
            ModelRef::Catalogue(entry) => self.entry_dir(entry),
            ModelRef::Hub { repo, .. } => self.repo_dir(repo),
            ModelRef::GgufFile(_) | ModelRef::Directory(_) => return Err(not_cached()),
        };
        if !directory.path.is_dir() {
            return Err(not_cached());
        }
        let Some(_lock) = directory.try_lock()? else {
            return Err(HubError::Busy { name: request });
        };
        let before = tree_bytes(&directory.path);
        let mut marker = Marker::load(&directory.path);
        let known = marker.pull(&request).is_some();
        marker.pulls.retain(|pull| pull.request != request);
        if marker.pulls.is_empty() {
            fs::remove_dir_all(&directory.path).map_err(HubError::io("remove", &directory.path))?;
            // Removes the organisation's directory with its last repository. With others in it this fails, as it should.
            if let (ModelRef::Hub { .. }, Some(parent)) = (&model, directory.path.parent()) {
                let _ = fs::remove_dir(parent);
            }
            return Ok(before);
        }
        if !known {
            return Err(not_cached());
        }
        // The files first: if the process dies in between, the next pull finds the files missing.
        directory.remove_orphans(&mut marker)?;
        directory.save(&marker)?;
        directory.clear_partials()?;
        Ok(before.saturating_sub(tree_bytes(&directory.path)))
    }
}

/// Directories in a directory, except hidden ones.
fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

fn models_in(directory: &ModelDir) -> Vec<CachedModel> {
    let marker = Marker::load(&directory.path);
    marker
        .pulls
        .iter()
        .map(|pull| CachedModel {
            name: pull.request.clone(),
            path: directory.answer(&pull.path),
            bytes: pull.files.iter().map(|file| fs::metadata(directory.path.join(file)).map_or(0, |m| m.len())).sum(),
            verified: marker.is_intact(&directory.path, pull),
            source: pull.source.clone(),
        })
        .collect()
}
