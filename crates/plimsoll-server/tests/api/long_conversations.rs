//! Conversations longer than the context: the oldest turns are left out if a client allows it.

use plimsoll_engine::testing::{Script, Step, limits};
use plimsoll_engine::{FinishReason, Request};
use serde_json::{Value, json};

use crate::common::{Server, config};

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";

/// A server with a context of 512 tokens, each a byte.
fn server() -> Server {
    let script = |_: &Request| -> Script {
        Box::new([Step::Token(97, "ok".into()), Step::Finish(FinishReason::Stop, None)].into_iter())
    };
    Server::over(TEMPLATE, config(), limits(), script)
}

/// A system message and `turns` turns of 100 bytes and more, of which the last is short.
fn messages(turns: usize) -> Value {
    let said = |i: usize| {
        [
            json!({"role": "user", "content": format!("question {i:03} {}", "x".repeat(60))}),
            json!({"role": "assistant", "content": format!("answer {i:03}")}),
        ]
    };
    let mut all = vec![json!({"role": "system", "content": "be brief"})];
    all.extend((0..turns).flat_map(said));
    all.push(json!({"role": "user", "content": "the last"}));
    all.into()
}

/// The text of the last prompt that reached the engine.
fn prompt(server: &Server) -> String {
    let ids = server.observed.requests.lock().unwrap().last().expect("a request").prompt.clone();
    server.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].as_str().expect("a text").to_owned()
}

/// Returns how many of the first turns are missing. Asserts that all others are there, in order.
fn missing(prompt: &str, turns: usize) -> usize {
    assert!(prompt.starts_with("[system]be brief[user]"), "{prompt}");
    assert!(prompt.ends_with("[user]the last"), "{prompt}");
    let first = (0..turns).find(|i| prompt.contains(&format!("question {i:03}"))).unwrap_or(turns);
    let kept: String =
        (first..turns).map(|i| format!("[user]question {i:03} {}[assistant]answer {i:03}", "x".repeat(60))).collect();
    assert_eq!(prompt, format!("[system]be brief{kept}[user]the last"));
    first
}

#[test]
fn responses_leave_out_the_fewest_of_the_oldest_turns() {
    let server = server();
    for turns in [1, 3, 4, 5, 40] {
        let body = json!({"model": "default", "input": messages(turns), "truncation": "auto", "max_output_tokens": 8});
        let answer = server.post("/v1/responses", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["truncation"], "auto");
        let prompt = prompt(&server);
        let left_out = missing(&prompt, turns);
        assert!(prompt.len() + 8 <= 512, "{} bytes", prompt.len());
        let one_more = prompt.len() + "[user]question 000 [assistant]answer 000".len() + 60;
        assert!(left_out == 0 || one_more + 8 > 512, "{left_out} of {turns} are left out; one more would fit");
    }
    let body = json!({"model": "default", "input": messages(40), "max_output_tokens": 8});
    let refused = server.post("/v1/responses", &body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
}

#[test]
fn a_last_turn_that_does_not_fit_is_refused() {
    let server = server();
    let long = json!([{"role": "user", "content": "short"}, {"role": "user", "content": "x".repeat(600)}]);
    for (path, body) in [
        ("/v1/responses", json!({"model": "default", "input": long, "truncation": "auto"})),
        ("/api/chat", json!({"model": "default", "messages": long, "stream": false})),
    ] {
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path}: {}", refused.body);
        assert!(refused.body.contains("maximum"), "{path}: {}", refused.body);
    }
    let unknown = server.post("/v1/responses", &json!({"model": "default", "input": "x", "truncation": "middle"}));
    assert_eq!((unknown.status, &unknown.json()["error"]["param"]), (400, &json!("truncation")));
}

#[test]
fn ollama_s_chat_leaves_out_turns_unless_truncate_is_false() {
    let server = server();
    let body = json!({"model": "default", "messages": messages(40), "stream": false});
    assert_eq!(server.post("/api/chat", &body).status, 200);
    assert!(missing(&prompt(&server), 40) > 30);
    let body = json!({"model": "default", "messages": messages(40), "stream": false, "truncate": false});
    assert_eq!(server.post("/api/chat", &body).status, 400);
}
