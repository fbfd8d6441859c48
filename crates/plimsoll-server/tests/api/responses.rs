//! `/v1/responses`: items in, items out, whole and streamed, stored, continued, cancelled.

mod background;
mod custom;
mod files;
mod mcp;
mod reports;
mod stored;

use std::time::Duration;

use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{FinishReason, Request};
use plimsoll_server::ServerConfig;
use serde_json::{Value, json};

use crate::common::{Answer, Server, config, eventually, post};

/// A template that writes every part of a conversation, and opens reasoning unless it is switched off.
const ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% if m.reasoning_content %}<r>{{ m.reasoning_content }}</r>{% endif %}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}\
{% endfor %}<|im_start|>{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}";
const PLAIN: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endfor %}";

fn says(template: &str, text: &'static str, pace: usize, finish: FinishReason) -> Server {
    says_with(template, config(), text, pace, finish)
}

/// A server with a scripted model: it writes `text`, `pace` characters a token, and ends with `finish`.
fn says_with(template: &str, config: ServerConfig, text: &'static str, pace: usize, finish: FinishReason) -> Server {
    let script = move |_: &Request| -> Script {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(pace).map(|piece| piece.iter().collect()).collect();
        let tokens = pieces.into_iter().map(|piece| Step::Token(97, piece));
        Box::new(tokens.chain([Step::Finish(finish, None)]))
    };
    let mut large = limits();
    large.max_req_total_len = 4096;
    large.max_total_token_num = 4096;
    Server::over(template, config, large, script)
}

fn ask(more: &Value) -> Value {
    let mut body = json!({"model": "tiny", "input": "Hi", "max_output_tokens": 300});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn tools() -> Value {
    json!([{"type": "function", "name": "weather", "description": "Weather", "strict": true,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

fn prompt_text(server: &Server) -> String {
    let ids = server.last_request().prompt;
    String::from_utf8(ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect()).unwrap()
}

fn create(server: &Server, more: &Value) -> Value {
    server.post("/v1/responses", &ask(more)).ok()
}

/// Returns the events of a stream; asserts that names are types and numbers count up.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    assert!(answer.body.ends_with("\n\n") && !answer.body.contains("[DONE]"), "{}", answer.body);
    let blocks = answer.body.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':'));
    let event = |(number, block): (usize, &str)| {
        let (name, data) = block.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(number)));
        data
    };
    blocks.enumerate().map(event).collect()
}

/// Returns the object at a stream's end after a check of every event against it.
fn streamed(server: &Server, more: &Value) -> Value {
    let mut body = ask(more);
    body["stream"] = true.into();
    let events = events(&server.post("/v1/responses", &body));
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[1]["type"], "response.in_progress");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    let mut output: Vec<Value> = Vec::new();
    let (mut open, mut grown) = (false, String::new());
    let (last, middle) = events[2..].split_last().unwrap();
    for event in middle {
        let kind = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        assert_eq!(event["output_index"], if kind == "output_item.added" { output.len() } else { output.len() - 1 });
        match kind {
            "output_item.added" => {
                assert!(!std::mem::replace(&mut open, true), "{event}");
                assert_eq!(event["item"]["status"], "in_progress");
                output.push(event["item"].clone());
                grown.clear();
            }
            "content_part.added" => assert_eq!(event["part"]["text"], ""),
            "output_text.delta"
            | "reasoning_text.delta"
            | "function_call_arguments.delta"
            | "custom_tool_call_input.delta" => {
                assert_eq!(event["item_id"], output.last().unwrap()["id"]);
                grown += event["delta"].as_str().unwrap();
            }
            "output_text.done" | "reasoning_text.done" => assert_eq!(event["text"], grown),
            "function_call_arguments.done" => assert_eq!(event["arguments"], grown),
            "custom_tool_call_input.done" => assert_eq!(event["input"], grown),
            "content_part.done" => assert_eq!(event["part"]["text"], grown),
            "output_item.done" => {
                assert!(std::mem::take(&mut open), "{event}");
                assert_eq!(event["item"]["id"], output.last().unwrap()["id"]);
                *output.last_mut().unwrap() = event["item"].clone();
            }
            other => panic!("odd event {other}"),
        }
    }
    assert!(!open, "every item is done");
    assert_eq!(last["type"], format!("response.{}", last["response"]["status"].as_str().unwrap()));
    assert_eq!(last["response"]["output"], json!(output));
    last["response"].clone()
}

