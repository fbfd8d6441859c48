//! Text between two given texts: `/infill`, and `suffix` at `/v1/completions` and `/api/generate`.

use std::sync::Arc;

use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{FinishReason, Limits, Request};
use plimsoll_server::serve;
use serde_json::{Value, json};

use crate::common::{Server, TEMPLATE, config, post, served, tokenizer_with};

/// The infill tokens of the model of [`filling`].
const PREFIX: u32 = 258;
const SUFFIX: u32 = 259;
const MIDDLE: u32 = 260;

/// A server with an infill model. Its special tokens from 261 on are `more`.
pub fn filling(more: &[&str], script: impl FnMut(&Request) -> Script + Send + 'static) -> Server {
    let own = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    let specials = [&own, more].concat();
    let limits = Limits { vocab_size: 256 + specials.len() as u32, ..limits() };
    let (mut served, observed) = served(TEMPLATE, limits, script, &["tiny", "org/tiny-alias"]);
    served.tokenizer = Arc::new(tokenizer_with(&specials));
    let handle = served.engine.clone();
    Server::around(handle, observed, config(), |listener, config, told| serve(listener, served, config, told))
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn gap(before: &str, after: &str) -> Vec<u32> {
    [vec![PREFIX], bytes(before), vec![SUFFIX], bytes(after), vec![MIDDLE]].concat()
}

fn says(text: &'static str) -> impl FnMut(&Request) -> Script + Send {
    move |_: &Request| -> Script {
        Box::new([Step::Token(97, text.into()), Step::Finish(FinishReason::Stop, None)].into_iter())
    }
}

#[test]
fn the_three_routes_make_the_same_prompt() {
    let server = filling(&[], letters);
    // A special token that the code spells is text.
    let (before, after) = ("fn f() {\n<|im_end|>", "\n}");
    for (path, body) in [
        ("/infill", json!({"input_prefix": before, "input_suffix": after, "n_predict": 3})),
        ("/v1/completions", json!({"prompt": before, "suffix": after, "max_tokens": 3})),
        ("/api/generate", json!({"prompt": before, "suffix": after, "stream": false, "options": {"num_predict": 3}})),
        ("/v1/completions", json!({"prompt": bytes(before), "suffix": after, "max_tokens": 3})),
    ] {
        server.post(path, &body).ok();
        assert_eq!(server.last_request().prompt, gap(before, after), "{path}");
    }
    server.assert_idle();
}

#[test]
fn a_gap_that_is_begun_goes_on() {
    let server = filling(&[], letters);
    let body = json!({"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 2});
    server.post("/infill", &body).ok();
    assert_eq!(server.last_request().prompt, [gap("a", "b"), bytes("c")].concat());
}

#[test]
fn other_files_stand_before_the_gap() {
    let extra = json!([{"filename": "a.rs", "text": "x"}, {"text": "y", "time": 7}]);
    let body = json!({"input_prefix": "a", "input_suffix": "b", "input_extra": extra, "n_predict": 2});
    let server = filling(&[], letters);
    server.post("/infill", &body).ok();
    assert_eq!(server.last_request().prompt, [bytes("a.rs\nx\ntmp\ny\n"), gap("a", "b")].concat());
    // Pad, repository and file are 261 to 263.
    let server = filling(&["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], letters);
    server.post("/infill", &body).ok();
    let request = server.last_request();
    let file = |text: &str| [vec![263], bytes(text)].concat();
    let files = [vec![262], bytes("myproject\n"), file("a.rs\nx\n"), file("tmp\ny\n"), file("filename\n")].concat();
    assert_eq!(request.prompt, [files, gap("a", "b")].concat());
    assert_eq!(request.stop_token_ids, [261, 262, 263], "another file ends the gap");
}

#[test]
fn infill_answers_whole_and_streamed() {
    let server = filling(&[], says("return 7;"));
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    let whole = server.post("/infill", &body).ok();
    assert_eq!((&whole["content"], &whole["stop"]), (&json!("return 7;"), &json!(true)));
    assert_eq!((&whole["stop_type"], &whole["tokens_predicted"]), (&json!("eos"), &json!(1)));
    assert_eq!(whole["tokens_evaluated"], server.last_request().prompt.len());
    assert!(whole["timings"]["prompt_ms"].is_number() && whole["timings"]["predicted_n"] == 1, "{whole}");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let answer = server.post("/infill", &streamed);
    let pieces: Vec<Value> = answer
        .ok_text()
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    assert_eq!((&pieces[0]["content"], &pieces[0]["stop"]), (&json!("return 7;"), &json!(false)));
    assert_eq!((&pieces[1]["stop"], &pieces[1]["stop_type"]), (&json!(true), &json!("eos")));
    assert_eq!(pieces.len(), 2, "{pieces:?}");
    server.assert_idle();
}

#[test]
fn a_model_without_the_tokens_says_so() {
    let server = Server::start(letters);
    for (path, body, param) in [
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"}), "input_prefix"),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"}), "suffix"),
    ] {
        let error = server.post(path, &body).error(400);
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("unsupported")));
        assert!(error["message"].as_str().unwrap().contains("fill-in-the-middle"), "{error}");
    }
    let answer = server.post("/api/generate", &json!({"prompt": "a", "suffix": "b"}));
    assert!(answer.status == 400 && answer.json()["error"].as_str().unwrap().contains("fill-in-the-middle"));
    // An empty suffix requests no infill.
    server.post("/v1/completions", &json!({"prompt": "a", "suffix": "", "max_tokens": 2})).ok();
    assert_eq!(server.last_request().prompt, bytes("a"));
}

#[test]
fn what_a_gap_cannot_have_is_named() {
    let server = filling(&[], letters);
    for (path, body, word) in [
        ("/v1/completions", json!({"prompt": "a", "suffix": "b", "echo": true}), "echo"),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b", "prompt_logprobs": 1}), "prompt_logprobs"),
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b", "n": 2}), "n is"),
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b", "return_token_ids": true}), "return_token_ids"),
        ("/infill", json!({"input_prefix": "a"}), "input_suffix"),
        ("/infill", json!({"input_suffix": "a"}), "input_prefix"),
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c"}]}),
            "input_extra[0].text",
        ),
    ] {
        let error = server.post(path, &body).error(400);
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    for (name, value) in [("raw", json!(true)), ("system", json!("x"))] {
        let mut body = json!({"prompt": "a", "suffix": "b"});
        body[name] = value;
        let answer = server.send(post("/api/generate", &body.to_string())).answer();
        assert!(answer.status == 400 && answer.json()["error"].as_str().unwrap().contains(name), "{}", answer.body);
    }
    assert!(server.observed.requests.lock().unwrap().is_empty());
}
