//! Tables that stay in the model's files: equal answers, planned bytes, and a file that changes while a server runs.

use std::os::unix::fs::FileExt;
use std::path::Path;

use plimsoll_device::TablePlace;

use super::tests::{alone, answers, first_error, fixture, start_with, stop};
use crate::api::options::{DiskCache, Options, PackedCache};
use crate::api::output::TokenOut;
use crate::handle::EngineHandle;

/// Planned and committed bytes of a component.
fn bytes(engine: &EngineHandle, name: &str) -> (u64, u64) {
    let report = engine.report();
    let row = report.components.iter().find(|row| row.component == name).expect("a component");
    (row.planned_bytes, row.committed_bytes)
}

#[test]
fn answers_are_the_same_and_what_the_cache_takes_is_planned() {
    let _alone = alone();
    let packed = tempfile::tempdir().unwrap();
    for (model, place) in [("qwen4-exp", TablePlace::Auto), ("gemma4-e2b", TablePlace::File)] {
        let memory = Options { tables: TablePlace::Memory, ..Options::default() };
        let engine = start_with(&fixture(model), &memory);
        let (expected, (weights, _)) = (answers(&engine), bytes(&engine, "weights"));
        assert_eq!(bytes(&engine, "table_cache"), (0, 0));
        assert_eq!(engine.metrics().table_rows_read.get(), 0);
        stop(engine);
        let packed_cache = Some(PackedCache::at(packed.path().join("packed")));
        for table_cache_bytes in [Some(1), None, None] {
            let options =
                Options { tables: place, table_cache_bytes, packed_cache: packed_cache.clone(), ..memory.clone() };
            let engine = start_with(&fixture(model), &options);
            assert!(answers(&engine) == expected, "{model} with {table_cache_bytes:?} bytes");
            let (planned, committed) = bytes(&engine, "table_cache");
            assert!(planned > 0 && planned == committed, "{planned} planned, {committed} committed");
            assert!(bytes(&engine, "weights").0 < weights);
            let (cached, read) = (engine.metrics().table_rows_cached.get(), engine.metrics().table_rows_read.get());
            assert!(cached > 0, "{cached} rows from the cache, {read} from the file");
            if table_cache_bytes == Some(1) {
                assert!(read > 1000, "eight rows do not serve twelve requests");
            }
            let report = engine.report();
            assert_eq!(report.device_allocations.after_ready, 0);
            stop(engine);
        }
    }
}

#[test]
fn a_file_that_changes_under_a_server_ends_its_requests_and_gives_no_wrong_answer() {
    let _alone = alone();
    for cut in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        copy(&fixture("qwen4-exp"), folder.path());
        let engine = start_with(folder.path(), &Options { table_cache_bytes: Some(1), ..Options::default() });
        answers(&engine);
        let file = std::fs::File::options().write(true).open(folder.path().join("model.safetensors")).unwrap();
        match cut {
            true => file.set_len(4096).unwrap(),
            false => file.write_all_at(&[0x55; 4096], 80 << 10).unwrap(),
        }
        let error = first_error(&engine).expect("the rows are not those that were there");
        assert!(
            error.contains("a table that stays in the model's file") && error.contains("model.safetensors"),
            "{error}"
        );
        stop(engine);
    }
}

#[test]
fn a_file_that_is_replaced_under_a_server_changes_nothing() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    copy(&fixture("qwen4-exp"), folder.path());
    let engine = start_with(folder.path(), &Options { table_cache_bytes: Some(1), ..Options::default() });
    let expected = answers(&engine);
    std::fs::write(folder.path().join("new"), "another model").unwrap();
    std::fs::rename(folder.path().join("new"), folder.path().join("model.safetensors")).unwrap();
    assert!(answers(&engine) == expected);
    stop(engine);
}

/// Returns greedy answers of the model at `path`, and the tokens that the disk cache had for them.
fn run(path: &Path, options: &Options) -> (Vec<Vec<TokenOut>>, u64) {
    let engine = start_with(path, options);
    let found = (answers(&engine), engine.cache_report().disk.map_or(0, |disk| disk.hit_tokens));
    stop(engine);
    found
}

/// Gives every value of a table the same bits.
fn overwrite_a_table(weights: &Path) {
    let bytes = std::fs::read(weights).unwrap();
    let head = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let names: serde_json::Value = serde_json::from_slice(&bytes[8..8 + head]).unwrap();
    for (_, tensor) in names.as_object().unwrap().iter().filter(|(name, _)| name.contains("ngram_embedding.")) {
        let [begin, end] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap());
        let file = std::fs::File::options().write(true).open(weights).unwrap();
        file.write_all_at(&vec![0x3f; (end - begin) as usize], 8 + head as u64 + begin).unwrap();
    }
}

#[test]
fn models_that_differ_in_a_table_share_nothing_on_disk() {
    let _alone = alone();
    let [first, second, cache] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    copy(&fixture("qwen4-exp"), first.path());
    copy(&fixture("qwen4-exp"), second.path());
    overwrite_a_table(&second.path().join("model.safetensors"));
    // A file that was just written can be written again within the same timestamp.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    let disk_cache = Some(DiskCache { read_always: true, ..DiskCache::at(cache.path().join("cache")) });
    let on_disk = Options { disk_cache, ..Options::default() };
    let (expected, _) = run(second.path(), &Options::default());
    let (own, _) = run(first.path(), &on_disk);
    assert!(own != expected, "the table decides answers");
    let (again, hits) = run(first.path(), &on_disk);
    assert!(again == own && hits > 0, "{hits} tokens from disk");
    let (found, hits) = run(second.path(), &on_disk);
    assert!(found == expected && hits == 0, "{hits} tokens of another model");
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
