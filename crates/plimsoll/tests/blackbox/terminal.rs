//! `run` in a real pseudo-terminal: keys, history, Ctrl-C, wrapping, a terminal that is resized; and `run` without a terminal.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::product::{
    Finished, PATIENCE, Server, default_model, eventually, plimsoll, repository, run, run_with_input,
};

/// Arguments that start an engine in the process, even if a server listens on this machine.
const DEMO: [&str; 6] = ["run", "demo", "--max-total-token-num", "1024", "--temperature", "0"];

/// A directory for a test's files, removed when it is dropped.
pub struct Data(pub PathBuf);

impl Data {
    pub fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("data-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The path of a file in the directory.
    pub fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process in its own pseudo-terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    /// Bytes of the screen that the test has read.
    seen: usize,
}

impl Terminal {
    /// Runs the binary in a terminal with this number of columns.
    fn open(args: &[&str], columns: u16, data: &Data) -> Self {
        Self::open_with(args, columns, data, &[])
    }

    /// As [`Self::open`], with further environment variables.
    fn open_with(args: &[&str], columns: u16, data: &Data, variables: &[(&str, &str)]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        tcsetwinsize(&master, size(columns)).unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name).unwrap();
        let inner = plimsoll(args);
        // `setsid --ctty` makes the terminal the controlling one, as a login does.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(inner.get_program()).args(inner.get_args());
        command.env("XDG_DATA_HOME", &data.0).env("PLIMSOLL_CACHE", crate::product::cache()).env("TERM", "xterm");
        command.env_remove("RUST_LOG").env_remove("NO_COLOR").envs(variables.iter().copied());
        command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
        let child = command.spawn().expect("setsid (util-linux) is there");
        drop(command);
        let keyboard = File::from(master);
        let (mut output, screen) = (keyboard.try_clone().unwrap(), Arc::new(Mutex::new(String::new())));
        let written = Arc::clone(&screen);
        thread::spawn(move || {
            let (mut bytes, mut rest) = ([0; 4096], Vec::new());
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                rest.extend_from_slice(&bytes[..read]);
                let whole = rest.utf8_chunks().next().map_or(0, |chunk| chunk.valid().len());
                written.lock().unwrap().push_str(std::str::from_utf8(&rest[..whole]).unwrap());
                rest.drain(..whole);
            }
        });
        Self { child, keyboard, screen, seen: 0 }
    }

    fn resize(&self, columns: u16) {
        tcsetwinsize(&self.keyboard, size(columns)).unwrap();
    }

    fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Enters a line.
    fn enter(&mut self, line: &str) {
        self.keys(&format!("{line}\r"));
    }

    /// Waits until this text appears in the unread part of the screen. Returns the text before it.
    fn expect(&mut self, words: &str) -> String {
        let since = Instant::now();
        loop {
            let found = {
                let screen = self.screen.lock().unwrap();
                let found = screen[self.seen..].find(words);
                found.map(|at| (screen[self.seen..self.seen + at].to_owned(), self.seen + at + words.len()))
            };
            if let Some((before, seen)) = found {
                self.seen = seen;
                return before;
            }
            let screen = self.screen.lock().unwrap().clone();
            assert!(since.elapsed() < 2 * PATIENCE, "no {words:?} after {:?}", &screen[self.seen..]);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The unread part of the screen after this time.
    fn rest(&self, after: Duration) -> String {
        thread::sleep(after);
        self.screen.lock().unwrap()[self.seen..].to_owned()
    }

    /// Waits for the next prompt in the unread part of the screen. Returns the text before it.
    fn prompt(&mut self) -> String {
        // The editor turns bracketed paste on when it begins to read keys.
        let before = self.expect("\x1b[?2004h");
        self.expect("> ");
        plain(&before)
    }

    fn ended(&mut self) -> ExitStatus {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(since.elapsed() < PATIENCE, "still running: {}", self.screen.lock().unwrap());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The process in the terminal is killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A text without the sequences that move the cursor or change the terminal.
fn plain(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.map(|part| part.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest));
    first + &rest.collect::<String>()
}

fn size(columns: u16) -> Winsize {
    Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

#[test]
fn keys_history_and_commands_work_in_a_terminal() {
    let data = Data::new("keys");
    let mut terminal = Terminal::open(&DEMO, 80, &data);
    terminal.expect("/help lists the commands");
    terminal.prompt();
    terminal.enter("/etc/hosts");
    terminal.expect("Error: unknown command '/etc/hosts': /help lists the commands");
    terminal.prompt();
    // Left over one character, and an x before it that is deleted again.
    terminal.enter("What is 12 + 3?\x1b[Dx\x7f0");
    terminal.expect("42");
    terminal.prompt();
    terminal.keys("\x1b[A");
    terminal.expect("What is 12 + 30?");
    // Ctrl-C discards the entry, and does not warn.
    terminal.keys("\x03");
    assert!(!terminal.prompt().contains("leaves"));
    terminal.enter("/show");
    terminal.expect("2 messages");
    terminal.prompt();
    terminal.enter("\"\"\"What is");
    terminal.enter("12 + 30?\"\"\"");
    terminal.prompt();
    terminal.enter("/save sums");
    terminal.expect("kept in ");
    terminal.prompt();
    terminal.keys("/sta\t\r");
    terminal.expect("tokens in");
    terminal.prompt();
    terminal.keys("\x03");
    terminal.expect("Ctrl-C again, or Ctrl-D, leaves");
    terminal.prompt();
    terminal.keys("\x03");
    assert!(terminal.ended().success());
    let kept: Value = serde_json::from_slice(&fs::read(data.0.join("plimsoll/chats/sums.json")).unwrap()).unwrap();
    assert_eq!(kept["messages"][2]["content"], "What is\n12 + 30?", "{kept}");
    let history = fs::metadata(data.0.join("plimsoll/history")).unwrap();
    assert_eq!(history.permissions().mode() & 0o777, 0o600);
    // The next session has the entries of this one, and its conversation.
    let mut terminal = Terminal::open(&DEMO, 80, &data);
    terminal.expect("Ctrl-D leaves.");
    terminal.prompt();
    terminal.keys("\x1b[A");
    terminal.expect("/stats");
    terminal.keys("\x15");
    terminal.enter("/load sums");
    terminal.expect("4 messages");
    terminal.prompt();
    terminal.keys("\x04");
    assert!(terminal.ended().success());
}

#[test]
#[ignore = "models"]
fn answers_wrap_stop_and_start_again_in_a_terminal() {
    default_model();
    let data = Data::new("smollm2");
    let flags =
        ["run", "smollm2", "--temperature", "0", "--max-total-token-num", "4096", "--max-tokens", "80", "--stats"];
    let mut terminal = Terminal::open(&flags, 40, &data);
    terminal.expect("Ctrl-D leaves.");
    for columns in [40, 24] {
        terminal.resize(columns);
        terminal.prompt();
        terminal.enter("Describe the sea now.");
        terminal.expect("\r\n");
        let answer = plain(&terminal.expect("tokens/s"));
        let lines: Vec<&str> = answer.rsplit_once("\r\n[").unwrap().0.split("\r\n").collect();
        println!("{lines:#?}");
        assert!(lines.len() > 4, "{answer}");
        assert!(lines.iter().all(|line| line.chars().count() <= usize::from(columns)), "{columns}: {lines:#?}");
        let broken = lines.iter().filter(|line| line.ends_with(char::is_whitespace)).count();
        assert_eq!(broken, 0, "no line ends with a space: {lines:#?}");
    }
    terminal.prompt();
    terminal.enter("/set max_tokens 3000");
    terminal.prompt();
    terminal.enter("Write a very long story about a ship, with many chapters.");
    terminal.expect("\r\n");
    let mut begun = terminal.rest(Duration::from_millis(700));
    // On a busy machine the first words take longer, and an answer without words is not kept.
    for _ in 0..100 {
        if begun.chars().filter(|char| char.is_alphabetic()).count() > 40 {
            break;
        }
        begun = terminal.rest(Duration::from_millis(200));
    }
    assert!(!begun.trim().is_empty(), "an answer has begun");
    // Keys that are pressed during the answer are not shown.
    terminal.keys("\x1b[A\x03");
    let story = terminal.prompt();
    assert!(story.len() > 20 && !story.contains("^["), "{story}");
    terminal.keys("\x15");
    terminal.enter("/show");
    terminal.expect("6 messages");
    terminal.prompt();
    terminal.enter("/set max_tokens 8");
    terminal.prompt();
    terminal.enter("/regen");
    terminal.expect("[8 tokens in");
    terminal.prompt();
    terminal.enter("/bye");
    assert!(terminal.ended().success());
}

#[test]
fn one_message_is_answered_from_arguments_or_standard_input() {
    let with = |more: &[&str]| run(&[&DEMO[..], more].concat());
    assert_eq!(with(&["What is 12 + 30?"]).good().trim(), "42");
    assert_eq!(with(&["What", "is", "12", "+", "30?"]).good().trim(), "42");
    let said = run_with_input(&[&DEMO[..], &["--json"]].concat(), "What is 12 + 30?\n").good();
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((said["content"].as_str().unwrap().trim(), &said["finish_reason"]), ("42", &"stop".into()), "{said}");
    assert!(said["usage"]["completion_tokens"].as_u64() > Some(0) && said["timings"]["total_s"].as_f64() > Some(0.0));
    let stats = with(&["--stats", "What is 12 + 30?"]);
    assert!(stats.stderr.contains("tokens in") && stats.stdout.trim() == "42", "{stats:?}");
    assert_eq!(run_with_input(&DEMO, "").good(), "", "no message, no answer");
    let error = run(&["run", "hello", "--memory-budget", "1GiB"]).refused();
    assert!(error.contains("no model is called `hello`") && error.contains("plimsoll run smollm2 'hello'"), "{error}");
    let error = with(&["--image", "./absent.png", "What colour?"]).refused();
    assert!(error.contains("./absent.png"), "{error}");
    let image = repository().join("tests/fixtures/demo");
    let questions: Value = serde_json::from_slice(&fs::read(image.join("questions.json")).unwrap()).unwrap();
    let (file, question) = (image.join(questions[0]["file"].as_str().unwrap()), questions[0]["question"].as_str());
    let flags = ["--image", file.to_str().unwrap(), question.unwrap()];
    assert_eq!(with(&flags).good().trim(), questions[0]["answer"].as_str().unwrap());
}

#[test]
fn run_connects_to_the_server_that_is_named() {
    let server = Server::start_model(Path::new("demo"), &["--max-total-token-num", "1024"]);
    let url = format!("http://{}", server.address);
    let with = |more: &[&str]| {
        Finished::of(plimsoll([&["run"][..], more, &["--temperature", "0", "--url", &url]].concat()).output().unwrap())
    };
    assert_eq!(with(&["demo", "What is 12 + 30?"]).good().trim(), "42");
    assert_eq!(with(&["What is 12 + 30?"]).good().trim(), "42", "a message without a model goes to the first one");
    assert_eq!(with(&["What is 12", "+ 30?"]).good().trim(), "42");
    let error = with(&["other", "What is 12 + 30?"]).refused();
    assert!(error.contains("no model 'other': use one of demo"), "{error}");
    let error = with(&["demo", "hi", "--memory-budget", "1GiB"]).refused();
    assert!(error.contains("--memory-budget is for an engine of this process"), "{error}");
    drop(server);
    let error = with(&["demo", "hi"]).refused();
    assert!(error.contains("no connection"), "{error}");
    // A server on the usual port is found.
    let mut command = plimsoll(["run", "demo", "What is 12 + 30?", "--temperature", "0"]);
    let server = Server::start_model(Path::new("demo"), &["--max-total-token-num", "1024"]);
    command.env("PLIMSOLL_PORT", server.address.port().to_string());
    assert_eq!(Finished::of(command.output().unwrap()).good().trim(), "42");
    eventually("it was that server", || server.log().contains("output_tokens="));
}

/// A hub with empty repositories. It counts the requests for their lists.
fn empty_hub() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (endpoint, asked) = (format!("http://{}", listener.local_addr().unwrap()), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&asked);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            let read = stream.read(&mut request).unwrap_or(0);
            let is_list = request[..read].starts_with(b"GET /api/models/");
            counted.fetch_add(usize::from(is_list), Ordering::Relaxed);
            let body = r#"{"sha": "0123456789abcdef0123456789abcdef01234567", "siblings": []}"#;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + body).as_bytes());
        }
    });
    (endpoint, asked)
}

#[test]
fn a_larger_model_that_fits_is_offered_where_the_hub_answers() {
    let (data, (hub, asked)) = (Data::new("offer"), empty_hub());
    let variables = [("HF_ENDPOINT", hub.as_str())];
    // The flag keeps `run` from connecting to a server of this machine.
    let mut terminal = Terminal::open_with(&["run", "--max-total-token-num", "1024"], 200, &data, &variables);
    terminal.expect("this machine can also run ");
    let name = terminal.expect(" (");
    terminal.expect("and run it? [y/N]");
    assert_eq!(asked.load(Ordering::Relaxed), 1, "the hub is asked once, before the question");
    terminal.enter("y");
    let known = plimsoll_hub::KNOWN.iter().find(|known| known.name == plain(&name)).expect("a name of the list");
    terminal.expect(known.repo.expect("a repository of the hub"));
    assert!(!terminal.ended().success(), "the repository is empty");
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}
