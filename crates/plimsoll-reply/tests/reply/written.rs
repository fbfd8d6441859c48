//! Answers that as a whole are calls in plain JSON, and answers that only look like calls.

use std::sync::Arc;

use plimsoll_reply::{Event, HELD_BYTES_MAX, ReasoningFormat, ReplyParser, Spec, ToolFormat, Tools};
use proptest::prelude::*;
use serde_json::json;

use crate::formats::ALL;

fn spec(format: ToolFormat) -> Spec {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = Arc::new(Tools::from_openai(&json!([tool("weather"), tool("web")])));
    let reasoning = if format == ToolFormat::Harmony { ReasoningFormat::Harmony } else { ReasoningFormat::Think };
    Spec { reasoning: Some(reasoning), tools: Some((format, tools)), written_calls: true, ..Spec::default() }
}

/// Returns the content, and the calls as `name(arguments)`.
fn parts(events: &[Event]) -> (String, Vec<String>) {
    let (mut content, mut calls) = (String::new(), Vec::<String>::new());
    for event in events {
        match event {
            Event::Reasoning(_) => {}
            Event::Content(text) => content += text,
            Event::CallBegin { name, .. } => calls.push(format!("{name}(")),
            Event::Arguments(text) => *calls.last_mut().unwrap() += text,
            Event::CallEnd => *calls.last_mut().unwrap() += ")",
        }
    }
    (content, calls)
}

/// Returns the parts of a reply, pushed whole and character by character.
fn read(spec: &Spec, text: &str) -> (String, Vec<String>) {
    let (mut whole, mut single) = (Vec::new(), Vec::new());
    let mut parser = ReplyParser::new(spec);
    parser.push(text, &mut whole);
    parser.finish(&mut whole);
    let mut parser = ReplyParser::new(spec);
    text.chars().for_each(|c| parser.push(c.encode_utf8(&mut [0; 4]), &mut single));
    parser.finish(&mut single);
    assert_eq!(parts(&whole), parts(&single), "{text}");
    parts(&whole)
}

