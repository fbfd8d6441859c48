//! OpenAI's request schemas, and Anthropic's, field by field. Each field works (the engine's request or the answer differs), is refused by
//! name, or is one of the few that by their meaning change nothing. Nothing is accepted and ignored.

use std::sync::atomic::Ordering;

use plimsoll_engine::testing::{Step, letters, limits};
use plimsoll_engine::{Limits, Request};
use serde_json::{Value, json};

use crate::common::{Answer, Server, config};

/// The effect of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// The field changes the engine's request or the answer.
    Works,
    /// The field states what holds already, or identifies the end user: it changes nothing.
    Nothing,
    /// The answer is a 400 that names the field.
    Refused,
}
use Fate::{Nothing, Refused, Works};

/// Returns the engine's request and the answer, without the parts that differ from one request to the next.
fn effect(server: &Server, path: &str, body: &Value) -> (Answer, String) {
    let before = server.observed.requests.lock().unwrap().len();
    let forms = || server.observed.constrained.load(Ordering::Acquire);
    let formed = forms();
    let answer = server.post(path, body);
    let mut asked: Vec<_> = server.observed.requests.lock().unwrap()[before..].to_vec();
    for request in &mut asked {
        request.received = None;
        // The seed is drawn if the request has none.
        if body["seed"].is_null() {
            request.sampling.seed = 0;
        }
    }
    let mut said: Vec<Value> = match answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event")) {
        true => {
            let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
            data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
        }
        false => vec![answer.json()],
    };
    said.iter_mut().for_each(strip);
    let effect = format!("{} {asked:?} {said:?}", forms() - formed);
    (answer, effect)
}

/// Removes ids and times, wherever they are.
fn strip(answer: &mut Value) {
    match answer {
        Value::Object(object) => {
            for name in ["id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at"] {
                object.remove(name);
            }
            object.values_mut().for_each(strip);
        }
        Value::Array(list) => list.iter_mut().for_each(strip),
        _ => {}
    }
}

fn walk(path: &str, base: &Value, fields: &[(&str, Value, Fate)]) {
    let server = Server::start(letters);
    walk_on(&server, path, base, fields);
    server.assert_idle();
}

fn walk_on(server: &Server, path: &str, base: &Value, fields: &[(&str, Value, Fate)]) {
    let (answer, plain) = effect(server, path, base);
    answer.ok();
    assert_eq!(effect(server, path, base).1, plain, "the same request has the same effect");
    for (name, value, fate) in fields {
        let mut body = base.clone();
        body[*name] = value.clone();
        // Some fields need another field.
        match *name {
            "stream_options" => body["stream"] = json!(true),
            "top_logprobs" if path == "/v1/responses" => body["include"] = json!(["message.output_text.logprobs"]),
            "top_logprobs" => body["logprobs"] = json!(true),
            "tool_choice" | "parallel_tool_calls" => body["tools"] = tools_of(path),
            "best_of" => body["n"] = value.clone(),
            _ => {}
        }
        let mut without = body.clone();
        without.as_object_mut().unwrap().remove(*name);
        let (_, expected) = effect(server, path, &without);
        let (answer, effect) = effect(server, path, &body);
        let found = match answer.status {
            200 if effect != expected => Works,
            200 => Nothing,
            400 => {
                assert!(names(&answer, path, name), "{name}: {}", answer.body);
                Refused
            }
            other => panic!("{name}: {value}: {other} {}", answer.body),
        };
        assert_eq!(found, *fate, "{path} {name} = {value}: {}", answer.body);
    }
    // An unknown field is refused like a known field that is not served.
    let mut body = base.clone();
    body["no_such_field"] = json!(1);
    assert!(names(&server.post(path, &body), path, "no_such_field"));
}

/// Whether an error names a field: as `param`, or in its message if the API has no `param`.
fn names(answer: &Answer, path: &str, name: &str) -> bool {
    assert_eq!(answer.status, 400, "{}", answer.body);
    if path == "/v1/messages" {
        let error = &answer.json()["error"];
        return error["type"] == "invalid_request_error" && error["message"].as_str().unwrap().contains(name);
    }
    let param = answer.error(400)["param"].clone();
    param.as_str().and_then(|param| param.split(['.', '[']).next()) == Some(name)
}

