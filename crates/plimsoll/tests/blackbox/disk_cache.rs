//! The prefix cache on disk from outside: several models in one directory, and servers that are killed during a write.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::product::{Server, eventually, fixture, plimsoll, posted, run};
use crate::terminal::Data;

const TOKENS: u64 = 6;

/// A prompt of some hundred tokens. Prompts with even numbers have the same beginning.
fn prompt(number: usize) -> String {
    let own = format!("{number} ships and {} sailors went out to sea. ", number * 7 % 23).repeat(3 + number % 3);
    if number.is_multiple_of(2) { "Once upon a time there was a town by the sea. ".repeat(3) + &own } else { own }
}

fn question(model: &str, number: usize) -> Value {
    json!({"model": model, "prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true})
}

/// The text of an answer, and its prompt tokens that were in the cache.
fn said(server: &Server, model: &str, number: usize) -> (String, u64) {
    let answer = server.ask("/v1/completions", &question(model, number));
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached)
}

/// Files below a directory, with their bytes in whole blocks.
fn look(dir: &Path, files: &mut BTreeMap<PathBuf, u64>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => look(&entry.path(), files),
            Ok(metadata) => drop(files.insert(entry.path(), metadata.len().next_multiple_of(4096))),
            // The file was removed meanwhile.
            Err(_) => {}
        }
    }
}

/// Number and bytes of the files below a directory. Only files that two scans in a row have seen count, so that all existed at one
/// moment.
fn taken(dir: &Path) -> (u64, u64) {
    taken_of(dir, |_| true)
}

fn taken_of(dir: &Path, counts: impl Fn(&Path) -> bool) -> (u64, u64) {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    look(dir, &mut before);
    look(dir, &mut after);
    let both = before.iter().filter(|(path, _)| counts(path) && after.contains_key(*path));
    both.fold((0, 0), |(files, bytes), (_, more)| (files + 1, bytes + more))
}

/// Number and bytes of the models' blobs in a directory, without lock files.
fn blobs(dir: &Path) -> (u64, u64) {
    taken_of(dir, |path| path.components().any(|part| part.as_os_str() == "blobs"))
}

fn folders(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_dir()).count()
}

fn several(folder: &Data, models: &[&str]) -> Vec<String> {
    let table = |name: &&str| {
        let model = fixture(name);
        // An encoder has no KV cache.
        let pool = if *name == "bert" { "" } else { "max-total-token-num = 1024\n" };
        format!("[[models]]\nname = '{name}'\nmodel = '{}'\nidle-seconds = 1\n{pool}", model.display())
    };
    let file = folder.at("models.toml");
    fs::write(&file, models.iter().map(table).collect::<String>()).unwrap();
    ["serve", "--port", "0", "--threads", "1", "--models", &file].map(str::to_owned).into()
}

fn with_cache(mut args: Vec<String>, dir: &str, bytes: &str) -> Vec<String> {
    args.extend(["--cache-dir", dir, "--cache-bytes", bytes].map(str::to_owned));
    args
}

fn start(args: &[String]) -> Server {
    Server::try_start(plimsoll(args)).unwrap_or_else(|words| panic!("{args:?}: {words}"))
}

fn stop(mut server: Server) {
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
}

fn all_unloaded(server: &Server) -> bool {
    server.memory()["models"].as_array().unwrap().iter().all(|part| part["state"] == "unloaded")
}

/// Models with dense, hybrid and sliding-window attention.
const MODELS: [&str; 3] = ["llama", "qwen3.5", "gemma3"];