/// Returns a response without the fields that differ from one response to the next.
fn plain(mut response: Value) -> Value {
    assert!(response["id"].as_str().unwrap().starts_with("resp_"), "{response}");
    for key in ["id", "created_at", "completed_at"] {
        response[key].take();
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"].take();
        if let Some(id) = item.get_mut("call_id") {
            assert!(id.as_str().unwrap().starts_with("call_"));
            id.take();
        }
    }
    response
}

const CALLS: &str = "On it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn a_response_has_openais_shape() {
    let server = says(PLAIN, "Hello!", 2, FinishReason::Stop);
    let more = json!({"instructions": "Be kind.", "metadata": {"a": "b"}, "user": "ann", "temperature": 0.5, "top_p": 0.9,
        "tool_choice": "auto", "truncation": "disabled", "text": {"format": {"type": "text"}}, "store": false,
        "reasoning": {"effort": "none"}, "safety_identifier": "s", "prompt_cache_key": "k"});
    let response = create(&server, &more);
    assert!(response["completed_at"].as_u64() >= response["created_at"].as_u64());
    let part = json!({"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []});
    let expected = json!({
        "id": null, "object": "response", "created_at": null, "completed_at": null, "status": "completed",
        "background": false, "error": null, "incomplete_details": null, "instructions": "Be kind.",
        "max_output_tokens": 300, "max_tool_calls": null, "metadata": {"a": "b"}, "model": "tiny",
        "output": [{"type": "message", "id": null, "role": "assistant", "status": "completed", "content": [part]}],
        "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": "k",
        "reasoning": {"effort": "none", "summary": null}, "safety_identifier": "s", "service_tier": "default",
        "store": false, "temperature": 0.5, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 0.9, "truncation": "disabled",
        "usage": {"input_tokens": 24, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 27},
        "user": "ann"
    });
    let id = response["id"].clone();
    assert_eq!(plain(response), expected);
    assert_eq!(prompt_text(&server), "[system]Be kind.[user]Hi");
    assert_eq!(plain(streamed(&server, &more)), expected);
    // A response with `store: false` is not stored.
    server.get(&format!("/v1/responses/{}", id.as_str().unwrap())).error(404);
    server.assert_idle();
}

#[test]
fn reasoning_text_and_calls_are_items_in_their_order() {
    const SAID: &str = "Hm.\nYes.\n</think>\n\nOn it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
    for pace in [1, 6, 1000] {
        let server = says(ALL, SAID, pace, FinishReason::Stop);
        let response = create(&server, &json!({"tools": tools()}));
        let kinds: Vec<&str> =
            response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call"]);
        assert_eq!(response["output"][0]["content"], json!([{"type": "reasoning_text", "text": "Hm.\nYes."}]));
        assert_eq!(response["output"][1]["content"][0]["text"], "On it.");
        assert_eq!(response["output"][2]["arguments"], "{\"city\": \"Paris\"}");
        let usage = response["usage"].clone();
        if pace == 1 {
            assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], "Hm.\nYes.".len());
        }
        assert_eq!(plain(streamed(&server, &json!({"tools": tools()}))), plain(response));
        // Without reasoning all is text.
        let off = json!({"reasoning": {"effort": "none"}});
        let response = create(&server, &off);
        assert_eq!(response["output"][0]["content"][0]["text"], SAID);
        assert_eq!(plain(streamed(&server, &off)), plain(response));
        server.assert_idle();
    }
    let server = says(PLAIN, CALLS, 5, FinishReason::Stop);
    for (more, items) in [
        (json!({"tools": tools()}), 3),
        (json!({"tools": tools(), "parallel_tool_calls": false}), 2),
        (json!({"tools": tools(), "tool_choice": "none"}), 1),
    ] {
        let response = create(&server, &more);
        assert_eq!(response["output"].as_array().unwrap().len(), items);
        assert_eq!(plain(streamed(&server, &more)), plain(response));
    }
    // Of two tools one is allowed: the model sees only that.
    let mut two = tools();
    two.as_array_mut().unwrap().push(json!({"type": "function", "name": "time"}));
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]});
    create(&server, &json!({"tools": two, "tool_choice": allowed}));
    assert!(prompt_text(&server).contains("time") && !prompt_text(&server).contains("weather"));
    // The same in chat.
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    let allowed = json!({"mode": "auto", "tools": [function("time")]});
    let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
    let two = json!([function("weather"), function("time")]);
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": two, "tool_choice": choice});
    server.post("/v1/chat/completions", &chat).ok();
    assert!(prompt_text(&server).contains("time") && !prompt_text(&server).contains("weather"));
    // Encrypted reasoning may be requested, though reasoning is returned as text.
    create(&server, &json!({"include": ["reasoning.encrypted_content"]}));
    // A response that is cut is incomplete, and so is the item that was being written.
    let server = says(PLAIN, "abc", 1, FinishReason::Length);
    let response = create(&server, &json!({}));
    assert_eq!((&response["status"], &response["completed_at"]), (&json!("incomplete"), &Value::Null));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(plain(streamed(&server, &json!({}))), plain(response));
}

