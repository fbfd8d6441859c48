//! Every format, whole and cut at any place.

use std::sync::Arc;

use plimsoll_reply::{Event, HELD_BYTES_MAX, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat, Tools};
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Arc<Tools> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "code": {"type": ["string", "null"]}, "both": {"type": ["string", "integer"]}
    }});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    Arc::new(Tools::from_openai(&json!([tool("weather"), tool("f")])))
}

fn spec(format: ToolFormat) -> Spec {
    let reasoning = (format == ToolFormat::Harmony).then_some(ReasoningFormat::Harmony);
    Spec { reasoning, start: Start::Turn, tools: Some((format, tools())), ..Spec::default() }
}

/// A reply taken apart: reasoning, content, calls as (name, id, arguments).
#[derive(Debug, Default, PartialEq)]
struct Parts {
    reasoning: String,
    content: String,
    calls: Vec<(String, Option<String>, String)>,
    open: bool,
}

/// Each content stands in the reply, in order.
fn contents_have_places(parser: &ReplyParser, events: &[Event]) {
    let contents = events.iter().filter(|event| matches!(event, Event::Content(_)));
    assert_eq!(contents.count(), parser.spans().len(), "{events:?}");
    let mut before = 0;
    for span in parser.spans() {
        assert!(span.start >= before && span.end >= span.start, "{events:?} at {:?}", parser.spans());
        before = span.end;
    }
    assert!(before <= parser.past() && parser.past() <= parser.taken());
}

fn parts(spec: &Spec, pieces: &[&str]) -> Parts {
    let mut parser = ReplyParser::new(spec);
    let (mut events, mut last) = (Vec::new(), 0);
    for piece in pieces {
        last = events.len();
        parser.push(piece, &mut events);
        contents_have_places(&parser, &events[last..]);
    }
    parser.finish(&mut events);
    contents_have_places(&parser, &events[last..]);
    let mut parts = Parts::default();
    for event in events {
        match event {
            Event::Reasoning(text) => parts.reasoning.push_str(&text),
            Event::Content(text) => parts.content.push_str(&text),
            Event::CallBegin { name, id } => {
                assert!(!std::mem::replace(&mut parts.open, true), "calls never interleave");
                parts.calls.push((name, id, String::new()));
            }
            Event::Arguments(text) => {
                assert!(parts.open);
                parts.calls.last_mut().unwrap().2.push_str(&text);
            }
            Event::CallEnd => assert!(std::mem::replace(&mut parts.open, false)),
        }
    }
    assert!(!parts.open, "every call ends");
    parts
}

/// The same whole, by characters, and in threes.
fn read(spec: &Spec, text: &str) -> Parts {
    let whole = parts(spec, &[text]);
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let threes: Vec<String> = chars.chunks(3).map(|three| three.concat()).collect();
    for cut in [&chars, &threes] {
        let pieces: Vec<&str> = cut.iter().map(String::as_str).collect();
        assert_eq!(parts(spec, &pieces), whole, "{text}");
    }
    whole
}

/// Content and calls, the latter as `name(arguments)`.
fn brief(format: ToolFormat, text: &str) -> (String, Vec<String>) {
    let parts = read(&spec(format), text);
    let calls = parts.calls.iter().map(|(name, _, arguments)| format!("{name}({arguments})"));
    (parts.content, calls.collect())
}

