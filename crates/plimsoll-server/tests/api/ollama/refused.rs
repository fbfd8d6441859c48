//! Refusals of Ollama's routes, and their shape.

use std::time::Duration;

use plimsoll_engine::testing::{Step, letters, limits};
use plimsoll_server::{ApiKeys, RateLimits, ServerConfig, UnknownFields};
use serde_json::{Value, json};

use super::{error, hello, says};
use crate::common::{Server, config, endless, eventually, post, silent};

#[test]
fn values_that_would_change_the_answer_are_named() {
    let server = Server::start(letters);
    for (path, body, word) in [
        ("/api/generate", json!({"prompt": "x", "template": "{{ .Prompt }}"}), "template"),
        ("/api/generate", json!({"prompt": "x", "context": [1, 2]}), "context"),
        ("/api/generate", json!({"prompt": "x", "raw": true, "system": "y"}), "system"),
        ("/api/generate", json!({"prompt": "x", "raw": true, "think": true}), "think"),
        ("/api/generate", json!({"prompt": "x", "images": ["AA=="]}), "images"),
        ("/api/generate", json!({"prompt": "x", "width": 64}), "width"),
        ("/api/generate", json!({"keep_alive": 0}), "keep_alive"),
        ("/api/chat", json!({"messages": [], "keep_alive": "0s"}), "keep_alive"),
        ("/api/chat", hello(&json!({"keep_alive": true})), "keep_alive"),
        ("/api/chat", hello(&json!({"think": "very"})), "think"),
        ("/api/chat", hello(&json!({"think": 3})), "think"),
        ("/api/chat", hello(&json!({"format": "xml"})), "format"),
        ("/api/chat", hello(&json!({"format": 7})), "format"),
        ("/api/chat", hello(&json!({"top_logprobs": 2})), "top_logprobs"),
        ("/api/chat", hello(&json!({"options": {"temperature": -1}})), "options.temperature"),
        ("/api/chat", hello(&json!({"options": {"num_predict": -3}})), "options.num_predict"),
        ("/api/chat", hello(&json!({"options": {"num_predict": 0}})), "options.num_predict"),
        ("/api/chat", hello(&json!({"options": {"mirostat": 2}})), "options.mirostat"),
        ("/api/chat", hello(&json!({"options": {"tfs_z": 0.5}})), "options.tfs_z"),
        (
            "/api/chat",
            hello(&json!({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}})),
            "options.repeat_last_n",
        ),
        ("/api/chat", json!({"messages": [{"role": "judge", "content": "x"}]}), "messages[0].role"),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}),
            "messages[0].images",
        ),
        ("/api/chat", json!({"messages": "x"}), "messages"),
    ] {
        let said = error(&server.post(path, &body), 400);
        assert!(said.contains(word), "{body}: {said}");
    }
    assert!(error(&server.post("/api/chat", &json!({"model": "llama3"})), 404).contains("llama3"));
    assert!(error(&server.post("/api/create", &json!({"model": "x"})), 404).contains("/api/create"));
    assert!(error(&server.get("/api/chat"), 405).contains("GET"));
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

/// Without penalties their window changes nothing.
#[test]
fn a_window_without_penalties_is_taken() {
    let server = Server::start(letters);
    server
        .post("/api/chat", &hello(&json!({"stream": false, "options": {"repeat_last_n": 64, "num_predict": 2}})))
        .ok();
}

#[test]
fn unknown_options_and_larger_contexts_are_warnings() {
    let options = json!({"num_ctx": 1_000_000, "colour": 1, "num_predict": 2});
    let body = hello(&json!({"stream": false, "options": options}));
    let warns = Server::with(ServerConfig { unknown_fields: UnknownFields::Warn, ..config() }, limits(), letters);
    let answer = warns.post("/api/chat", &body);
    answer.ok();
    assert_eq!(answer.header("x-plimsoll-unknown-fields"), Some("options.num_ctx, options.colour"));
    let refuses = Server::start(letters);
    let said = error(&refuses.post("/api/chat", &body), 400);
    assert!(said.contains("options.num_ctx") && said.contains("1000000"), "{said}");
}

#[test]
fn keys_and_rates_are_asked_here_too() {
    let keyed = ServerConfig {
        api_keys: ApiKeys::new(["a-long-key".to_owned()]).unwrap(),
        rates: RateLimits { requests: Some(1), tokens: None },
        ..config()
    };
    let server = Server::with(keyed, limits(), letters);
    assert!(error(&server.get("/api/tags"), 401).contains("API key"));
    let body = hello(&json!({"stream": false, "options": {"num_predict": 2}})).to_string();
    let with_key = |path: &str| post(path, &body).replacen("\r\n", "\r\nauthorization: Bearer a-long-key\r\n", 1);
    server.send(with_key("/api/chat")).answer().ok();
    let second = server.send(with_key("/api/chat")).answer();
    assert!(error(&second, 429).contains("--rate-limit-requests"));
    assert!(second.header("retry-after").is_some());
}

#[test]
fn a_stream_that_fails_ends_with_an_error_line() {
    let server = Server::start(|_| Box::new([Step::Token(97, "a".into()), Step::Fail("it broke".into())].into_iter()));
    let answer = server.post("/api/chat", &hello(&json!({})));
    assert_eq!(answer.status, 200);
    let lines: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The output before the error may be dropped with it.
    assert_eq!(lines.last(), Some(&json!({"error": "it broke"})));
    assert_eq!(error(&server.post("/api/chat", &hello(&json!({"stream": false}))), 500), "it broke");
    server.assert_idle();
}

#[test]
fn a_client_that_goes_ends_its_request() {
    let server = Server::start(endless);
    let mut client = server.send(post("/api/chat", &hello(&json!({})).to_string()));
    client.until("\"done\":false");
    drop(client);
    eventually("it is aborted", || server.aborted() == 1);
    server.assert_idle();
}

/// A blank before a line is part of that line's JSON.
#[test]
fn a_quiet_stream_carries_blanks() {
    let quiet = ServerConfig { keep_alive: Duration::from_millis(30), ..config() };
    let server = Server::with(quiet, limits(), silent);
    let mut client = server.send(post("/api/chat", &hello(&json!({})).to_string()));
    client.until("\r\n\r\n");
    client.until("1\r\n \r\n1\r\n \r\n");
}

#[test]
fn a_prompt_that_is_too_long_is_refused() {
    let server = says(super::TEMPLATE, "ok");
    let long = "x".repeat(limits().max_req_total_len as usize + 1);
    let said = error(&server.post("/api/generate", &json!({"prompt": long, "truncate": true})), 400);
    assert!(said.contains("prompt"), "{said}");
}
