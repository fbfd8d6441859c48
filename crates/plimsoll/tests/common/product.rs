//! Runs the binary from outside: commands to their end, and servers, which are always killed at the end of the test.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::http::{Answer, request};

/// Time limit of [`eventually`]. It allows for machines that stand still for seconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A server prints its ready line within this time, or its start has failed.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// Time after the end of a process until its last output has been read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The directory of the tests' models: `PLIMSOLL_CACHE` if it is set, else a directory in the build directory.
pub fn cache() -> PathBuf {
    let given = std::env::var_os("PLIMSOLL_CACHE").filter(|value| !value.is_empty());
    given.map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("plimsoll-cache"), PathBuf::from)
}

/// The repository's root.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the crate lies in the repository")
}

/// A fixture model: the directory, or the GGUF file in it.
pub fn fixture(name: &str) -> PathBuf {
    let directory = repository().join("tests/fixtures/models").join(name);
    let gguf = directory.join("model.gguf");
    if gguf.is_file() { gguf } else { directory }
}

/// The binary, as a hard link of this test process: a test that builds packages replaces cargo's binary while others run.
pub fn binary() -> &'static Path {
    static BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
        let all = Path::new(env!("CARGO_TARGET_TMPDIR")).join("binaries");
        for old in std::fs::read_dir(&all).into_iter().flatten().flatten() {
            // Without /proc, no old link is removed.
            let ended = Path::new("/proc/self").exists() && !Path::new("/proc").join(old.file_name()).exists();
            if ended {
                let _ = std::fs::remove_dir_all(old.path());
            }
        }
        let own = all.join(std::process::id().to_string());
        std::fs::create_dir_all(&own).expect("a folder in the build directory");
        std::fs::hard_link(env!("CARGO_BIN_EXE_plimsoll"), own.join("plimsoll")).expect("a link to the binary");
        own.join("plimsoll")
    });
    &BINARY
}

/// The binary with the tests' cache.
pub fn plimsoll<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(binary());
    command.args(args).env("PLIMSOLL_CACHE", cache()).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Removes cargo's variables about this test's package. Build scripts of dependencies would take them for a change and run again.
pub fn outside_of_cargo(command: &mut Command) {
    let of_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| of_package(name)).for_each(|name| _ = command.env_remove(name));
}

/// Runs a command to its end.
pub fn run(args: &[&str]) -> Finished {
    Finished::of(plimsoll(args).output().expect("the binary starts"))
}

/// Runs a command to its end with `input` on its standard input.
pub fn run_with_input(args: &[&str], input: &str) -> Finished {
    let mut command = plimsoll(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the input is taken");
    Finished::of(child.wait_with_output().expect("the binary ends"))
}

/// The exit code and the outputs of a command.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// Reads both outputs.
    pub fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("the binary speaks UTF-8");
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Returns the standard output. The exit code must be 0.
    pub fn good(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.stdout
    }

    /// Returns the standard error of a failed command: its code must be 1 or 2, without a panic and with no standard output.
    pub fn refused(self) -> String {
        assert!(matches!(self.code, Some(1 | 2)), "{self:#?}");
        assert!(!self.stderr.contains("panicked") && self.stdout.is_empty(), "{self:#?}");
        self.stderr
    }
}

/// The default model's file, pulled on first use. If it can neither be found nor fetched, every test that needs it fails.
pub fn default_model() -> &'static Path {
    static MODEL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let pulled = MODEL.get_or_init(|| {
        let pull = run(&["pull", "smollm2"]);
        match pull.code {
            Some(0) => Ok(PathBuf::from(pull.stdout.trim())),
            _ => Err(format!("the default model could not be pulled:\n{}", pull.stderr)),
        }
    });
    pulled.as_deref().unwrap_or_else(|error| panic!("{error}"))
}

/// A running server. It is killed when it is dropped.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    /// The ready line on standard output.
    pub ready: String,
    /// When the process was started.
    pub started: Instant,
    log: Arc<Mutex<String>>,
}

impl Server {
    /// Serves the default model on a free port.
    pub fn start(flags: &[&str]) -> Self {
        default_model();
        Self::start_with(&[&["serve", "--port", "0"], flags].concat())
    }

    /// Serves a model by path.
    pub fn start_model(model: &Path, flags: &[&str]) -> Self {
        let model = model.to_str().expect("paths here are UTF-8");
        Self::start_with(&[&["serve", model, "--port", "0"], flags].concat())
    }

    fn start_with(args: &[&str]) -> Self {
        Self::try_start(plimsoll(args)).unwrap_or_else(|words| panic!("{args:?}: {words}"))
    }

