//! The prefix cache on disk at a start: its directory, and the fingerprint of everything that determines the bits of a page.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::Ordering::Relaxed;

use plimsoll_device::CpuWeights;
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Bytes;
use plimsoll_memory::host::own_program;
use plimsoll_tier::{Access, Key, Limits, Store, System, Tier};
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_128;

use crate::api::options::Options;
use crate::api::start_error::StartError;
use crate::cache::Link;
use crate::plan::EnginePlan;
use crate::worker::DiskParts;

/// Opens the directory of `--cache-dir`, if it is set. This comes early: a directory in use is reported before the weights are loaded.
///
/// # Errors
/// The directory cannot be used. With several models the model is served without a disk cache instead: a request waits for the load, and
/// must not fail because of a cache.
pub(super) fn open(planned: &EnginePlan, options: &Options) -> Result<Option<Store>, StartError> {
    match try_open(planned, options) {
        Err(error) if options.hosted => {
            tracing::warn!("{error}; the model is served without a cache on disk until it is loaded again");
            Ok(None)
        }
        opened => opened,
    }
}

fn try_open(planned: &EnginePlan, options: &Options) -> Result<Option<Store>, StartError> {
    let (Some(disk), Some(plan)) = (&options.disk_cache, &planned.disk) else { return Ok(None) };
    let limits = Limits { bytes: disk.bytes, entries: plan.entries, write_bytes_per_day: disk.write_bytes_per_day };
    let key = disk.key_file.as_deref().map(Key::read).transpose()?;
    let access = key.as_ref().map_or(Access::Plain, Access::Key);
    let store = Store::open_with(&disk.dir, limits, Box::new(System), access)?;
    let [files, bytes] = [&store.counts().blobs, &store.counts().bytes].map(|count| count.load(Relaxed));
    let how = if key.is_some() { "encrypted" } else { "not encrypted" };
    tracing::info!("prefix cache on disk: {} with {files} files, {}, {how}", disk.dir.display(), Bytes(bytes));
    Ok(Some(store))
}

/// Returns a hash of all inputs that determine the bits of keys, values and states for given tokens. These are the packed weights, the
/// model's configuration, the shape of the cache, the arithmetic, and the program. Tokens are compared by their ids. Tables that stay in
/// the model's files are too large to read; the identities of their files are hashed instead. `None` if a file was changed just before, or
/// if the system gives no identity.
pub(super) fn fingerprint(
    checkpoint: &Checkpoint,
    weights: &CpuWeights,
    planned: &EnginePlan,
    options: &Options,
) -> Result<Option<[u8; 32]>, StartError> {
    let mut print = Sha256::new();
    let mut add = |label: &str, value: &[u8]| {
        print.update((label.len() as u64).to_le_bytes());
        print.update(label);
        print.update((value.len() as u64).to_le_bytes());
        print.update(value);
    };
    add("program", &program().map_err(StartError::Build)?.to_le_bytes());
    add("weights", &XxHash3_128::oneshot(weights.bytes()).to_le_bytes());
    if !weights.table().file_tables().is_empty() {
        let Some(identity) = checkpoint.identity() else { return Ok(None) };
        add("files", format!("{identity:?}").as_bytes());
    }
    add("config", format!("{:?}", checkpoint.config).as_bytes());
    add("cache", format!("{:?} {:?}", planned.kv, planned.sizing.state.map(|state| state.slot_bytes)).as_bytes());
    add("draft model", format!("{:?}", checkpoint.draft()).as_bytes());
    let arithmetic = (options.isa(), options.compute_dtype, options.dtype, planned.step.bf16, options.enable_mtp);
    add("arithmetic", format!("{arithmetic:?}").as_bytes());
    let media = (options.max_image_pixels, options.max_video_frames, options.max_audio_seconds);
    add("media", format!("{media:?}").as_bytes());
    Ok(Some(print.finalize().into()))
}

/// A checksum of the program, because another build can round differently.
pub(super) fn program() -> io::Result<u128> {
    let mut file = File::open(own_program())?;
    let (mut sum, mut buffer) = (XxHash3_128::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum.finish_128()),
            bytes => sum.write(&buffer[..bytes]),
        }
    }
}

/// An opened directory, with the root of its pages' names.
pub(super) struct DiskStart {
    store: Store,
    /// The link of the empty prompt, from which the names of pages are derived.
    pub root: Link,
    print: [u8; 32],
}

impl DiskStart {
    pub fn new(store: Store, print: [u8; 32]) -> Self {
        let mut root = Sha256::new();
        root.update(store.seed());
        root.update(print);
        Self { root: root.finalize().into(), store, print }
    }

    /// Starts the cache's thread.
    pub fn start(self, planned: &EnginePlan) -> Result<DiskParts, StartError> {
        let Self { store, root, print } = self;
        let plan = planned.disk.clone().expect("a store has a plan");
        let tier = Tier::start(store, &plan.classes).map_err(StartError::Thread)?;
        Ok(DiskParts { tier, root, print, plan, context: planned.limits.max_req_total_len as usize })
    }
}
