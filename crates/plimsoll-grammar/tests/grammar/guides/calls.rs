//! Tool calls under a grammar.

use plimsoll_grammar::{CallStyle, CallableTool, CompileLimits, Guide, Source, ToolCalls, ToolInput};
use serde_json::{Value, json};

use super::{accept, grammars, sample, schema, tokenizer};

/// The call format of Hermes.
const STYLE: CallStyle = CallStyle {
    marker: "<tool_call>",
    open: "",
    before: "<tool_call>\n{\"name\": \"",
    between: "\", \"arguments\": ",
    after: "}\n</tool_call>",
    next: "\n",
    close: "",
};

#[test]
fn calls_follow_their_format_and_argument_schema() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let tools = vec![
        CallableTool { name: "f".into(), parameters: schema(), strict: true, input: None },
        CallableTool {
            name: "g".into(),
            parameters: json!({"properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}),
            strict: true,
            input: None,
        },
    ];
    let source = Source::Calls(ToolCalls { tools, several: false, style: STYLE });
    let guide = Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap();
    for seed in 0..10 {
        let Some((_, text)) = sample(&guide, &tokenizer, seed, 500) else { continue };
        let inner = text.strip_prefix("<tool_call>\n").unwrap().strip_suffix("\n</tool_call>").unwrap();
        let call: Value = serde_json::from_str(inner).unwrap();
        assert!(call["name"] == "f" || call["arguments"]["x"].is_boolean(), "{text}");
    }
}

#[test]
fn output_is_calls_or_structured_output() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": false});
    let tools = vec![CallableTool { name: "weather".into(), parameters, strict: true, input: None }];
    let calls = ToolCalls { tools, several: true, style: STYLE };
    let output_schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let source = Source::CallsOr(calls.clone(), Box::new(Source::JsonSchema(output_schema.to_string())));
    let guide = Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap();
    let (mut called, mut structured) = (0, 0);
    for seed in 0..60 {
        let Some((_, text)) = sample(&guide, &tokenizer, seed, 400) else { continue };
        match text.strip_prefix("<tool_call>") {
            Some(call) => {
                let first = call.split("</tool_call>").next().unwrap();
                let call: Value = serde_json::from_str(first).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert_eq!(call["name"], "weather");
                called += 1;
            }
            None => {
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert!(value["a"].is_boolean() && value.as_object().unwrap().len() == 1, "{text}");
                structured += 1;
            }
        }
    }
    assert!(called > 0 && structured > 0, "{called} called, {structured} structured");
    // A prefix is allowed, and applies to the other output only. A Lark grammar is not allowed as the other output.
    Guide::new(&grammars, Some(&source), "final:", None, &CompileLimits::default()).unwrap();
    let own = Source::CallsOr(calls, Box::new(Source::Lark("start: \"x\"".into())));
    assert!(Guide::new(&grammars, Some(&own), "", None, &CompileLimits::default()).is_err());
}

/// The supported part of a schema applies without `strict`.
#[test]
fn supported_part_of_a_schema_applies_without_strict() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let style = CallStyle { marker: "", open: "", before: "", between: ":", after: "", next: "", close: "" };
    let source = |parameters: &Value, strict: bool| {
        let tools = vec![CallableTool { name: "f".into(), parameters: parameters.clone(), strict, input: None }];
        Source::Calls(ToolCalls { tools, several: false, style })
    };
    let guide = |source: &Source| {
        Guide::new(&grammars, Some(source), "", None, &CompileLimits::default()).map_err(|error| error.to_string())
    };
    let known = json!({"properties": {"n": {"type": "integer"}, "s": {"type": "string", "format": "shoe-size"},
        "l": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": true},
        "p": {"type": "string", "pattern": "^(?!x)y"}}, "required": ["n"], "additionalProperties": false});
    assert!(guide(&source(&known, true)).is_err());
    let relaxed = guide(&source(&known, false)).unwrap();
    assert_eq!(accept(&relaxed, &tokenizer, "f:{\"n\": 1, \"s\": \"47\", \"l\": [true, true]}"), Ok(true));
    assert!(accept(&relaxed, &tokenizer, "f:{\"n\": \"1\"}").is_err(), "the type is supported");
    // No part of this schema is supported, so any object is allowed. The other tool keeps its schema.
    let unsupported = json!({"properties": {"n": {"type": "integer", "multipleOf": 999_983}}});
    assert!(guide(&source(&unsupported, true)).is_err());
    let tools = [("f", &unsupported), ("g", &known)].map(|(name, parameters)| CallableTool {
        name: name.into(),
        parameters: parameters.clone(),
        strict: false,
        input: None,
    });
    let both = Source::Calls(ToolCalls { tools: tools.into(), several: false, style });
    for _ in 0..2 {
        let both = guide(&both).unwrap();
        assert_eq!(accept(&both, &tokenizer, "f:{\"anything\": [1]}"), Ok(true));
        assert_eq!(accept(&both, &tokenizer, "g:{\"n\": 1}"), Ok(true));
        assert!(accept(&both, &tokenizer, "g:{\"n\": \"1\"}").is_err(), "the other tool keeps its schema");
    }
    // Arguments are an object, whatever type the schema has.
    let list = json!({"type": "array"});
    assert!(guide(&source(&list, true)).unwrap_err().contains("must have type object"));
    assert!(accept(&guide(&source(&list, false)).unwrap(), &tokenizer, "f:[").is_err());
    let usage = grammars.usage();
    assert_eq!(usage.compiled, 3, "the relaxed grammar is cached: {usage:?}");
}

