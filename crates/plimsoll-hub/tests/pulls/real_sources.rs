//! The real sources of every catalogue entry, on request: `cargo test -p plimsoll-hub -- --ignored --nocapture`.

use std::time::Instant;

use plimsoll_hub::{CATALOGUE, Cache, ModelRef, Quiet, Settings, TerminalProgress, pull};

#[test]
#[ignore = "manual: downloads 930 MB"]
fn manual_every_catalogue_entry_can_be_pulled() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path()).unwrap();
    let settings = Settings::from_env();
    for entry in CATALOGUE {
        let model = ModelRef::Catalogue(entry);
        let begin = Instant::now();
        let path = pull(&model, &cache, &settings, &mut TerminalProgress::new()).unwrap();
        let pulled = begin.elapsed();
        let weights = if entry.beside.is_empty() { path } else { path.join(entry.file) };
        assert_eq!(std::fs::metadata(&weights).unwrap().len(), entry.bytes);
        let begin = Instant::now();
        pull(&model, &cache, &settings, &mut Quiet).unwrap();
        eprintln!(
            "{}: pulled in {pulled:.1?}, found again in {:.1?}, {}",
            entry.name,
            begin.elapsed(),
            cache.list().iter().find(|model| model.name == entry.name).map_or("", |model| model.source.as_str())
        );
        cache.remove(entry.name).unwrap();
    }
}
