//! Calls of tools under a grammar.

use plimsoll_grammar::{Call, CallStyle, Calls, Guide, Input, Patience, Source};
use serde_json::{Value, json};

use super::{follow, grammars, schema, tokenizer, walk};

/// How Hermes writes a call.
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
fn calls_have_their_format_and_their_arguments() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let tools = vec![
        Call { name: "f".into(), parameters: schema(), strict: true, input: None },
        Call {
            name: "g".into(),
            parameters: json!({"properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}),
            strict: true,
            input: None,
        },
    ];
    let source = Source::Calls(Calls { tools, several: false, style: STYLE });
    let guide = Guide::new(&grammars, Some(&source), "", None, &Patience::default()).unwrap();
    for seed in 0..10 {
        let Some((_, text)) = walk(&guide, &tokenizer, seed, 500) else { continue };
        let inner = text.strip_prefix("<tool_call>\n").unwrap().strip_suffix("\n</tool_call>").unwrap();
        let call: Value = serde_json::from_str(inner).unwrap();
        assert!(call["name"] == "f" || call["arguments"]["x"].is_boolean(), "{text}");
    }
}

#[test]
fn calls_or_structured_output() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": false});
    let tools = vec![Call { name: "weather".into(), parameters, strict: true, input: None }];
    let calls = Calls { tools, several: true, style: STYLE };
    let form = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let source = Source::CallsOr(calls.clone(), Box::new(Source::JsonSchema(form.to_string())));
    let guide = Guide::new(&grammars, Some(&source), "", None, &Patience::default()).unwrap();
    let (mut called, mut formed) = (0, 0);
    for seed in 0..60 {
        let Some((_, text)) = walk(&guide, &tokenizer, seed, 400) else { continue };
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
                formed += 1;
            }
        }
    }
    assert!(called > 0 && formed > 0, "{called} called, {formed} formed");
    // A text before the form is no text before a call; a grammar of one's own has no place here.
    Guide::new(&grammars, Some(&source), "final:", None, &Patience::default()).unwrap();
    let own = Source::CallsOr(calls, Box::new(Source::Lark("start: \"x\"".into())));
    assert!(Guide::new(&grammars, Some(&own), "", None, &Patience::default()).is_err());
}

/// What of a schema can be followed holds a tool's calls, unless the whole of it is asked for.
#[test]
fn schemas_of_tools_that_are_not_strict_are_followed_as_far_as_they_can_be() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let style = CallStyle { marker: "", open: "", before: "", between: ":", after: "", next: "", close: "" };
    let source = |parameters: &Value, strict: bool| {
        let tools = vec![Call { name: "f".into(), parameters: parameters.clone(), strict, input: None }];
        Source::Calls(Calls { tools, several: false, style })
    };
    let guide = |source: &Source| {
        Guide::new(&grammars, Some(source), "", None, &Patience::default()).map_err(|error| error.to_string())
    };
    let known = json!({"properties": {"n": {"type": "integer"}, "s": {"type": "string", "format": "shoe-size"},
        "l": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": true},
        "p": {"type": "string", "pattern": "^(?!x)y"}}, "required": ["n"], "additionalProperties": false});
    assert!(guide(&source(&known, true)).is_err());
    let loose = guide(&source(&known, false)).unwrap();
    assert_eq!(follow(&loose, &tokenizer, "f:{\"n\": 1, \"s\": \"47\", \"l\": [true, true]}"), Ok(true));
    assert!(follow(&loose, &tokenizer, "f:{\"n\": \"1\"}").is_err(), "what can be followed is");
    // Nothing of this one can: its calls are objects, and those of the tool beside it are what they were.
    let odd = json!({"properties": {"n": {"type": "integer", "multipleOf": 999_983}}});
    assert!(guide(&source(&odd, true)).is_err());
    let tools = [("f", &odd), ("g", &known)].map(|(name, parameters)| Call {
        name: name.into(),
        parameters: parameters.clone(),
        strict: false,
        input: None,
    });
    let both = Source::Calls(Calls { tools: tools.into(), several: false, style });
    for _ in 0..2 {
        let both = guide(&both).unwrap();
        assert_eq!(follow(&both, &tokenizer, "f:{\"anything\": [1]}"), Ok(true));
        assert_eq!(follow(&both, &tokenizer, "g:{\"n\": 1}"), Ok(true));
        assert!(follow(&both, &tokenizer, "g:{\"n\": \"1\"}").is_err(), "the one beside it is held");
    }
    // Arguments are an object, whatever their schema says.
    let list = json!({"type": "array"});
    assert!(guide(&source(&list, true)).unwrap_err().contains("arguments are an object"));
    assert!(follow(&guide(&source(&list, false)).unwrap(), &tokenizer, "f:[").is_err());
    let usage = grammars.usage();
    assert_eq!(usage.compiled, 3, "what was loosened once is found again: {usage:?}");
}

