//! Ollama's API: chat and generate, whole and as lines; refused requests.

mod catalog;
mod refused;

use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{FinishReason, Request};
use serde_json::{Value, json};

use crate::common::{Answer, Server, config};

const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}:\
{{ m.reasoning_content or '' }}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.arguments.city }}\
</tool_call>{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }} {{ m.name }}]{% endif %}\n{% endfor %}";
const THINKS: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}<|im_start|>\
{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}";

/// A server with a scripted model: it writes `text`, three characters a token, and stops.
fn says(template: &str, text: &'static str) -> Server {
    let script = move |_: &Request| -> Script {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(3).map(|piece| piece.iter().collect()).collect();
        let tokens = pieces.into_iter().map(|piece| Step::Token(97, piece));
        Box::new(tokens.chain([Step::Finish(FinishReason::Stop, None)]))
    };
    Server::over(template, config(), limits(), script)
}

/// Returns the lines of a stream, of which only the last says `done`.
fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("content-type"), Some("application/x-ndjson"));
    assert!(answer.body.ends_with('\n'));
    let lines: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let done: Vec<bool> = lines.iter().map(|line| line["done"].as_bool().unwrap()).collect();
    assert!(done.last() == Some(&true) && !done[..done.len() - 1].contains(&true), "{done:?}");
    lines
}

/// Returns the error of an answer with this status, in Ollama's shape.
fn error(answer: &Answer, status: u16) -> String {
    assert_eq!(answer.status, status, "{}", answer.body);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let body = answer.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    body["error"].as_str().unwrap().to_owned()
}

/// Returns the content of a chat's lines, as one message.
fn joined(lines: &[Value]) -> Value {
    let text = |name: &str| lines.iter().filter_map(|line| line["message"][name].as_str()).collect::<String>();
    let calls: Vec<Value> =
        lines.iter().flat_map(|line| line["message"]["tool_calls"].as_array().cloned().unwrap_or_default()).collect();
    json!({"content": text("content"), "thinking": text("thinking"), "calls": without_ids(&calls.into())})
}

fn without_ids(calls: &Value) -> Value {
    let function = |call: &Value| {
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        call["function"].clone()
    };
    calls.as_array().into_iter().flatten().map(function).collect()
}

fn hello(more: &Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Returns the prompt of the last request at the engine; tokens that are no bytes are `#`.
fn prompt(server: &Server) -> String {
    let ids = server.last_request().prompt;
    let bytes = ids.iter().map(|id| u8::try_from(*id).unwrap_or(b'#')).collect();
    String::from_utf8(bytes).unwrap()
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])
}

#[test]
fn chat_streams_lines_unless_the_body_says_otherwise() {
    let server = Server::start(letters);
    let body = hello(&json!({"options": {"num_predict": 5, "seed": 7, "temperature": 0}}));
    let streamed = lines(&server.post("/api/chat", &body));
    let mut once = body.clone();
    once["stream"] = false.into();
    let whole = server.post("/api/chat", &once).ok();
    assert_eq!(joined(&streamed)["content"], whole["message"]["content"]);
    assert_eq!(whole["message"]["content"].as_str().unwrap().len(), 5);
    for last in [streamed.last().unwrap(), &whole] {
        assert_eq!(last["model"], "tiny");
        assert_eq!(last["message"]["role"], "assistant");
        assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("length")));
        assert_eq!(last["eval_count"], 5);
        assert_eq!(last["prompt_eval_count"], server.last_request().prompt.len());
        let duration = |name: &str| last[name].as_u64().unwrap_or_else(|| panic!("{name}: {last}"));
        let parts = ["load_duration", "prompt_eval_duration", "eval_duration"].map(duration);
        assert!(duration("total_duration") >= parts.iter().sum(), "{last}");
        let created = last["created_at"].as_str().unwrap();
        assert!(created.len() == 27 && created.starts_with("20") && created.ends_with('Z'), "{created}");
    }
    assert!(streamed[0].get("eval_count").is_none() && streamed[0].get("done_reason").is_none());
    server.assert_idle();
}

#[test]
fn options_reach_the_engine() {
    let server = Server::start(letters);
    let options = json!({
        "num_predict": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 42, "stop": ["x", "yz"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "num_ctx": 16, "num_thread": 4,
        "repeat_last_n": -1, "mirostat": 0, "typical_p": 1.0
    });
    server.post("/api/chat", &hello(&json!({"stream": false, "options": options}))).ok();
    let request = server.last_request();
    let sampling = &request.sampling;
    assert_eq!((request.max_tokens, request.stop), (3, vec!["x".to_owned(), "yz".to_owned()]));
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, 7, 0.5));
    assert_eq!((sampling.min_p, sampling.seed, sampling.repetition_penalty), (0.25, 42, 1.5));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
    // Without its window a penalty has nothing to count.
    let options = json!({"num_predict": 3, "repeat_penalty": 1.5, "repeat_last_n": 0});
    server.post("/api/chat", &hello(&json!({"stream": false, "options": options}))).ok();
    assert_eq!(server.last_request().sampling.repetition_penalty, 1.0);
}

#[test]
fn a_number_of_tokens_beyond_the_context_fills_it() {
    let server = Server::start(letters);
    let context = limits().max_req_total_len;
    for n in [json!(1_000_000), json!(-1), json!(-2)] {
        let answer = server.post("/api/chat", &hello(&json!({"stream": false, "options": {"num_predict": n}}))).ok();
        let request = server.last_request();
        assert_eq!(request.max_tokens + request.prompt.len() as u32, context, "{n}");
        assert_eq!(answer["done_reason"], "length");
    }
}

