//! The environment of the process: a log without a reader, a limit on files, few threads, variables. None of
//! these ends the server. A variable that would change it unnoticed is refused.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use serde_json::json;

use crate::product::{Finished, Server, fixture, plimsoll, run};

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("surroundings-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server that logs to `log`. The shell that starts it runs `before` first.
fn logging_to(log: &Path, before: &str) -> Server {
    let model = fixture("llama");
    let serve = plimsoll(["serve", model.to_str().unwrap(), "--port", "0", "--max-total-token-num", "4096"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{before} exec \"$0\" \"$@\" 2>\"$LOG\"")]).env("LOG", log);
    shell.args([serve.get_program()]).args(serve.get_args());
    for (name, value) in serve.get_envs() {
        if let Some(value) = value {
            shell.env(name, value);
        }
    }
    Server::try_start(shell).unwrap_or_else(|words| panic!("{words}"))
}

fn ask(server: &Server) {
    server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
}

#[test]
fn unread_log_loses_lines_and_nothing_else() {
    let folder = Folder::new("unread");
    let path = folder.0.join("log");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    // The log's reader holds it open and does not read.
    let mut log = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut server = logging_to(&path, "");
    (0..600).for_each(|_| ask(&server));
    assert_eq!((server.get("/health").status, server.get("/metrics").status), (200, 200));
    let mut told = vec![0; 1 << 20];
    let full = log.read(&mut told).unwrap();
    assert!(full >= 32 << 10, "{full} bytes: nothing was lost, and nothing is shown");
    ask(&server);
    ask(&server);
    let more = log.read(&mut told).unwrap();
    let told = String::from_utf8_lossy(&told[..more]);
    assert!(told.contains("lines of this log were lost"), "{told}");
    server.signal("TERM");
    let status = server.ended();
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn a_limit_on_files_costs_lines_of_the_log_and_not_the_server() {
    let folder = Folder::new("limited");
    let path = folder.0.join("log");
    let mut server = logging_to(&path, "ulimit -f 16;");
    (0..200).for_each(|_| ask(&server));
    // The limit's unit is 512 or 1,024 bytes, depending on the shell.
    let bytes = fs::metadata(&path).unwrap().len();
    assert!((7 << 10..=16 << 10).contains(&bytes), "{bytes} bytes: the limit is met");
    server.signal("TERM");
    let status = server.ended();
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn all_threads_are_there_before_ready() {
    let server = Server::start_model(&fixture("llama"), &["--max-total-token-num", "4096"]);
    let ids = fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let before: Vec<OsString> = ids.map(|id| id.unwrap().file_name()).collect();
    thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| ask(&server));
        }
    });
    // A thread of the start may end late, so old threads may be missing.
    for id in fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap() {
        assert!(before.contains(&id.unwrap().file_name()), "one more could have been refused");
    }
}

#[test]
fn what_is_no_text_in_the_environment_is_refused() {
    let broken = || OsString::from_vec(b"schl\xfcssel-sehr-geheim".to_vec());
    for name in ["PLIMSOLL_API_KEY", "PLIMSOLL_PORT", "PLIMSOLL_NOSUCH"] {
        let plan = plimsoll(["plan", fixture("llama").to_str().unwrap()]).env(name, broken()).output().unwrap();
        let refused = Finished::of(plan).refused();
        assert!(refused.contains(name) && refused.contains("UTF-8") && !refused.contains("geheim"), "{refused}");
    }
    // Variables of other programs are ignored.
    let plan = plimsoll(["plan", fixture("llama").to_str().unwrap()]).env("NAME", broken()).output().unwrap();
    Finished::of(plan).good();
}

#[test]
fn limits_beyond_all_numbers_are_refused_by_name() {
    let model = fixture("llama");
    let bytes = [
        "max-body-bytes",
        "max-bytes-in-flight",
        "grammar-bytes",
        "response-store-bytes",
        "request-bytes",
        "media-bytes",
    ];
    for flag in bytes.map(|name| format!("--{name}")) {
        let refused = run(&["plan", model.to_str().unwrap(), &flag, "18446744073709551615"]).refused();
        assert!(refused.contains(&flag) && refused.contains("1125899906842624"), "{refused}");
    }
    for flag in ["--request-timeout", "--inactivity-timeout", "--heartbeat", "--stall-seconds", "--drain-seconds"] {
        let refused = run(&["serve", model.to_str().unwrap(), flag, "9223372036854775807"]).refused();
        assert!(refused.contains(flag) && refused.contains("4294967295"), "{refused}");
    }
}

/// A command without variables that give a directory for the cache.
fn homeless(args: &[&str]) -> Command {
    let mut command = plimsoll(args);
    for name in ["HOME", "XDG_CACHE_HOME", "PLIMSOLL_CACHE"] {
        command.env_remove(name);
    }
    command
}

#[test]
fn local_models_need_no_home_and_other_models_say_what_to_set() {
    let folder = Folder::new("homeless");
    let (model, list) = (fixture("llama"), folder.0.join("models.toml"));
    let (model, list_path) = (model.to_str().unwrap(), list.to_str().unwrap());
    fs::write(&list, format!("[[models]]\nname = 'a'\nmodel = '{model}'\n")).unwrap();
    for served in [&["serve", model, "--max-total-token-num", "1024"][..], &["serve", "--models", list_path]] {
        let args = [served, &["--host", "127.0.0.1", "--port", "0"]].concat();
        let server = Server::try_start(homeless(&args)).unwrap_or_else(|words| panic!("{args:?}: {words}"));
        assert_eq!(server.get("/health").status, 200);
    }
    for asked in [&["plan", model][..], &["plan", "--models", list_path], &["doctor", model, "--port", "0"]] {
        Finished::of(homeless(asked).output().unwrap()).good();
    }
    for asked in [&["serve", "smollm2", "--port", "0"][..], &["plan", "smollm2"]] {
        let words = Finished::of(homeless(asked).output().unwrap()).refused();
        assert!(words.contains("set PLIMSOLL_CACHE to a directory"), "{words}");
    }
}

#[test]
fn a_host_in_brackets_is_listened_on() {
    if let Err(error) = std::net::TcpListener::bind("[::1]:0") {
        crate::limit::say(&format!("\n*** NOT RUN: A HOST IN BRACKETS. THIS MACHINE HAS NO IPV6: {error} ***\n"));
        return;
    }
    let model = fixture("llama");
    let args = ["serve", model.to_str().unwrap(), "--host", "[::1]", "--port", "0", "--max-total-token-num", "1024"];
    let server = Server::try_start(plimsoll(args)).unwrap_or_else(|words| panic!("{words}"));
    assert_eq!(server.get("/health").status, 200);
}
