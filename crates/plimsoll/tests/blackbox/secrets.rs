//! Secrets must be in no log and no trace, at any log level and for any result of a request: keys, credentials, signed URLs, and the
//! texts of clients and models.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::http::Answer;
use crate::product::{Server, eventually, fixture, plimsoll, run};

/// A word that every secret of these tests contains.
const SECRET: &str = "sesame";

/// The server's own keys.
const KEYS: [&str; 2] = ["key-sesame-one", "key-sesame-two"];

/// A directory that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("plimsoll-quiet-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Sends a request with these header lines, and returns the answer, if there is one.
fn send(server: &Server, head: &str, headers: &[&str], body: &str) -> Option<Answer> {
    let mut text = format!("{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    headers.iter().for_each(|header| write!(text, "{header}\r\n").unwrap());
    write!(text, "content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    Answer::read(stream).ok()
}

const OPEN: &str = "authorization: Bearer key-sesame-one";

/// Sends a request with the right key, reads the answer to its end, and returns its status.
fn status(server: &Server, head: &str, body: &Value) -> u16 {
    let answer = send(server, head, &[OPEN, "cookie: session=sesame"], &body.to_string()).expect("there is an answer");
    let status = answer.status;
    answer.text();
    status
}

/// A server of images that has none. It redirects to another signed URL, or answers with nonsense, with nothing, or with 404.
fn gallery() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = [0; 2048];
            let read = stream.read(&mut head).unwrap_or(0);
            let line = String::from_utf8_lossy(&head[..read]).lines().next().unwrap_or_default().to_owned();
            let answer = match line.split(['/', '?']).nth(1).unwrap_or_default() {
                "moved" => "HTTP/1.1 302 Found\r\nlocation: /gone?X-Amz-Signature=sesame\r\ncontent-length: 0\r\n\r\n",
                "nonsense" => "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsesame",
                "nothing" => "",
                "broken" => "HTTP/1.1 sesame\r\nset-cookie: sesame\r\n\r\n",
                _ => "HTTP/1.1 404 Not Found\r\nset-cookie: sesame\r\ncontent-length: 6\r\n\r\nsesame",
            };
            seen.lock().unwrap().push(line);
            // The client may have disconnected.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    (address, asked)
}

/// Sends requests to every API, whole and streamed, and disconnects from one of them.
fn answered(server: &Server) {
    for stream in [false, true] {
        let chat = json!({"messages": [{"role": "system", "content": "sesame"}, {"role": "user", "content": "open sesame"}],
            "max_tokens": 4, "stream": stream, "stop": ["sesame"], "user": "sesame", "metadata": {"k": "sesame"},
            "logprobs": true, "cache_salt": "sesame", "tools": [{"type": "function", "function": {"name": "sesame"}}]});
        assert_eq!(status(server, "POST /v1/chat/completions?api_key=sesame", &chat), 200);
        let completion = json!({"prompt": "sesame ".repeat(20), "max_tokens": 4, "stream": stream, "echo": true,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "sesame"}}}});
        assert_eq!(status(server, "POST /v1/completions", &completion), 200);
        let messages = json!({"messages": [{"role": "user", "content": "sesame"}], "max_tokens": 4, "stream": stream});
        let answer = send(server, "POST /v1/messages", &["x-api-key: key-sesame-two"], &messages.to_string()).unwrap();
        assert_eq!(answer.status, 200);
        answer.text();
        let response = json!({"input": "sesame", "instructions": "sesame", "max_output_tokens": 4, "stream": stream});
        assert_eq!(status(server, "POST /v1/responses", &response), 200);
    }
    assert_eq!(status(server, "POST /tokenize", &json!({"prompt": "sesame"})), 200);
    let long = json!({"prompt": "sesame", "max_tokens": 200, "ignore_eos": true, "stream": true});
    let mut left = send(server, "POST /v1/completions", &[OPEN], &long.to_string()).unwrap();
    assert!(left.event().is_some());
}

