//! MCP servers as tools: their lists, calls, approvals and failures.

mod protocol;
mod rules;
mod server;

use plimsoll_engine::Limits;
use plimsoll_server::McpConfig;

use self::server::{Manner, McpServer};
use super::*;
use crate::common::PATIENCE;

const CALL: &str = "<tool_call>\n{\"name\": \"calc.add\", \"arguments\": {\"a\": 2, \"b\": 3}}\n</tool_call>";
const ANSWER: &str = "It is 5.";

fn allowing(mcp: &McpServer, timeout: Duration) -> ServerConfig {
    let server = format!("calc={}", mcp.url()).parse().unwrap();
    ServerConfig { mcp: McpConfig { servers: vec![server], timeout, ..McpConfig::default() }, ..config() }
}

/// A server with a model that writes `first` until it reads a tool's result, then the answer.
fn model(config: ServerConfig, first: &'static str) -> Server {
    let script = move |request: &Request| -> Script {
        let has_result = prompt_of(request).contains("[tool]");
        let text = if has_result { ANSWER } else { first };
        let tokens = text.chars().map(|c| Step::Token(97, c.to_string()));
        Box::new(tokens.collect::<Vec<_>>().into_iter().chain([Step::Finish(FinishReason::Stop, None)]))
    };
    Server::over(PLAIN, config, large(), script)
}

fn prompt_of(request: &Request) -> String {
    let prompt: Vec<u8> = request.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    String::from_utf8_lossy(&prompt).into_owned()
}

/// Limits that hold a conversation with calls.
fn large() -> Limits {
    let mut large = limits();
    large.max_req_total_len = 4096;
    large.max_total_token_num = 4096;
    large
}

fn calc(more: &Value) -> Value {
    let mut tool = json!({"type": "mcp", "server_label": "calc", "require_approval": "never"});
    tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"tools": [tool]})
}

fn kinds(response: &Value) -> Vec<&str> {
    response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect()
}

fn stream(server: &Server, more: &Value) -> Vec<Value> {
    let mut body = ask(more);
    body["stream"] = true.into();
    events(&server.post("/v1/responses", &body))
}

#[test]
fn tools_are_listed_called_and_answered_in_one_response() {
    for manner in [Manner::Answers, Manner::Streams] {
        let mcp = McpServer::start(manner, manner);
        let server = model(allowing(&mcp, PATIENCE), CALL);
        let secret = json!({"authorization": "sesame", "headers": {"X-Team": "blue"}, "server_url": mcp.url()});
        let response = create(&server, &calc(&secret));
        assert_eq!(response["status"], "completed", "{response}");
        assert_eq!(kinds(&response), ["mcp_list_tools", "mcp_call", "message"]);
        let list = &response["output"][0];
        assert_eq!((&list["server_label"], &list["error"]), (&json!("calc"), &Value::Null));
        assert_eq!(list["tools"][0]["name"], "add");
        assert_eq!(list["tools"][0]["input_schema"]["required"], json!(["a", "b"]));
        assert_eq!(list["tools"][0]["annotations"], json!({"readOnlyHint": true}));
        let call = &response["output"][1];
        let expected = json!({"type": "mcp_call", "id": call["id"], "approval_request_id": null, "server_label": "calc",
            "name": "add", "arguments": "{\"a\": 2, \"b\": 3}", "output": "5", "error": null, "status": "completed"});
        assert_eq!(*call, expected);
        assert_eq!(response["output"][2]["content"][0]["text"], ANSWER);
        // Tokens of both turns.
        assert_eq!(response["usage"]["output_tokens"], CALL.len() + ANSWER.len());
        let prompt = prompt_text(&server);
        assert!(prompt.contains("<tool_call>calc.add</tool_call>[tool]5"), "{prompt}");
        let usage = &response["usage"];
        assert!(usage["input_tokens"].as_u64().unwrap() > prompt.len() as u64, "{usage}");
        // The methods and headers of the requests.
        assert_eq!(
            mcp.methods()[..4],
            ["initialize", "notifications/initialized", "tools/list", "tools/call"],
            "{:?}",
            mcp.methods()
        );
        let came = mcp.came();
        for message in &came[..4] {
            assert!(message.head.contains("authorization: bearer sesame\r\n") && message.head.contains("x-team: blue"));
            assert!(message.head.contains("accept: application/json, text/event-stream"), "{}", message.head);
        }
        assert!(came[3].head.contains("mcp-session-id: s-1\r\nmcp-protocol-version: 2025-06-18"), "{}", came[3].head);
        assert_eq!(came[3].body["params"], json!({"name": "add", "arguments": {"a": 2, "b": 3}}));
        eventually("the session ends", || mcp.count("delete") == 1);
        assert!(!response.to_string().contains("sesame") && !response.to_string().contains("blue"), "{response}");
        server.assert_idle();
    }
}

