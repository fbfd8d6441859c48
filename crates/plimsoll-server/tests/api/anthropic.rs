//! `/v1/messages` and `/v1/messages/count_tokens`: blocks in, blocks out, whole and streamed, and errors in Anthropic's shape.

use std::time::Duration;

use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{FinishReason, Request};
use serde_json::{Value, json};

use crate::common::{self, Answer, Server, config, post};

/// A template that writes every part of a conversation, and opens reasoning unless it is switched off.
const ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% if m.reasoning_content %}<r>{{ m.reasoning_content }}</r>{% endif %}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}\n\
{% endfor %}<|im_start|>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}";
const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}\n{% endfor %}";

/// A server with a scripted model: it writes `text`, `pace` characters a token, and ends with `finish` and `stop`.
fn says(template: &str, text: &'static str, pace: usize, finish: FinishReason, stop: Option<&'static str>) -> Server {
    let script = move |_: &Request| -> Script {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(pace).map(|piece| piece.iter().collect()).collect();
        let tokens = pieces.into_iter().map(|piece| Step::Token(97, piece));
        Box::new(tokens.chain([Step::Finish(finish, stop.map(str::to_owned))]))
    };
    let mut large = limits();
    large.max_req_total_len = 4096;
    large.max_total_token_num = 4096;
    Server::over(template, config(), large, script)
}

fn ask(more: &Value) -> Value {
    let mut body = json!({"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn tools() -> Value {
    json!([{"name": "weather", "description": "Weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

fn prompt_text(server: &Server) -> String {
    let ids = server.last_request().prompt;
    String::from_utf8(ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect()).unwrap()
}

/// Returns the error of an answer with this status and asserts Anthropic's shape.
fn error(answer: &Answer, status: u16) -> Value {
    assert_eq!(answer.status, status, "{}", answer.body);
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
    assert_eq!(body["request_id"].as_str(), answer.header("request-id"), "{body}");
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    body["error"].clone()
}

/// Returns the events of a stream. Each event's name must be its type.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    assert!(answer.body.ends_with("\n\n") && !answer.body.contains("[DONE]"), "{}", answer.body);
    let event = |block: &str| {
        let (name, data) = block.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    answer.body.split("\n\n").filter(|block| !block.is_empty()).map(event).collect()
}

/// Returns a stream's message, assembled as Anthropic's client does; asserts every rule of the events' order.
fn streamed(server: &Server, more: &Value) -> Value {
    let mut body = ask(more);
    body["stream"] = true.into();
    let events = events(&server.post("/v1/messages", &body));
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events[1]["type"], "ping");
    let mut message = events[0]["message"].clone();
    let (mut open, mut arguments) = (false, String::new());
    for event in &events[2..] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!open && event["index"] == content.len(), "{event}");
                content.push(event["content_block"].clone());
                (open, arguments) = (true, String::new());
            }
            "content_block_delta" => {
                assert!(open && event["index"] == content.len() - 1, "{event}");
                let block = content.last_mut().unwrap();
                let (field, piece) = match event["delta"]["type"].as_str().unwrap() {
                    "text_delta" => ("text", &event["delta"]["text"]),
                    "thinking_delta" => ("thinking", &event["delta"]["thinking"]),
                    "signature_delta" => ("signature", &event["delta"]["signature"]),
                    "input_json_delta" => {
                        arguments += event["delta"]["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("odd delta {other}"),
                };
                block[field] = (block[field].as_str().unwrap().to_owned() + piece.as_str().unwrap()).into();
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open) && event["index"] == content.len() - 1, "{event}");
                let block = content.last_mut().unwrap();
                if block["type"] == "tool_use" && !arguments.is_empty() {
                    block["input"] =
                        serde_json::from_str(&arguments).unwrap_or_else(|_| json!({"INVALID_JSON": arguments}));
                }
            }
            "message_delta" => {
                assert!(!open);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" | "ping" => {}
            other => panic!("odd event {other}"),
        }
    }
    assert_eq!(events[events.len() - 2]["type"], "message_delta");
    assert_eq!(events[events.len() - 1]["type"], "message_stop");
    without_ids(message)
}

fn whole(server: &Server, more: &Value) -> Value {
    without_ids(server.post("/v1/messages", &ask(more)).ok())
}

/// Removes ids, which differ from answer to answer, after a check of their format.
fn without_ids(mut message: Value) -> Value {
    let id = message["id"].take();
    assert!(id.as_str().unwrap().starts_with("msg_"), "{id}");
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].as_str().unwrap().starts_with("toolu_"), "{block}");
            block["id"] = Value::Null;
        }
    }
    message
}

