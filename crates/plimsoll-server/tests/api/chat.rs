//! `/v1/chat/completions`: messages through the template, whole and streamed.

use plimsoll_engine::testing::{letters, limits};
use serde_json::{Value, json};

use crate::common::{Server, config};

fn prompt_text(server: &Server) -> String {
    let ids = server.last_request().prompt;
    let text: Vec<u8> = ids
        .iter()
        .flat_map(|id| match id {
            256 => b"<|im_start|>".to_vec(),
            257 => b"<|im_end|>".to_vec(),
            byte => vec![u8::try_from(*byte).unwrap()],
        })
        .collect();
    String::from_utf8(text).unwrap()
}

fn hello() -> Value {
    json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
}

#[test]
fn messages_go_through_the_template() {
    let server = Server::start(letters);
    let answer =
        server.post("/v1/chat/completions", &json!({"model": "tiny", "messages": hello(), "max_tokens": 5})).ok();
    assert_eq!(
        prompt_text(&server),
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"].as_str().unwrap().len(), 5);
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"], Value::Null);
    let prompt = server.last_request().prompt.len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[test]
fn parts_options_and_tools_reach_the_template() {
    let server = Server::start(letters);
    // Cache marks that gateways add to messages for Anthropic have no effect here.
    let mark = json!({"type": "ephemeral"});
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": mark}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let function = json!({"name": "f", "cache_control": mark, "parameters": {"type": "object"}});
    let marked = json!({"cache_control": mark, "type": tool["type"], "function": function});
    let body = json!({
        "messages": [
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": null, "refusal": null, "annotations": [{"type": "url_citation"}], "cache_control": mark,
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"}
        ],
        "tools": [marked], "tool_choice": "auto", "parallel_tool_calls": true,
        "add_generation_prompt": false, "chat_template_kwargs": {"mood": "gay"}, "max_completion_tokens": 2
    });
    server.post("/v1/chat/completions", &body).ok();
    let text = prompt_text(&server);
    assert!(text.starts_with("<|im_start|>tools\n[") && !text.contains("ephemeral"), "{text}");
    assert!(text.contains("<|im_start|>user\none\ntwo<|im_end|>"), "{text}");
    assert!(text.ends_with("gay") || text.ends_with("\"gay\""), "{text}");
    assert_eq!(server.last_request().max_tokens, 2);
    let plain = json!({"messages": body["messages"], "tools": [tool], "add_generation_prompt": false, "max_tokens": 2,
        "chat_template_kwargs": {"mood": "gay"}});
    server.post("/v1/chat/completions", &plain).ok();
    assert_eq!(prompt_text(&server), text, "a mark changes nothing, wherever it stands");
    // With `tool_choice: none` the model does not see the tools.
    let mut body = body;
    body["tool_choice"] = "none".into();
    server.post("/v1/chat/completions", &body).ok();
    assert!(!prompt_text(&server).contains("tools"));
}

#[test]
fn an_answer_that_has_begun_is_continued() {
    let server = Server::start(letters);
    let ask = |last: Value, more: Value| {
        let mut body =
            json!({"messages": [hello()[0], hello()[1], last], "continue_final_message": true, "max_tokens": 3});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    let begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, ";
    let parts = json!([{"type": "text", "text": "Well, "}]);
    for (content, more) in [(json!("Well, "), json!({})), (parts, json!({"add_generation_prompt": false}))] {
        let answer = ask(json!({"role": "assistant", "content": content}), more).ok();
        assert!(prompt_text(&server).ends_with(begun), "{}", prompt_text(&server));
        assert_eq!(answer["choices"][0]["message"]["content"].as_str().unwrap().len(), 3, "what is new of it");
    }
    let counted = json!({"messages": [{"role": "assistant", "content": "Well, "}], "continue_final_message": true});
    assert_eq!(server.post("/tokenize", &counted).ok()["count"], "_assistant\nWell, ".len());
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    for (last, more, says) in [
        (json!({"role": "user", "content": "Hi"}), json!({}), "has role \"user\""),
        (json!({"role": "assistant", "content": "a", "tool_calls": [call]}), json!({}), "the results come next"),
        (json!({"role": "assistant", "content": "a"}), json!({"add_generation_prompt": true}), "a prompt has one end"),
        (json!({"role": "assistant", "content": "a"}), json!({"messages": []}), "messages is empty"),
    ] {
        let error = ask(last, more).error(400);
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    // A template may hide the message to be continued.
    let server = Server::over("{{ messages[0].content }}", config(), limits(), letters);
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]);
    let error = server.post("/v1/chat/completions", &json!({"messages": messages, "continue_final_message": true}));
    assert!(error.error(400)["message"].as_str().unwrap().contains("nothing to go on from"));
}

#[test]
fn without_a_number_the_rest_of_the_context_is_generated() {
    let server = Server::start(letters);
    let answer = server.post("/v1/chat/completions", &json!({"messages": hello()})).ok();
    assert_eq!(answer["usage"]["total_tokens"], 512);
}

#[test]
fn a_stream_has_role_deltas_reason_usage_and_end() {
    let server = Server::start(letters);
    let ask = |stream: bool| {
        let mut body = json!({"messages": hello(), "max_tokens": 20, "n": 2, "seed": 1});
        if stream {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    };
    let whole = server.post("/v1/chat/completions", &ask(false)).ok();
    let events = server.post("/v1/chat/completions", &ask(true)).events();
    assert!(events.iter().all(|e| e["object"] == "chat.completion.chunk"));
    for index in 0..2usize {
        let choices: Vec<&Value> = events
            .iter()
            .flat_map(|e| e["choices"].as_array().unwrap())
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(choices[0]["delta"], json!({"role": "assistant", "content": ""}));
        assert!(choices[1..].iter().all(|c| c["delta"].get("role").is_none()));
        let text: String = choices.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], text);
        let (last, rest) = choices.split_last().unwrap();
        assert_eq!((&last["finish_reason"], &last["delta"]), (&json!("length"), &json!({})));
        assert!(rest.iter().all(|c| c["finish_reason"].is_null()));
    }
    let (last, rest) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], whole["usage"]);
    assert!(rest.iter().all(|e| e["usage"].is_null()));
}

