//! Calls in every format: well-formed, malformed and cut calls.

use plimsoll_reply::{Event, HELD_BYTES_MAX, ReplyParser, ToolFormat as F, ToolFormat};

use super::{brief, read, spec};

const ONE: &[&str] = &[r#"weather({"city": "Paris"})"#];
const TWO: &[&str] = &[r#"weather({"city": "Paris"})"#, r#"f({"days": 3})"#];

/// A format, a reply, its content, its calls.
type Case = (F, &'static str, &'static str, &'static [&'static str]);

const GOOD: &[Case] = &[
    (F::Hermes, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>", "", ONE),
    (
        F::Hermes,
        "Let me see.\n<tool_call>{\"arguments\": {\"city\": \"Paris\"}, \"name\": \"weather\"}</tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"days\": 3}}\n</tool_call>\n",
        "Let me see.",
        TWO,
    ),
    (F::Hermes, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &["f({})"]),
    (F::Hermes, r#"<tool_call>{"name": "f"}</tool"#, "", &["f({})"]),
    (F::Hermes, r#"x<tool_call>{"name": "f"}</tool_call></tool"#, "x</tool", &["f({})"]),
    (F::Hermes, r#"<tool_call>{"name": "f", "arguments": null}</tool_call>"#, "", &["f({})"]),
    (F::Hermes, r#"<tool_call>{"name": "f", "arguments": "{\"days\": 3}"}"#, "", &[r#"f({"days": 3})"#]),
    (F::Llama3, r#"{"name": "weather", "parameters": {"city": "Paris"}}"#, "", ONE),
    (
        F::Llama3,
        r#"<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {"days": 3}}"#,
        "",
        TWO,
    ),
    (
        F::Mistral,
        r#"[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {"days": 3}}]"#,
        "",
        TWO,
    ),
    (
        F::Mistral,
        r#"Well. [TOOL_CALLS] weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]x[ARGS]{"days": 3}"#,
        "Well.",
        TWO,
    ),
    (F::Mistral, r#"[TOOL_CALLS]weather{"city": "Paris"}"#, "", ONE),
    (
        F::DeepSeek,
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"days\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        TWO,
    ),
    (
        F::DeepSeek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"days\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        TWO,
    ),
    (
        F::QwenXml,
        "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Sure.",
        TWO,
    ),
    // Forgotten tags.
    (F::QwenXml, "<function=weather>\n<parameter=city>\nParis\n</function>\n</tool_call>", "", ONE),
    (F::QwenXml, "<function=f></function>", "", &["f({})"]),
    // A parameter that may be a string or null is one of these, whatever its value looks like.
    (
        F::QwenXml,
        "<function=f><parameter=zip>90210</parameter><parameter=code>null</parameter><parameter=both>7</parameter><parameter=zip>True</parameter></function>",
        "",
        &[r#"f({"zip": "90210", "code": null, "both": 7, "zip": "True"})"#],
    ),
    (
        F::Glm,
        "<tool_call>f<arg_key>zip</arg_key><arg_value>[1]</arg_value><arg_key>code</arg_key><arg_value>None</arg_value></tool_call>",
        "",
        &[r#"f({"zip": "[1]", "code": null})"#],
    ),
    (
        F::QwenXml,
        "<function=f><parameter=city>\na \"b\"\n\n<c>\\\n</parameter><parameter=days>x</parameter><parameter=odd>[1]</parameter></function>",
        "",
        &[r#"f({"city": "a \"b\"\n\n<c>\\", "days": "x", "odd": [1]})"#],
    ),
    (
        F::Glm,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        TWO,
    ),
    (F::Glm, "<tool_call>f\n</tool_call>", "", &["f({})"]),
    (F::FunctionGemma, "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", ONE),
    (
        F::Gemma4,
        "Yes <|tool_call>call:weather{city:<|\"|>Paris<|\"|>}<tool_call|><|tool_call>call:f{days:3}<tool_call|>",
        "Yes",
        TWO,
    ),
    (
        F::Gemma4,
        "<|tool_call>call:f{a:[1,{b:true,<|\"|>c d<|\"|>:<|\"|>{x}\n\"<|\"|>}],e:[],g:{},h:word}<tool_call|>",
        "",
        &[r#"f({"a": [1, {"b": true, "c d": "{x}\n\""}], "e": [], "g": {}, "h": "word"})"#],
    ),
    (
        F::Harmony,
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
        "",
        ONE,
    ),
    (
        F::Harmony,
        " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Paris\"}<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"days\": 3}",
        "",
        TWO,
    ),
    (
        F::Lfm2,
        "Let me see. <|tool_call_start|>[weather(city=\"Paris\"), f(days=3)]<|tool_call_end|>\n",
        "Let me see.",
        TWO,
    ),
    (F::Lfm2, "<|tool_call_start|>weather(city='Paris')<|tool_call_end|>", "", ONE),
    (F::Lfm2, "<|tool_call_start|>[f()]<|tool_call_end|>Done.", "Done.", &["f({})"]),
    (
        F::Lfm2,
        r#"<|tool_call_start|>[f(a=[1, (2.5,), {'b': True, "c d": None}], e=[], g={}, h="it's \x41\n\"\q\u00e9", i=-1e3,)]<|tool_call_end|>"#,
        "",
        &[r#"f({"a": [1, [2.5], {"b": true, "c d": null}], "e": [], "g": {}, "h": "it's A\n\"\\q\u00e9", "i": -1e3})"#],
    ),
];

/// Well-formed calls: the content, and the calls.
#[test]
fn calls_are_read_in_every_format() {
    for &(format, text, content, calls) in GOOD {
        assert_eq!(
            brief(format, text),
            (content.to_owned(), calls.iter().map(|c| (*c).to_owned()).collect()),
            "{text}"
        );
    }
}

/// Text that is not a call is content, to the last character.
#[test]
fn malformed_calls_come_back() {
    for (format, text) in [
        (F::Hermes, "plain text\n"),
        (F::Hermes, "a <tool_call> b"),
        (F::Hermes, "<tool_call>\n{\"name\": 5, \"arguments\": {}}\n</tool_call>"),
        (F::Hermes, "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>"),
        (F::Hermes, "<tool_call>{name: f}</tool_call> and so on"),
        (F::Hermes, "<tool_call>{\"name\": \"f\""),
        (F::Hermes, "the tag </tool_call> alone <tool_ca"),
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        (F::Llama3, "{\"name\": \"Ann\", \"parameters\": {}}"),
        (F::Llama3, "{\"name\": \"f\"}"),
        (F::Llama3, "{\"age\": 3} is JSON"),
        (F::Llama3, "<|python_tag|>print(1)"),
        (F::Llama3, "see {\"name\": \"f\", \"parameters\": {}}"),
        (F::Mistral, "[TOOL_CALLS] what is this?"),
        (F::Mistral, "[TOOL_CALLS][]"),
        (F::Mistral, "[TOOL_CALLS][\n]"),
        (F::Mistral, "[TOOL_CALLS][{\"x\": 1}]"),
        (F::Mistral, "[TOOL_CALLS]f[ARGS]none"),
        (F::Mistral, "[TOOL_CALLS]f"),
        (F::DeepSeek, "<｜tool▁calls▁begin｜> nothing"),
        (F::DeepSeek, "<｜tool▁calls▁begin｜>"),
        (F::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f\n<｜tool▁sep｜>"),
        (F::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\n<｜tool▁calls▁end｜>"),
        (F::DeepSeek, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```python\nx"),
        (F::QwenXml, "<tool_call>{\"name\": \"f\"}</tool_call>"),
        (F::QwenXml, "<function=two words>"),
        (F::QwenXml, "<function="),
        (F::Glm, "<tool_call>two words\n</tool_call>"),
        (F::FunctionGemma, "<start_function_call>f{}<end_function_call>"),
        (F::Gemma4, "<|tool_call>call:<tool_call|>"),
        (F::Gemma4, "<|tool_call>call:f("),
        (F::Harmony, "no channel at all"),
        (F::Lfm2, "<|tool_call_start|>[two words()]<|tool_call_end|>"),
        (F::Lfm2, "<|tool_call_start|>[f"),
        (F::Lfm2, "a <|tool_call_end|> alone <|tool_call_st"),
    ] {
        assert_eq!(brief(format, text), (text.to_owned(), vec![]), "{format:?}");
    }
}

/// A call stays one after its name was emitted. Its arguments are the model's text.
#[test]
fn broken_and_cut_arguments_are_passed_on() {
    for (format, text, content, call) in [
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {bad}}</tool_call> so", "so", "f({bad}})"),
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cu", "", "f({\"a\": \"cu)"),
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"::1\"}</tool_call>", "", "f(\"::1\")"),
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "", "f({\"a\": 1})"),
        // One brace too many.
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {}}}</tool_call>", "}</tool_call>", "f({})"),
        (F::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {}, x}</tool_call>", ", x}</tool_call>", "f({})"),
        (F::Llama3, "<|python_tag|>{\"name\": \"f\", \"parameters\": {oh", "", "f({oh)"),
        (F::Mistral, "[TOOL_CALLS]f[ARGS]{\"a\": x} [TOOL", "", "f({\"a\": x} [TOOL)"),
        (F::DeepSeek, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{no<｜tool▁call▁end｜>!", "!", "f({no)"),
        (F::QwenXml, "<function=f><parameter=city>Par", "", "f({\"city\": \"Par)"),
        (F::QwenXml, "<function=f><parameter=city>Paris</parameter>", "", "f({\"city\": \"Paris\"})"),
        (F::QwenXml, "<function=f>oh no</function>", "oh no</function>", "f({})"),
        (
            F::Glm,
            "<tool_call>f\n<arg_key>city</arg_key>Paris</tool_call>",
            "<arg_key>city</arg_key>Paris</tool_call>",
            "f({})",
        ),
        (F::Gemma4, "<|tool_call>call:f{a:1]<tool_call|>.", ".", "f({\"a\": 1])"),
        (F::Harmony, "<|channel|>commentary to=functions.f<|message|>{\"a", "", "f({\"a)"),
        (F::Lfm2, "<|tool_call_start|>[f(a=1]<|tool_call_end|>.", ".", "f({\"a\": 1])"),
        (F::Lfm2, "<|tool_call_start|>[f(city='Par", "", "f({\"city\": \"Par)"),
        (F::Lfm2, "<|tool_call_start|>[f('x')]<|tool_call_end|>", "", "f({'x')])"),
        (F::Lfm2, "<|tool_call_start|>[f(), so it goes", ", so it goes", "f({})"),
    ] {
        assert_eq!(brief(format, text), (content.to_owned(), vec![call.to_owned()]), "{text}");
    }
}

#[test]
fn ids_are_kept() {
    let text = r#"[TOOL_CALLS][{"name": "f", "id": "abcdefghi", "arguments": {}}]"#;
    assert_eq!(read(&spec(ToolFormat::Mistral), text).calls[0].1.as_deref(), Some("abcdefghi"));
    let text = "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}";
    assert_eq!(read(&spec(ToolFormat::Mistral), text).calls[0].1.as_deref(), Some("123456789"));
}

#[test]
fn arguments_go_out_while_they_come() {
    let mut parser = ReplyParser::new(&spec(ToolFormat::Hermes));
    let mut events = Vec::new();
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"lo", &mut events);
    let begin = Event::CallBegin { name: "f".into(), id: None };
    assert_eq!(events, [begin, Event::Arguments("{\"a\": \"lo".into())]);
    events.clear();
    parser.push("ng", &mut events);
    assert_eq!(events, [Event::Arguments("ng".into())]);
}

/// An unclosed call is not held for ever.
#[test]
fn memory_is_bounded() {
    let long = "x".repeat(3 * HELD_BYTES_MAX);
    for (format, head, quote) in [
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": {\"a\": \"", ""),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"note\": \"", ""),
        (ToolFormat::Llama3, "{\"parameters\": {\"a\": \"", ""),
        (ToolFormat::Mistral, "[TOOL_CALLS]", ""),
        (ToolFormat::DeepSeek, "<｜tool▁call▁begin｜>", ""),
        (ToolFormat::QwenXml, "<function=", ""),
        (ToolFormat::Glm, "<tool_call>f\n<arg_key>", "f({})"),
        (ToolFormat::Gemma4, "<|tool_call>call:", ""),
        (ToolFormat::Harmony, "<|channel|>", ""),
        (ToolFormat::Lfm2, "<|tool_call_start|>[", ""),
        (ToolFormat::Olmo3, "<function_calls>", ""),
        (ToolFormat::KimiK2, "<|tool_call_begin|>", ""),
        (ToolFormat::Nemotron, "<TOOLCALL>[{\"name\": \"f\", \"note\": \"", ""),
        (ToolFormat::Granite, "<|tool_call|>[{\"arguments\": {\"a\": \"", ""),
    ] {
        let text = format!("{head}{long}");
        let (content, calls) = brief(format, &text);
        if quote.is_empty() {
            assert!(content == text && calls.is_empty(), "{format:?}: {} of {}", content.len(), text.len());
        } else {
            assert!(content.ends_with(&long) && calls == [quote], "{format:?}");
        }
    }
    // A value that is declared as no string becomes one when it is too long to wait for.
    let (_, calls) = brief(ToolFormat::QwenXml, &format!("<function=f><parameter=days>{long}</parameter></function>"));
    assert_eq!(calls, [format!("f({{\"days\": \"{long}\"}})")]);
}