const CALLS: &str = "On it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn a_message_has_anthropics_shape() {
    let server = says(HERMES, "Hello!", 2, FinishReason::Stop, None);
    let message = whole(&server, &json!({"system": "Be kind."}));
    let usage = json!({"input_tokens": 22, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}, "output_tokens": 3, "service_tier": "standard"});
    let expected = json!({"id": null, "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "text", "text": "Hello!"}], "stop_reason": "end_turn", "stop_sequence": null, "usage": usage});
    assert_eq!(message, expected);
    assert_eq!(prompt_text(&server), "system:Be kind.user:Hi");
    assert_eq!(streamed(&server, &json!({"system": "Be kind."})), message);
    server.assert_idle();
}

#[test]
fn every_block_reaches_the_template() {
    let server = says(ALL, "ok", 9, FinishReason::Stop, None);
    let call = |id: &str, city: &str| json!({"type": "tool_use", "id": id, "name": "weather", "input": {"city": city}});
    let mark = json!({"type": "ephemeral", "ttl": "1h"});
    let body = ask(&json!({
        "system": [{"type": "text", "text": "Be kind.", "cache_control": mark}, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "citations": null}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                {"type": "text", "text": "Let me see."}, call("a", "Oslo"), call("b", "Rome")]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "is_error": true,
                 "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "idea"}]},
                {"type": "text", "text": "And?"}]}
        ],
        "tools": [{"type": "custom", "name": "weather", "input_schema": {"type": "object"}, "cache_control": mark}],
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "ann"}, "service_tier": "auto", "speed": "standard",
        "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "cache_control": {"type": "ephemeral"}
    }));
    server.post("/v1/messages", &body).ok();
    assert_eq!(
        prompt_text(&server),
        "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\"}}}]\
         [system]Be kind.\nBe brief.[user]Hi\nWeather?[assistant]Let me see.<r>Hm.</r>\
         <tool_call>weather{\"city\": \"Oslo\"}</tool_call><tool_call>weather{\"city\": \"Rome\"}</tool_call>\
         [tool]rain[tool]Error: no\nidea[user]And?<think>\n\n</think>\n\n"
    );
    let request = server.last_request();
    assert_eq!((request.stop, request.max_tokens, request.sampling.top_k), (vec!["END".to_owned()], 300, 5));
    assert!((request.sampling.temperature - 0.5).abs() < 1e-6 && (request.sampling.top_p - 0.9).abs() < 1e-6);
    // The counted prompt is the computed prompt.
    let mut counted = body;
    for field in ["max_tokens", "metadata", "service_tier", "stop_sequences", "temperature", "top_p", "top_k"] {
        counted.as_object_mut().unwrap().remove(field);
    }
    let count = server.post("/v1/messages/count_tokens", &counted).ok();
    assert_eq!(count, json!({"input_tokens": request.prompt.len()}));
    assert_eq!(server.observed.requests.lock().unwrap().len(), 1, "counting computes nothing");
    server.assert_idle();
}

