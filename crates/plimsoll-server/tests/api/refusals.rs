//! Nothing is accepted and ignored: a request that cannot be served is refused, with the field and the limit in the answer.

use plimsoll_engine::testing::{Step, letters, limits};
use serde_json::{Value, json};

use crate::common::{self, Server, post};

fn refused(server: &Server, change: &Value) -> Value {
    let mut body = json!({"prompt": "abc"});
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    server.post("/v1/completions", &body).error(400)
}

#[test]
fn values_out_of_range_name_field_and_range() {
    let server = Server::start(letters);
    for (change, param, says) in [
        (json!({"temperature": -1}), "temperature", "between 0 and 100"),
        (json!({"temperature": 1e39}), "temperature", "out of range"),
        (json!({"temperature": "hot"}), "temperature", "expected f64"),
        (json!({"top_p": -0.5}), "top_p", "above 0"),
        (json!({"top_p": 1.01}), "top_p", "at most 1"),
        (json!({"top_k": -2}), "top_k", "top_k is -2"),
        (json!({"min_p": 2}), "min_p", "between 0 and 1"),
        (json!({"presence_penalty": 3}), "presence_penalty", "between -2 and 2"),
        (json!({"frequency_penalty": -3}), "frequency_penalty", "between -2 and 2"),
        (json!({"repetition_penalty": 0}), "repetition_penalty", "0.01"),
        (json!({"logit_bias": {"258": 1}}), "logit_bias", "258"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "not a token id"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias", "between -100 and 100"),
        (json!({"n": 0}), "n", "1 to 8"),
        (json!({"n": 9}), "n", "1 to 8"),
        (json!({"n": 100000}), "n", "1 to 8"),
        (json!({"n": 4_294_967_296_u64}), "n", "n: "),
        (json!({"best_of": 2}), "best_of", "equal to n"),
        (json!({"max_tokens": 0}), "max_tokens", "at least 1"),
        (json!({"max_tokens": -5}), "max_tokens", "max_tokens: "),
        (json!({"max_tokens": 510}), "max_tokens", "maximum context length is 512"),
        (json!({"max_tokens": 1, "max_completion_tokens": 2}), "max_completion_tokens", "one of them"),
        (json!({"min_tokens": 17}), "min_tokens", "more than max_tokens"),
        (json!({"logprobs": 21}), "logprobs", "limit of 20"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs", "limit of 20"),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs", "not available with stream"),
        (json!({"stop": ""}), "stop", "1 to 256"),
        (json!({"stop": vec!["a"; 17]}), "stop", "limit of 16"),
        (json!({"stop": "x".repeat(257)}), "stop", "1 to 256"),
        (json!({"stop_token_ids": [258]}), "stop_token_ids", "vocabulary of 258"),
        (json!({"stream": "yes"}), "stream", "boolean"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "only allowed when stream"),
        (json!({"stream": true, "stream_options": {"speed": 1}}), "stream_options.speed", "unknown field"),
        (json!({"prompt": ""}), "prompt", "empty"),
        (json!({"prompt": []}), "prompt", "empty"),
        (json!({"prompt": [[]]}), "prompt", "empty"),
        (json!({"prompt": null}), "prompt", "missing"),
        (json!({"prompt": [258]}), "prompt", "vocabulary of 258"),
        (json!({"prompt": {"a": 1}}), "prompt", "prompt: "),
        (json!({"prompt": vec!["a"; 9]}), "prompt", "limit of 8"),
        (json!({"prompt": vec!["a"; 5], "n": 2}), "prompt", "10 sequences"),
        (json!({"prompt": vec![1; 512]}), "prompt", "maximum context length is 512"),
        (json!({"prompt": "x".repeat(600)}), "prompt", "maximum context length is 512"),
        (json!({"prompt": "x".repeat(500_000)}), "prompt", "cannot fit"),
        (json!({"cache_salt": ""}), "cache_salt", "empty"),
        (json!({"model": 5}), "model", "expected a string"),
    ] {
        let error = refused(&server, &change);
        assert_eq!(error["param"], param, "{change}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    assert!(server.observed.requests.lock().unwrap().is_empty(), "nothing of this reached the engine");
    server.assert_idle();
}

#[test]
fn what_would_have_no_effect_is_refused() {
    let server = Server::start(letters);
    for change in [
        json!({"temprature": 1}),
        json!({"messages": []}),
        json!({"suffix": "x"}),
        json!({"guided_json": "{"}),
        json!({"guided_json": 5}),
        json!({"guided_json": {"type": "colour"}}),
        json!({"guided_regex": "("}),
        json!({"guided_choice": []}),
        json!({"guided_choice": [""]}),
        json!({"guided_grammar": "start: nothing"}),
        json!({"guided_grammar": format!("start: \"{}\"", "x".repeat(200_000))}),
        json!({"guided_decoding_backend": "xgrammar"}),
        json!({"structured_outputs": {}}),
        json!({"structured_outputs": {"json": {}, "regex": "a"}}),
        json!({"thinking_token_budget": 5}),
        json!({"response_format": {"type": "xml"}}),
        json!({"bad_words": ["x"]}),
        json!({"allowed_token_ids": [1]}),
        json!({"truncate_prompt_tokens": 5}),
        json!({"use_beam_search": true}),
        json!({"service_tier": "batch"}),
        json!({"priority": 3}),
        json!({"request_id": "x"}),
        json!({"tools": []}),
    ] {
        let error = refused(&server, &change);
        let param = error["param"].as_str().unwrap().split('.').next().unwrap();
        assert_eq!(param, change.as_object().unwrap().keys().next().unwrap(), "{error}");
    }
    let twice = json!({"response_format": {"type": "json_object"}, "guided_regex": "a"});
    assert_eq!(refused(&server, &twice)["param"], "guided_regex");
    for (format, param) in [
        (json!({"type": "json_schema"}), "response_format.json_schema"),
        (json!({"type": "json_schema", "json_schema": {"name": "x"}}), "response_format.json_schema.schema"),
        (json!({"type": "json_schema", "json_schema": {"schema": {}}}), "response_format.json_schema.name"),
        (json!({"type": "text", "json_schema": {"name": "x"}}), "response_format.json_schema"),
        (json!({"type": "text", "colour": 1}), "response_format.colour"),
    ] {
        assert_eq!(refused(&server, &json!({"response_format": format}))["param"], param);
    }
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

/// Returns the parameter that the refusal of a conversation with this `change` names.
fn refused_chat(server: &Server, change: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    server.post("/v1/chat/completions", &body).error(400)["param"].clone()
}

#[test]
fn what_would_have_no_effect_in_a_conversation_is_refused() {
    let server = Server::start(letters);
    let chat = |change: Value| refused_chat(&server, &change);
    assert_eq!(chat(json!({"enable_thinking": 1})), "enable_thinking");
    let twice = json!({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(chat(twice), "enable_thinking");
    assert_eq!(chat(json!({"include_reasoning": "yes"})), "include_reasoning");
    assert_eq!(chat(json!({"top_logprobs": 2})), "top_logprobs");
    assert_eq!(chat(json!({"logprobs": 2})), "logprobs");
    assert_eq!(chat(json!({"modalities": ["audio"]})), "modalities");
    assert_eq!(chat(json!({"reasoning_effort": "most"})), "reasoning_effort");
    assert_eq!(chat(json!({"chat_template": "x"})), "chat_template");
    assert_eq!(chat(json!({"chat_template_kwargs": {"messages": []}})), "chat_template_kwargs");
    assert_eq!(chat(json!({"continue_final_message": true})), "messages");
    assert_eq!(chat(json!({"continue_final_message": true, "add_generation_prompt": true})), "continue_final_message");
    assert_eq!(chat(json!({"prompt": "x"})), "prompt");
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn tools_that_cannot_be_called_are_refused() {
    let server = Server::start(letters);
    let chat = |change: Value| refused_chat(&server, &change);
    assert_eq!(chat(json!({"tool_choice": "required"})), "tool_choice");
    assert_eq!(chat(json!({"tool_choice": "some"})), "tool_choice");
    let named = json!({"type": "function", "function": {"name": "g"}});
    assert_eq!(chat(json!({"tool_choice": named})), "tool_choice.function.name");
    assert_eq!(chat(json!({"tool_choice": {"type": "spell"}})), "tool_choice.type");
    assert_eq!(chat(json!({"tool_choice": {"type": "allowed_tools"}})), "tool_choice.allowed_tools");
    let odd =
        json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "colour"}}}]);
    assert_eq!(chat(json!({"tools": odd, "tool_choice": "required"})), "tools");
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(chat(json!({"tools": tools, "parallel_tool_calls": 1})), "parallel_tool_calls");
    assert_eq!(chat(json!({"tools": [tools[0], tools[0]]})), "tools[1]");
    assert_eq!(chat(json!({"tools": [{"type": "spell"}]})), "tools[0].type");
    assert_eq!(chat(json!({"tools": [{"type": "function"}]})), "tools[0].function");
    assert_eq!(chat(json!({"tools": [{"type": "function", "function": {}}]})), "tools[0].function.name");
    let tool = |key: &str, value: Value| {
        let mut tool = json!({"type": "function", "function": {"name": "f"}});
        tool["function"][key] = value;
        json!({"tools": [tool]})
    };
    assert_eq!(chat(tool("name", json!("a b"))), "tools[0].function.name");
    assert_eq!(chat(tool("parameters", json!("x"))), "tools[0].function.parameters");
    assert_eq!(chat(tool("strict", json!("x"))), "tools[0].function.strict");
    assert_eq!(chat(tool("colour", json!("x"))), "tools[0].function.colour");
    let many: Vec<Value> =
        (0..129).map(|i| json!({"type": "function", "function": {"name": format!("f{i}")}})).collect();
    assert_eq!(chat(json!({"tools": many})), "tools");
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn wrong_places_have_openais_shape_too() {
    let server = Server::start(letters);
    let error = server.post("/v1/completions", &json!({"model": "gpt-5", "prompt": "x"})).error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("tiny"));
    server.post("/v1/completions", &json!({"model": "default", "prompt": "x"})).ok();
    server.get("/v1/nothing").error(404);
    server.get("/v1/completions").error(405);
    let body = r#"{"prompt": "x", "max_tokens": 1}"#;
    let typed = |headers: &str| {
        let length = body.len();
        format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {length}\r\n\r\n{body}")
    };
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    server.send(typed("")).answer().ok();
    server.send(typed(form)).answer().ok();
    server.send(typed("content-type: multipart/form-data\r\n")).answer().error(415);
    server.send(typed("content-type: application/xml\r\n")).answer().error(415);
    // A browser's page must send the JSON type, so that the browser sends a preflight.
    server.send(typed("origin: http://elsewhere.example\r\n")).answer().error(415);
    server.send(typed(&format!("{form}sec-fetch-site: cross-site\r\n"))).answer().error(415);
    let zipped = post("/v1/completions", "{}").replace("\r\n\r\n", "\r\ncontent-encoding: gzip\r\n\r\n");
    server.send(zipped).answer().error(415);
    for bad in [
        "",
        "{",
        "[]",
        "nul",
        "{\"prompt\":\"a\",\"prompt\":\"b\"}",
        "{\"prompt\":\"\\ud800\"}",
        "{\"prompt\":\"a\"} x",
    ] {
        server.post_text("/v1/completions", bad).error(400);
    }
}

#[test]
fn a_request_id_is_echoed_or_made() {
    let server = Server::start(letters);
    let with = |id: &str| {
        server.send(format!("GET /version HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\n\r\n")).answer()
    };
    assert_eq!(with("my-id").header("x-request-id"), Some("my-id"));
    assert!(server.get("/version").header("x-request-id").unwrap().starts_with("req-"));
    with(&"x".repeat(200)).error(400);
}

#[test]
fn a_full_engine_says_when_to_come_back() {
    // Requests that never end fill the 8 running and 8 waiting places.
    let server = Server::start(|_| Box::new(std::iter::empty::<Step>()));
    let hold = post("/v1/completions", &json!({"prompt": "x", "n": 8}).to_string());
    let waiting: Vec<_> = (0..2).map(|_| server.send(&hold)).collect();
    common::eventually("all places are taken", || server.engine.reserved().1 == 16);
    let answer = server.post("/v1/completions", &json!({"prompt": "x"}));
    assert_eq!(answer.header("retry-after"), Some("1"));
    let error = answer.error(429);
    assert!(error["message"].as_str().unwrap().contains("all 16 places are taken (8 may run and 8 wait)"), "{error}");
    // A group that fits only in part is refused as a whole, and its submitted requests are cancelled.
    drop(waiting);
    common::eventually("the places are free", || server.engine.reserved() == (0, 0));
    let _one = server.send(post("/v1/completions", &json!({"prompt": "x", "n": 8}).to_string()));
    let _two = server.send(post("/v1/completions", &json!({"prompt": "x", "n": 4}).to_string()));
    common::eventually("12 places are taken", || server.engine.reserved().1 == 12);
    server.post("/v1/completions", &json!({"prompt": "x", "n": 8})).error(429);
    common::eventually("only 12 remain", || server.engine.reserved().1 == 12);
}

#[test]
fn text_that_could_take_too_much_to_tokenize_is_refused() {
    let tight = plimsoll_server::ServerConfig { max_tokenizing_bytes: 1 << 10, ..common::config() };
    let server = Server::with(tight, limits(), letters);
    let error = server.post("/v1/completions", &json!({"prompt": "x".repeat(300)})).error(400);
    assert!(error["message"].as_str().unwrap().contains("limit of 1024"), "{error}");
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
}

#[test]
fn an_answer_that_could_not_be_held_is_refused_at_once() {
    let mut large = limits();
    large.max_req_total_len = 1 << 20;
    large.max_total_token_num = 1 << 23;
    large.host_bytes = 1 << 40;
    let server = Server::with(common::config(), large, letters);
    let ask = json!({"prompt": "x", "max_tokens": 100_000, "logprobs": 20});
    let error = server.post("/v1/completions", &ask).error(400);
    assert!(error["message"].as_str().unwrap().contains("stream it"), "{error}");
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

/// Requests that HTTP refuses before the engine are counted like requests that the engine refuses, each once.
#[test]
fn invalid_requests_are_counted_in_every_layer() {
    let server = Server::start(letters);
    let refused = || {
        let page = server.get("/metrics");
        let line =
            page.ok_text().lines().find_map(|l| l.strip_prefix("plimsoll_requests_refused_invalid_total ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    assert_eq!(refused(), 0);
    let many = json!({"prompt": "x", "stop_token_ids": [5], "logit_bias": {"99999": 1}});
    for (n, (path, body, status)) in [
        ("/v1/completions", json!({"prompt": "x", "colour": 1}), 400),
        ("/v1/completions", json!({"prompt": "x", "model": "other"}), 404),
        ("/v1/chat/completions", json!({"messages": []}), 400),
        ("/v1/messages", json!({"messages": []}), 400),
        ("/v1/completions", json!({"prompt": "x".repeat(2 << 20)}), 413),
        ("/v1/completions", many, 400),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(refused(), n as u64 + 1, "{path} {}", answer.body);
    }
    // Answered requests do not count, nor do requests for unknown models or routes.
    server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).ok();
    server.get("/nowhere").error(404);
    server.get("/v1/models/other").error(404);
    assert_eq!(refused(), 6);
}
