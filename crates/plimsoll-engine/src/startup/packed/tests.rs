//! Answers are the same with and without the packed cache; a damaged file is packed again.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use tempfile::TempDir;

use super::super::tests::{alone, answers, fixture, start_with, stop};
use super::*;
use crate::api::output::TokenOut;
use crate::handle::EngineHandle;

fn options(dir: &TempDir) -> Options {
    Options { packed_cache: Some(PackedCache::at(dir.path().join("packed"))), ..Options::default() }
}

fn mapped(engine: &EngineHandle) -> bool {
    engine.metrics().weights_mapped.get() == 1
}

/// Starts, answers and stops. Returns the answers, and whether the weights were mapped.
fn run(model: &str, options: &Options) -> (Vec<Vec<TokenOut>>, bool) {
    let engine = start_with(&fixture(model), options);
    let found = (answers(&engine), mapped(&engine));
    stop(engine);
    found
}

fn file_in(dir: &TempDir) -> PathBuf {
    let all = std::fs::read_dir(dir.path().join("packed")).unwrap().map(|entry| entry.unwrap().path());
    let all: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|end| end == "file")).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all.into_iter().next().unwrap()
}

#[test]
fn the_second_start_maps_and_answers_alike() {
    let _alone = alone();
    for model in ["llama", "qwen3-moe", "qwen3.5"] {
        let dir = tempfile::tempdir().unwrap();
        let (expected, packed) = run(model, &Options::default());
        assert!(!packed);
        let (first, second) = (run(model, &options(&dir)), run(model, &options(&dir)));
        assert_eq!((first.1, second.1), (false, true), "{model}");
        assert!(first.0 == expected && second.0 == expected, "{model}");
    }
}

#[test]
fn damaged_files_are_packed_anew() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (expected, _) = run("llama", &options(&dir));
    let whole = std::fs::read(file_in(&dir)).unwrap();
    let at = |part: usize| whole.len() * part / 8;
    // Header, sums, weights; cut; longer; empty.
    let flip = |place: usize| {
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        bytes
    };
    let cut = |bytes: usize| whole[..bytes].to_vec();
    let longer = [&whole[..], &[0]].concat();
    let damaged =
        [flip(3), flip(30), flip(60), flip(at(6)), flip(whole.len() - 1), cut(at(5)), cut(10), cut(0), longer];
    for (case, bytes) in damaged.iter().enumerate() {
        std::fs::write(file_in(&dir), bytes).unwrap();
        let (found, mapped) = run("llama", &options(&dir));
        assert!(!mapped && found == expected, "case {case}");
        assert!(std::fs::read(file_in(&dir)).unwrap() == whole, "case {case}: it is written again");
    }
    assert_eq!(run("llama", &options(&dir)), (expected, true));
}

#[test]
fn a_file_that_changes_under_a_server_ends_its_requests_and_gives_no_wrong_answer() {
    let _alone = alone();
    for cut in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = run("llama", &options(&dir));
        let engine = start_with(&fixture("llama"), &options(&dir));
        assert!(mapped(&engine) && answers(&engine) == expected);
        let file = std::fs::File::options().write(true).open(file_in(&dir)).unwrap();
        match cut {
            true => file.set_len(64 << 10).unwrap(),
            false => file.write_all_at(&[0x55; 4096], 80 << 10).unwrap(),
        }
        let error = super::super::tests::first_error(&engine).expect("the weights are not those that were checked");
        assert!(error.contains("packed weights were changed"), "{error}");
        stop(engine);
        assert_eq!(run("llama", &options(&dir)), (expected, false), "the next start packs");
    }
}

#[test]
fn servers_share_a_file_and_one_of_them_writes() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (expected, _) = run("llama", &Options::default());
    let files = open(&options(&dir)).unwrap().unwrap();
    let lock = std::fs::File::create(files.dir().join("lock")).unwrap();
    lock.lock().unwrap();
    assert_eq!(run("llama", &options(&dir)), (expected.clone(), false), "another one is writing");
    drop(lock);
    assert_eq!(run("llama", &options(&dir)), (expected.clone(), false), "so nothing was kept");
    let first = start_with(&fixture("llama"), &options(&dir));
    let second = start_with(&fixture("llama"), &options(&dir));
    assert!(mapped(&first) && mapped(&second));
    // A removed file stays for the processes that map it.
    std::fs::remove_file(file_in(&dir)).unwrap();
    assert!(answers(&first) == expected && answers(&second) == expected);
    stop(first);
    stop(second);
}

#[test]
fn mapped_weights_are_counted_like_packed_ones() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let _ = run("llama", &options(&dir));
    let rows = |options: &Options| {
        let engine = start_with(&fixture("llama"), options);
        let report = engine.report();
        let row = report.components.iter().find(|row| row.component == "weights").unwrap().clone();
        stop(engine);
        (row.planned_bytes, row.committed_bytes, row.detail, report.process.held_file)
    };
    let (packed, mapped) = (rows(&Options::default()), rows(&options(&dir)));
    assert_eq!((&packed.0, &packed.2), (&mapped.0, &mapped.2));
    // The ledger counts the whole touched pages of anonymous memory.
    assert!(packed.1.abs_diff(mapped.1) <= 2 << 20, "{packed:?} {mapped:?}");
    assert_eq!((packed.3, mapped.3), (0, mapped.0), "the file's pages count as the process's own");
}

#[test]
fn the_key_has_all_that_decides_the_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("model");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(fixture("llama")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let key_of = |path: &Path, options: &Options| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let table = crate::plan::Blueprint::new(&checkpoint, options).unwrap().weights;
        key(&checkpoint, &table, options.isa())
    };
    let usual = Options { isa: Some(Isa::Portable), ..Options::default() };
    let own = key_of(&fixture("llama"), &usual);
    assert!(own.is_some() && own == key_of(&fixture("llama"), &usual));
    assert_ne!(own, key_of(&fixture("llama"), &Options { isa: Some(Isa::Avx2), ..usual.clone() }), "instruction set");
    let f32 = Options { dtype: plimsoll_device::DtypePolicy::Bf16, ..usual.clone() };
    assert_ne!(own, key_of(&fixture("llama"), &f32), "packing");
    assert_eq!(key_of(&copy, &usual), None, "it was written just now, and may be again within the same time");
    std::thread::sleep(Duration::from_millis(2100));
    let copied = key_of(&copy, &usual);
    assert!(copied.is_some() && copied != own, "another file");
    let weights = copy.join("model.safetensors");
    let status = weights.metadata().unwrap();
    let file = std::fs::File::options().write(true).open(&weights).unwrap();
    let last = status.len() - 1;
    file.write_all_at(&[1], last).unwrap();
    file.set_modified(status.modified().unwrap()).unwrap();
    std::thread::sleep(Duration::from_millis(2100));
    assert_ne!(key_of(&copy, &usual), copied, "the same length and time of writing");
}
