//! Shutdown: after a signal running requests finish, new ones are refused, and no process is left behind.

use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::Answer;
use crate::product::{Server, eventually};

const POOL: [&str; 2] = ["--max-total-token-num", "8192"];

/// A stream of `tokens` tokens, after its first few tokens have arrived.
fn running_stream(server: &Server, tokens: u32) -> Answer {
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let mut answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200);
    for _ in 0..5 {
        answer.event().expect("more than five events");
    }
    answer
}

fn rest(mut answer: Answer) -> Vec<String> {
    std::iter::from_fn(|| answer.event()).collect()
}

fn assert_gone(server: &Server) {
    assert!(!Path::new(&format!("/proc/{}", server.pid())).exists(), "the process is still there");
    assert!(TcpStream::connect(server.address).is_err(), "somebody still listens");
}

#[test]
#[ignore = "models"]
fn sigterm_lets_a_stream_finish() {
    // A drain time that is enough on the slowest machine.
    let mut server = Server::start(&[&POOL[..], &["--drain-seconds", "600"]].concat());
    let stream = running_stream(&server, 400);
    server.signal("TERM");
    eventually("whoever comes is told", || server.get("/ready").status == 503);
    assert_eq!(server.get("/health").status, 200);
    let events = rest(stream);
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{events:?}");
    let parsed: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let finished = parsed.iter().find_map(|event| event["choices"][0]["finish_reason"].as_str());
    assert_eq!(finished, Some("length"), "{events:?}");
    assert_eq!(parsed.last().unwrap()["usage"]["completion_tokens"], 400, "{events:?}");
    let status = server.ended();
    assert_eq!(status.code(), Some(0), "{status}:\n{}", server.log());
    assert!(!server.log().contains("panicked"), "{}", server.log());
    assert_gone(&server);
}

#[test]
#[ignore = "models"]
fn an_idle_server_ends_at_once() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[&POOL[..], &["--drain-seconds", "600"]].concat());
        // A kept-alive connection without a request must not delay the end.
        let idle = TcpStream::connect(server.address).unwrap();
        let since = Instant::now();
        server.signal(signal);
        // Less time than an idle connection stays open.
        let status = server.ended_within(Duration::from_secs(12));
        println!("idle, SIG{signal}: ended after {:.2} s", since.elapsed().as_secs_f64());
        assert_eq!(status.code(), Some(0), "{signal}: {status}:\n{}", server.log());
        assert_gone(&server);
        drop(idle);
    }
}

#[test]
#[ignore = "models"]
fn what_does_not_finish_in_time_is_told_so() {
    // The drain ends after `--drain-seconds` or at a second signal.
    for (seconds, again) in [("1", false), ("600", true)] {
        let mut server = Server::start(&[&POOL[..], &["--drain-seconds", seconds]].concat());
        let stream = running_stream(&server, 8000);
        let since = Instant::now();
        server.signal("TERM");
        if again {
            // A second signal at once counts as the same one.
            server.signal("INT");
            eventually("it drains", || server.get("/ready").status == 503);
            thread::sleep(Duration::from_millis(1200));
            assert_eq!(server.get("/ready").status, 503, "and still drains");
            server.signal("INT");
        }
        let events = rest(stream);
        let told = events.iter().rev().find_map(|event| serde_json::from_str::<Value>(event).ok()).unwrap_or_default();
        assert!(told["error"]["message"].is_string(), "the last event is an error: {told}");
        let status = server.ended();
        assert!(since.elapsed() >= Duration::from_millis(900), "the second was given");
        eventually("it is counted", || server.log().contains("0 finished, 1 aborted, 0 failed"));
        assert_eq!(status.code(), Some(0), "{status}:\n{}", server.log());
        assert_gone(&server);
    }
}
