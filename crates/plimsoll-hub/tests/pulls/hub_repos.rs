//! Pulling from a hub: whole and interrupted transfers, wrong content, hostile listings, tokens.

use std::fs;
use std::time::{Duration, Instant};

use plimsoll_hub::{HubError, ModelRef, Quiet, pull};
use serde_json::json;

use crate::fixtures::{Recorder, cache, content, files_below, nowhere, settings, sha256};
use crate::server::{COMMIT, Page, Server, file_path};

const REPO: &str = "org/repo";
const MODEL: &str = "m.gguf";

fn model() -> ModelRef {
    ModelRef::parse("hf:org/repo:m.gguf").unwrap()
}

#[test]
fn a_file_is_pulled_once_and_then_found_without_a_network() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(300_000, 1);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    let mut progress = Recorder::default();
    let path = pull(&model(), &cache, &settings(server.endpoint()), &mut progress).unwrap();
    assert_eq!(fs::read(&path).unwrap(), body);
    assert_eq!(progress.stages, ["pulling m.gguf", "verifying m.gguf"]);
    assert_eq!(progress.bytes, 300_000);
    assert!(!progress.open);
    assert_eq!(files_below(cache.root()), ["hf/org/repo/m.gguf", "hf/org/repo/plimsoll.json"]);

    let mut progress = Recorder::default();
    let again = pull(&model(), &cache, &settings(nowhere()), &mut progress).unwrap();
    assert_eq!(again, path);
    assert!(progress.stages.is_empty() && progress.notes.is_empty());
}

#[test]
fn a_cut_transfer_goes_on_where_it_stopped() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(500_000, 2);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    server.change(&file_path(REPO, MODEL), |page| {
        page.cuts = vec![200_000, 0, 100_000, usize::MAX];
    });
    let path = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    let requests = server.requests("/resolve/");
    let ranges: Vec<_> = requests.iter().map(|request| request.headers.get("range").map(String::as_str)).collect();
    assert_eq!(ranges, [None, Some("bytes=200000-"), Some("bytes=200000-"), Some("bytes=300000-")]);
    assert_eq!(requests[1].headers["if-range"], format!("\"{}\"", &sha256(&body)[..16]));
}

#[test]
fn a_server_without_ranges_or_with_a_changed_file_starts_over() {
    for ignore_range in [true, false] {
        let (_dir, cache) = cache();
        let server = Server::start();
        let body = content(200_000, 3);
        server.publish_repo(REPO, &[(MODEL, &body)]);
        server.change(&file_path(REPO, MODEL), |page| {
            page.cuts = vec![150_000];
            page.ignore_range = ignore_range;
        });
        let mut impatient = settings(server.endpoint());
        impatient.retry_pause = Duration::from_millis(300);
        let path = std::thread::scope(|scope| {
            let pulling = scope.spawn(|| {
                let mut progress = Recorder::default();
                pull(&model(), &cache, &impatient, &mut progress)
            });
            while server.requests("/resolve/").is_empty() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Another ETag for the retry: the server must not be asked to continue another file.
            server.change(&file_path(REPO, MODEL), |page| page.etag = Some("\"new\"".to_owned()));
            pulling.join().unwrap().unwrap()
        });
        assert_eq!(fs::read(path).unwrap(), body);
        assert_eq!(server.requests("/resolve/").len(), 2);
    }
}

#[test]
fn a_transfer_that_never_advances_is_given_up_and_resumed_by_the_next_pull() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(100_000, 4);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    server.change(&file_path(REPO, MODEL), |page| {
        page.cuts = [vec![60_000], vec![0; 4]].concat();
    });
    let error = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
    assert!(matches!(error, HubError::Interrupted { received: 60_000, expected: 100_000, .. }), "{error}");
    assert!(cache.list().is_empty());
    assert!(!cache.root().join("hf/org/repo/m.gguf").exists());

    let path = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    let last = server.requests("/resolve/").pop().unwrap();
    assert_eq!(last.headers["range"], "bytes=60000-");
    assert_eq!(files_below(cache.root()), ["hf/org/repo/m.gguf", "hf/org/repo/plimsoll.json"]);
}