#[test]
fn an_unloaded_model_keeps_its_cache_on_disk_within_one_bound_for_all() {
    const BYTES: u64 = 4 << 20;
    let folder = Data::new("disk-cache-several");
    let all = [&MODELS[..], &["bert"]].concat();
    let plain = start(&several(&folder, &all));
    let expect = |model: &str| (0..4).map(|number| said(&plain, model, number).0).collect::<Vec<_>>();
    let expected = MODELS.map(expect);
    stop(plain);

    let dir = folder.at("cache");
    let args = with_cache(several(&folder, &all), &dir, &BYTES.to_string());
    let server = start(&args);
    let refused = run(&args.iter().map(String::as_str).collect::<Vec<_>>()).refused();
    assert!(refused.contains("another process uses"), "{refused}");
    let embedding = server.ask("/v1/embeddings", &json!({"model": "bert", "input": "a ship"}));
    assert!(embedding["data"][0]["embedding"].is_array(), "an encoder is served beside them");
    for round in 0..2 {
        for (model, expected) in MODELS.iter().zip(&expected) {
            for (number, expected) in expected.iter().enumerate() {
                let (text, cached) = said(&server, model, number);
                assert_eq!(text, *expected, "{model}, {number}");
                assert!(round == 0 || cached > 0, "{model}, {number}: nothing was found after the model was unloaded");
            }
        }
        eventually("all models are unloaded", || all_unloaded(&server));
    }
    assert_eq!(folders(Path::new(&dir)), MODELS.len());

    // More data than the limit: at no moment do all models together exceed it.
    let over = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Relaxed) {
                most = most.max(blobs(Path::new(&dir)).1);
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        for number in 10..60 {
            MODELS.iter().for_each(|model| drop(said(&server, model, number)));
        }
        over.store(true, Relaxed);
        watch.join().unwrap()
    });
    println!("at most {most} of {BYTES} bytes, {:?} at the end", blobs(Path::new(&dir)));
    assert!(most <= BYTES && most > BYTES / 2, "{most} of {BYTES}");
    stop(server);

    // A restart finds the last conversations. A model that is no longer listed has no share.
    let args = with_cache(several(&folder, &MODELS[..2]), &dir, &BYTES.to_string());
    let server = start(&args);
    assert_eq!(folders(Path::new(&dir)), 2);
    for model in &MODELS[..2] {
        assert!(said(&server, model, 59).1 > 0, "{model}");
    }
    stop(server);
}

/// The signal comes right after the last answer, when parts of its prefix are not on the disk yet.
#[test]
fn a_server_that_is_told_to_end_writes_what_it_has() {
    let folder = Data::new("disk-cache-ended");
    let (model, dir) = (fixture("llama"), folder.at("cache"));
    let flags = ["--threads", "1", "--cache-dir", &dir, "--cache-bytes", "64MiB"];
    for round in 0..4 {
        let server = Server::start_model(&model, &flags);
        for number in 0..30 {
            let answer = server.ask("/v1/completions", &question("llama", 30 * round + number));
            assert_eq!(answer["usage"]["completion_tokens"], TOKENS);
        }
        stop(server);
        let (mut files, dir) = (BTreeMap::new(), Path::new(&dir));
        look(dir, &mut files);
        let torn = files.keys().filter(|path| path.extension().is_some_and(|kind| kind == "tmp")).count();
        assert_eq!(torn, 0, "{} files", files.len());
    }
    let server = Server::start_model(&model, &flags);
    for number in 0..120 {
        let usage = &server.ask("/v1/completions", &question("llama", number))["usage"];
        let (cached, all) = (&usage["prompt_tokens_details"]["cached_tokens"], &usage["prompt_tokens"]);
        assert!(cached.as_u64().unwrap() + 16 >= all.as_u64().unwrap(), "prompt {number}: {cached} of {all}");
    }
    stop(server);
}

/// The ID of a server's disk thread. The thread sets its name itself, maybe only after "ready".
fn disk_thread(server: &Server) -> u32 {
    let is_disk = |path: &Path| fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "plimsoll-disk");
    let mut thread = None;
    eventually("a thread of the cache", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let task = tasks.map(|task| task.unwrap().path()).find(|path| is_disk(path));
        thread = task.and_then(|task| task.file_name()?.to_str()?.parse().ok());
        thread.is_some()
    });
    thread.unwrap()
}

