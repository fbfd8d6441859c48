//! Custom tools: the arguments of their calls are a text.

use plimsoll_engine::FinishReason;
use serde_json::{Value, json};

use super::{ALL, PLAIN, create, events, plain, prompt_text, says, streamed};

const PATCH: &str =
    "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"+a \\\"b\\\"\\n-\\u00e4\\n\"}}\n</tool_call>";
const TEXT: &str = "+a \"b\"\n-ä\n";

fn tools(format: &Value) -> Value {
    json!([{"type": "custom", "name": "patch", "description": "Changes files.", "format": format},
           {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}])
}

fn grammar(syntax: &str, definition: &str) -> Value {
    json!({"type": "grammar", "syntax": syntax, "definition": definition})
}

#[test]
fn call_of_a_custom_tool_carries_its_text() {
    let lark = grammar("lark", "start: line+\nline: (\"+\" | \"-\") /.+/ \"\\n\"");
    for (pace, format) in [(1, json!({"type": "text"})), (3, Value::Null), (1000, lark)] {
        let server = says(PLAIN, PATCH, pace, FinishReason::Stop);
        let more = json!({"tools": tools(&format)});
        let response = create(&server, &more);
        let item = &response["output"][0];
        assert_eq!(response["output"].as_array().unwrap().len(), 1);
        assert_eq!(
            (&item["type"], &item["name"], &item["input"]),
            (&json!("custom_tool_call"), &json!("patch"), &json!(TEXT))
        );
        assert_eq!(item["status"], "completed");
        assert!(item["id"].as_str().unwrap().starts_with("ctc_"), "{item}");
        let prompt = prompt_text(&server);
        assert!(prompt.contains("Changes files.") && prompt.contains("\"input\""), "{prompt}");
        assert_eq!(prompt.contains("(\\\"+\\\" | \\\"-\\\")"), pace == 1000, "the model sees the grammar: {prompt}");
        assert_eq!(plain(streamed(&server, &more)), plain(response.clone()));
        let mut body = super::ask(&more);
        body["stream"] = true.into();
        let events = events(&server.post("/v1/responses", &body));
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
        let done = of("response.custom_tool_call_input.done");
        assert_eq!((done.len(), &done[0]["input"]), (1, &json!(TEXT)));
        let deltas = of("response.custom_tool_call_input.delta");
        // A busy machine joins pieces.
        let joined: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(joined, TEXT, "{deltas:?}");
        // The conversation continues, from the store or from the items sent again.
        let call = item["call_id"].as_str().unwrap();
        let result = json!({"type": "custom_tool_call_output", "call_id": call, "output": "Done."});
        let again = json!({"input": [{"role": "user", "content": "Hi"}, item, result]});
        let kept = json!({"previous_response_id": response["id"], "input": [result]});
        let told = create(&server, &kept);
        assert!(prompt_text(&server).contains("<tool_call>patch</tool_call>[tool]Done."), "{}", prompt_text(&server));
        let first = prompt_text(&server);
        create(&server, &again);
        assert_eq!(prompt_text(&server), first);
        let id = told["id"].as_str().unwrap();
        let items = server.get(&format!("/v1/responses/{id}/input_items?order=asc")).ok();
        let kinds: Vec<&str> =
            items["data"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["message", "custom_tool_call", "custom_tool_call_output"]);
        assert_eq!(items["data"][1]["input"], TEXT);
        server.assert_idle();
    }
    let server = says(ALL, PATCH, 4, FinishReason::Stop);
    let call = json!({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a\"b"});
    create(&server, &json!({"input": [{"role": "user", "content": "Hi"}, call]}));
    assert!(
        prompt_text(&server).contains("<tool_call>patch{\"input\": \"a\\\"b\"}</tool_call>"),
        "{}",
        prompt_text(&server)
    );
}

#[test]
fn grammars_of_custom_tools_are_checked() {
    let server = says(PLAIN, "Hello!", 2, FinishReason::Stop);
    for (tool, choice, param, words) in [
        (json!({"format": {"type": "xml"}}), json!("auto"), "tools[0].format.type", "text and grammar"),
        (json!({"format": grammar("ebnf", "x")}), json!("auto"), "tools[0].format.syntax", "lark and regex"),
        (
            json!({"format": grammar("lark", "start: %json {}")}),
            json!("auto"),
            "tools",
            "tool 'patch': the grammar has %json",
        ),
        (json!({"format": grammar("lark", "start: none")}), json!("required"), "tools", "none"),
        (json!({"format": grammar("regex", "(?=x)")}), json!("auto"), "tools", "cannot be read"),
        (json!({"parameters": {}}), json!("auto"), "tools[0].parameters", "unknown field"),
        (json!({}), json!({"type": "custom", "name": "other"}), "tool_choice.name", "not among the tools"),
    ] {
        let mut one = json!({"type": "custom", "name": "patch"});
        one.as_object_mut().unwrap().extend(tool.as_object().unwrap().clone());
        let error =
            server.post("/v1/responses", &super::ask(&json!({"tools": [one], "tool_choice": choice}))).error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let ok = json!({"tools": tools(&Value::Null), "tool_choice": {"type": "allowed_tools", "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}]}});
    create(&server, &ok);
    let orphan = json!({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]});
    let error = server.post("/v1/responses", &super::ask(&orphan)).error(400);
    assert!(error["message"].as_str().unwrap().contains("no call before its output"), "{error}");
    server.assert_idle();
}

#[test]
fn chat_has_custom_tools_too() {
    let tools = json!([{"type": "custom", "custom": {"name": "patch", "format":
        {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[^x]*"}}}}]);
    for pace in [1, 1000] {
        let server = says(PLAIN, PATCH, pace, FinishReason::Stop);
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 300});
        let answer = server.post("/v1/chat/completions", &body).ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        let call = answer["choices"][0]["message"]["tool_calls"][0].clone();
        assert_eq!((&call["type"], &call["custom"]), (&json!("custom"), &json!({"name": "patch", "input": TEXT})));
        body["stream"] = true.into();
        let events = server.post("/v1/chat/completions", &body).events();
        let calls =
            events.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]).filter(|call| !call.is_null());
        let mut input = String::new();
        for (at, call) in calls.enumerate() {
            assert_eq!(call["type"].as_str(), (at == 0).then_some("custom"), "{call}");
            assert_eq!(call["custom"]["name"].as_str(), (at == 0).then_some("patch"), "{call}");
            input += call["custom"]["input"].as_str().unwrap();
        }
        assert_eq!(input, TEXT);
        // The call and its result in a chat request.
        body = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Done."}],
            "tools": tools, "tool_choice": {"type": "custom", "custom": {"name": "patch"}}, "max_tokens": 300});
        server.post("/v1/chat/completions", &body).ok();
        assert!(prompt_text(&server).contains("<tool_call>patch</tool_call>[tool]Done."), "{}", prompt_text(&server));
        server.assert_idle();
    }
}