#[test]
fn log_probabilities_have_chats_shape() {
    let server = Server::start(letters);
    let ask = json!({"messages": hello(), "max_tokens": 3, "logprobs": true, "top_logprobs": 2});
    let answer = server.post("/v1/chat/completions", &ask).ok();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 3);
    for (token, letter) in content.iter().zip(answer["choices"][0]["message"]["content"].as_str().unwrap().chars()) {
        assert_eq!(token["token"], letter.to_string());
        assert_eq!(token["logprob"], -0.5);
        assert_eq!(token["bytes"], json!([letter as u32]));
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][1]["logprob"], -1.5);
    }
    let mut ask = ask;
    ask["stream"] = true.into();
    let events = server.post("/v1/chat/completions", &ask).events();
    let streamed = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert_eq!(json!(streamed.collect::<Vec<_>>()), json!(content));
}

#[test]
fn vllms_reports_are_there_on_request() {
    let server = Server::start(letters);
    let ask = json!({"messages": hello(), "max_tokens": 2, "return_token_ids": true, "prompt_logprobs": 0});
    let answer = server.post("/v1/chat/completions", &ask).ok();
    assert_eq!(answer["prompt_token_ids"], json!(server.last_request().prompt));
    assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 2);
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), server.last_request().prompt.len());
}

#[test]
fn conversations_that_cannot_be_are_refused_by_name() {
    let server = Server::start(letters);
    let called = |call: &Value| json!([{"role": "assistant", "tool_calls": [call]}]);
    for (messages, param) in [
        (json!([]), "messages"),
        (json!("hi"), "messages"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "wizard", "content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[1].content[0].type",
        ),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (json!([{"role": "user", "content": "x", "colour": "red"}]), "messages[0].colour"),
        (json!([{"role": "user", "content": "x", "audio": {"id": "a"}}]), "messages[0].audio"),
        (called(&json!({})), "messages[0].tool_calls[0].function.name"),
        (called(&json!({"function": "f"})), "messages[0].tool_calls[0].function.name"),
        (called(&json!({"function": {"name": 1}})), "messages[0].tool_calls[0].function.name"),
        (called(&json!({"function": {"name": "f", "arguments": [1]}})), "messages[0].tool_calls[0].function.arguments"),
        (called(&json!({"id": 1, "function": {"name": "f"}})), "messages[0].tool_calls[0].id"),
        (called(&json!({"type": "custom", "function": {"name": "f"}})), "messages[0].tool_calls[0].custom.input"),
        (called(&json!({"type": "odd", "function": {"name": "f"}})), "messages[0].tool_calls[0].type"),
        (json!([{"role": "user", "content": "RAISE"}]), "messages"),
        (json!([3]), "messages[0]"),
    ] {
        let error = server.post("/v1/chat/completions", &json!({"messages": messages})).error(400);
        assert_eq!(error["param"], param, "{error}");
    }
    assert_eq!(server.post("/v1/chat/completions", &json!({})).error(400)["param"], "messages");
    let wide = format!("{{\"messages\":[{}]}}", vec!["{}"; 20_000].join(","));
    let error = server.post_text("/v1/chat/completions", &wide).error(400);
    assert!(error["message"].as_str().unwrap().contains("limit of 32768"), "{error}");
    assert!(server.observed.requests.lock().unwrap().is_empty());
}