#[test]
fn abandoned_transfer_ends_between_two_pieces() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(100_000, 6);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    // Twenty seconds, if it were waited for.
    server.change(&file_path(REPO, MODEL), |page| page.drip = Some((1_000, Duration::from_millis(200))));
    let begin = Instant::now();
    let mut leaving = Recorder { enough: Some(2_000), ..Recorder::default() };
    let error = pull(&model(), &cache, &settings(server.endpoint()), &mut leaving).unwrap_err();
    assert!(matches!(error, HubError::GivenUp), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(10) && !leaving.open);
    assert!((2_000..20_000).contains(&leaving.bytes), "{}", leaving.bytes);
    // The lock is free, and the next goes on where it stopped.
    server.change(&file_path(REPO, MODEL), |page| page.drip = None);
    let path = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    let last = server.requests("/resolve/").pop().unwrap();
    assert_eq!(last.headers["range"], format!("bytes={}-", leaving.bytes));
}

#[test]
fn a_silent_server_is_noticed() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(100_000, 5);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    server.change(&file_path(REPO, MODEL), |page| {
        page.silence = Some((40_000, Duration::from_secs(60)));
    });
    let mut impatient = settings(server.endpoint());
    impatient.read_timeout = Duration::from_millis(300);
    let begin = Instant::now();
    let path = pull(&model(), &cache, &impatient, &mut Quiet).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(fs::read(path).unwrap(), body);
    assert_eq!(server.requests("/resolve/")[1].headers["range"], "bytes=40000-");
}

#[test]
fn wrong_content_is_refused_with_both_sums_and_not_kept() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let (right, wrong) = (content(50_000, 6), content(50_000, 7));
    server.publish_repo(REPO, &[(MODEL, &right)]);
    server.change(&file_path(REPO, MODEL), |page| page.body.clone_from(&wrong));
    let error = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(&sha256(&right)) && message.contains(&sha256(&wrong)), "{message}");
    assert!(files_below(cache.root()).is_empty());
}

#[test]
fn another_length_than_listed_is_refused_before_the_body() {
    for len in [50_001, 49_999] {
        let (_dir, cache) = cache();
        let server = Server::start();
        server.publish_repo(REPO, &[(MODEL, &content(50_000, 8))]);
        server.change(&file_path(REPO, MODEL), |page| page.body = content(len, 8));
        let error = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
        assert!(matches!(error, HubError::SizeMismatch { expected: 50_000, .. }), "{error}");
    }
}

