//! Prefixes saved under a name, over HTTP and a restart, in an encrypted directory.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::http::request;
use crate::product::{Server, eventually, plimsoll, run};
use crate::terminal::Data;

#[test]
fn a_saved_prefix_is_loaded_after_a_restart() {
    let folder = Data::new("saved");
    let (dir, key) = (folder.at("prefixes"), folder.at("key"));
    std::fs::write(&key, "0123456789abcdef".repeat(4)).unwrap();
    let start = |more: &[&str]| {
        let flags = ["--cache-dir", &dir, "--cache-bytes", "64MiB"];
        Server::start_model(Path::new("demo"), &[&flags, more].concat())
    };
    let chmod = |mode: &str| assert!(Command::new("chmod").args([mode, &key]).status().unwrap().success());
    chmod("644");
    let flags = ["serve", "demo", "--port", "0", "--cache-dir", &dir, "--cache-key-file", &key];
    assert!(run(&flags).refused().contains("chmod 600"));
    chmod("600");
    let mut server = start(&["--cache-key-file", &key]);
    let text = "What is 12 + 30? ".repeat(20);
    let refused = |server: &Server, path: &str, body: &Value, status: u16| {
        let answer = server.post(path, body);
        assert_eq!(answer.status, status);
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    for (body, says) in [
        (json!({"name": "a/b", "prompt": text}), "letters, digits"),
        (json!({"prompt": text}), "name is missing"),
        (json!({"name": "agent"}), "messages is missing"),
        (json!({"name": "agent", "prompt": text, "model": "other"}), "does not exist"),
    ] {
        let status = if says == "does not exist" { 404 } else { 400 };
        let message = refused(&server, "/v1/cache/save", &body, status);
        assert!(message.contains(says), "{message}");
    }
    assert!(refused(&server, "/v1/cache/load", &json!({"name": "agent"}), 404).contains("no prefix is saved as"));
    let saved = server.ask("/v1/cache/save", &json!({"name": "agent", "prompt": text}));
    let tokens = saved["tokens"].as_u64().unwrap();
    assert!(saved["object"] == "cache.saved" && tokens > 64 && saved["cached_tokens"] == 0, "{saved}");
    eventually("its files are pinned", || server.get("/v1/cache").json()["disk"]["pinned_bytes"].as_u64() > Some(0));
    let listed = server.get("/v1/cache").json()["saved"].clone();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["tokens"], listed.as_array().unwrap().len()),
        (&json!("agent"), &json!(tokens), 1)
    );
    assert!(server.status()["disk"]["files"].as_u64() > Some(0));
    let listing = run(&["cache", "ls", &dir]).good();
    assert!(listing.contains("(an encrypted name)") && !listing.contains("agent"), "{listing}");
    assert!(listing.contains("\n  page ") && !listing.contains("encoder_output"), "{listing}");
    server.signal("TERM");
    assert!(server.ended().success());
    assert!(run(&["serve", "demo", "--port", "0", "--cache-dir", &dir]).refused().contains("--cache-key-file"));
    assert!(run(&["cache", "verify", &dir]).good().contains("are encrypted"));
    assert!(!run(&["cache", "verify", &dir, "--cache-key-file", &key]).good().contains("are encrypted"));
    let server = start(&["--cache-key-file", &key]);
    let loaded = server.ask("/v1/cache/load", &json!({"name": "agent"}));
    assert_eq!((&loaded["object"], &loaded["tokens"]), (&json!("cache.loaded"), &json!(tokens)));
    assert!(loaded["cached_tokens"].as_u64().unwrap() + 32 > tokens, "{loaded}");
    let answer = server.ask("/v1/completions", &json!({"prompt": text, "max_tokens": 1}));
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0), "{answer}");
    let remove = || request(server.address, "DELETE", "/v1/cache/saved/agent", b"").expect("an answer");
    assert_eq!(remove().json()["object"], "cache.removed");
    assert_eq!(remove().status, 404);
    eventually("no file is pinned", || server.get("/v1/cache").json()["disk"]["pinned_bytes"] == 0);
    assert!(server.get("/v1/cache").json()["saved"].as_array().unwrap().is_empty());
}

#[test]
fn without_a_directory_nothing_is_saved() {
    let server = Server::start_model(Path::new("demo"), &[]);
    let answer = server.post("/v1/cache/save", &json!({"name": "agent", "prompt": "x"}));
    assert_eq!(answer.status, 400);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("--cache-dir"));
    assert!(server.get("/v1/cache").json().get("saved").is_none());
    assert!(!String::from_utf8_lossy(&plimsoll(["cache", "ls", "/"]).output().unwrap().stderr).is_empty());
}