/// Good calls: what is content, and the calls.
#[test]
fn calls_are_read_in_every_format() {
    use ToolFormat as F;
    let one: &[&str] = &[r#"weather({"city": "Paris"})"#];
    let two: &[&str] = &[r#"weather({"city": "Paris"})"#, r#"f({"days": 3})"#];
    for (format, text, content, calls) in [
        (
            F::Hermes,
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
            "",
            one,
        ),
        (
            F::Hermes,
            "Let me see.\n<tool_call>{\"arguments\": {\"city\": \"Paris\"}, \"name\": \"weather\"}</tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"days\": 3}}\n</tool_call>\n",
            "Let me see.",
            two,
        ),
        (F::Hermes, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &["f({})"]),
        (F::Hermes, r#"<tool_call>{"name": "f"}</tool"#, "", &["f({})"]),
        (F::Hermes, r#"x<tool_call>{"name": "f"}</tool_call></tool"#, "x</tool", &["f({})"]),
        (F::Hermes, r#"<tool_call>{"name": "f", "arguments": null}</tool_call>"#, "", &["f({})"]),
        (F::Hermes, r#"<tool_call>{"name": "f", "arguments": "{\"days\": 3}"}"#, "", &[r#"f({"days": 3})"#]),
        (F::Llama3, r#"{"name": "weather", "parameters": {"city": "Paris"}}"#, "", one),
        (
            F::Llama3,
            r#"<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {"days": 3}}"#,
            "",
            two,
        ),
        (
            F::Mistral,
            r#"[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {"days": 3}}]"#,
            "",
            two,
        ),
        (
            F::Mistral,
            r#"Well. [TOOL_CALLS] weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]x[ARGS]{"days": 3}"#,
            "Well.",
            two,
        ),
        (F::Mistral, r#"[TOOL_CALLS]weather{"city": "Paris"}"#, "", one),
        (
            F::DeepSeek,
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"days\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Hm.",
            two,
        ),
        (
            F::DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"days\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            two,
        ),
        (
            F::QwenXml,
            "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "Sure.",
            two,
        ),
        // Forgotten tags.
        (F::QwenXml, "<function=weather>\n<parameter=city>\nParis\n</function>\n</tool_call>", "", one),
        (F::QwenXml, "<function=f></function>", "", &["f({})"]),
        // What may be a string or null is one of these, however much it looks like something else.
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
            two,
        ),
        (F::Glm, "<tool_call>f\n</tool_call>", "", &["f({})"]),
        (F::FunctionGemma, "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", one),
        (
            F::Gemma4,
            "Yes <|tool_call>call:weather{city:<|\"|>Paris<|\"|>}<tool_call|><|tool_call>call:f{days:3}<tool_call|>",
            "Yes",
            two,
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
            one,
        ),
        (
            F::Harmony,
            " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Paris\"}<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"days\": 3}",
            "",
            two,
        ),
    ] {
        assert_eq!(
            brief(format, text),
            (content.to_owned(), calls.iter().map(|c| (*c).to_owned()).collect()),
            "{text}"
        );
    }
}

/// What is no call is content, to the last character.
#[test]
fn malformed_calls_come_back() {
    use ToolFormat as F;
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
    ] {
        assert_eq!(brief(format, text), (text.to_owned(), vec![]), "{format:?}");
    }
}

/// A call whose name is out stays one: its arguments are what the model wrote.
#[test]
fn broken_and_cut_arguments_are_passed_on() {
    use ToolFormat as F;
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

fn thinks(start: Start, text: &str) -> (String, String) {
    let spec = Spec { reasoning: Some(ReasoningFormat::Think), start, tools: None, ..Spec::default() };
    let parts = read(&spec, text);
    (parts.reasoning, parts.content)
}

#[test]
fn thinking_follows_the_models_rules() {
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    // The model opens the block.
    assert_eq!(thinks(Start::Turn, "<think>\nHm.\n</think>\n\nYes.\n"), pair("Hm.", "Yes.\n"));
    assert_eq!(thinks(Start::Turn, "\n<think>Hm.</think>Yes."), pair("Hm.", "Yes."));
    assert_eq!(thinks(Start::Turn, "<think>\n\n</think>\n\nYes."), pair("", "Yes."));
    // The template has opened it: all is reasoning until it is closed, also where the output was cut.
    assert_eq!(thinks(Start::Thoughts, "Hm.\n\nSo.\n</think>\n\nYes."), pair("Hm.\n\nSo.", "Yes."));
    assert_eq!(thinks(Start::Thoughts, "Hm, I wonder"), pair("Hm, I wonder", ""));
    assert_eq!(thinks(Start::Thoughts, "Hm </thi"), pair("Hm </thi", ""));
    assert_eq!(thinks(Start::Turn, "<think>Hm, I"), pair("Hm, I", ""));
    // Elsewhere tags are text.
    assert_eq!(thinks(Start::Thoughts, "a <think> b</think>c </think> d"), pair("a <think> b", "c </think> d"));
    assert_eq!(thinks(Start::Turn, "The tag <think> opens. </think>"), pair("", "The tag <think> opens. </think>"));
    assert_eq!(thinks(Start::Turn, "<thin"), pair("", "<thin"));
    assert_eq!(thinks(Start::Turn, "  \nYes"), pair("", "  \nYes"));
    // Behind the thoughts, too.
    assert_eq!(thinks(Start::Answer, "<think>x</think>"), pair("", "<think>x</think>"));
    // Without thinking all is content.
    let none = Spec::default();
    assert_eq!(read(&none, "<think>x</think> ").content, "<think>x</think> ");
}

#[test]
fn thinking_and_calls_go_together() {
    let spec = Spec {
        reasoning: Some(ReasoningFormat::Think),
        start: Start::Thoughts,
        tools: Some((ToolFormat::Hermes, tools())),
        ..Spec::default()
    };
    let text = "Call <tool_call>?\n</think>\n\nOn it.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let parts = read(&spec, text);
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("Call <tool_call>?", "On it."));
    assert_eq!(parts.calls.len(), 1);
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>On it.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>";
    let parts = read(&spec_of_harmony(), text);
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str(), parts.calls.len()), ("Hm.", "On it.", 1));
    let spec = Spec { reasoning: Some(ReasoningFormat::Harmony), ..Spec::default() };
    let parts = read(
        &spec,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.<|return|>",
    );
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("Hm.", "Yes <b>."));
    let parts = read(&Spec { start: Start::Answer, ..spec }, "ll done.<|return|>");
    assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("", "ll done."));
}

#[test]
fn a_turn_that_stands_in_the_prompt_may_be_thinking() {
    let think = ReasoningFormat::Think;
    assert!(think.opened_in("<think>\nHm, ") && think.opened_in("<think>a</think> b <think>"));
    assert!(!think.opened_in("Yes, ") && !think.opened_in("<think>a</think> b"));
    assert!(!ReasoningFormat::Harmony.opened_in("<think>"));
}

fn spec_of_harmony() -> Spec {
    spec(ToolFormat::Harmony)
}

#[test]
fn formats_are_known_by_their_templates() {
    for (template, tool, reasoning) in [
        (
            "{%- if tools %}<tool_call></tool_call>{% endif %}<think>",
            Some(ToolFormat::Hermes),
            Some(ReasoningFormat::Think),
        ),
        ("<tool_call><function=x><parameter=y>", Some(ToolFormat::QwenXml), None),
        ("[TOOL_CALLS] [THINK]", Some(ToolFormat::Mistral), Some(ReasoningFormat::Mistral)),
        ("<|start|><|channel|>x<|message|>", Some(ToolFormat::Harmony), Some(ReasoningFormat::Harmony)),
        ("<|tool_call>call <|channel>thought", Some(ToolFormat::Gemma4), Some(ReasoningFormat::Gemma4)),
        ("<tool_call>{{name}}<arg_key></think>", Some(ToolFormat::Glm), Some(ReasoningFormat::Think)),
        ("<|im_start|>", None, None),
    ] {
        assert_eq!(ToolFormat::of_template(template), tool, "{template}");
        assert_eq!(ReasoningFormat::of_template(template), reasoning, "{template}");
    }
    assert!(ReasoningFormat::Think.opened_by("<|im_start|>assistant\n<think>\n"));
    assert!(!ReasoningFormat::Think.opened_by("what is <think>?<|im_end|>\n<|im_start|>assistant\n"));
    assert!("hermes".parse::<ToolFormat>().is_ok());
    assert!("horse".parse::<ToolFormat>().unwrap_err().to_string().contains("hermes"));
}

/// What never ends is not held for ever.
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
    ] {
        let text = format!("{head}{long}");
        let (content, calls) = brief(format, &text);
        if quote.is_empty() {
            assert!(content == text && calls.is_empty(), "{format:?}: {} of {}", content.len(), text.len());
        } else {
            assert!(content.ends_with(&long) && calls == [quote], "{format:?}");
        }
    }
    // A value that is no string by declaration becomes one when it is too long to wait for.
    let (_, calls) = brief(ToolFormat::QwenXml, &format!("<function=f><parameter=days>{long}</parameter></function>"));
    assert_eq!(calls, [format!("f({{\"days\": \"{long}\"}})")]);
}

