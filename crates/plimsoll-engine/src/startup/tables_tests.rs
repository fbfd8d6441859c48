//! Tables that stay in the model's files: the same answers, planned bytes, and a file that changes under a server.

use std::os::unix::fs::FileExt;
use std::path::Path;

use plimsoll_device::TablePlace;

use super::tests::{alone, answers, first_error, fixture, start_with, stop};
use crate::api::options::{Options, PackedCache};
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
        for table_cache_bytes in [1, 1 << 30, 1 << 30] {
            let options =
                Options { tables: place, table_cache_bytes, packed_cache: packed_cache.clone(), ..memory.clone() };
            let engine = start_with(&fixture(model), &options);
            assert!(answers(&engine) == expected, "{model} with {table_cache_bytes} bytes");
            let (planned, committed) = bytes(&engine, "table_cache");
            assert!(planned > 0 && planned == committed, "{planned} planned, {committed} committed");
            assert!(bytes(&engine, "weights").0 < weights);
            let (cached, read) = (engine.metrics().table_rows_cached.get(), engine.metrics().table_rows_read.get());
            assert!(cached > 0, "{cached} rows from the cache, {read} from the file");
            if table_cache_bytes == 1 {
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
        let engine = start_with(folder.path(), &Options { table_cache_bytes: 1, ..Options::default() });
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
    let engine = start_with(folder.path(), &Options { table_cache_bytes: 1, ..Options::default() });
    let expected = answers(&engine);
    std::fs::write(folder.path().join("new"), "another model").unwrap();
    std::fs::rename(folder.path().join("new"), folder.path().join("model.safetensors")).unwrap();
    assert!(answers(&engine) == expected);
    stop(engine);
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
