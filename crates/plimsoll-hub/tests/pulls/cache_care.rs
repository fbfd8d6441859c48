//! Files that change behind our back, listing, removing.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use plimsoll_hub::{Cache, HubError, ModelRef, Quiet, pull};

use crate::fixtures::{Recorder, cache, content, files_below, nowhere, settings};
use crate::server::Server;

const SPEC: &str = "hf:org/repo:m.gguf";

fn pulled(cache: &Cache, body: &[u8]) -> (Server, std::path::PathBuf) {
    let server = Server::start();
    server.publish_repo("org/repo", &[("m.gguf", body)]);
    let model = ModelRef::parse(SPEC).unwrap();
    let path = pull(&model, cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    (server, path)
}

fn touch(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(1_000)).unwrap();
}

#[test]
fn a_touched_file_is_verified_again_without_a_network() {
    let (_dir, cache) = cache();
    let (_server, path) = pulled(&cache, &content(10_000, 40));
    let model = ModelRef::parse(SPEC).unwrap();
    touch(&path);
    assert!(!cache.list()[0].verified);
    let mut progress = Recorder::default();
    pull(&model, &cache, &settings(nowhere()), &mut progress).unwrap();
    assert_eq!(progress.stages, ["verifying m.gguf"]);
    assert!(cache.list()[0].verified);
    let mut progress = Recorder::default();
    pull(&model, &cache, &settings(nowhere()), &mut progress).unwrap();
    assert!(progress.stages.is_empty(), "verified once is enough");
}

#[test]
fn a_damaged_file_is_pulled_again() {
    let body = content(10_000, 41);
    let damages: [fn(&Path); 3] = [
        |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[5_000] ^= 1;
            fs::write(path, bytes).unwrap();
            touch(path);
        },
        |path| fs::write(path, b"short").unwrap(),
        |path| fs::remove_file(path).unwrap(),
    ];
    for damage in damages {
        let (_dir, cache) = cache();
        let (server, path) = pulled(&cache, &body);
        damage(&path);
        let model = ModelRef::parse(SPEC).unwrap();
        // A damaged file is never an answer, not even when nothing better can be had.
        pull(&model, &cache, &settings(nowhere()), &mut Quiet).unwrap_err();
        assert!(cache.list().is_empty());
        let again = pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
        assert_eq!(fs::read(again).unwrap(), body);
    }
}

#[test]
fn a_file_whose_marker_is_lost_is_verified_and_not_pulled() {
    let (_dir, cache) = cache();
    let (server, path) = pulled(&cache, &content(10_000, 42));
    fs::write(path.with_file_name("plimsoll.json"), b"{ broken").unwrap();
    let model = ModelRef::parse(SPEC).unwrap();
    pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(server.requests("/resolve/").len(), 1);
    assert!(cache.list()[0].verified);
}

#[test]
fn models_are_listed_and_removed() {
    let (_dir, cache) = cache();
    assert!(cache.list().is_empty());
    let body = content(10_000, 43);
    let (server, path) = pulled(&cache, &body);
    let [model] = &cache.list()[..] else {
        panic!("one model expected");
    };
    assert_eq!((model.name.as_str(), model.bytes), (SPEC, 10_000));
    assert_eq!(model.path, path);
    assert!(model.source.starts_with(&server.endpoint()));

    let freed = cache.remove(SPEC).unwrap();
    assert!((10_000..12_000).contains(&freed), "{freed}");
    assert!(cache.list().is_empty() && files_below(cache.root()).is_empty());
    assert!(!cache.root().join("hf/org").exists());
    for name in [SPEC, "smollm2", "hf:no/such"] {
        assert!(matches!(cache.remove(name), Err(HubError::NotCached { .. })));
    }
    assert!(matches!(cache.remove("smollm3"), Err(HubError::UnknownModel { .. })));
}

#[test]
fn removing_one_of_two_keeps_what_the_other_needs() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let (config, weights, single) = (b"{}".as_slice(), content(5_000, 44), content(7_000, 45));
    server.publish_repo("org/repo", &[("config.json", config), ("model.safetensors", &weights), ("m.gguf", &single)]);
    for spec in ["hf:org/repo", SPEC, "hf:org/repo:config.json"] {
        let model = ModelRef::parse(spec).unwrap();
        pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    }
    assert_eq!(cache.list().len(), 3);
    let freed = cache.remove("hf:org/repo").unwrap();
    // The marker became shorter too.
    assert!((5_000..7_000).contains(&freed), "{freed}");
    assert_eq!(files_below(&cache.root().join("hf/org/repo")), ["config.json", "m.gguf", "plimsoll.json"]);
    for spec in [SPEC, "hf:org/repo:config.json"] {
        let model = ModelRef::parse(spec).unwrap();
        pull(&model, &cache, &settings(nowhere()), &mut Quiet).unwrap();
    }
}

#[test]
fn a_new_revision_leaves_nothing_of_the_old_one_beside_it() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let (weights, shard, single) = (content(5_000, 46), content(4_000, 47), content(7_000, 48));
    let pulled = |spec: &str| {
        let model = ModelRef::parse(spec).unwrap();
        pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap()
    };
    let old: [(&str, &[u8]); 3] = [("config.json", b"{}"), ("model.safetensors", &weights), ("m.gguf", &single)];
    server.publish_repo("org/repo", &old);
    let directory = pulled("hf:org/repo");
    pulled(SPEC);
    fs::write(directory.join("notes.txt"), b"somebody's").unwrap();
    let (index, shards) = ("model.safetensors.index.json", "model-00001-of-00001.safetensors");
    let new: [(&str, &[u8]); 4] =
        [("config.json", b"{ }"), (index, b"{}"), (shards, &shard), ("m.gguf", &content(7_000, 49))];
    server.publish_repo("org/repo", &new);

    // One file of the new revision undoes the pull of the directory, and its weights wait for that to be done again.
    pulled("hf:org/repo:config.json");
    assert!(directory.join("model.safetensors").exists());
    // Files that another pull needs stay, from any revision, and so do files that were never pulled.
    pulled("hf:org/repo");
    let there = ["config.json", "m.gguf", shards, index, "notes.txt", "plimsoll.json"];
    assert_eq!(files_below(&directory), there);
    let model = ModelRef::parse(SPEC).unwrap();
    assert_eq!(fs::read(pull(&model, &cache, &settings(nowhere()), &mut Quiet).unwrap()).unwrap(), single);
    let marker = fs::read_to_string(directory.join("plimsoll.json")).unwrap();
    assert!(!marker.contains("\"model.safetensors\""), "{marker}");
}

#[test]
fn an_unfinished_pull_can_be_removed() {
    let (_dir, cache) = cache();
    let partial = cache.root().join("catalogue/smollm2/.partial");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("x.hub.part"), vec![0; 3_000]).unwrap();
    assert_eq!(cache.remove("smollm2").unwrap(), 3_000);
    assert!(!partial.exists());
}