/// Sends a request, which may fail. Returns whether an answer came.
fn try_ask(address: SocketAddr, model: &str, number: usize) -> bool {
    let ask = || -> std::io::Result<usize> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.write_all(&posted("/v1/completions", &question(model, number)))?;
        stream.read(&mut [0; 64])
    };
    ask().is_ok_and(|read| read > 0)
}

/// Starts a server and kills it with SIGKILL at its disk thread's n-th of these system calls. Returns whether there were so many.
fn killed_at(model: &Path, dir: &str, calls: &str, nth: usize) -> bool {
    let mut server = Server::start_model(model, &["--threads", "1", "--cache-dir", dir, "--cache-bytes", "8MiB"]);
    let thread = disk_thread(&server);
    let mut strace = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "-p", &thread.to_string()])
        .args(["-e", &format!("trace={calls}"), "-e", &format!("inject={calls}:signal=KILL:when={nth}")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("strace runs");
    let traced = format!("/proc/{}/task/{thread}/status", server.pid());
    eventually("strace is attached", || {
        fs::read_to_string(&traced).is_ok_and(|status| !status.contains("TracerPid:\t0\n"))
    });
    let name = model.file_name().unwrap().to_str().unwrap();
    let _ = (0..6).all(|number| try_ask(server.address, name, number));
    // The disk thread still writes after the last answer.
    let until = Instant::now() + Duration::from_secs(3);
    let gone = |server: &Server| !Path::new(&format!("/proc/{}/exe", server.pid())).exists();
    while !gone(&server) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = gone(&server);
    if killed {
        assert_eq!(server.ended().signal(), Some(9), "{}", server.log());
    }
    drop(server);
    let _ = strace.wait();
    killed
}

/// Kills a server at every call that writes a byte, a name or a file. The next server must use the directory, and give the answers
/// of a server without a cache.
#[test]
#[ignore = "external"]
fn a_server_killed_at_any_write_leaves_a_usable_cache() {
    let folder = Data::new("disk-cache-killed");
    let (mut kills, mut found) = (0, 0);
    for name in ["qwen3.5", "gemma3"] {
        let model = fixture(name);
        let plain = Server::start_model(&model, &["--threads", "1", "--disable-prefix-cache"]);
        let expected: Vec<String> = (0..6).map(|number| said(&plain, name, number).0).collect();
        stop(plain);
        for (calls, most) in [("write", 8), ("openat", 4), ("/^rename", 4), ("/^mkdir", 2)] {
            for nth in 1..=most {
                let dir = folder.at(&format!("{name}-{nth}-{}", calls.trim_start_matches("/^")));
                if !killed_at(&model, &dir, calls, nth) {
                    println!("{name}: fewer than {nth} of {calls}");
                    break;
                }
                kills += 1;
                let left = taken(Path::new(&dir));
                let verified = run(&["cache", "verify", &dir]).good();
                let server =
                    Server::start_model(&model, &["--threads", "1", "--cache-dir", &dir, "--cache-bytes", "8MiB"]);
                for round in 0..2 {
                    for (number, expected) in expected.iter().enumerate() {
                        let (text, cached) = said(&server, name, number);
                        assert_eq!(text, *expected, "{name}, {calls} {nth}, round {round}, prompt {number}");
                        found += cached;
                    }
                }
                stop(server);
                let (files, bytes) = taken(&Path::new(&dir).join("blobs"));
                assert!(
                    files > left.0.saturating_sub(3) && bytes <= 8 << 20,
                    "{files} files, {bytes} bytes after {left:?}"
                );
                println!("{name}, {calls} {nth}: {left:?} left, {files} files then; {}", verified.trim());
            }
        }
    }
    println!("{kills} kills, {found} tokens found");
    assert!(kills >= 20, "{kills}");
}
