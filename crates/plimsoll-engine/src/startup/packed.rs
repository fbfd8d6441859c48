//! Weights of the CPU: mapped from the packed cache if they are in it; otherwise packed, and then saved in it.
//!
//! A fault of the cache never fails a start: weights of an unusable file are packed again, and a failed write is a warning.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_device::cpu::{LoadError, PackedError, PackedFile};
use plimsoll_device::{CpuWeights, Isa, ThreadPool, WeightTable};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Bytes, Ledger};
use plimsoll_tier::{LargeFiles, System};
use sha2::{Digest, Sha256};

use super::disk::program;
use crate::api::options::{Options, PackedCache};
use crate::api::start_error::StartError;

/// Loaded weights, and how they were loaded.
pub(super) struct Loaded {
    pub weights: CpuWeights,
    pub how: WeightsLoad,
}

/// How weights were loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightsLoad {
    /// Whether they were mapped from the packed cache; otherwise they were packed.
    pub mapped: bool,
    /// The time that loading took.
    pub took: Duration,
}

/// Opens the directory of `--packed-cache`. This comes before the weights, so that an unusable directory is refused at once.
///
/// # Errors
/// [`StartError::PackedCache`]. With `--models` the model is loaded without the cache instead.
pub(super) fn open(options: &Options) -> Result<Option<LargeFiles>, StartError> {
    let Some(cache) = options.packed_cache.as_ref().filter(|_| options.target().isa().is_some()) else {
        return Ok(None);
    };
    match try_open(cache) {
        Err(error) if options.hosted => {
            tracing::warn!("--packed-cache: {error}; the model is loaded without it");
            Ok(None)
        }
        opened => opened.map(Some).map_err(StartError::PackedCache),
    }
}

fn try_open(cache: &PackedCache) -> Result<LargeFiles, String> {
    if let Some(above) = cache.dir.parent().filter(|above| !above.as_os_str().is_empty()) {
        std::fs::create_dir_all(above).map_err(|error| format!("create {}: {error}", above.display()))?;
    }
    LargeFiles::open(&cache.dir, cache.bytes, Box::new(System)).map_err(|error| error.to_string())
}

/// Loads the weights of `table`.
///
/// # Errors
/// The errors of packing.
pub(super) fn load(
    table: WeightTable,
    (checkpoint, options): (&Checkpoint, &Options),
    cache: Option<&LargeFiles>,
    (ledger, pool): (&Arc<Ledger>, &mut ThreadPool),
    mut progress: impl FnMut(u64),
    stopped: impl Fn() -> bool,
) -> Result<Loaded, StartError> {
    let began = Instant::now();
    let keyed = cache.and_then(|files| Some((files, key(checkpoint, &table, options.isa())?)));
    if let (Some(files), None) = (cache, &keyed) {
        let dir = files.dir().display();
        tracing::warn!(
            "packed cache: {dir} is not used: a file of the model was changed just before the start, or its identity is unknown"
        );
    }
    if let Some((files, key)) = &keyed
        && let Some(path) = files.find(key)
    {
        match PackedFile::open(&table, &path, key, (ledger, pool), &mut progress, &stopped) {
            Ok(file) => {
                let weights = CpuWeights::mapped(table, file, (checkpoint, ledger, pool.threads()))?;
                checkpoint.unchanged().map_err(LoadError::Changed)?;
                files.used(key);
                let how = WeightsLoad { mapped: true, took: began.elapsed() };
                let (bytes, ms) = (Bytes(weights.bytes().len() as u64), how.took.as_millis() as u64);
                tracing::info!(ms, "weights: {bytes} mapped from {}, every byte checked", path.display());
                return Ok(Loaded { weights, how });
            }
            Err(PackedError::OutOfMemory(error)) => return Err(error.into()),
            Err(PackedError::Stopped) => return Err(LoadError::Stopped.into()),
            Err(error) => refuse(files, key, &path, &error),
        }
    }
    let weights = CpuWeights::load_unless(table, checkpoint, ledger, pool, progress, stopped)?;
    let how = WeightsLoad { mapped: false, took: began.elapsed() };
    if let Some((files, key)) = &keyed {
        tracing::info!(ms = how.took.as_millis() as u64, "weights: {} packed", Bytes(weights.bytes().len() as u64));
        keep(&weights, files, key, pool);
    }
    Ok(Loaded { weights, how })
}

/// Removes a file that cannot be used, unless its disk is only slow.
fn refuse(files: &LargeFiles, key: &[u8; 32], path: &Path, error: &PackedError) {
    tracing::warn!("packed cache: {} cannot be used, the weights are packed again: {error}", path.display());
    if !matches!(error, PackedError::Slow(_)) {
        files.discard(key);
    }
}

/// Writes the packed weights to the cache, for the next start.
fn keep(weights: &CpuWeights, files: &LargeFiles, key: &[u8; 32], pool: &mut ThreadPool) {
    let began = Instant::now();
    let header = weights.packed_header(key, pool);
    match files.keep(key, &[&header, weights.bytes()]) {
        Ok(()) => {
            let ms = began.elapsed().as_millis() as u64;
            tracing::info!(ms, "packed cache: the weights are kept in {} for the next start", files.dir().display());
        }
        Err(error) => tracing::warn!("packed cache: the weights are not kept, the next start packs again: {error}"),
    }
}

/// Returns a hash of everything that determines the packed bytes: the model's files, their packing, the instruction set, and the program.
fn key(checkpoint: &Checkpoint, table: &WeightTable, isa: Isa) -> Option<[u8; 32]> {
    let mut hash = Hashed(Sha256::new());
    let identity = checkpoint.identity()?;
    let program = program().ok()?;
    // Writing into a hash cannot fail.
    write!(hash, "plimsoll packed weights 1\n{program}\n{isa}\n{identity:?}\n").ok()?;
    write!(hash, "{:?}\n{:?}\n{}", table.linears, table.vectors, table.bytes).ok()?;
    Some(hash.0.finalize().into())
}

/// A hash of text.
struct Hashed(Sha256);

impl Write for Hashed {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.update(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