/// Words from which replies of any kind are made.
fn words(format: ToolFormat) -> Vec<&'static str> {
    let mut words = vec![
        "{",
        "}",
        "\"name\": \"f\"",
        ", ",
        "\"arguments\": ",
        "\"parameters\": ",
        "\"a\": 1",
        "f",
        "\n",
        " x",
        "é",
        "\"",
        "[",
        "]",
        ":",
        "function",
        "<",
    ];
    words.extend(format.markers());
    words.extend([
        "<think>",
        "</think>",
        "<function=",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        ">",
        "```json",
        "call:",
        "commentary to=f",
    ]);
    words
}

const ALL: [ToolFormat; 9] = [
    ToolFormat::Hermes,
    ToolFormat::QwenXml,
    ToolFormat::Llama3,
    ToolFormat::Mistral,
    ToolFormat::DeepSeek,
    ToolFormat::Glm,
    ToolFormat::FunctionGemma,
    ToolFormat::Gemma4,
    ToolFormat::Harmony,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_split_of_any_soup_gives_the_same(
        format in 0..ALL.len(),
        picks in proptest::collection::vec(0usize..1000, 0..24),
        cuts in proptest::collection::vec(0usize..400, 0..12),
        thinks in any::<bool>(),
        start in prop_oneof![Just(Start::Turn), Just(Start::Thoughts), Just(Start::Answer)],
    ) {
        let format = ALL[format];
        let words = words(format);
        let text: String = picks.iter().map(|pick| words[pick % words.len()]).collect();
        let reasoning = thinks.then_some(ReasoningFormat::Think);
        let spec = Spec { reasoning, start, ..spec(format) };
        let whole = parts(&spec, &[&text]);
        let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).filter(|cut| text.is_char_boundary(*cut)).collect();
        ends.extend([0, text.len()]);
        ends.sort_unstable();
        let pieces: Vec<&str> = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parts(&spec, &pieces), parts(&spec, &[&text]));
        // Without calls and thoughts nothing is lost.
        if whole.calls.is_empty() && !thinks && format != ToolFormat::Harmony {
            prop_assert_eq!(whole.content, text);
        }
    }
}
