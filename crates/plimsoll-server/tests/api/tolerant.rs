//! Requests of other servers' clients are accepted: unknown fields, hints, other names of known fields, late system messages.

use plimsoll_engine::testing::{letters, limits};
use plimsoll_server::{ServerConfig, UnknownFields};
use serde_json::{Value, json};

use crate::common::{Server, config};

const HEADER: &str = "x-plimsoll-unknown-fields";

fn with(policy: UnknownFields) -> Server {
    Server::with(ServerConfig { unknown_fields: policy, ..config() }, limits(), letters)
}

fn completion(change: &Value) -> Value {
    let mut body = json!({"prompt": "abc", "max_tokens": 2, "seed": 1});
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    body
}

fn chat(change: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi", "colour": 1}], "max_tokens": 2});
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    body
}

#[test]
fn unknown_fields_are_named_in_a_header_and_counted() {
    let server = with(UnknownFields::Warn);
    let answer = server.post("/v1/completions", &completion(&json!({"beams": 3, "speed": null})));
    assert_eq!(answer.header(HEADER), Some("beams"), "null asks for nothing");
    answer.ok();
    // Unknown fields inside messages, at every API, and in streams.
    let answer = server.post("/v1/chat/completions", &chat(&json!({"stream": true, "x": 1})));
    assert_eq!(answer.header(HEADER), Some("messages[0].colour, x"));
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "y": 1});
    assert_eq!(server.post("/v1/messages", &body).header(HEADER), Some("y"));
    let body = json!({"input": "a", "max_output_tokens": 2, "z": 1});
    assert_eq!(server.post("/v1/responses", &body).header(HEADER), Some("z"));
    assert_eq!(server.post("/v1/completions", &completion(&json!({}))).header(HEADER), None);
    let page = server.get("/metrics");
    let page = page.ok_text();
    assert!(page.contains("plimsoll_http_unknown_fields_total 5\n"), "{page}");
}

#[test]
fn the_policy_may_refuse_or_ignore_unknown_fields() {
    let server = with(UnknownFields::Refuse);
    let error = server.post("/v1/completions", &completion(&json!({"beams": 3}))).error(400);
    assert_eq!((&error["param"], &error["code"]), (&json!("beams"), &json!("unknown_field")));
    let server = with(UnknownFields::Ignore);
    let answer = server.post("/v1/completions", &completion(&json!({"beams": 3})));
    assert_eq!(answer.header(HEADER), None);
    answer.ok();
}

#[test]
fn an_unsupported_value_of_a_known_field_is_refused_whatever_the_policy() {
    let server = with(UnknownFields::Ignore);
    for (change, param) in [
        (json!({"temperature": -1}), "temperature"),
        (json!({"typical_p": 0.5}), "typical_p"),
        (json!({"n_predict": -2}), "n_predict"),
        (json!({"use_beam_search": true}), "use_beam_search"),
    ] {
        assert_eq!(server.post("/v1/completions", &completion(&change)).error(400)["param"], param);
    }
}

#[test]
fn hints_change_nothing_whatever_their_value() {
    let server = Server::start(letters);
    let text = |change: &Value| server.post("/v1/completions", &completion(change)).ok()["choices"][0]["text"].clone();
    let plain = text(&json!({}));
    for change in [
        json!({"store": true, "verbosity": "low", "safe_prompt": true, "keep_alive": "5m", "cache_prompt": true}),
        json!({"ttl": 300, "slot_id": -1, "id_slot": 0, "prompt_cache_retention": "24h", "typical_p": 1.0}),
        json!({"prediction": {"type": "content", "content": "x"}, "provider_specific_fields": {"a": [1]}}),
    ] {
        assert_eq!(text(&change), plain, "{change}");
    }
    let mark = json!({"type": "ephemeral", "scope": "global"});
    let body = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}],
                      "system": [{"type": "text", "text": "s", "cache_control": mark}]});
    server.post("/v1/messages", &body).ok();
}

#[test]
fn other_names_of_known_fields_mean_the_same() {
    let server = Server::start(letters);
    let asked = |change: &Value| {
        let mut body = completion(change);
        body.as_object_mut().unwrap().remove("max_tokens");
        server.post("/v1/completions", &body).ok();
        server.last_request()
    };
    assert_eq!(asked(&json!({"n_predict": 3})).max_tokens, 3);
    assert_eq!(asked(&json!({"num_predict": 4, "max_tokens": 4})).max_tokens, 4);
    assert_eq!(asked(&json!({"n_predict": -1})).max_tokens, asked(&json!({})).max_tokens);
    assert_eq!(asked(&json!({"repeat_penalty": 1.25})).sampling.repetition_penalty, 1.25);
    assert_eq!(asked(&json!({"top_p": 0})).sampling.top_p, f32::MIN_POSITIVE);
    for (change, param) in [
        (json!({"repeat_penalty": 1.5, "repetition_penalty": 1.25}), "repeat_penalty"),
        (json!({"n_predict": 3}), "n_predict"),
    ] {
        let words = server.post("/v1/completions", &completion(&change)).error(400);
        assert!(words["message"].as_str().unwrap().contains("give one of them"), "{words}");
        assert_eq!(words["param"], param);
    }
}