/// Prefill: the answer begins with the assistant's last turn, and the message has the rest.
#[test]
fn the_assistants_last_turn_is_gone_on_with() {
    let server = says(ALL, " is blue.", 4, FinishReason::Stop, None);
    let turn = json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "The sky"}]);
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": turn}]);
    let body = ask(&json!({"system": "Be kind.", "messages": messages}));
    let message = server.post("/v1/messages", &body).ok();
    let text = prompt_text(&server);
    assert!(text.starts_with("[system]Be kind.[user]Hi[assistant]The sky") && text.ends_with("The sky"), "{text}");
    assert_eq!(message["content"], json!([{"type": "text", "text": " is blue."}]));
    let mut counted = body;
    counted.as_object_mut().unwrap().remove("max_tokens");
    let count = server.post("/v1/messages/count_tokens", &counted).ok();
    assert_eq!(count["input_tokens"], server.last_request().prompt.len());
}

#[test]
fn calls_come_as_blocks_in_their_order() {
    for pace in [1, 7, 1000] {
        let server = says(HERMES, CALLS, pace, FinishReason::Stop, None);
        let message = whole(&server, &json!({"tools": tools()}));
        let call = |city: &str| json!({"type": "tool_use", "id": null, "name": "weather", "input": {"city": city}});
        assert_eq!(message["content"], json!([{"type": "text", "text": "On it."}, call("Paris"), call("Rome")]));
        assert_eq!(message["stop_reason"], "tool_use");
        assert_eq!(streamed(&server, &json!({"tools": tools()})), message, "pace {pace}");
        let one = json!({"tools": tools(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
        let message = whole(&server, &one);
        assert_eq!(message["content"].as_array().unwrap().len(), 2);
        assert_eq!(streamed(&server, &one), message);
        let none = json!({"tools": tools(), "tool_choice": {"type": "none"}});
        let message = whole(&server, &none);
        assert_eq!(message["content"], json!([{"type": "text", "text": CALLS}]));
        assert_eq!((streamed(&server, &none), &message["stop_reason"]), (message.clone(), &json!("end_turn")));
        assert!(!prompt_text(&server).contains("weather"));
        server.assert_idle();
    }
    // A call that is cut: its arguments are no object, and their text is kept.
    let cut = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci";
    let server = says(HERMES, cut, 3, FinishReason::Length, None);
    let message = whole(&server, &json!({"tools": tools()}));
    assert_eq!(message["content"][0]["input"], json!({"INVALID_JSON": "{\"ci"}));
    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(streamed(&server, &json!({"tools": tools()})), message);
}

#[test]
fn reasoning_are_blocks() {
    for pace in [1, 5, 1000] {
        let server = says(ALL, "Hm.\nYes.\n</think>\n\nParis.", pace, FinishReason::Stop, None);
        let message = whole(&server, &json!({}));
        let reasoning = json!({"type": "thinking", "thinking": "Hm.\nYes.", "signature": "unsigned"});
        assert_eq!(message["content"], json!([reasoning, {"type": "text", "text": "Paris."}]));
        assert_eq!(streamed(&server, &json!({})), message);
        let adaptive = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
        let message = whole(&server, &adaptive);
        assert_eq!(message["content"], json!([{"type": "text", "text": "Paris."}]));
        assert_eq!(streamed(&server, &adaptive), message);
        let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 20}});
        assert_eq!(whole(&server, &enabled)["content"][0], reasoning);
        let off = json!({"thinking": {"type": "disabled"}});
        let message = whole(&server, &off);
        assert_eq!(message["content"][0]["text"], "Hm.\nYes.\n</think>\n\nParis.");
        assert_eq!(streamed(&server, &off), message);
    }
}

#[test]
fn every_reason_to_stop() {
    for (finish, stop, reason) in [
        (FinishReason::Stop, None, "end_turn"),
        (FinishReason::Stop, Some("END"), "stop_sequence"),
        (FinishReason::Length, None, "max_tokens"),
    ] {
        let server = says(HERMES, "abc", 1, finish, stop);
        let message = whole(&server, &json!({}));
        assert_eq!((&message["stop_reason"], message["stop_sequence"].as_str()), (&json!(reason), stop));
        assert_eq!(streamed(&server, &json!({})), message);
    }
    // The request asks for more tokens than the context has left. The answer fills the context, and the stop reason says this.
    let server = Server::start(letters);
    let message = server.post("/v1/messages", &ask(&json!({"max_tokens": 4000}))).ok();
    assert_eq!(message["stop_reason"], "model_context_window_exceeded");
    let usage = &message["usage"];
    assert_eq!(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap(), 512);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(600)}]});
    error(&server.post("/v1/messages", &ask(&long)), 400);
}