#[test]
fn a_stream_has_openais_events() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let all = stream(&server, &calc(&json!({})));
    let mut names: Vec<&str> = all.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    let names: Vec<&str> = names.iter().map(|name| name.strip_prefix("response.").unwrap()).collect();
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "mcp_list_tools.in_progress",
            "mcp_list_tools.completed",
            "output_item.done",
            "output_item.added",
            "mcp_call.in_progress",
            "mcp_call_arguments.delta",
            "mcp_call_arguments.done",
            "mcp_call.completed",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed"
        ]
    );
    let of = |name: &'static str| all.iter().filter(move |event| event["type"] == format!("response.{name}"));
    let deltas: String = of("mcp_call_arguments.delta").map(|event| event["delta"].as_str().unwrap()).collect();
    let done = of("mcp_call_arguments.done").next().unwrap();
    assert_eq!((deltas.as_str(), &done["output_index"]), (done["arguments"].as_str().unwrap(), &json!(1)));
    assert_eq!(done.as_object().unwrap().len(), 5, "{done}");
    let added = of("output_item.added").nth(1).unwrap();
    assert_eq!((&added["item"]["status"], &added["item"]["output"]), (&json!("in_progress"), &Value::Null));
    assert_eq!(done["item_id"], added["item"]["id"]);
    let last = &all.last().unwrap()["response"];
    let items: Vec<&Value> = of("output_item.done").map(|event| &event["item"]).collect();
    assert_eq!(last["output"].as_array().unwrap().iter().collect::<Vec<_>>(), items);
    server.assert_idle();
}

#[test]
fn stored_conversation_goes_on_without_another_list() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let first = create(&server, &calc(&json!({})));
    let mut next = calc(&json!({}));
    next["previous_response_id"] = first["id"].clone();
    let second = create(&server, &next);
    assert_eq!(kinds(&second), ["message"]);
    assert!(prompt_text(&server).contains("calc.add</tool_call>[tool]5[assistant]It is 5.[user]Hi"));
    assert_eq!(mcp.count("tools/list"), 1, "the list is cached");
    assert_eq!(server.metric("plimsoll_mcp_lists_cached_total"), 1);
    assert!(server.metric("plimsoll_mcp_cache_bytes") > 100);
    let page = server.get("/metrics").ok_text().to_owned();
    for line in [
        "plimsoll_mcp_exchanges_total{method=\"tools/call\",outcome=\"ok\"} 1",
        "plimsoll_mcp_exchange_seconds_count 2",
        "plimsoll_mcp_running 0",
    ] {
        assert!(page.contains(line), "{line}");
    }
    // A client can also send all items again.
    let mut items = vec![json!({"role": "user", "content": "Hi"})];
    items.extend(first["output"].as_array().unwrap().clone());
    let mut again = calc(&json!({}));
    again["input"] = json!(items);
    assert_eq!(kinds(&create(&server, &again)), ["message"]);
    // A request with another key reads the list again.
    create(&server, &calc(&json!({"authorization": "other"})));
    assert_eq!(mcp.count("tools/list"), 2);
    server.assert_idle();
}

