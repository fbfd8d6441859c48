//! `cache`: lists, removes or checks the contents of a prefix cache on disk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use anyhow::{Context, bail, ensure};
use plimsoll_engine::metrics::DISK_KINDS;
use plimsoll_memory::Bytes;
use plimsoll_tier::{Access, KINDS, Key, Limits, Store, Sum, System, Tag, kind_of, tag_of};

use crate::args::CacheCommand;
use crate::output::say;

/// Runs the subcommand.
pub fn run(command: &CacheCommand) -> anyhow::Result<()> {
    match command {
        CacheCommand::Ls { dir } => list(dir),
        CacheCommand::Rm { dir, model } => remove(dir, model.as_deref()),
        CacheCommand::Verify { dir, cache_key_file } => verify(dir, cache_key_file.as_deref()),
    }
}

/// The files of one model and build by kind, and the last use of any of them.
struct OfModel {
    kinds: [Sum; KINDS],
    used: SystemTime,
}

impl OfModel {
    fn all(&self) -> Sum {
        let sum = |of: fn(&Sum) -> u64| self.kinds.iter().map(of).sum();
        Sum { blobs: sum(|kind| kind.blobs), bytes: sum(|kind| kind.bytes) }
    }
}

type Models = BTreeMap<Tag, OfModel>;

fn models(dir: &Path) -> anyhow::Result<Models> {
    ensure!(dir.join("blobs").is_dir(), "{} is not a prefix cache: it has no folder blobs", dir.display());
    let mut models = BTreeMap::new();
    Store::each(dir, &System, |name, bytes, used| {
        let none = || OfModel { kinds: [Sum::default(); KINDS], used: SystemTime::UNIX_EPOCH };
        let model = models.entry(tag_of(name)).or_insert_with(none);
        let kind = &mut model.kinds[kind_of(name)];
        *kind = Sum { blobs: kind.blobs + 1, bytes: kind.bytes + bytes };
        model.used = model.used.max(used);
    });
    Ok(models)
}

fn hex(tag: Tag) -> String {
    tag.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn list(dir: &Path) -> anyhow::Result<()> {
    let models = models(dir)?;
    for (tag, model) in &models {
        let minutes = model.used.elapsed().map_or(0, |since| since.as_secs() / 60);
        let line = |Sum { blobs, bytes }: Sum| format!("{blobs:>8} files  {:>11}", Bytes(bytes).to_string());
        say!("{}  {}  used {minutes} minutes ago", hex(*tag), line(model.all()));
        for (kind, sum) in DISK_KINDS.into_iter().zip(model.kinds).filter(|(_, sum)| sum.blobs > 0) {
            say!("  {kind:<14}  {}", line(sum));
        }
    }
    for saved in Store::list_saved(dir, &System) {
        let name = saved.label.as_deref().unwrap_or("(an encrypted name)");
        say!("{}  saved as {name}: {} files, {} bytes of tokens", hex(saved.tag), saved.blobs, saved.data_bytes);
    }
    let bytes: u64 = models.values().map(|model| model.all().bytes).sum();
    say!("{} in all", Bytes(bytes));
    if let Some(free) = plimsoll_tier::free_bytes(dir) {
        say!("{} free on its disk", Bytes(free));
    }
    Ok(())
}

/// Opens the store of these models without a limit on its size.
fn open(dir: &Path, known: &Models, access: Access<'_>) -> anyhow::Result<Store> {
    let files: u64 = known.values().map(|model| model.all().blobs).sum();
    let limits = Limits { bytes: u64::MAX >> 1, entries: files as usize + 1, write_bytes_per_day: None };
    Store::open_with(dir, limits, Box::new(System), access).with_context(|| format!("opening {}", dir.display()))
}

fn remove(dir: &Path, model: Option<&str>) -> anyhow::Result<()> {
    let known = models(dir)?;
    let tag = match model {
        None => None,
        Some(model) => match known.keys().find(|tag| hex(**tag) == model) {
            Some(tag) => Some(*tag),
            None => bail!("{} has nothing of '{model}': `plimsoll cache ls` lists what it has", dir.display()),
        },
    };
    let store = open(dir, &known, Access::Upkeep)?;
    let bytes = || store.counts().bytes.load(Relaxed);
    let before = bytes();
    store.clear(tag);
    say!("{} removed", Bytes(before.saturating_sub(bytes())));
    Ok(())
}

fn verify(dir: &Path, key_file: Option<&Path>) -> anyhow::Result<()> {
    let key = key_file.map(Key::read).transpose()?;
    let access = key.as_ref().map_or(Access::Upkeep, Access::Key);
    let checked = open(dir, &models(dir)?, access)?.verify();
    let files = checked.whole + checked.damaged + checked.unreadable;
    say!("{files} files looked at ({}): {} are damaged and removed", Bytes(checked.bytes), checked.damaged);
    if checked.closed > 0 {
        say!(
            "{} are encrypted: their checksums are right; --cache-key-file checks that they are authentic",
            checked.closed
        );
    }
    if checked.unreadable > 0 {
        bail!("{} files could not be read; they stay: check the disk and run it again", checked.unreadable);
    }
    Ok(())
}