#[test]
fn a_body_without_an_announced_length_is_bounded_all_the_same() {
    for (len, fits) in [(200_000, true), (200_001, false), (199_999, false)] {
        let (_dir, cache) = cache();
        let server = Server::start();
        let body = content(200_000, 14);
        server.publish_repo(REPO, &[(MODEL, &body)]);
        server.change(&file_path(REPO, MODEL), |page| {
            page.body = content(len, 14);
            page.no_length = true;
            page.ignore_range = true;
        });
        let pulled = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet);
        match pulled {
            Ok(path) => assert!(fits && fs::read(path).unwrap() == body),
            Err(HubError::TooLarge { limit: 200_000, .. }) => assert!(len > 200_000),
            Err(HubError::Interrupted { received: 199_999, .. }) => assert!(len < 200_000),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn passing_trouble_is_waited_out_and_lasting_trouble_is_told() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(1_000, 9);
    server.publish_repo(REPO, &[(MODEL, &body)]);
    server.change(&file_path(REPO, MODEL), |page| page.statuses = vec![503, 429]);
    pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap();

    let absent = ModelRef::parse("hf:org/absent").unwrap();
    let error = pull(&absent, &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
    assert!(matches!(error, HubError::Status { code: 404, .. }), "{error}");
    assert_eq!(server.requests("absent").len(), 1, "404 is not retried");

    let listing = "/api/models/org/gated/revision/main?blobs=true";
    server.publish(listing, Page::default());
    server.change(listing, |page| page.statuses = vec![401]);
    let gated = ModelRef::parse("hf:org/gated").unwrap();
    let error = pull(&gated, &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
    assert!(error.to_string().contains("HF_TOKEN"), "{error}");

    let error = pull(&absent, &cache, &settings(nowhere()), &mut Quiet).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[test]
fn a_checkpoint_becomes_a_directory_and_nothing_leaves_it() {
    let (dir, cache) = cache();
    let server = Server::start();
    let weights = content(70_000, 10);
    server.publish_repo(
        REPO,
        &[
            ("config.json", b"{}".as_slice()),
            ("tokenizer.json", b"[]"),
            ("generation_config.json", b""),
            ("model.safetensors", &weights),
            ("README.md", b"hello"),
            ("../../../evil.json", b"x"),
            ("/evil.json", b"x"),
            (".partial/evil.json", b"x"),
            ("plimsoll.json", b"{}"),
        ],
    );
    let spec = ModelRef::parse("hf:org/repo").unwrap();
    let path = pull(&spec, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(path, cache.root().join("hf/org/repo"));
    assert_eq!(
        files_below(&path),
        ["config.json", "generation_config.json", "model.safetensors", "plimsoll.json", "tokenizer.json"]
    );
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    assert!(files_below(dir.path()).iter().all(|file| file.starts_with("cache/hf/org/repo/")));
    assert!(server.requests("evil").is_empty());
    assert_eq!(pull(&spec, &cache, &settings(nowhere()), &mut Quiet).unwrap(), path);
}

#[test]
fn a_checkpoint_that_lost_a_file_fetches_that_file_only_unless_the_hub_has_moved_on() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let weights = content(70_000, 11);
    let first = [("config.json", b"{1}".as_slice()), ("model.safetensors", &weights)];
    server.publish_repo(REPO, &first);
    let spec = ModelRef::parse("hf:org/repo").unwrap();
    let path = pull(&spec, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();

    fs::remove_file(path.join("model.safetensors")).unwrap();
    pull(&spec, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(server.requests("config.json").len(), 1);
    assert_eq!(server.requests("model.safetensors").len(), 2);

    // Same size, other content: the old file must not be mixed with the new weights.
    server.publish_repo(REPO, &[("config.json", b"{2}"), first[1]]);
    fs::remove_file(path.join("model.safetensors")).unwrap();
    pull(&spec, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{2}");
}

#[test]
fn nonsense_from_the_hub_is_told_and_not_believed() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let attempt = |spec: &str| {
        let spec = ModelRef::parse(spec).unwrap();
        pull(&spec, &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err()
    };
    server
        .publish("/api/models/org/html/revision/main?blobs=true", Page { body: b"<html>".to_vec(), ..Page::default() });
    assert!(matches!(attempt("hf:org/html"), HubError::BadResponse { .. }));

    let listing = |bytes: u64| json!({"sha": COMMIT, "siblings": [{"rfilename": MODEL, "size": bytes}]});
    server.publish_listing("org/huge", &listing((4 << 40) + 1));
    assert!(matches!(attempt("hf:org/huge"), HubError::TooLarge { .. }));

    // Larger than any disk this test runs on.
    server.publish_listing("org/large", &listing(4 << 40));
    let error = attempt("hf:org/large");
    assert!(matches!(error, HubError::DiskFull { needed, free: Some(_), .. } if needed == 4 << 40), "{error}");
    assert!(error.to_string().contains("4.3 TB more needed"), "{error}");
    assert!(server.requests("/resolve/").is_empty());
    assert!(files_below(cache.root()).is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_fills_up_is_told_and_given_back() {
    let (_dir, cache) = cache();
    let server = Server::start();
    server.publish_repo(REPO, &[(MODEL, &content(100_000, 12))]);
    let partial = cache.root().join("hf/org/repo/.partial");
    fs::create_dir_all(&partial).unwrap();
    std::os::unix::fs::symlink("/dev/full", partial.join("m.gguf.hub.part")).unwrap();
    let error = pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap_err();
    assert!(matches!(error, HubError::DiskFull { needed: 100_000, .. }), "{error}");
    assert!(!partial.exists());
    // With room again, the next pull succeeds.
    pull(&model(), &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
}

#[test]
fn the_token_goes_to_the_endpoint_and_nowhere_else() {
    let (_dir, cache) = cache();
    let (hub, storage) = (Server::start(), Server::start());
    let body = content(10_000, 13);
    hub.publish_repo(REPO, &[(MODEL, &body)]);
    storage.publish("/blob", Page { body: body.clone(), ..Page::default() });
    let target = format!("{}/blob", storage.other_endpoint());
    hub.change(&file_path(REPO, MODEL), |page| page.redirect = Some(target));
    let mut with_token = settings(hub.endpoint());
    with_token.token = Some("hf_secret".to_owned());
    let path = pull(&model(), &cache, &with_token, &mut Quiet).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    assert!(hub.requests("/").iter().all(|request| request.headers["authorization"] == "Bearer hf_secret"));
    let [request] = &storage.requests("/blob")[..] else {
        panic!("one request expected");
    };
    assert!(!request.headers.contains_key("authorization"));

    with_token.endpoint = "http://hub.example".to_owned();
    let other = ModelRef::parse("hf:org/other").unwrap();
    let message = pull(&other, &cache, &with_token, &mut Quiet).unwrap_err().to_string();
    assert!(message.contains("HF_TOKEN") && !message.contains("hf_secret"), "{message}");
}