#[test]
fn an_answer_that_is_calls_as_a_whole_becomes_calls_in_every_format() {
    let paris = r#"weather({"city": "Paris", "at": [1, {"a": "}"}]})"#;
    for (text, calls) in [
        (r#"{"name": "weather", "arguments": {"city": "Paris", "at": [1, {"a": "}"}]}}"#, vec![paris]),
        ("{\n  \"arguments\": {},\n  \"name\": \"web\"\n}\n", vec!["web({})"]),
        (r#"{"name":"web","parameters":{}}"#, vec!["web({})"]),
        (
            "\n```json\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"at\": [1, {\"a\": \"}\"}]}}\n```",
            vec![paris],
        ),
        ("```\n{\"name\": \"web\", \"arguments\": {\"q\": \"```\"}}\n```\n\n", vec![r#"web({"q": "```"})"#]),
        (
            r#"[{"name": "web", "arguments": {}}, {"name": "weather", "arguments": {"n": 12345678901234567890123}}]"#,
            vec!["web({})", r#"weather({"n": 12345678901234567890123})"#],
        ),
        ("```json\n[{\"name\": \"web\", \"arguments\": {}}]\n```", vec!["web({})"]),
    ] {
        for format in ALL {
            let before =
                if format == ToolFormat::Harmony { "<|channel|>final<|message|>" } else { "<think>\nHm\n</think>\n\n" };
            let calls: Vec<String> = calls.iter().map(ToString::to_string).collect();
            assert_eq!(read(&spec(format), &format!("{before}{text}")), (String::new(), calls), "{format:?} {text}");
        }
    }
}

#[test]
fn text_that_only_resembles_a_call_stays_content() {
    let many = format!("[{}]", vec![r#"{"name": "web", "arguments": {}}"#; 129].join(","));
    for text in [
        r#"{"name": "other", "arguments": {}}"#,
        r#"{"name": "we", "arguments": {}}"#,
        r#"{"name": "web"}"#,
        r#"{"name": "web", "arguments": "{}"}"#,
        r#"{"name": "web", "arguments": {}, "more": 1}"#,
        r#"{"name": "web", "arguments": {}, "parameters": {}}"#,
        r#"{"name": "web", "name": "web", "arguments": {}}"#,
        r#"{"name": "web", "arguments": {"a": 01}}"#,
        r#"{"name": "web", "arguments": {}"#,
        r#"{"name": "web", "arguments": {}} is the call."#,
        r#"{"name": "web", "arguments": {}}{"name": "web", "arguments": {}}"#,
        r#"I call {"name": "web", "arguments": {}}"#,
        r#"[{"name": "web", "arguments": {}}, 1]"#,
        r#"[{"name": "web", "arguments": {}},]"#,
        "[]",
        "{}",
        "``` json\n1```",
        "```json\n{\"name\": \"web\", \"arguments\": {}}\n",
        "```json\n{\"name\": \"web\", \"arguments\": {}}\n```\nThis searches.",
        "{\"name\": \"web\", \"arguments\": {}}\n```",
        "```python\nprint()\n```",
        "\n \n{\"answer\": [1, 2]}\n ",
        " \n",
        "`x` is a name\n",
        &many,
    ] {
        for format in
            [ToolFormat::Hermes, ToolFormat::QwenXml, ToolFormat::Mistral, ToolFormat::DeepSeek, ToolFormat::Gemma4]
        {
            assert_eq!(read(&spec(format), text), (text.to_owned(), vec![]), "{format:?} {text}");
        }
    }
}

#[test]
fn an_answer_is_content_from_the_first_character_that_rules_calls_out() {
    for (held, then) in [
        ("```", "p"),
        ("```json\n{\"", "t"),
        ("{\"name\": \"we", "x"),
        ("  ", "I"),
        ("[", "1"),
        ("{\"name\": \"web\", \"arguments\": {}}\n", "I"),
    ] {
        let (mut parser, mut events) = (ReplyParser::new(&spec(ToolFormat::Hermes)), Vec::new());
        parser.push(held, &mut events);
        assert_eq!(events, [], "{held}");
        parser.push(then, &mut events);
        assert_eq!(events, [Event::Content(format!("{held}{then}"))], "{held}");
        assert_eq!(parser.spans().first(), Some(&(0..held.len() + then.len())));
    }
}

#[test]
fn possible_calls_are_held_back_up_to_the_limit() {
    let head = "{\"name\": \"web\", \"arguments\": {\"text\": \"";
    let (mut parser, mut events) = (ReplyParser::new(&spec(ToolFormat::Hermes)), Vec::new());
    parser.push(head, &mut events);
    parser.push(&"x".repeat(HELD_BYTES_MAX - head.len() - 1), &mut events);
    assert_eq!(events, []);
    parser.push("xx", &mut events);
    assert_eq!(parts(&events).0.len(), HELD_BYTES_MAX + 1);
    let small = format!("{head}{}\"}}}}", "x".repeat(HELD_BYTES_MAX / 2));
    assert_eq!(read(&spec(ToolFormat::Hermes), &small).1.len(), 1);
}

#[test]
fn a_call_in_the_models_own_format_follows_what_was_held() {
    let text =
        "{\"name\": \"web\", \"arguments\": {}}\n<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    let content = "{\"name\": \"web\", \"arguments\": {}}".to_owned();
    assert_eq!(read(&spec(ToolFormat::Hermes), text), (content, vec!["weather({})".into()]));
}

/// Returns the parts of a reply that a stop string ends, and whether it cut a call.
fn stopped(format: ToolFormat, text: &str) -> (String, Vec<String>, bool) {
    let read = |pace: usize| {
        let spec = Spec { whole_calls: true, ..spec(format) };
        let (mut parser, mut events) = (ReplyParser::new(&spec), Vec::new());
        let chars: Vec<char> = text.chars().collect();
        chars.chunks(pace).for_each(|piece| parser.push(&piece.iter().collect::<String>(), &mut events));
        let cut = parser.stop(&mut events);
        let (content, calls) = parts(&events);
        (content, calls, cut)
    };
    assert_eq!(read(1), read(1000), "{text}");
    read(1)
}

#[test]
fn a_call_that_a_stop_string_cuts_is_dropped() {
    use ToolFormat as F;
    let whole =
        |content: &str, calls: &[&str], cut| (content.to_owned(), calls.iter().map(ToString::to_string).collect(), cut);
    let call = "<tool_call>{\"name\": \"web\", \"arguments\": {}}</tool_call>";
    for (format, text, expected) in [
        (
            F::Hermes,
            "On it.\n<tool_call>\n{\"name\": \"web\", \"arguments\": {\"q\": \"".to_owned(),
            whole("On it.", &[], true),
        ),
        (F::Hermes, "On it.\n<tool_call>\n{\"na".to_owned(), whole("On it.", &[], true)),
        (
            F::Hermes,
            format!("{call}\n<tool_call>{{\"name\": \"weather\", \"arguments\": {{\"c"),
            whole("", &["web({})"], true),
        ),
        (F::Hermes, "<tool_call>{\"name\": \"web\", \"arguments\": {}}".to_owned(), whole("", &["web({})"], false)),
        (F::Hermes, "a <".to_owned(), whole("a <", &[], false)),
        (F::QwenXml, "<tool_call>\n<function=web>\n<parameter=q>\nPa".to_owned(), whole("", &[], true)),
        (F::Llama3, "{\"name\": \"web\", \"parameters\": {\"q\": \"".to_owned(), whole("", &[], true)),
        (F::Llama3, "{\"answer\": \"".to_owned(), whole("{\"answer\": \"", &[], false)),
        (F::Mistral, "Well. [TOOL_CALLS]web[ARGS]{\"q\": \"".to_owned(), whole("Well.", &[], true)),
        (
            F::DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>web<｜tool▁sep｜>{\"q\": \"".to_owned(),
            whole("", &[], true),
        ),
        (F::Glm, "<tool_call>web\n<arg_key>q</arg_key>\n<arg_value>".to_owned(), whole("", &[], true)),
        (F::Gemma4, "<|tool_call>call:web{q:<|\"|>".to_owned(), whole("", &[], true)),
        (F::Harmony, "<|channel|>commentary to=functions.web<|message|>{\"q\": \"".to_owned(), whole("", &[], true)),
        (
            F::Harmony,
            "<|channel|>commentary to=functions.web<|message|>{\"q\": 1}".to_owned(),
            whole("", &["web({\"q\": 1})"], false),
        ),
    ] {
        assert_eq!(stopped(format, &text), expected, "{format:?} {text}");
    }
}

#[test]
fn a_call_too_long_to_be_held_goes_out_as_it_comes() {
    let spec = Spec { whole_calls: true, ..spec(ToolFormat::Hermes) };
    let (mut parser, mut events) = (ReplyParser::new(&spec), Vec::new());
    parser.push("<tool_call>{\"name\": \"web\", \"arguments\": {\"q\": \"", &mut events);
    assert_eq!(events, []);
    parser.push(&"x".repeat(HELD_BYTES_MAX), &mut events);
    assert_eq!(events[0], Event::CallBegin { name: "web".into(), id: None });
    assert!(parser.stop(&mut events));
    assert_eq!(events.last(), Some(&Event::CallEnd));
}

proptest! {
    /// No text is lost, whatever the reply.
    #[test]
    fn an_answer_is_content_or_calls(text in r#"[ \n]{0,2}(```(json)?\n?)?\[?(\{"name": ?"(web|weather|we|x)", "(arguments|parameters|a)": \{("q": 1)?\}\}(, )?){0,2}\]?(\n```)?[ \n]?x?"#) {
        let (content, calls) = read(&spec(ToolFormat::Hermes), &text);
        prop_assert!(calls.is_empty() && content == text || !calls.is_empty() && content.is_empty(), "{text}");
        let inner = text.trim().trim_start_matches("```json").trim_matches('`').trim();
        let json = serde_json::from_str::<serde_json::Value>(inner);
        prop_assert!(calls.is_empty() || json.is_ok(), "{text}");
    }
}
