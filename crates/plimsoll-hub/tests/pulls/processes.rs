//! Several processes, and processes that are killed. This test program starts itself again as the other process.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_hub::{Cache, HubError, ModelRef, Quiet, pull};

use crate::fixtures::{Recorder, cache, content, files_below, settings};
use crate::server::{Server, file_path};

const SPEC: &str = "hf:org/repo:m.gguf";
const CHILD_VARIABLE: &str = "PLIMSOLL_HUB_TEST_CHILD";

/// Not a test of its own: what the other process does.
#[test]
fn child_process() {
    let Ok(task) = std::env::var(CHILD_VARIABLE) else {
        return;
    };
    let (endpoint, root) = task.split_once(' ').unwrap();
    let cache = Cache::at(Path::new(root)).unwrap();
    let mut progress = Recorder::default();
    let model = ModelRef::parse(SPEC).unwrap();
    pull(&model, &cache, &settings(endpoint.to_owned()), &mut progress).unwrap();
}

fn start_child(server: &Server, cache: &Cache) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child_process"])
        .env(CHILD_VARIABLE, format!("{} {}", server.endpoint(), cache.root().display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn slow_server(body: &[u8]) -> Server {
    let server = Server::start();
    server.publish_repo("org/repo", &[("m.gguf", body)]);
    server.change(&file_path("org/repo", "m.gguf"), |page| {
        page.drip = Some((4_096, Duration::from_millis(10)));
    });
    server
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} never happened");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_pull_leaves_a_partial_file_that_the_next_one_completes() {
    let (_dir, cache) = cache();
    let body = content(1_000_000, 60);
    let server = slow_server(&body);
    let partial = cache.root().join("hf/org/repo/.partial/m.gguf.hub.part");
    let mut child = start_child(&server, &cache);
    wait_for("a partial file", || fs::metadata(&partial).is_ok_and(|metadata| metadata.len() > 100_000));
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = fs::metadata(&partial).unwrap().len();
    assert!(kept < body.len() as u64, "it was killed too late to tell");
    assert!(cache.list().is_empty());
    assert!(!cache.root().join("hf/org/repo/m.gguf").exists());

    let model = ModelRef::parse(SPEC).unwrap();
    let path = pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    let last = server.requests("/resolve/").pop().unwrap();
    assert_eq!(last.headers["range"], format!("bytes={kept}-"));
    assert_eq!(files_below(cache.root()), ["hf/org/repo/m.gguf", "hf/org/repo/plimsoll.json"]);
}

#[test]
fn of_two_processes_one_pulls_and_the_other_waits_and_finds() {
    let (_dir, cache) = cache();
    let body = content(400_000, 61);
    let server = slow_server(&body);
    let mut child = start_child(&server, &cache);
    wait_for("the first download", || !server.requests("/resolve/").is_empty());
    assert!(matches!(cache.remove(SPEC), Err(HubError::Busy { .. })));
    let model = ModelRef::parse(SPEC).unwrap();
    let mut progress = Recorder::default();
    let path = pull(&model, &cache, &settings(server.endpoint()), &mut progress).unwrap();
    assert_eq!(fs::read(path).unwrap(), body);
    assert!(child.wait().unwrap().success());
    assert_eq!(progress.notes, [format!("another process is pulling {SPEC}; waiting for it to finish")]);
    assert!(progress.stages.is_empty(), "it found the file");
    assert_eq!(server.requests("/resolve/").len(), 1);
}

#[test]
fn of_many_threads_one_pulls() {
    let (_dir, cache) = cache();
    let body = content(200_000, 62);
    let server = slow_server(&body);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let model = ModelRef::parse(SPEC).unwrap();
                let path = pull(&model, &cache, &settings(server.endpoint()), &mut Quiet).unwrap();
                assert_eq!(fs::read(path).unwrap(), body);
            });
        }
    });
    assert_eq!(server.requests("/resolve/").len(), 1);
}

#[test]
fn when_the_first_process_dies_the_waiting_one_takes_over() {
    let (_dir, cache) = cache();
    let body = content(600_000, 63);
    let server = slow_server(&body);
    let mut child = start_child(&server, &cache);
    let partial = cache.root().join("hf/org/repo/.partial/m.gguf.hub.part");
    wait_for("a partial file", || fs::metadata(&partial).is_ok_and(|metadata| metadata.len() > 50_000));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let model = ModelRef::parse(SPEC).unwrap();
            pull(&model, &cache, &settings(server.endpoint()), &mut Quiet)
        });
        thread::sleep(Duration::from_millis(200));
        child.kill().unwrap();
        child.wait().unwrap();
        let path = waiting.join().unwrap().unwrap();
        assert_eq!(fs::read(path).unwrap(), body);
    });
    assert!(server.requests("/resolve/")[1].headers.contains_key("range"));
}
