//! Allowed servers and calls: by the operator, by the request, by the user.

use super::*;

#[test]
fn calls_wait_for_an_approval() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    let always = json!({"require_approval": {"always": {"tool_names": ["add"]}}});
    let all = stream(&server, &calc(&always));
    let asked = &all.last().unwrap()["response"];
    assert_eq!((kinds(asked), &asked["status"]), (vec!["mcp_list_tools", "mcp_approval_request"], &json!("completed")));
    let request = &asked["output"][1];
    assert_eq!((&request["name"], &request["arguments"]), (&json!("add"), &json!("{\"a\": 2, \"b\": 3}")));
    let added: Vec<&Value> = all.iter().filter(|event| event["item"]["type"] == "mcp_approval_request").collect();
    assert_eq!(added.len(), 2, "{added:?}");
    assert_eq!(mcp.count("tools/call"), 0);
    let answer = |approve: bool, reason: Value| {
        let mut next = calc(&always);
        next["previous_response_id"] = asked["id"].clone();
        next["input"] = json!([{"type": "mcp_approval_response", "approval_request_id": request["id"],
                                "approve": approve, "reason": reason}]);
        next
    };
    let denied = create(&server, &answer(false, json!("too risky")));
    assert_eq!(kinds(&denied), ["message"]);
    assert!(prompt_text(&server).contains("[tool]Error: the user did not approve this call: too risky"));
    assert_eq!(mcp.count("tools/call"), 0);
    let mut beyond = answer(true, Value::Null);
    beyond["max_tool_calls"] = 0.into();
    let error = server.post("/v1/responses", &ask(&beyond)).error(400);
    assert!(error["message"].as_str().unwrap().contains("the limit is 0 (max_tool_calls)"), "{error}");
    let approved = create(&server, &answer(true, Value::Null));
    assert_eq!(kinds(&approved), ["mcp_call", "message"]);
    let call = &approved["output"][0];
    assert_eq!((&call["approval_request_id"], &call["output"]), (&request["id"], &json!("5")));
    assert_eq!(mcp.count("tools/call"), 1);
    // The call was made: a later response does not make it again.
    let mut after = calc(&always);
    after["previous_response_id"] = approved["id"].clone();
    assert_eq!(kinds(&create(&server, &after)), ["message"]);
    assert_eq!(mcp.count("tools/call"), 1);
    // An approval of an unknown request, and one without the server among the tools.
    let mut none = calc(&always);
    none["input"] = json!([{"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": true}]);
    let error = server.post("/v1/responses", &ask(&none)).error(400);
    assert!(error["message"].as_str().unwrap().contains("mcpr_x"), "{error}");
    let mut bare = answer(true, Value::Null);
    bare["tools"] = json!([]);
    let error = server.post("/v1/responses", &ask(&bare)).error(400);
    assert!(error["message"].as_str().unwrap().contains("tools names none"), "{error}");
    // A tool that is not allowed is not called, whatever is approved.
    let mut forged = calc(&json!({"allowed_tools": ["write"]}));
    forged["input"] = json!([{"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "calc", "name": "add",
        "arguments": "{}"}, {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": true}]);
    let refused = create(&server, &forged);
    assert_eq!(refused["output"][1]["error"]["type"], "mcp_protocol_error", "{refused}");
    assert_eq!(mcp.count("tools/call"), 1);
    server.assert_idle();
}

#[test]
fn only_servers_of_the_operator_are_used() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    for (more, param) in [
        (json!({"server_url": "http://127.0.0.1:1/mcp"}), "tools[0].server_url"),
        (json!({"server_label": "other"}), "tools[0].server_label"),
    ] {
        let error = server.post("/v1/responses", &ask(&calc(&more))).error(400);
        assert_eq!(error["param"], param);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("--mcp-server (now: calc)"), "{message}");
    }
    for (more, param) in [
        (json!({"server_label": "a b"}), "tools[0].server_label"),
        (json!({"connector_id": "connector_gmail"}), "tools[0].connector_id"),
        (json!({"headers": {"Host": "x"}}), "tools[0].headers"),
        (json!({"headers": {"a": "b\r\nc: d"}}), "tools[0].headers"),
        (json!({"headers": {"authorization": "a"}, "authorization": "b"}), "tools[0].headers"),
        (json!({"require_approval": "sometimes"}), "tools[0].require_approval"),
        (json!({"allowed_tools": 7}), "tools[0].allowed_tools"),
        (json!({"x": 1}), "tools[0].x"),
    ] {
        let error = server.post("/v1/responses", &ask(&calc(&more))).error(400);
        assert_eq!(error["param"], param, "{error}");
    }
    let twice = json!({"tools": [calc(&json!({}))["tools"][0], calc(&json!({}))["tools"][0]]});
    assert_eq!(server.post("/v1/responses", &ask(&twice)).error(400)["param"], "tools[1].server_label");
    assert!(mcp.came().is_empty());
    let off = model(config(), CALL);
    let error = off.post("/v1/responses", &ask(&calc(&json!({"server_url": mcp.url()})))).error(400);
    assert!(error["message"].as_str().unwrap().contains("--mcp-server"), "{error}");
    assert!(!off.get("/metrics").ok_text().contains("plimsoll_mcp"));
}