#[test]
fn a_failing_call_is_an_item_and_the_model_goes_on() {
    let short = Duration::from_millis(400);
    for (manner, kind, code, word, outcome) in [
        (Manner::Fails, "mcp_tool_execution_error", Value::Null, "no such file", "tool_error"),
        (Manner::Refuses, "mcp_protocol_error", json!(-32000), "not today", "rpc_error"),
        (Manner::Hangs, "http_error", json!(504), "0.4 s (--mcp-timeout)", "timeout"),
        (Manner::Floods, "http_error", json!(502), "524288 bytes", "too_large"),
        (Manner::Garbles, "mcp_protocol_error", json!(-32700), "JSON-RPC", "invalid"),
        (Manner::BreaksOff, "http_error", json!(502), "broke", "disconnected"),
        (Manner::Status(500), "http_error", json!(500), "status 500", "http_status"),
    ] {
        let mcp = McpServer::start(Manner::Answers, manner);
        let server = model(allowing(&mcp, if manner == Manner::Hangs { short } else { PATIENCE }), CALL);
        let all = stream(&server, &calc(&json!({})));
        assert!(all.iter().any(|event| event["type"] == "response.mcp_call.failed"), "{manner:?}");
        let response = &all.last().unwrap()["response"];
        assert_eq!(
            (kinds(response), &response["status"]),
            (vec!["mcp_list_tools", "mcp_call", "message"], &json!("completed"))
        );
        let call = &response["output"][1];
        assert_eq!((&call["status"], &call["output"]), (&json!("failed"), &Value::Null));
        assert_eq!((&call["error"]["type"], &call["error"]["code"]), (&json!(kind), &code), "{manner:?}");
        assert!(call["error"].to_string().contains(word), "{manner:?}: {call}");
        assert!(prompt_text(&server).contains("[tool]Error: "), "{manner:?}");
        let page = server.get("/metrics").ok_text().to_owned();
        let line = format!("plimsoll_mcp_exchanges_total{{method=\"tools/call\",outcome=\"{outcome}\"}} 1");
        assert!(page.contains(&line), "{manner:?}: {line}");
        // The next request contains the failed call as it was.
        let mut next = calc(&json!({}));
        next["previous_response_id"] = response["id"].clone();
        create(&server, &next);
        assert!(prompt_text(&server).contains("[tool]Error: "), "{manner:?}");
        server.assert_idle();
    }
}