#[test]
fn calls_come_whole_with_arguments_as_objects() {
    let text = "Well.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    let server = says(TEMPLATE, text);
    let body = hello(&json!({"tools": tools()}));
    let streamed = lines(&server.post("/api/chat", &body));
    let mut once = body.clone();
    once["stream"] = false.into();
    let whole = server.post("/api/chat", &once).ok();
    let calls = json!([
        {"index": 0, "name": "weather", "arguments": {"city": "Rome"}},
        {"index": 1, "name": "weather", "arguments": {}}
    ]);
    assert_eq!(joined(&streamed)["calls"], calls);
    assert_eq!(without_ids(&whole["message"]["tool_calls"]), calls);
    assert_eq!((&whole["message"]["content"], &whole["done_reason"]), (&json!("Well."), &json!("stop")));
    assert_eq!(joined(&streamed)["content"], "Well.");
    server.assert_idle();
}

#[test]
fn results_find_their_calls() {
    let server = says(TEMPLATE, "ok");
    let call = |city: &str| json!({"function": {"name": "weather", "arguments": {"city": city}}});
    let messages = json!([
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("Rome"), call("Oslo")]},
        {"role": "tool", "tool_name": "weather", "content": "hot"},
        {"role": "tool", "tool_name": "weather", "content": "cold"}
    ]);
    server.post("/api/chat", &json!({"messages": messages, "stream": false})).ok();
    let said = prompt(&server);
    assert!(said.contains("assistant:Hm.<tool_call>000000001 Rome</tool_call><tool_call>000000002 Oslo</tool_call>"));
    assert!(said.contains("tool:hot[000000001 weather]tool:cold[000000002 weather]"), "{said}");
}

#[test]
fn reasoning_is_thinking() {
    let server = says(THINKS, "Hm.\n</think>\n\nRome.");
    for think in [json!({}), json!({"think": true}), json!({"think": "low"})] {
        let streamed = lines(&server.post("/api/chat", &hello(&think)));
        assert_eq!(joined(&streamed), json!({"content": "Rome.", "thinking": "Hm.", "calls": []}), "{think}");
    }
    let body = json!({"prompt": "Hi", "stream": false});
    let answer = server.post("/api/generate", &body).ok();
    assert_eq!((&answer["thinking"], &answer["response"]), (&json!("Hm."), &json!("Rome.")));
    let server = says(THINKS, "Rome.");
    let answer = server.post("/api/chat", &hello(&json!({"think": false, "stream": false}))).ok();
    assert_eq!(answer["message"], json!({"role": "assistant", "content": "Rome."}));
    assert!(prompt(&server).ends_with("<think>\n\n</think>\n\n"));
}

#[test]
fn generate_goes_through_the_template_unless_it_is_raw() {
    let server = Server::start(letters);
    let body = json!({"model": "tiny:latest", "prompt": "Hi", "system": "Be kind.", "options": {"num_predict": 4}});
    let streamed = lines(&server.post("/api/generate", &body));
    assert!(prompt(&server).contains("system\nBe kind.") && prompt(&server).contains("user\nHi"));
    assert_eq!(streamed.last().unwrap()["model"], "tiny:latest");
    let text: String = streamed.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(text.len(), 4);
    assert!(streamed[0].get("message").is_none());
    let body = json!({"prompt": "Once", "raw": true, "stream": false, "options": {"num_predict": 4}});
    let answer = server.post("/api/generate", &body).ok();
    assert_eq!((prompt(&server), answer["response"].as_str().unwrap().len()), ("Once".into(), 4));
    assert_eq!(answer["done_reason"], "length");
    server.assert_idle();
}

#[test]
fn without_a_prompt_the_model_is_loaded() {
    let server = Server::start(letters);
    for (path, body) in [("/api/generate", json!({"model": "tiny"})), ("/api/chat", json!({"messages": []}))] {
        let streamed = lines(&server.post(path, &body));
        assert_eq!((streamed.len(), &streamed[0]["done_reason"]), (1, &json!("load")));
        let mut once = body.clone();
        (once["stream"], once["keep_alive"]) = (false.into(), "5m".into());
        assert_eq!(server.post(path, &once).ok()["done"], true);
    }
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn format_is_compiled_and_an_empty_one_asks_for_nothing() {
    let server = Server::start(letters);
    for format in [json!("json"), json!({"type": "object"}), json!("")] {
        let options = json!({"num_predict": 2});
        let answer = server.post("/api/chat", &hello(&json!({"format": format, "stream": false, "options": options})));
        assert_eq!(answer.status, 200, "{format}: {}", answer.body);
    }
    let said = error(&server.post("/api/chat", &hello(&json!({"format": {"type": "colour"}}))), 400);
    assert!(said.contains("format") && said.contains("colour"), "{said}");
}

#[test]
fn log_probabilities_are_reported_token_by_token() {
    let server = Server::start(letters);
    let body = hello(&json!({"logprobs": true, "top_logprobs": 2, "options": {"num_predict": 3}}));
    let streamed = lines(&server.post("/api/chat", &body));
    assert_eq!(server.last_request().logprobs, Some(2));
    let tokens: Vec<&Value> = streamed.iter().filter_map(|line| line["logprobs"].as_array()).flatten().collect();
    assert_eq!(tokens.len(), 3);
    assert!(tokens.iter().all(|token| token["token"].is_string() && token["logprob"].is_number()), "{tokens:?}");
}

/// Python's client ends a line at each of these characters.
#[test]
fn no_character_of_a_text_ends_a_line() {
    let text = "a\u{2028}b\u{2029}c\u{85}d\ne";
    let server = says(TEMPLATE, text);
    let answer = server.post("/api/chat", &hello(&json!({})));
    assert!(!answer.body.contains(['\u{2028}', '\u{2029}', '\u{85}']));
    assert_eq!(joined(&lines(&answer))["content"], text);
}