#[test]
fn what_came_from_the_cache_is_counted_apart_where_a_mark_asks_for_it() {
    let server = Server::start(|_| {
        Box::new([Step::Cached(4), Step::Token(97, "a".into()), Step::Finish(FinishReason::Stop, None)].into_iter())
    });
    let marked = json!({"cache_control": {"type": "ephemeral"}});
    let (plain, counted) = (whole(&server, &json!({})), whole(&server, &marked));
    let all = plain["usage"]["input_tokens"].as_u64().unwrap();
    assert_eq!(plain["usage"]["cache_read_input_tokens"], 0);
    assert_eq!(counted["usage"]["cache_read_input_tokens"], 4);
    assert_eq!(counted["usage"]["input_tokens"], all - 4);
    assert_eq!(streamed(&server, &marked)["usage"], counted["usage"]);
    let count = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.post("/v1/messages/count_tokens", &count).ok()["input_tokens"], all);
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let server = Server::start(letters);
    let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let image = json!([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]);
    let tool = |more: Value| {
        let mut tool = json!({"name": "f", "input_schema": {"type": "object"}});
        more.as_object().unwrap().iter().for_each(|(key, value)| tool[key] = value.clone());
        json!({"tools": [tool]})
    };
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    let both_formats = json!({"output_format": format, "output_config": {"format": format}});
    for (change, says) in [
        (message(image.clone()), "messages[0].content[0].type is `image`: the served model `tiny` takes no images"),
        (message(json!([{"type": "document"}])), "source is missing"),
        (message(json!([{"type": "tool_use", "id": "a", "name": "f", "input": {}}])), "tool_use"),
        (message(json!([{"type": "tool_result", "tool_use_id": "a"}])), "no tool_use before it"),
        (message(json!([])), "messages[0].content is empty"),
        (message(json!(5)), "messages[0].content"),
        (message(json!([{"type": "text", "text": "x", "citations": [{}]}])), "messages[0].content[0].citations"),
        (message(json!([{"type": "text", "text": "x", "cache_control": {"type": "eternal"}}])), "cache_control.type"),
        (json!({"messages": []}), "messages is empty"),
        (json!({"messages": null}), "messages is missing"),
        (json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role is `wizard`"),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}),
            "the results come next",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}),
            "redacted",
        ),
        (json!({"system": image}), "system[0].type"),
        (json!({"max_tokens": null}), "max_tokens is missing"),
        (json!({"max_tokens": 0}), "max_tokens must be at least 1"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"stop_sequences": "x"}), "stop_sequences"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens is missing"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 300}}), "below max_tokens"),
        (json!({"thinking": {"type": "between_tools"}}), "thinking.type"),
        (json!({"thinking": {"type": "adaptive", "display": "short"}}), "thinking.display"),
        (json!({"output_config": {"effort": "most"}}), "output_config.effort"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema is missing"),
        (json!({"output_format": {"type": "json_schema"}}), "output_format.schema is missing"),
        (both_formats, "two names of one thing"),
        (json!({"messages": [{"role": "user", "content": "x".repeat(700)}]}), "prompt is too long: "),
        (json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}), "colour"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice is any, but there are no tools"),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), "tool_choice names `f`"),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema is missing"),
        (tool(json!({"defer_loading": true})), "tools[0].defer_loading"),
        (tool(json!({"allowed_callers": ["code_execution_20250825"]})), "tools[0].allowed_callers"),
        (tool(json!({"input_examples": [{}]})), "tools[0].input_examples"),
        (tool(json!({"eager_input_streaming": false})), "tools[0].eager_input_streaming"),
        (json!({"container": "x"}), "container"),
        (json!({"speed": "fast"}), "speed"),
        (json!({"service_tier": "priority"}), "service_tier"),
        (json!({"mcp_servers": []}), "unknown field `mcp_servers`"),
    ] {
        let answer = server.post("/v1/messages", &ask(&change));
        let refused = error(&answer, 400);
        assert_eq!(
            (&refused["type"], answer.header("x-should-retry")),
            (&json!("invalid_request_error"), Some("false"))
        );
        assert!(refused["message"].as_str().unwrap().contains(says), "{change}: {refused}");
    }
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn errors_of_every_layer_have_anthropics_shape() {
    let server = Server::start(letters);
    let with = |head: &str| {
        let body = ask(&json!({})).to_string();
        server
            .send(post("/v1/messages", &body).replace("host: localhost", &format!("host: localhost\r\n{head}")))
            .answer()
    };
    with("anthropic-version: 2023-06-01\r\nx-api-key: k\r\nanthropic-beta: a,b").ok();
    assert!(error(&with("anthropic-version: 2031-01-01"), 400)["message"].as_str().unwrap().contains("2023-06-01"));
    let unknown = error(&server.post("/v1/messages", &ask(&json!({"model": "claude"}))), 404);
    assert_eq!(unknown["type"], "not_found_error");
    assert_eq!(error(&server.get("/v1/messages"), 405)["type"], "invalid_request_error");
    assert_eq!(error(&server.get("/v1/messages/batches"), 404)["type"], "not_found_error");
    error(&server.post_text("/v1/messages", "{"), 400);
    let large = server.send(
        "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n",
    );
    assert_eq!(error(&{ large }.answer(), 413)["type"], "request_too_large");
    error(&with(&format!("x-request-id: {}", "x".repeat(200))), 400);
    assert_eq!(with("x-request-id: mine").header("request-id"), Some("mine"));
    // Anthropic's client continues without a thread if the error has these words.
    let threads = error(&server.post("/v1/messages", &ask(&json!({"thread": {"type": "create"}}))), 400);
    assert_eq!(threads["details"]["error_code"], "thread_unsupported_request");
    // Other routes keep their error shape.
    server.get("/v1/nothing").error(404);
    // Full, failed and shut down.
    let server = Server::start(|_| Box::new(std::iter::empty::<Step>()));
    let busy: Vec<_> = (0..16).map(|_| server.send(post("/v1/messages", &ask(&json!({})).to_string()))).collect();
    common::eventually("all places are taken", || server.engine.reserved().1 == 16);
    let full = server.post("/v1/messages", &ask(&json!({})));
    assert_eq!((full.header("retry-after"), &error(&full, 429)["type"]), (Some("1"), &json!("rate_limit_error")));
    assert_eq!(full.header("x-should-retry"), None, "another time is worth a try");
    drop(busy);
    server.assert_idle();
    server.engine.drain();
    let draining = server.post("/v1/messages", &ask(&json!({})));
    assert_eq!(error(&draining, 529)["type"], "overloaded_error");
    assert!(draining.header("retry-after").is_some());
}

#[test]
fn a_stream_always_ends() {
    let server = Server::start(|_| {
        Box::new([Step::Token(97, "a".into()), Step::Fail("kernel panic in layer 3".into())].into_iter())
    });
    assert_eq!(error(&server.post("/v1/messages", &ask(&json!({}))), 500)["type"], "api_error");
    let all = events(&server.post("/v1/messages", &ask(&json!({"stream": true}))));
    let last = all.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(last["error"]["message"].as_str().unwrap().contains("layer 3"));
    server.assert_idle();
    // Quiet streams carry pings, and a shutdown is an error event.
    let times = plimsoll_server::ServerConfig { keep_alive: Duration::from_millis(50), ..config() };
    let server = Server::with(times, limits(), |_| Box::new(std::iter::empty::<Step>()));
    let mut client = server.send(post("/v1/messages", &ask(&json!({"stream": true})).to_string()));
    client.until("event: ping");
    client.until("event: ping");
    client.until("event: ping");
    server.shut_down();
    client.until("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"");
    client.until("\r\n0\r\n\r\n");
}