/// One tool in an API's own shape.
fn tools_of(path: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    match path {
        "/v1/messages" => json!([{"name": "f", "input_schema": schema}]),
        "/v1/responses" => json!([{"type": "function", "name": "f", "parameters": schema}]),
        _ => tools(),
    }
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
    let strict =
        json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object"}}}]);
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
            ("prediction", json!({"type": "content", "content": "x"}), Nothing),
            ("presence_penalty", json!(0.5), Works),
            ("prompt_cache_key", json!("k"), Nothing),
            ("prompt_cache_options", json!({"mode": "explicit"}), Nothing),
            ("prompt_cache_retention", json!("24h"), Nothing),
            ("reasoning_effort", json!("low"), Nothing),
            ("reasoning_effort", json!("none"), Nothing),
            ("reasoning_effort", json!("most"), Refused),
            ("response_format", json!({"type": "json_object"}), Works),
            ("response_format", schema, Works),
            ("response_format", json!({"type": "text"}), Nothing),
            ("safety_identifier", json!("s"), Nothing),
            ("seed", json!(2), Works),
            ("service_tier", json!("auto"), Nothing),
            ("service_tier", json!("flex"), Nothing),
            ("service_tier", json!("batch"), Refused),
            ("stop", json!("q"), Works),
            ("stop", json!(["q", "z"]), Works),
            ("store", json!(false), Nothing),
            ("store", json!(true), Nothing),
            ("stream", json!(true), Works),
            ("stream_options", json!({"include_usage": true}), Works),
            ("stream_options", json!({"include_obfuscation": true}), Refused),
            ("temperature", json!(0.3), Works),
            ("tool_choice", json!("required"), Works),
            ("tool_choice", json!("none"), Works),
            ("tool_choice", named, Works),
            ("tool_choice", json!("auto"), Nothing),
            ("tools", tools(), Works),
            ("tools", strict, Works),
            ("tools", json!([{"type": "custom", "custom": {"name": "f"}}]), Works),
            ("top_logprobs", json!(3), Works),
            ("top_p", json!(0.5), Works),
            ("user", json!("u"), Nothing),
            ("verbosity", json!("medium"), Nothing),
            ("verbosity", json!("low"), Nothing),
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

#[test]
fn responses() {
    let base = json!({"input": "x", "max_output_tokens": 6, "temperature": 0});
    let schema = json!({"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}});
    let strict = json!([{"type": "function", "name": "f", "strict": true, "parameters": {"type": "object"}}]);
    walk(
        "/v1/responses",
        &base,
        &[
            ("input", json!("y"), Works),
            ("input", json!([{"role": "user", "content": "y"}]), Works),
            ("model", json!("tiny"), Nothing),
            ("access_programs", json!({"cyber": "standard"}), Refused),
            // With `true` the response continues after the answer: `responses/background.rs`.
            ("background", json!(false), Nothing),
            ("background", json!("yes"), Refused),
            ("client_metadata", json!({"a": "b"}), Nothing),
            ("client_metadata", json!({"a": 1}), Refused),
            ("context_management", json!([{"type": "compaction"}]), Refused),
            ("conversation", json!("conv_1"), Refused),
            ("image", json!({"context_compression": "enabled"}), Refused),
            ("include", json!(["message.output_text.logprobs"]), Works),
            ("include", json!(["file_search_call.results"]), Refused),
            ("instructions", json!("be brief"), Works),
            ("max_output_tokens", json!(5), Works),
            ("max_tool_calls", json!(3), Works),
            ("metadata", json!({"a": "b"}), Works),
            ("moderation", json!({"model": "x"}), Refused),
            ("parallel_tool_calls", json!(false), Works),
            ("previous_response_id", json!("resp_none"), Refused),
            ("prompt", json!({"id": "x"}), Refused),
            ("prompt_cache_key", json!("k"), Works),
            ("prompt_cache_options", json!({"mode": "explicit"}), Nothing),
            ("prompt_cache_retention", json!("24h"), Nothing),
            ("reasoning", json!({"effort": "high"}), Works),
            ("safety_identifier", json!("s"), Works),
            ("service_tier", json!("auto"), Nothing),
            ("service_tier", json!("flex"), Nothing),
            ("service_tier", json!("batch"), Refused),
            ("store", json!(false), Works),
            ("stream", json!(true), Works),
            ("stream_options", json!({"include_obfuscation": true}), Refused),
            ("temperature", json!(0.3), Works),
            ("text", json!({"format": {"type": "json_object"}}), Works),
            ("text", schema, Works),
            ("tool_choice", json!("required"), Works),
            ("tool_choice", json!({"type": "function", "name": "f"}), Works),
            ("tools", tools_of("/v1/responses"), Works),
            ("tools", strict, Works),
            ("tools", json!([{"type": "web_search"}]), Refused),
            ("tools", json!([{"type": "web_search", "external_web_access": false}]), Works),
            ("top_logprobs", json!(3), Works),
            ("top_p", json!(0.5), Works),
            ("truncation", json!("disabled"), Nothing),
            ("truncation", json!("auto"), Works),
            ("user", json!("u"), Works),
        ],
    );
}

#[test]
fn messages() {
    let base = json!({
        "model": "tiny", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "x"}]
    });
    walk(
        "/v1/messages",
        &base,
        &[
            ("messages", json!([{"role": "user", "content": "y"}]), Works),
            ("max_tokens", json!(5), Works),
            ("cache_control", json!({"type": "ephemeral"}), Nothing),
            ("container", json!({"id": "x"}), Refused),
            ("context_management", json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}), Nothing),
            ("context_management", json!({"edits": [{"type": "clear_tool_uses_20250919"}]}), Refused),
            ("diagnostics", json!({"previous_message_id": "x"}), Refused),
            ("inference_geo", json!("eu"), Refused),
            ("metadata", json!({"user_id": "u"}), Nothing),
            ("output_config", json!({"effort": "max"}), Nothing),
            ("output_format", json!({"type": "json_schema", "schema": {"type": "object"}}), Works),
            ("service_tier", json!("auto"), Nothing),
            ("service_tier", json!("priority"), Refused),
            ("speed", json!("fast"), Refused),
            ("stop_sequences", json!(["q"]), Works),
            ("stream", json!(true), Works),
            ("system", json!("be brief"), Works),
            ("temperature", json!(0.3), Works),
            ("thinking", json!({"type": "disabled"}), Nothing),
            ("tool_choice", json!({"type": "any"}), Works),
            ("tool_choice", json!({"type": "none"}), Works),
            ("tools", tools_of("/v1/messages"), Works),
            ("tools", json!([{"type": "web_search_20250305", "name": "web_search"}]), Refused),
            ("top_k", json!(5), Works),
            ("top_p", json!(0.5), Works),
            ("user_profile_id", json!("x"), Refused),
            ("workspace_id", json!("x"), Refused),
        ],
    );
}

