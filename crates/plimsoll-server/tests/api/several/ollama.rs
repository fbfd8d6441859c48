//! Ollama's routes on a server of several models.

use std::time::Duration;

use serde_json::{Value, json};

use super::{model, start};
use crate::common::{config, post};

fn names(list: &Value) -> Vec<&str> {
    list["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect()
}

#[test]
fn a_pull_loads_a_model_and_ps_lists_it() {
    let (server, fake) = start(vec![model("a", 4), model("b", 5)], config());
    let tags = server.get("/api/tags").ok();
    assert_eq!(names(&tags), ["a:latest", "a-alias:latest", "b:latest", "b-alias:latest"]);
    assert_eq!(tags["models"][0]["details"]["family"], "", "nothing is known before it is loaded");
    assert!(names(&server.get("/api/ps").ok()).is_empty());
    // JavaScript's client sends `name`.
    let answer = server.post("/api/pull", &json!({"name": "b:latest", "stream": false}));
    assert_eq!(answer.ok(), json!({"status": "success"}));
    assert_eq!(fake.loaded(), ["b"]);
    assert_eq!(names(&server.get("/api/ps").ok()), ["b:latest"]);
    assert_eq!(server.get("/api/tags").ok()["models"][2]["details"]["family"], "llama");
    assert_eq!(server.post("/api/show", &json!({"model": "a"})).ok()["details"]["family"], "llama");
    assert_eq!(fake.loaded(), ["b", "a"]);
    let unknown = server.post("/api/pull", &json!({"model": "c"}));
    assert_eq!(unknown.status, 404);
    assert!(unknown.json()["error"].as_str().unwrap().contains("`a`, `b`"), "{}", unknown.body);
}

/// The default is a stream, which sends blanks while it waits.
#[test]
fn a_stream_waits_for_its_model_with_blanks() {
    let mut slow = model("a", 4);
    slow.takes = Duration::from_secs(2);
    let hasty = plimsoll_server::ServerConfig { keep_alive: Duration::from_millis(50), ..config() };
    let (server, _) = start(vec![slow], hasty);
    let body = json!({"model": "a", "prompt": "x", "raw": true, "options": {"num_predict": 2}}).to_string();
    let answer = server.send(post("/api/generate", &body)).answer();
    assert_eq!(answer.header("content-type"), Some("application/x-ndjson"));
    assert!(answer.ok_text().starts_with(' '), "{:?}", answer.body);
    let lines: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!((&last["done"], &last["eval_count"]), (&json!(true), &json!(2)));
    assert!(last["load_duration"].as_u64().unwrap() > 1_000_000_000, "{last}");
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_stream_with_an_error() {
    let mut broken = model("a", 4);
    (broken.takes, broken.fails) = (Duration::from_secs(2), true);
    let (server, _) = start(vec![broken], config());
    let answer = server.post("/api/pull", &json!({"model": "a"}));
    let last: Value = serde_json::from_str(answer.ok_text().lines().last().unwrap()).unwrap();
    assert!(last["error"].as_str().unwrap().contains("weights are broken"), "{last}");
}