#[test]
fn a_call_in_text_follows_its_schema() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let parameters = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let plain = CallStyle { marker: "", open: "", before: "", between: "", after: "", next: "", close: "" };
    let hermes = CallStyle {
        marker: "<tool_call>",
        before: "<tool_call>\n{\"name\": \"",
        between: "\", \"arguments\": ",
        after: "}\n</tool_call>",
        next: "\n",
        ..plain
    };
    let listed = CallStyle {
        marker: "[CALLS]",
        open: "[CALLS][",
        before: "{\"name\": \"",
        between: "\", \"arguments\": ",
        after: "}",
        next: ", ",
        close: "]",
    };
    let guide = |style: CallStyle, several: bool| {
        let tools = vec![CallableTool { name: "f".into(), parameters: parameters.clone(), strict: true, input: None }];
        let source = Source::TextWithCalls(ToolCalls { tools, several, style });
        Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap()
    };
    let call = |n: &str| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"n\": {n}}}}}\n</tool_call>");
    let many = guide(hermes, true);
    for good in [
        "Just talk. {\"name\": 1}\n",
        &call("7"),
        &format!("Let me see. {}", call("7")),
        &format!("{}\n{}!", call("1"), call("2")),
    ] {
        assert_eq!(accept(&many, &tokenizer, good), Ok(true), "{good}");
    }
    assert_eq!(
        accept(&many, &tokenizer, "x <tool_call>\n{\"name\": \"f\""),
        Ok(false),
        "the output ends inside a call"
    );
    for bad in [
        call("\"seven\"").as_str(),
        &format!("Hm. {}", call("true")),
        "<tool_call>\n{\"name\": \"g\"",
        &format!("{} {}", call("1"), call("x")),
    ] {
        assert!(accept(&many, &tokenizer, bad).is_err(), "{bad}");
    }
    let one = guide(hermes, false);
    assert_eq!(accept(&one, &tokenizer, &format!("Hm. {}", call("7"))), Ok(true));
    assert!(accept(&one, &tokenizer, &format!("{}\n{}", call("1"), call("2"))).is_err(), "only one call is allowed");
    let list = guide(listed, true);
    let element = |n: &str| format!("{{\"name\": \"f\", \"arguments\": {{\"n\": {n}}}}}");
    assert_eq!(accept(&list, &tokenizer, &format!("So: [CALLS][{}, {}]", element("1"), element("2"))), Ok(true));
    assert!(accept(&list, &tokenizer, &format!("[CALLS][{}", element("null"))).is_err());
}

/// A custom tool's text is written as a JSON string in the arguments.
#[test]
fn text_of_custom_tools_matches_its_grammar() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let guide = |input: ToolInput, text: bool| {
        let tools = vec![CallableTool { name: "f".into(), parameters: Value::Null, strict: true, input: Some(input) }];
        let calls = ToolCalls { tools, several: true, style: STYLE };
        let source = if text { Source::TextWithCalls(calls) } else { Source::Calls(calls) };
        Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).map_err(|error| error.to_string())
    };
    let call = |input: &str| {
        format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {}}}\n</tool_call>", json!({"input": input}))
            .replace("\":\"", "\": \"")
    };
    const PATCH: &str =
        "start: \"*** Begin\" LF line+ \"*** End\" LF?\nline: (\"+\" | \"-\") /(.*)/ LF -> change\n%import common.LF\n";
    const SUM: &str =
        "start: NUMBER (OP NUMBER)~1..3\nOP: \"+\" | \"a\"..\"c\"\nNUMBER: /[0-9]+/ // whole\n%ignore \" \"\n";
    for (input, good, bad) in [
        (ToolInput::Regex("^[a-z\"]+\n?$".into()), &["ab", "a\"b\n"][..], &["", "1", "a\nb"][..]),
        (
            ToolInput::Lark(PATCH.into()),
            &["*** Begin\n+a \"b\" \\ c\n-\n*** End", "*** Begin\n-\u{e4}\t\n*** End\n"],
            &["*** Begin\n*** End", "*** Begin\n a\n*** End", "*** Begin\n+a*** End"],
        ),
        (ToolInput::Lark(SUM.into()), &["1+2", "1 b 22 + 3"], &["1", "1+2+3+4+5", "1d2"]),
    ] {
        for (text, prefix) in [(false, ""), (true, "Well. ")] {
            let guide = guide(input.clone(), text).unwrap();
            for input in good {
                let followed = accept(&guide, &tokenizer, &format!("{prefix}{}", call(input)));
                assert_eq!(followed, Ok(true), "{input:?} in {}", call(input));
            }
            for input in bad {
                assert_ne!(accept(&guide, &tokenizer, &format!("{prefix}{}", call(input))), Ok(true), "{input:?}");
            }
        }
        let forced = guide(input, false).unwrap();
        for seed in 0..3 {
            let Some((_, text)) = sample(&forced, &tokenizer, seed, 400) else { continue };
            let first = text.strip_prefix("<tool_call>\n").unwrap().split("\n</tool_call>").next().unwrap();
            let call: Value = serde_json::from_str(first).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(call["arguments"]["input"].is_string(), "{text}");
        }
    }
    let error = guide(ToolInput::Lark("start: %json {}".into()), false).err().unwrap();
    assert!(error.starts_with("tool 'f': the grammar has %json"), "{error}");
    assert!(guide(ToolInput::Lark("start: nothing".into()), false).is_err());
}