#[test]
fn functions_in_a_namespace_are_called_by_both_names() {
    let server =
        says(PLAIN, "<tool_call>\n{\"name\": \"mail.send\", \"arguments\": {}}\n</tool_call>", 3, FinishReason::Stop);
    let function = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
    let namespace =
        |functions: Value| json!({"type": "namespace", "name": "mail", "description": "Mail", "tools": functions});
    let search = json!({"type": "web_search", "external_web_access": false});
    // Fields that an agent adds by itself are accepted.
    let agent = json!({"tools": [namespace(json!([function("send"), function("read")])), function("send"), search],
        "client_metadata": {"session": "1"}});
    let response = create(&server, &agent);
    let call = response["output"][0].clone();
    assert_eq!(
        (&call["type"], &call["namespace"], &call["name"]),
        (&json!("function_call"), &json!("mail"), &json!("send"))
    );
    let prompt = prompt_text(&server);
    assert!(prompt.contains("mail.send") && prompt.contains("mail.read") && !prompt.contains("search"), "{prompt}");
    assert_eq!(plain(streamed(&server, &agent)), plain(response.clone()));
    // The conversation continues from the server's copy and from the client's.
    let result =
        json!({"type": "function_call_output", "call_id": call["call_id"], "namespace": "mail", "output": "sent"});
    create(&server, &json!({"previous_response_id": response["id"], "input": [result]}));
    let stored = prompt_text(&server);
    create(&server, &json!({"input": [{"role": "user", "content": "Hi"}, call, result]}));
    assert!(stored.contains("<tool_call>mail.send</tool_call>"), "{stored}");
    assert_eq!(prompt_text(&server), stored);
    let many: Vec<Value> = (0..129).map(|n| function(&format!("f{n}"))).collect();
    for (tools, says) in [
        (
            namespace(json!([function("send"), function("send")])),
            "tools[0].tools[1]: there is a tool `mail.send` already",
        ),
        (namespace(json!([namespace(json!([]))])), "type is supported only as \"function\""),
        (namespace(json!(many)), "more tools than the limit of 128"),
        (json!({"type": "web_search", "external_web_access": true}), "tools[0].type is `web_search`"),
    ] {
        let error = server.post("/v1/responses", &ask(&json!({"tools": [tools]}))).error(400);
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    server.assert_idle();
}

#[test]
fn the_same_reply_at_three_endpoints() {
    let server = says(
        ALL,
        "Hm.</think>\n\nOn it. <tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>",
        3,
        FinishReason::Stop,
    );
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let schema = tools()[0]["parameters"].clone();
    let function = json!({"name": "weather", "description": "Weather", "parameters": schema});
    let chat = json!({"messages": messages, "max_tokens": 300, "tools": [{"type": "function", "function": function}]});
    let chat = server.post("/v1/chat/completions", &chat).ok()["choices"][0]["message"].clone();
    let prompt = prompt_text(&server);
    let tool = json!({"name": "weather", "description": "Weather", "input_schema": schema});
    let message = json!({"messages": messages, "max_tokens": 300, "tools": [tool]});
    let message = server.post("/v1/messages", &message).ok()["content"].clone();
    assert_eq!(prompt_text(&server), prompt);
    let mut tool = tools();
    tool[0].as_object_mut().unwrap().remove("strict");
    let response = create(&server, &json!({"tools": tool}))["output"].clone();
    assert_eq!(prompt_text(&server), prompt);
    assert_eq!((&chat["reasoning_content"], &chat["content"]), (&json!("Hm."), &json!("On it.")));
    assert_eq!((&message[0]["thinking"], &message[1]["text"]), (&json!("Hm."), &json!("On it.")));
    assert_eq!(response[0]["content"][0]["text"], "Hm.");
    assert_eq!(response[1]["content"][0]["text"], "On it.");
    for name in [&chat["tool_calls"][0]["function"]["name"], &message[2]["name"], &response[2]["name"]] {
        assert_eq!(name, "weather");
    }
}

#[test]
fn the_tokens_of_an_input_are_counted() {
    let server = says(ALL, "Ok.</think>Fine.", 4, FinishReason::Stop);
    let asked = json!({"input": [{"role": "user", "content": "Hi"}], "instructions": "Kind!", "tools": tools(),
        "reasoning": {"effort": "none"}, "truncation": "disabled"});
    let count = |asked: &Value| {
        let mut body = asked.clone();
        body["model"] = "tiny".into();
        server.post("/v1/responses/input_tokens", &body)
    };
    let counted = count(&asked).ok();
    assert_eq!(counted["object"], "response.input_tokens");
    let response = create(&server, &asked);
    assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"]);
    let more = json!({"previous_response_id": response["id"], "input": "So?"});
    let counted = count(&more).ok();
    assert_eq!(counted["input_tokens"], create(&server, &more)["usage"]["input_tokens"]);
    for (change, param) in [(json!({"max_output_tokens": 3}), "max_output_tokens"), (json!({"store": true}), "store")] {
        let mut asked = asked.clone();
        asked.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        assert_eq!(count(&asked).error(400)["param"], param);
    }
    server.assert_idle();
}

#[test]
fn what_was_cut_is_taken_back() {
    let server = Server::over(ALL, config(), limits(), letters);
    // A call with arguments that are no JSON, and reasoning without an answer.
    let call = json!({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"city\": \"Par"});
    let result = json!({"type": "function_call_output", "call_id": "a", "output": "cut"});
    let reasoning =
        json!({"type": "reasoning", "summary": [ ], "content": [{"type": "reasoning_text", "text": "Hm."}]});
    create(
        &server,
        &json!({"input": [{"role": "user", "content": "x"}, call, result, reasoning, {"role": "user", "content": "y"}]}),
    );
    let told = prompt_text(&server);
    assert!(told.contains(r#"{"INVALID_JSON": "{\"city\": \"Par"}"#), "{told}");
    let function = json!({"name": "f", "arguments": "{\"city\": \"Par"});
    let messages = json!([
        {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "cut"},
        {"role": "assistant", "content": null, "reasoning_content": "Hm."},
        {"role": "user", "content": "y"},
    ]);
    server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 1})).ok();
    assert!(prompt_text(&server).contains("INVALID_JSON"));
    let said = json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}]);
    let messages = json!([{"role": "assistant", "content": said}, {"role": "user", "content": "y"}]);
    server.post("/v1/messages", &json!({"model": "tiny", "messages": messages, "max_tokens": 1})).ok();
}