#[test]
fn calls_are_limited_and_chosen() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    // The model never stops calling.
    let endless = says_with(PLAIN, allowing(&mcp, PATIENCE), CALL, 8, FinishReason::Stop);
    let mut two = calc(&json!({}));
    two["max_tool_calls"] = 2.into();
    let response = create(&endless, &two);
    assert_eq!(kinds(&response), ["mcp_list_tools", "mcp_call", "mcp_call", "message"], "{response}");
    assert_eq!((&response["max_tool_calls"], mcp.count("tools/call")), (&json!(2), 2));
    assert!(!prompt_text(&endless).contains("Adds."), "the model sees no tools in the last turn");
    let mut many = calc(&json!({}));
    many["max_tool_calls"] = 129.into();
    assert_eq!(endless.post("/v1/responses", &ask(&many)).error(400)["param"], "max_tool_calls");
    // One limit of tokens holds for all turns: each may generate what the earlier ones have left.
    let mut few = calc(&json!({}));
    few["max_output_tokens"] = 25.into();
    let response = create(&endless, &few);
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}), "{response}");
    let asked: Vec<u32> = endless.observed.requests.lock().unwrap().iter().map(|request| request.max_tokens).collect();
    assert_eq!(asked[asked.len() - 3..], [25, 15, 5]);
    let server = model(allowing(&mcp, PATIENCE), CALL);
    for (choice, sees) in [
        (json!({"type": "mcp", "server_label": "calc", "name": "add"}), "calc.add"),
        (json!({"type": "mcp", "server_label": "calc"}), "calc.write"),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "calc"}]}),
            "calc.write",
        ),
    ] {
        let mut chosen = calc(&json!({}));
        chosen["tool_choice"] = choice;
        let response = create(&server, &chosen);
        assert_eq!(response["status"], "completed", "{response}");
        assert!(prompt_text(&server).contains(sees));
    }
    let mut unknown = calc(&json!({}));
    unknown["tool_choice"] = json!({"type": "mcp", "server_label": "calc", "name": "none"});
    assert_eq!(server.post("/v1/responses", &ask(&unknown)).error(400)["param"], "tool_choice.name");
    let mut only_reading = calc(&json!({"allowed_tools": {"read_only": true}}));
    only_reading["store"] = false.into();
    let response = create(&server, &only_reading);
    assert_eq!(response["output"][0]["tools"].as_array().unwrap().len(), 1);
    assert!(!prompt_text(&server).contains("calc.write"));
    endless.assert_idle();
    server.assert_idle();
}

#[test]
fn calls_of_the_client_end_the_response_after_those_of_servers() {
    const BOTH: &str = "<tool_call>\n{\"name\": \"calc.add\", \"arguments\": {\"a\": 1, \"b\": 1}}\n</tool_call>\n\
<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let server = model(allowing(&mcp, PATIENCE), BOTH);
    let mut both = calc(&json!({}));
    both["tools"].as_array_mut().unwrap().push(tools()[0].clone());
    let response = create(&server, &both);
    assert_eq!(kinds(&response), ["mcp_list_tools", "mcp_call", "function_call"], "{response}");
    assert_eq!((&response["output"][1]["output"], &response["status"]), (&json!("2"), &json!("completed")));
    let mut next = both.clone();
    next["previous_response_id"] = response["id"].clone();
    next["input"] =
        json!([{"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": "Sun"}]);
    assert_eq!(kinds(&create(&server, &next)), ["message"]);
    assert!(prompt_text(&server).contains("[tool]2") && prompt_text(&server).contains("[tool]Sun"));
    server.assert_idle();
}

#[test]
fn memory_of_exchanges_is_planned() {
    let mcp = McpServer::start(Manner::Answers, Manner::Answers);
    let more = allowing(&mcp, PATIENCE).heap_bytes_max() - config().heap_bytes_max();
    // Eight answers of 512 KiB in three forms, their connections, and 1 MiB of lists.
    assert_eq!(more, 8 * (3 * (512 << 10) + (256 << 10)) + (1 << 20));
}
