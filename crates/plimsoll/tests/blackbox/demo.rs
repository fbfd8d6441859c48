//! The demo model inside the program: no network, images with known answers. Each client gets the answer to its own image.

use std::path::Path;
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::http::request;
use crate::product::{Server, repository};

/// Held-out images that the model reads correctly (`tools/train_demo/keep.py`): the question as a message, and the answer.
fn questions() -> Vec<(Value, String)> {
    let folder = repository().join("tests/fixtures/demo");
    let listed: Value = serde_json::from_slice(&std::fs::read(folder.join("questions.json")).unwrap()).unwrap();
    let one = |entry: &Value| {
        let text = |key: &str| entry[key].as_str().unwrap().to_owned();
        let url =
            format!("data:image/png;base64,{}", STANDARD.encode(std::fs::read(folder.join(text("file"))).unwrap()));
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        (json!([{"role": "user", "content": [image, {"type": "text", "text": text("question")}]}]), text("answer"))
    };
    listed.as_array().unwrap().iter().map(one).collect()
}

#[test]
fn demo_model_reads_images_and_answers_each_client() {
    let server = Server::start_model(Path::new("demo"), &["--enable-mtp"]);
    let questions = questions();
    let ask = |messages: &Value| {
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 16});
        let answer = server.ask("/v1/chat/completions", &body);
        answer["choices"][0]["message"]["content"].as_str().unwrap().trim().to_owned()
    };
    assert_eq!(ask(&json!([{"role": "user", "content": "What is 12 + 30?"}])), "42");
    // 176 requests, 16 at a time: a neighbour's image would show as its answer.
    thread::scope(|scope| {
        for client in 0..16 {
            let (questions, ask) = (&questions, &ask);
            scope.spawn(move || {
                for turn in 0..questions.len() {
                    let (messages, answer) = &questions[(turn + client) % questions.len()];
                    assert_eq!(ask(messages), *answer, "client {client}, turn {turn}");
                }
            });
        }
    });
    // Cached encoder outputs are reported, and removed on demand.
    let kept = server.get("/v1/cache").json();
    assert!(kept["encoder_entries"].as_u64() > Some(0) && kept["encoder_bytes"].as_u64() > Some(0), "{kept}");
    let after = request(server.address, "DELETE", "/v1/cache", b"").expect("an answer").json();
    assert_eq!(
        (&after["after"]["encoder_entries"], &after["after"]["encoder_bytes"]),
        (&json!(0), &json!(0)),
        "{after}"
    );
}
