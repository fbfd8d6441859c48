//! OpenAI's request schemas field by field: each field works (the engine is asked for something else, or the answer differs), is
//! refused by name, or is one of the few that by their meaning change nothing. Nothing is accepted and ignored.

mod common;

use std::sync::atomic::Ordering;

use common::{Answer, Server, events};
use plimsoll_engine::testing::letters;
use serde_json::{Value, json};

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// It changes what the engine is asked for or what is answered.
    Works,
    /// It says what is so already, or names somebody: there is nothing it could change.
    Nothing,
    /// 400 that names it.
    Refused,
}
use Fate::{Nothing, Refused, Works};

/// What the engine was asked for and what was answered, without what differs from one request to the next.
fn effect(server: &Server, path: &str, body: &Value) -> (Answer, String) {
    let before = server.observed.requests.lock().unwrap().len();
    let forms = || server.observed.constrained.load(Ordering::Acquire);
    let formed = forms();
    let answer = server.post(path, body);
    let mut asked: Vec<_> = server.observed.requests.lock().unwrap()[before..].to_vec();
    asked.iter_mut().for_each(|request| request.id.clear());
    let strip = |mut answer: Value| {
        for name in ["id", "created"] {
            answer.as_object_mut().map(|answer| answer.remove(name));
        }
        answer
    };
    let said: Vec<Value> = match answer.body.starts_with("data: ") {
        true => events(&answer.body).into_iter().map(strip).collect(),
        false => vec![strip(answer.json())],
    };
    let effect = format!("{} {asked:?} {said:?}", forms() - formed);
    (answer, effect)
}

fn walk(path: &str, base: &Value, fields: &[(&str, Value, Fate)]) {
    let server = Server::start(letters);
    let (answer, plain) = effect(&server, path, base);
    answer.ok();
    assert_eq!(effect(&server, path, base).1, plain, "the same request has the same effect");
    for (name, value, fate) in fields {
        let mut body = base.clone();
        body[*name] = value.clone();
        // What makes sense only beside something else.
        match *name {
            "stream_options" => body["stream"] = json!(true),
            "top_logprobs" => body["logprobs"] = json!(true),
            "tool_choice" | "parallel_tool_calls" => body["tools"] = tools(),
            "best_of" => body["n"] = value.clone(),
            _ => {}
        }
        let mut without = body.clone();
        without.as_object_mut().unwrap().remove(*name);
        let (_, expected) = effect(&server, path, &without);
        let (answer, effect) = effect(&server, path, &body);
        let found = match answer.status {
            200 if effect != expected => Works,
            200 => Nothing,
            400 => {
                let param = answer.error(400)["param"].clone();
                assert_eq!(param.as_str().unwrap().split(['.', '[']).next(), Some(*name), "{}", answer.body);
                Refused
            }
            other => panic!("{name}: {value}: {other} {}", answer.body),
        };
        assert_eq!(found, *fate, "{path} {name} = {value}: {}", answer.body);
    }
    server.assert_idle();
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    json!([{"type": "function", "function": {"name": "f", "parameters": schema}}])
}

#[test]
fn chat_completions() {
    let base = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "seed": 1});
    let named = json!({"type": "function", "function": {"name": "f"}});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}});
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]);
    walk(
        "/v1/chat/completions",
        &base,
        &[
            ("messages", json!([{"role": "user", "content": "y"}]), Works),
            ("messages", image, Refused),
            ("model", json!("tiny"), Nothing),
            ("audio", json!({"voice": "alloy", "format": "wav"}), Refused),
            ("frequency_penalty", json!(0.5), Works),
            ("function_call", json!("auto"), Refused),
            ("functions", json!([{"name": "f"}]), Refused),
            ("logit_bias", json!({"97": 5}), Works),
            ("logprobs", json!(true), Works),
            ("max_completion_tokens", json!(6), Nothing),
            ("max_completion_tokens", json!(5), Refused),
            ("max_tokens", json!(5), Works),
            ("metadata", json!({"a": "b"}), Nothing),
            ("modalities", json!(["text"]), Nothing),
            ("modalities", json!(["text", "audio"]), Refused),
            ("moderation", json!({}), Refused),
            ("n", json!(2), Works),
            ("parallel_tool_calls", json!(true), Nothing),
            ("prediction", json!({"type": "content", "content": "x"}), Refused),
            ("presence_penalty", json!(0.5), Works),
            ("prompt_cache_key", json!("k"), Nothing),
            ("prompt_cache_retention", json!("24h"), Refused),
            ("reasoning_effort", json!("low"), Refused),
            ("response_format", json!({"type": "json_object"}), Works),
            ("response_format", schema, Works),
            ("response_format", json!({"type": "text"}), Nothing),
            ("safety_identifier", json!("s"), Nothing),
            ("seed", json!(2), Works),
            ("service_tier", json!("auto"), Nothing),
            ("service_tier", json!("flex"), Refused),
            ("stop", json!("q"), Works),
            ("stop", json!(["q", "z"]), Works),
            ("store", json!(false), Nothing),
            ("store", json!(true), Refused),
            ("stream", json!(true), Works),
            ("stream_options", json!({"include_usage": true}), Works),
            ("stream_options", json!({"include_obfuscation": true}), Refused),
            ("temperature", json!(0.3), Works),
            ("tool_choice", json!("required"), Works),
            ("tool_choice", json!("none"), Works),
            ("tool_choice", named, Works),
            ("tool_choice", json!("auto"), Nothing),
            ("tools", tools(), Works),
            ("tools", json!([{"type": "custom", "custom": {"name": "f"}}]), Refused),
            ("top_logprobs", json!(3), Works),
            ("top_p", json!(0.5), Works),
            ("user", json!("u"), Nothing),
            ("verbosity", json!("medium"), Nothing),
            ("verbosity", json!("low"), Refused),
            ("web_search_options", json!({}), Refused),
        ],
    );
}

#[test]
fn completions() {
    let base = json!({"prompt": "x", "max_tokens": 6, "seed": 1});
    walk(
        "/v1/completions",
        &base,
        &[
            ("prompt", json!("y"), Works),
            ("prompt", json!([97, 98]), Works),
            ("model", json!("tiny"), Nothing),
            ("best_of", json!(2), Nothing),
            ("echo", json!(true), Works),
            ("frequency_penalty", json!(0.5), Works),
            ("logit_bias", json!({"97": 5}), Works),
            ("logprobs", json!(2), Works),
            ("max_tokens", json!(5), Works),
            ("n", json!(2), Works),
            ("presence_penalty", json!(0.5), Works),
            ("seed", json!(2), Works),
            ("stop", json!("q"), Works),
            ("stream", json!(true), Works),
            ("stream_options", json!({"include_usage": true}), Works),
            ("suffix", json!("end"), Refused),
            ("temperature", json!(0.3), Works),
            ("top_p", json!(0.5), Works),
            ("user", json!("u"), Nothing),
        ],
    );
}