/// Sends requests that are refused, each for another reason, with the expected status.
fn refused(server: &Server) {
    let good = json!({"prompt": "sesame", "max_tokens": 2}).to_string();
    for (status, head, headers, body) in [
        (401, "POST /v1/completions", &["authorization: Bearer wrong-sesame"][..], good.as_str()),
        (401, "POST /v1/completions", &["authorization: Basic c2VzYW1lOnNlc2FtZQ==", "cookie: sesame"], &good),
        (401, "POST /v1/messages", &["x-api-key: wrong-sesame"], &good),
        (401, "POST /v1/completions?api_key=sesame", &[], &good),
        (404, "POST /sesame?token=sesame", &[OPEN], &good),
        (405, "DELETE /v1/completions?token=sesame", &[OPEN], ""),
        (400, "POST /v1/completions", &[OPEN], "{\"prompt\": \"sesame\", sesame"),
        (400, "POST /v1/completions", &[OPEN], r#"{"prompt": "x", "sesame": "sesame"}"#),
        (400, "POST /v1/completions", &[OPEN], r#"{"prompt": "x", "temperature": "sesame"}"#),
        (400, "POST /v1/completions", &[OPEN], r#"{"prompt": "x", "guided_regex": "(sesame"}"#),
        (404, "POST /v1/completions", &[OPEN], r#"{"prompt": "x", "model": "sesame"}"#),
        (404, "GET /v1/responses/sesame", &[OPEN], ""),
        (400, "POST /v1/responses", &[OPEN], r#"{"input": "x", "previous_response_id": "sesame"}"#),
        (400, "POST /v1/messages", &[OPEN, "anthropic-version: sesame"], r#"{"messages": [], "max_tokens": 1}"#),
        (400, "POST /v1/embeddings", &[OPEN], r#"{"input": "sesame", "dimensions": "sesame"}"#),
    ] {
        let answer = send(server, head, headers, body).unwrap_or_else(|| panic!("{head}: no answer"));
        assert_eq!((answer.status, head), (status, head), "{body}: {}", answer.text());
    }
    let long = json!({"prompt": "sesame ".repeat(20_000), "max_tokens": 2});
    assert_eq!(status(server, "POST /v1/completions", &long), 400);
    // A head that is too long, an invalid head, and a body that ends early.
    drop(send(server, "POST /v1/completions", &[&format!("x-sesame: {}", "sesame".repeat(9_000))], &good));
    for bytes in [
        "sesame\r\n\r\n",
        "POST /sesame HTTP/1.1\r\nauthorization: Bearer sesame\r\ncontent-length: sesame\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-sesame-one\r\ncontent-length: 90\r\n\r\n{\"prompt\": \"sesame",
    ] {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
    }
}

/// Asks about images with secrets in their URLs. None of the images can be fetched.
fn images(server: &Server, gallery: &str) {
    for url in [
        format!("http://{gallery}/moved?X-Amz-Signature=sesame"),
        format!("http://{gallery}/nonsense?sig=sesame"),
        format!("http://{gallery}/nothing?sig=sesame"),
        format!("http://{gallery}/broken?sig=sesame"),
        format!("http://{gallery}/missing/sesame.png?sig=sesame"),
        format!("http://sesame:sesame@{gallery}/missing.png"),
        "http://127.0.0.1:1/closed?sig=sesame".to_owned(),
        "https://sesame.invalid/x?sig=sesame".to_owned(),
        "file:///sesame".to_owned(),
        "data:image/png;base64,c2VzYW1l".to_owned(),
        "sesame".to_owned(),
    ] {
        let content = json!([{"type": "text", "text": "sesame"}, {"type": "image_url", "image_url": {"url": url}}]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2});
        let status = status(server, "POST /v1/chat/completions", &body);
        assert!((400..=504).contains(&status) && status != 401 && status != 500, "{url}: {status}");
    }
}

#[test]
fn no_log_and_no_trace_has_keys_addresses_or_what_was_said() {
    let folder = Folder::new();
    let (keys, trace) = (folder.file("keys", &KEYS.join("\n")), folder.0.join("trace.jsonl"));
    let mut command = plimsoll(["--verbose", "serve"]);
    command.arg(fixture("vl-qwen3")).args(["--port", "0", "--media-fetch", "any", "--media-fetch-timeout", "2"]);
    command.args(["--unknown-fields", "refuse"]);
    command.args(["--api-key-file", &keys, "--max-total-token-num", "8192", "--media-bytes", "67108864"]);
    // The most verbose log level of all crates in the process.
    command.arg("--record").arg(&trace).env("RUST_LOG", "trace").env("RUST_BACKTRACE", "1");
    let mut server = Server::try_start(command).unwrap_or_else(|words| panic!("{words}"));
    let url = format!("http://{}", server.address);
    let words = run(&["bench", "--url", &url, "--requests", "1"]).refused();
    assert!(words.contains("401: it wants a key (--api-key or PLIMSOLL_API_KEY)"), "{words}");
    run(&["bench", "--url", &url, "--requests", "1", "--rounds", "1", "--output-tokens", "4", "--api-key-file", &keys])
        .good();
    let (address, asked) = gallery();
    answered(&server);
    refused(&server);
    images(&server, &address);
    assert!(asked.lock().unwrap().len() >= 5, "pictures were asked for: {:?}", asked.lock().unwrap());
    let pages: String = ["/metrics", "/v1/status", "/v1/memory", "/health", "/openapi.json"]
        .map(|page| send(&server, &format!("GET {page}"), &[OPEN], "").unwrap().text())
        .concat();
    assert!(!pages.contains(SECRET), "a page says it");
    eventually("all requests are over", || {
        send(&server, "GET /v1/status", &[OPEN], "").unwrap().json()["requests"].as_array().is_some_and(Vec::is_empty)
    });
    server.signal("TERM");
    assert!(server.ended_within(Duration::from_secs(60)).success());
    eventually("the last words", || server.log().contains("the ledger at the end"));
    let (log, trace) = (server.log(), folder.read("trace.jsonl"));
    assert!(log.lines().filter(|line| line.contains("request_id")).count() >= 9, "every request has a line:\n{log}");
    assert!(trace.lines().count() >= 9, "every request is recorded:\n{trace}");
    for (name, text) in [("log", log), ("trace", trace)] {
        let said: Vec<&str> = text.lines().filter(|line| line.to_ascii_lowercase().contains(SECRET)).collect();
        assert!(said.is_empty(), "the {name} says: {said:#?}");
    }
}