#[test]
fn a_call_that_has_begun_in_a_text_is_held_to_its_schema() {
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
        let tools = vec![Call { name: "f".into(), parameters: parameters.clone(), strict: true, input: None }];
        let source = Source::TextWithCalls(Calls { tools, several, style });
        Guide::new(&grammars, Some(&source), "", None, &Patience::default()).unwrap()
    };
    let call = |n: &str| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"n\": {n}}}}}\n</tool_call>");
    let many = guide(hermes, true);
    for good in [
        "Just talk. {\"name\": 1}\n",
        &call("7"),
        &format!("Let me see. {}", call("7")),
        &format!("{}\n{}!", call("1"), call("2")),
    ] {
        assert_eq!(follow(&many, &tokenizer, good), Ok(true), "{good}");
    }
    assert_eq!(
        follow(&many, &tokenizer, "x <tool_call>\n{\"name\": \"f\""),
        Ok(false),
        "a call is not left in the middle"
    );
    for bad in [
        call("\"seven\"").as_str(),
        &format!("Hm. {}", call("true")),
        "<tool_call>\n{\"name\": \"g\"",
        &format!("{} {}", call("1"), call("x")),
    ] {
        assert!(follow(&many, &tokenizer, bad).is_err(), "{bad}");
    }
    let one = guide(hermes, false);
    assert_eq!(follow(&one, &tokenizer, &format!("Hm. {}", call("7"))), Ok(true));
    assert!(follow(&one, &tokenizer, &format!("{}\n{}", call("1"), call("2"))).is_err(), "one call was asked for");
    let list = guide(listed, true);
    let element = |n: &str| format!("{{\"name\": \"f\", \"arguments\": {{\"n\": {n}}}}}");
    assert_eq!(follow(&list, &tokenizer, &format!("So: [CALLS][{}, {}]", element("1"), element("2"))), Ok(true));
    assert!(follow(&list, &tokenizer, &format!("[CALLS][{}", element("null"))).is_err());
}

/// What custom tools take is text, which is written as a string of the arguments.
#[test]
fn input_of_custom_tools_matches_its_grammar() {
    let (tokenizer, grammars) = (tokenizer(), grammars(64 << 20));
    let guide = |input: Input, text: bool| {
        let tools = vec![Call { name: "f".into(), parameters: Value::Null, strict: true, input: Some(input) }];
        let calls = Calls { tools, several: true, style: STYLE };
        let source = if text { Source::TextWithCalls(calls) } else { Source::Calls(calls) };
        Guide::new(&grammars, Some(&source), "", None, &Patience::default()).map_err(|error| error.to_string())
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
        (Input::Regex("^[a-z\"]+\n?$".into()), &["ab", "a\"b\n"][..], &["", "1", "a\nb"][..]),
        (
            Input::Lark(PATCH.into()),
            &["*** Begin\n+a \"b\" \\ c\n-\n*** End", "*** Begin\n-\u{e4}\t\n*** End\n"],
            &["*** Begin\n*** End", "*** Begin\n a\n*** End", "*** Begin\n+a*** End"],
        ),
        (Input::Lark(SUM.into()), &["1+2", "1 b 22 + 3"], &["1", "1+2+3+4+5", "1d2"]),
    ] {
        for (text, prefix) in [(false, ""), (true, "Well. ")] {
            let guide = guide(input.clone(), text).unwrap();
            for input in good {
                let followed = follow(&guide, &tokenizer, &format!("{prefix}{}", call(input)));
                assert_eq!(followed, Ok(true), "{input:?} in {}", call(input));
            }
            for input in bad {
                assert_ne!(follow(&guide, &tokenizer, &format!("{prefix}{}", call(input))), Ok(true), "{input:?}");
            }
        }
        let forced = guide(input, false).unwrap();
        for seed in 0..3 {
            let Some((_, text)) = walk(&forced, &tokenizer, seed, 400) else { continue };
            let first = text.strip_prefix("<tool_call>\n").unwrap().split("\n</tool_call>").next().unwrap();
            let call: Value = serde_json::from_str(first).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(call["arguments"]["input"].is_string(), "{text}");
        }
    }
    let error = guide(Input::Lark("start: %json {}".into()), false).err().unwrap();
    assert!(error.starts_with("tool 'f': the grammar has %json"), "{error}");
    assert!(guide(Input::Lark("start: nothing".into()), false).is_err());
}
