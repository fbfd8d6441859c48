//! The log line of a refused request.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, Once};

use plimsoll_engine::testing::letters;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{Server, eventually};

/// Log lines of requests with this prefix in their id are kept.
pub const OURS: &str = "log-test-";

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A subscriber that keeps the lines of this file's requests, from any server in this process.
struct Keeper;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        if line.0.contains(OURS) {
            LINES.lock().unwrap().push(line.0);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Keeps lines from now on.
pub fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Keeper).unwrap());
}

/// Waits for a line that names this id and returns all such lines.
pub fn lines(id: &str) -> Vec<String> {
    let names = |line: &&String| line.split(' ').any(|word| word.trim_end_matches('"').ends_with(id));
    let of = || LINES.lock().unwrap().iter().filter(names).cloned().collect::<Vec<_>>();
    eventually("the line is there", || !of().is_empty());
    of()
}

#[test]
fn a_refused_request_is_one_line_that_says_why_and_nothing_of_its_body() {
    keep();
    let server = Server::start(letters);
    let asked = |id: &str, path: &str, body: &str| {
        let (length, id) = (body.len(), format!("{OURS}{id}"));
        let head = format!(
            "host: localhost\r\nx-request-id: {id}\r\ncontent-type: application/json\r\ncontent-length: {length}"
        );
        let status = server.send(format!("POST {path} HTTP/1.1\r\n{head}\r\n\r\n{body}")).answer().status;
        let lines = lines(&id);
        assert_eq!(lines.len(), 1, "{lines:?}");
        (status, lines[0].clone())
    };
    for (id, path, body, status, parts) in [
        (
            "a",
            "/v1/completions",
            r#"{"prompt": "secret", "temperature": 1000}"#,
            400,
            ["route=\"/v1/completions\"", "reason=\"invalid_value\"", "param=\"temperature\""],
        ),
        ("b", "/v1/completions", "secret", 400, ["route=\"/v1/completions\"", "reason=\"invalid_json\"", "status=400"]),
        (
            "c",
            "/v1/completions",
            r#"{"prompt": "secret", "model": "secret"}"#,
            404,
            ["reason=\"model_not_found\"", "param=\"model\"", "status=404"],
        ),
        ("d", "/secret", "{}", 404, ["route=\"other\"", "status=404", "request refused"]),
        (
            "e",
            "/v1/messages",
            r#"{"messages": "secret", "max_tokens": 1}"#,
            400,
            ["route=\"/v1/messages\"", "param=\"messages\"", "status=400"],
        ),
    ] {
        let (seen, line) = asked(id, path, body);
        assert_eq!(seen, status, "{line}");
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        assert!(!line.contains("secret"), "{line}");
    }
    // An answered request has the usual line, in readable numbers.
    let (status, line) = asked("f", "/v1/completions", r#"{"prompt": "x", "max_tokens": 2}"#);
    assert_eq!(status, 200);
    let number =
        |name: &str| line.split(name).nth(1).unwrap().split(' ').next().unwrap().trim_end_matches(')').to_owned();
    for number in [number("ttft_ms="), number("duration_ms=")] {
        let decimals = number.split('.').nth(1).map_or(0, str::len);
        assert!(number.parse::<f64>().is_ok() && decimals <= 1, "{line}");
    }
}