#[test]
fn a_failing_list_fails_the_response() {
    let short = Duration::from_millis(400);
    for (manner, word) in [
        (Manner::Hangs, "--mcp-timeout"),
        (Manner::Floods, "524288"),
        (Manner::Garbles, "JSON-RPC"),
        (Manner::BreaksOff, "broke"),
        (Manner::Status(401), "status 401"),
        (Manner::Fails, "tools/list"),
    ] {
        let mcp = McpServer::start(manner, Manner::Answers);
        let server = model(allowing(&mcp, if manner == Manner::Hangs { short } else { PATIENCE }), CALL);
        let error = server.post("/v1/responses", &ask(&calc(&json!({})))).error(424);
        assert_eq!((&error["code"], &error["param"]), (&json!("mcp_server_failed"), &json!("tools")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("`calc`") && message.contains(word), "{manner:?}: {message}");
        let all = stream(&server, &calc(&json!({})));
        let names: Vec<&str> = all.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(names[3..5], ["response.mcp_list_tools.in_progress", "response.mcp_list_tools.failed"]);
        let last = all.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
        assert!(last["response"]["output"][0]["error"].as_str().unwrap().contains(word));
        assert!(server.observed.requests.lock().unwrap().is_empty(), "the model was not asked");
        server.assert_idle();
    }
    // Nothing listens at this address.
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut config = allowing(&mcp, PATIENCE);
    config.mcp.servers = vec![format!("calc=http://{nowhere}").parse().unwrap()];
    let server = model(config, CALL);
    let error = server.post("/v1/responses", &ask(&calc(&json!({})))).error(424);
    assert!(error["message"].as_str().unwrap().contains("no connection"), "{error}");
}

#[test]
fn a_forgotten_session_begins_again() {
    let mcp = McpServer::start(Manner::Answers, Manner::Forgets);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let response = create(&server, &calc(&json!({})));
    assert_eq!(response["output"][1]["output"], "5");
    assert_eq!((mcp.count("initialize"), mcp.count("tools/call")), (2, 2));
}

#[test]
fn a_client_that_leaves_or_cancels_ends_the_call() {
    let mcp = McpServer::start(Manner::Answers, Manner::Hangs);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let mut body = ask(&calc(&json!({})));
    body["stream"] = true.into();
    let mut client = server.send(post("/v1/responses", &body.to_string()));
    client.until("response.mcp_call_arguments.done");
    eventually("the call has come", || mcp.count("tools/call") == 1);
    drop(client);
    eventually("the call is called off", || mcp.count("notifications/cancelled") == 1);
    let id = mcp.came().iter().find(|came| came.method == "tools/call").unwrap().body["id"].clone();
    let off = mcp.came().into_iter().find(|came| came.method == "notifications/cancelled").unwrap();
    assert_eq!(off.body["params"]["requestId"], id);
    server.assert_idle();
    let ended = "plimsoll_generations_ended_total{api=\"responses\",reason=\"aborted\"} 1";
    eventually("it counts as aborted", || server.get("/metrics").ok_text().contains(ended));
    // The response is cancelled by its id.
    let mut client = server.send(post("/v1/responses", &body.to_string()));
    let begun = client.until("response.mcp_call_arguments.done");
    let id = begun.split("\"id\":\"resp_").nth(1).unwrap().split('"').next().unwrap().to_owned();
    eventually("the call has come", || mcp.count("tools/call") == 2);
    let cancelled = std::thread::scope(|scope| {
        let reading = scope.spawn(|| client.until("response.incomplete"));
        let answer = server.post(&format!("/v1/responses/resp_{id}/cancel"), &json!({})).ok();
        reading.join().unwrap();
        answer
    });
    assert_eq!((&cancelled["status"], &cancelled["output"][1]["status"]), (&json!("cancelled"), &json!("incomplete")));
    server.assert_idle();
}

#[test]
fn a_draining_server_lets_a_response_take_its_next_turn() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    // The first turn still runs when the server begins to drain.
    let script = |request: &Request| -> Script {
        let has_result = prompt_of(request).contains("[tool]");
        let (wait, text) = if has_result { (0, ANSWER) } else { (500, CALL) };
        let wait = Step::Wait(Duration::from_millis(wait));
        let tokens: Vec<Step> = text.chars().map(|c| Step::Token(97, c.to_string())).collect();
        Box::new([wait].into_iter().chain(tokens).chain([Step::Finish(FinishReason::Stop, None)]))
    };
    let config = ServerConfig { drain_deadline: PATIENCE, ..allowing(&mcp, PATIENCE) };
    let server = Server::over(PLAIN, config, large(), script);
    let mut body = ask(&calc(&json!({})));
    body["stream"] = true.into();
    let mut client = server.send(post("/v1/responses", &body.to_string()));
    eventually("the first turn runs", || !server.observed.requests.lock().unwrap().is_empty());
    server.shut_down();
    eventually("the engine drains", || server.engine.draining());
    let all = events(&client.answer());
    let last = &all.last().unwrap()["response"];
    assert_eq!((&last["status"], kinds(last)), (&json!("completed"), vec!["mcp_list_tools", "mcp_call", "message"]));
    assert!(server.wait_for_end(PATIENCE), "serve returned");
}

#[test]
fn responses_in_the_background_call_tools() {
    let mcp = McpServer::start(Manner::Answers, Manner::Streams);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let mut body = calc(&json!({}));
    body["background"] = true.into();
    let id = create(&server, &body)["id"].as_str().unwrap().to_owned();
    let look = || server.get(&format!("/v1/responses/{id}")).ok();
    eventually("it is made", || look()["status"] == "completed");
    assert_eq!(kinds(&look()), ["mcp_list_tools", "mcp_call", "message"]);
    let all = stream(&server, &body);
    assert!(all.iter().any(|event| event["type"] == "response.mcp_call.completed"));
    let last = all.last().unwrap();
    assert_eq!((&last["type"], kinds(&last["response"]).len()), (&json!("response.completed"), 3));
    server.assert_idle();
}
