//! The prefix caches on disk of several models: each model has its own directory in `--cache-dir`, and an equal share of the limits.
//!
//! A share holds whether its model is loaded or not, so that all together never take more than `--cache-bytes`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use plimsoll_engine::DiskCache;
use plimsoll_tier::{DirLock, Key, System};
use sha2::{Digest, Sha256};

use crate::args::{EngineArgs, ModelArgs};

/// The longest part of a model's name in the name of its directory.
const NAME_CHARS_MAX: usize = 64;

/// The name of a model's directory in `--cache-dir`: the model's name without unusual characters, and a checksum of the full name.
fn directory_of(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
    let words: String = name.chars().map(plain).take(NAME_CHARS_MAX).collect();
    let sum: String = Sha256::digest(name).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{words}.{sum}")
}

/// Whether a directory's name is one that [`directory_of`] makes.
fn is_of_a_model(directory: &str) -> bool {
    let sum = directory.rsplit_once('.').map_or("", |(_, sum)| sum);
    sum.len() == 8 && sum.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// The cache of each model; none without `--cache-dir`, or for a model without a prefix cache.
pub fn shares(models: &[(String, ModelArgs)], engine: &EngineArgs) -> Vec<Option<DiskCache>> {
    let keeps = |model: &ModelArgs| !model.engine.disable_prefix_cache;
    let sharing = models.iter().filter(|(_, model)| keeps(model)).count().max(1) as u64;
    let share = |(name, model): &(String, ModelArgs)| {
        let all = engine.disk.options().filter(|_| keeps(model))?;
        Some(DiskCache {
            dir: all.dir.join(directory_of(name)),
            bytes: all.bytes / sharing,
            write_bytes_per_day: all.write_bytes_per_day.map(|bytes| bytes / sharing),
            ..all
        })
    };
    models.iter().map(share).collect()
}

/// The directory of all models, which one server uses at a time.
#[derive(Debug)]
pub struct SharedDirectory {
    /// Held as long as the server runs, whether a model is loaded or not.
    _lock: DirLock,
}

impl SharedDirectory {
    /// Makes and locks the directory, and removes the caches of models that are no longer listed, because they have no share.
    ///
    /// # Errors
    /// The directory is in use, open to other users, not writable or that of a server of one model; or the key cannot be read.
    pub fn open(engine: &EngineArgs, shares: &[Option<DiskCache>]) -> anyhow::Result<Option<Self>> {
        let Some(DiskCache { dir, key_file, .. }) = engine.disk.options() else { return Ok(None) };
        let what = || format!("--cache-dir: {}", dir.display());
        key_file.as_deref().map(Key::read).transpose().context("--cache-key-file")?;
        let lock = DirLock::take(&dir, &System).context("--cache-dir")?;
        ensure!(
            !dir.join("blobs").exists(),
            "{}: it is the cache of a server of one model: name another directory, or remove it",
            what()
        );
        remove_unlisted(&dir, shares).with_context(what)?;
        Ok(Some(Self { _lock: lock }))
    }
}

fn remove_unlisted(dir: &Path, shares: &[Option<DiskCache>]) -> anyhow::Result<()> {
    let listed: Vec<&PathBuf> = shares.iter().flatten().map(|share| &share.dir).collect();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let known = path.file_name().and_then(|name| name.to_str()).is_some_and(is_of_a_model);
        if known && path.join("seed").is_file() && !listed.contains(&&path) {
            tracing::info!("{} is removed: no model of that name is served any more", path.display());
            fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_models_are_told_apart_and_from_other_files() {
        let names = ["a", "A", "a/b", "a_b", "..", "a\0b", &"long".repeat(100), ""];
        let directories: Vec<String> = names.iter().map(|name| directory_of(name)).collect();
        for (i, directory) in directories.iter().enumerate() {
            assert!(is_of_a_model(directory) && !directory.contains('/') && directory.len() <= 73, "{directory}");
            assert!(!directories[..i].contains(directory), "{directory}");
        }
        for other in ["lock", "blobs", "seed", "notes.txt", "a.0123456", "a.0123456g"] {
            assert!(!is_of_a_model(other), "{other}");
        }
    }
}