#[test]
fn a_stream_always_ends() {
    let server = Server::start(|_| {
        Box::new([Step::Token(97, "a".into()), Step::Fail("kernel panic in layer 3".into())].into_iter())
    });
    server.post("/v1/responses", &ask(&json!({}))).error(500);
    let response = streamed(&server, &json!({}));
    assert_eq!((&response["status"], &response["error"]["code"]), (&json!("failed"), &json!("server_error")));
    assert!(response["error"]["message"].as_str().unwrap().contains("layer 3"));
    assert_ne!(response["output"][0]["status"], "completed", "there may be no text before a failure: {response}");
    server.assert_idle();
    let server = Server::start(|_| Box::new(std::iter::empty::<Step>()));
    let mut client = server.send(post("/v1/responses", &ask(&json!({"stream": true})).to_string()));
    client.until("response.in_progress");
    server.shut_down();
    client.until("event: response.failed");
    client.until("\r\n0\r\n\r\n");
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let server = Server::start(letters);
    let item = |item: Value| json!({"input": [item]});
    for (change, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (item(json!({"role": "wizard", "content": "x"})), "input[0].role"),
        (item(json!({"role": "user"})), "input[0].content"),
        (item(json!({"role": "user", "content": "x", "phase": "commentary"})), "input[0].phase"),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0].type"),
        (
            item(
                json!({"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {}}]}),
            ),
            "input[0].content[0].prompt_cache_breakpoint",
        ),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].id"),
        (item(json!({"type": "item_reference"})), "input[0].id"),
        (item(json!({"type": "item_reference", "id": "x", "role": "user"})), "input[0].role"),
        (item(json!({"type": "function_call_output", "call_id": "a", "output": "x"})), "input"),
        (
            item(json!({"type": "reasoning", "id": "r", "summary": [{"type": "input_image"}]})),
            "input[0].summary[0].type",
        ),
        (
            item(json!({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"})),
            "input[0].encrypted_content",
        ),
        (json!({"previous_response_id": "resp_none"}), "previous_response_id"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"max_output_tokens": 4000}), "max_output_tokens"),
        (json!({"truncation": "middle"}), "truncation"),
        (json!({"include": ["file_search_call.results"]}), "include"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {}}}}), "text.format.name"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "colour"}}}}),
            "text.format",
        ),
        (json!({"reasoning": {"effort": "most"}}), "reasoning.effort"),
        (json!({"reasoning": {"summary": "short"}}), "reasoning.summary"),
        (json!({"reasoning": {"context": "all_turns"}}), "reasoning.context"),
        (json!({"reasoning": {"mode": "pro"}}), "reasoning.mode"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "f", "output_schema": {}}]}), "tools[0].output_schema"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "mcp", "server_label": "x"}}), "tool_choice.server_label"),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (json!({"stream_options": {"include_obfuscation": true}}), "stream_options.include_obfuscation"),
        (json!({"service_tier": "batch"}), "service_tier"),
        (json!({"conversation": "x"}), "conversation"),
        (json!({"prompt": {"id": "x"}}), "prompt"),
        (json!({"max_tool_calls": 129}), "max_tool_calls"),
        (json!({"messages": []}), "messages"),
    ] {
        let error = server.post("/v1/responses", &ask(&change)).error(400);
        assert_eq!(error["param"], param, "{change}: {error}");
    }
    assert!(server.observed.requests.lock().unwrap().is_empty());
    server.assert_idle();
}