    /// Runs a command that serves. If it does not become ready, the error is its output.
    pub fn try_start(mut command: Command) -> Result<Self, String> {
        let started = Instant::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let log = Arc::new(Mutex::new(String::new()));
        keep(child.stderr.take().expect("piped"), Arc::clone(&log));
        let (says, said) = channel();
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        thread::spawn(move || {
            let mut line = String::new();
            // Read until the end: a closed pipe would be an error to the server.
            while stdout.read_line(&mut line).is_ok_and(|read| read > 0) {
                let _ = says.send(std::mem::take(&mut line));
            }
        });
        let ready = said.recv_timeout(READY_WITHIN);
        let address = ready.as_deref().ok().and_then(address_in);
        // Owned from here on, so that a failed start is cleared away too.
        let mut server =
            Self { child, address: ([127, 0, 0, 1], 0).into(), ready: ready.unwrap_or_default(), started, log };
        let Some(address) = address else {
            // The process may still run, so it is killed before its log is read.
            let _ = server.child.kill();
            let _ = server.child.wait();
            thread::sleep(LAST_WORDS);
            return Err(format!("not ready: {:?}\n{}", server.ready, server.log()));
        };
        server.address = address;
        Ok(server)
    }

    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        self.log.lock().expect("nobody panics while writing a log").clone()
    }

    /// GET, any status.
    pub fn get(&self, path: &str) -> Answer {
        request(self.address, "GET", path, b"").unwrap_or_else(|error| panic!("GET {path}: {error}\n{}", self.log()))
    }

    /// POST, any status.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        request(self.address, "POST", path, body.as_bytes())
            .unwrap_or_else(|error| panic!("POST {path}: {error}\n{}", self.log()))
    }

    /// POST that must be answered with 200 and JSON.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        let status = answer.status;
        let answer = answer.json();
        assert_eq!(status, 200, "{body} -> {answer}");
        answer
    }

    /// Sends a POST and does not read the answer yet.
    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        stream.write_all(&posted(path, body)).expect("the server reads");
        stream
    }

    /// The ledger's page.
    pub fn memory(&self) -> Value {
        self.get("/v1/memory").json()
    }

    /// The page of requests.
    pub fn status(&self) -> Value {
        self.get("/v1/status").json()
    }

    /// The rows of `/v1/status` of requests in this phase.
    pub fn rows(&self, phase: &str) -> Vec<Value> {
        let page = self.status();
        let rows = page["requests"].as_array().expect("a list").iter().filter(|row| row["phase"] == phase);
        rows.cloned().collect()
    }

    /// Whether no request runs or waits and every pool is full again.
    pub fn at_rest(&self) -> bool {
        rests(&self.status())
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let done = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status().expect("kill runs");
        assert!(done.success(), "kill -s {name}: {done}");
    }

    /// Waits for the process to end by itself.
    pub fn ended(&mut self) -> ExitStatus {
        self.ended_within(PATIENCE)
    }

    /// As [`Self::ended`], within this time.
    pub fn ended_within(&mut self, within: Duration) -> ExitStatus {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status;
            }
            assert!(since.elapsed() < within, "still running after {within:?}:\n{}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail harmlessly if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a page of `/v1/status` shows no request and full pools.
pub fn rests(page: &Value) -> bool {
    let pools = &page["pools"];
    page["requests"].as_array().is_some_and(Vec::is_empty)
        && pools["kv_pages"]["used"] == pools["kv_pages"]["cached"]
        && pools["state_slots"]["used"] == pools["state_slots"]["cached"]
        && pools["encoder_outputs"]["used"] == pools["encoder_outputs"]["cached"]
        && pools["media_bytes"]["used"] == 0
        && pools["requests"]["in_system"] == 0
        && pools["host_bytes"]["used"] == 0
        && pools["http_bytes"]["used"] == 0
}

/// The bytes of a POST on a connection that stays.
pub fn posted(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    (head + &body).into_bytes()
}

fn keep(mut from: impl Read + Send + 'static, into: Arc<Mutex<String>>) {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            into.lock().expect("nobody panics here").push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    });
}

/// The address in "ready in 0.51 s: smollm2 at http://127.0.0.1:8000/v1 (...)".
fn address_in(ready: &str) -> Option<SocketAddr> {
    ready.strip_prefix("ready in ")?.split_once("http://")?.1.split_once("/v1")?.0.parse().ok()
}

/// Waits for `condition`, and fails after [`PATIENCE`].
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    eventually_within(what, PATIENCE, condition);
}

/// As [`eventually`], with another time limit.
pub fn eventually_within(what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < within, "in vain for {within:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
