//! `pull`, `models`, `rm`: fetch, list and remove models of the cache.

use plimsoll_hub::{CATALOGUE, Cache, KNOWN};
use plimsoll_memory::Bytes;

use crate::output::say;

/// Fetches a model.
pub fn pull(model: &str) -> anyhow::Result<()> {
    let path = super::resolve(model)?;
    say!("{}", path.display());
    Ok(())
}

/// Prints the cached models, then the known models that are not cached.
pub fn list() -> anyhow::Result<()> {
    let cache = Cache::default_location()?;
    let cached = cache.list();
    for model in &cached {
        let state = if model.verified { "verified" } else { "incomplete" };
        say!("{:<24} {:>11}  {state:<10} {}", model.name, Bytes(model.bytes).to_string(), model.path.display());
    }
    for entry in CATALOGUE.iter().filter(|entry| cached.iter().all(|model| model.name != entry.name)) {
        say!("{:<24} {:>11}  not cached ({})", entry.name, Bytes(entry.bytes).to_string(), entry.title);
    }
    let repo = |name: &str| name.strip_prefix("hf:").map(str::to_owned);
    let cached: Vec<_> = cached.iter().filter_map(|model| repo(&model.name)).collect();
    for known in KNOWN {
        if let Some(repo) = known.repo.filter(|repo| !cached.iter().any(|cached| cached == repo)) {
            say!("{:<24} {:>11}  not cached (hf:{repo}, {}, {})", known.name, "", known.kind.name(), known.licence);
        }
    }
    Ok(())
}

/// Removes a model.
pub fn remove(model: &str) -> anyhow::Result<()> {
    let freed = Cache::default_location()?.remove(model)?;
    say!("removed {model}: {} freed", Bytes(freed));
    Ok(())
}
