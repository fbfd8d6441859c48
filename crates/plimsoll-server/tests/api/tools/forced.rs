//! Calls that `tool_choice` or a strict tool requires.

use super::*;

/// The text with the required format belongs to another answer.
#[test]
fn forced_call_comes_before_structured_output() {
    let server = says(HERMES, CALLS, 9, FinishReason::Stop);
    for format in [json!({"type": "json_object"}), json!({"type": "text"})] {
        let (message, reason) =
            whole(&server, &json!({"tools": tools(), "tool_choice": "required", "response_format": format}));
        assert!(message["tool_calls"][0]["function"]["name"].is_string(), "{message}");
        assert_eq!(reason, json!("tool_calls"));
    }
}

/// A required call that is cut before its name is complete does not appear as text.
#[test]
fn a_call_that_is_asked_for_and_cut_has_no_text() {
    let server = says(HERMES, "<tool_call>\n{\"name\": \"wea", 3, FinishReason::Length);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let asked = json!({"tools": tools(), "tool_choice": choice});
        for (message, reason) in [whole(&server, &asked), streamed(&server, &asked)] {
            assert_eq!(
                (message["content"].as_str().unwrap_or(""), &message["tool_calls"]),
                ("", &Value::Null),
                "{message}"
            );
            assert_eq!(reason, "length");
        }
    }
    // Without a forced call the model might have been about to write any text.
    let (message, _) = whole(&server, &json!({"tools": tools()}));
    assert_eq!(message["content"], "<tool_call>\n{\"name\": \"wea");
}

/// Schemas are written for people too: an unsupported keyword refuses a call only if the tool is strict.
#[test]
fn a_call_is_asked_for_of_any_tool_that_is_not_strict() {
    let server = says(HERMES, CALLS, 9, FinishReason::Stop);
    for odd in [json!({"type": "integer", "multipleOf": 999_983}), json!({"type": "string", "pattern": "^(?!x)y"})] {
        let mut asked = json!({"tools": tools(), "tool_choice": "required"});
        asked["tools"][0]["function"]["parameters"]["properties"]["city"] = odd;
        let (message, _) = whole(&server, &asked);
        assert_eq!(message["tool_calls"][0]["function"]["name"], "weather", "{message}");
        asked["tools"][0]["function"]["strict"] = true.into();
        assert_eq!(server.post("/v1/chat/completions", &ask(&asked)).error(400)["param"], "tools");
    }
}

#[test]
fn strict_tools_are_held_to_their_schemas_also_where_the_model_is_free() {
    use std::sync::atomic::Ordering;
    let server = says(HERMES, "Hello.", 3, FinishReason::Stop);
    let formed = || server.observed.constrained.load(Ordering::Acquire);
    let strict = |on: bool| {
        let mut tools = tools();
        tools[0]["function"]["strict"] = on.into();
        json!({"tools": tools})
    };
    whole(&server, &strict(false));
    assert_eq!(formed(), 0, "free");
    let (message, reason) = whole(&server, &strict(true));
    assert_eq!((formed(), &message["content"], &reason), (1, &json!("Hello."), &json!("stop")));
    // One grammar covers the text and the calls, as without strict.
    let mut both = strict(true);
    both["response_format"] = json!({"type": "json_object"});
    whole(&server, &both);
    assert_eq!(formed(), 2);
    let mut none = strict(true);
    none["tool_choice"] = json!("none");
    whole(&server, &none);
    assert_eq!(formed(), 2, "nothing is called");
    // Calls in this format have arguments that are no JSON. A schema cannot constrain them while the model may write text too.
    let xml = says(
        "{% if tools %}<function=name><parameter=x>{% endif %}{{ messages[0].content }}",
        "Hi",
        2,
        FinishReason::Stop,
    );
    // Clients make all their tools strict by default: the answer is not constrained all the same.
    whole(&xml, &strict(true));
    whole(&xml, &strict(false));
    assert_eq!(xml.observed.constrained.load(Ordering::Acquire), 0);
    let mut required = strict(true);
    required["tool_choice"] = json!("required");
    whole(&xml, &required);
}