#[test]
fn think_and_reasoning_set_what_enable_thinking_and_reasoning_effort_do() {
    let template = "{{ enable_thinking }}/{{ reasoning_effort }}";
    let server = templated(template);
    let said = |change: Value| {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
        let mut body = body.as_object().unwrap().clone();
        body.extend(change.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body.into()).ok();
        text(&server)
    };
    assert_eq!(said(json!({"think": false})), said(json!({"enable_thinking": false})));
    assert_eq!(said(json!({"think": "low"})), said(json!({"reasoning_effort": "low"})));
    assert_eq!(said(json!({"reasoning": {"effort": "high"}})), said(json!({"reasoning_effort": "high"})));
    let both = json!({"messages": [{"role": "user", "content": "Hi"}], "think": true, "enable_thinking": false});
    assert_eq!(server.post("/v1/chat/completions", &both).error(400)["param"], "think");
}

#[test]
fn a_gbnf_grammar_holds_the_answer_or_is_refused_with_its_line() {
    let server = Server::start(letters);
    let bound = || server.observed.constrained.load(std::sync::atomic::Ordering::Acquire);
    server.post("/v1/completions", &completion(&json!({"grammar": "root ::= [a-c]+ \"!\""}))).ok();
    assert_eq!(bound(), 1);
    let error = server.post("/v1/completions", &completion(&json!({"grammar": "root ::= (\"a\""}))).error(400);
    assert_eq!(error["param"], "grammar");
    assert!(error["message"].as_str().unwrap().contains("line 1: ')' is missing"), "{error}");
    let two = json!({"grammar": "root ::= \"a\"", "guided_regex": "a"});
    assert_eq!(server.post("/v1/completions", &completion(&two)).error(400)["param"], "grammar");
}

/// A template that refuses late system messages, as Qwen3.5's does.
const GUARDED: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";

fn templated(template: &str) -> Server {
    Server::over(template, config(), limits(), letters)
}

fn text(server: &Server) -> String {
    let bytes = server.last_request().prompt.iter().map(|id| u8::try_from(*id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn late_system_messages_are_folded_where_the_template_refuses_them() {
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = json!([
        say("system", "s"),
        say("user", "a"),
        say("assistant", "b"),
        say("system", "t"),
        say("developer", "d"),
        say("user", "c")
    ]);
    let body = json!({"messages": messages, "max_tokens": 1});
    let server = templated(GUARDED);
    server.post("/v1/chat/completions", &body).ok();
    assert_eq!(text(&server), "[system]s\n\nt\n\nd[user]a[assistant]b[user]c");
    // A template that accepts late system messages has them where they stand.
    let server = templated("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}");
    server.post("/v1/chat/completions", &body).ok();
    assert_eq!(text(&server), "[system]s[user]a[assistant]b[system]t[system]d[user]c");
}

#[test]
fn late_system_messages_are_folded_at_all_three_apis() {
    let server = templated(GUARDED);
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let input = [say("user", "a"), say("assistant", "b"), say("system", "t"), say("user", "c")];
    let body = json!({"model": "tiny", "instructions": "s", "input": input, "max_output_tokens": 1});
    server.post("/v1/responses", &body).ok();
    assert_eq!(text(&server), "[system]s\n\nt[user]a[assistant]b[user]c");
    let body = json!({"model": "tiny", "system": "s", "messages": input, "max_tokens": 1});
    server.post("/v1/messages", &body).ok();
    assert_eq!(text(&server), "[system]s\n\nt[user]a[assistant]b[user]c");
    // Without a first system message the text moves to the beginning.
    let body = json!({"messages": input, "max_tokens": 1});
    server.post("/v1/chat/completions", &body).ok();
    assert_eq!(text(&server), "[system]t[user]a[assistant]b[user]c");
}

#[test]
fn a_template_that_refuses_for_another_reason_still_refuses() {
    let server = templated("{{ raise_exception('never') }}");
    let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "t"}]);
    let error = server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 1})).error(400);
    assert!(error["message"].as_str().unwrap().contains("never"), "{error}");
}