#[test]
fn embeddings() {
    let counts = |request: &Request| -> plimsoll_engine::testing::Script {
        let values = (0..8).map(|i| (request.prompt.len() * 7 + i * i) as f32).collect();
        Box::new(std::iter::once(Step::Pooled(values)))
    };
    let server = Server::with(config(), Limits { encoder: true, ..limits() }, counts);
    walk_on(
        &server,
        "/v1/embeddings",
        &json!({"input": "x"}),
        &[
            ("input", json!("yy"), Works),
            ("input", json!(["x", "yy"]), Works),
            ("input", json!([97, 98]), Works),
            ("input", json!([]), Refused),
            ("input", json!(vec!["x"; 2049]), Refused),
            ("model", json!("tiny"), Nothing),
            ("dimensions", json!(4), Works),
            ("dimensions", json!(9), Refused),
            ("encoding_format", json!("base64"), Works),
            ("encoding_format", json!("float"), Nothing),
            ("encoding_format", json!("int8"), Refused),
            ("user", json!("u"), Nothing),
        ],
    );
    for (input, words) in
        [(json!([]), "the list of inputs is empty"), (json!(vec!["x"; 2049]), "more than 2048 inputs")]
    {
        let error = server.post("/v1/embeddings", &json!({"input": input})).error(400);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    server.assert_idle();
}
