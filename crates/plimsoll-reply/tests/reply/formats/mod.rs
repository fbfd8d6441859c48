//! Every format, whole and cut at any place.

mod calls;
mod families;

use std::sync::Arc;

use plimsoll_reply::{Event, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat, Tools};
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

/// The parts of a reply: reasoning, content, calls as (name, id, arguments).
#[derive(Debug, Default, PartialEq)]
struct Parts {
    reasoning: String,
    content: String,
    calls: Vec<(String, Option<String>, String)>,
    open: bool,
}

/// Asserts that each content has a span in the reply, in order.
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

/// Returns the parts of a reply; asserts that they are equal whole, by characters, and in threes.
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

/// Returns the content, and the calls as `name(arguments)`.
fn brief(format: ToolFormat, text: &str) -> (String, Vec<String>) {
    let parts = read(&spec(format), text);
    let calls = parts.calls.iter().map(|(name, _, arguments)| format!("{name}({arguments})"));
    (parts.content, calls.collect())
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
    assert_eq!(thinks(Start::Reasoning, "Hm.\n\nSo.\n</think>\n\nYes."), pair("Hm.\n\nSo.", "Yes."));
    assert_eq!(thinks(Start::Reasoning, "Hm, I wonder"), pair("Hm, I wonder", ""));
    assert_eq!(thinks(Start::Reasoning, "Hm </thi"), pair("Hm </thi", ""));
    assert_eq!(thinks(Start::Turn, "<think>Hm, I"), pair("Hm, I", ""));
    // Elsewhere tags are text.
    assert_eq!(thinks(Start::Reasoning, "a <think> b</think>c </think> d"), pair("a <think> b", "c </think> d"));
    assert_eq!(thinks(Start::Turn, "The tag <think> opens. </think>"), pair("", "The tag <think> opens. </think>"));
    assert_eq!(thinks(Start::Turn, "<thin"), pair("", "<thin"));
    assert_eq!(thinks(Start::Turn, "  \nYes"), pair("", "  \nYes"));
    // Behind the reasoning tags are text too.
    assert_eq!(thinks(Start::Answer, "<think>x</think>"), pair("", "<think>x</think>"));
    // Without a reasoning format all is content.
    let none = Spec::default();
    assert_eq!(read(&none, "<think>x</think> ").content, "<think>x</think> ");
}

#[test]
fn thinking_and_calls_go_together() {
    let spec = Spec {
        reasoning: Some(ReasoningFormat::Think),
        start: Start::Reasoning,
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
        ("List of tools: <|tool_list_start|>[", Some(ToolFormat::Lfm2), None),
        ("<tool_call>{{name}}<arg_key></think>", Some(ToolFormat::Glm), Some(ReasoningFormat::Think)),
        ("<TOOLCALL>[{{…}}]</TOOLCALL> <think>", Some(ToolFormat::Nemotron), Some(ReasoningFormat::Think)),
        ("respond only with <|tool_call|> followed by a list", Some(ToolFormat::Granite), None),
        ("'<|tool|>' + tools + '<|/tool|>'", Some(ToolFormat::Phi4Mini), None),
        ("<|tool_call|>{…}<|/tool_call|>", Some(ToolFormat::Phi4Mini), None),
        ("<tool_calls>[{\"name\": …}]</tool_calls>", Some(ToolFormat::Hunyuan), None),
        ("within <function_calls></function_calls> tags", Some(ToolFormat::Olmo3), None),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>{{id}} <think>",
            Some(ToolFormat::KimiK2),
            Some(ReasoningFormat::Think),
        ),
        // Tags of families that no reader knows.
        ("<tool_calls>\n<tool_call>", Some(ToolFormat::Hermes), None),
        ("<x:function_calls>", None, None),
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
        "f(",
        "a=1",
        ")",
        "\\x4",
        "functions.f:0",
    ]);
    words
}

pub const ALL: [ToolFormat; 16] = [
    ToolFormat::Hermes,
    ToolFormat::QwenXml,
    ToolFormat::Llama3,
    ToolFormat::Mistral,
    ToolFormat::DeepSeek,
    ToolFormat::Glm,
    ToolFormat::FunctionGemma,
    ToolFormat::Gemma4,
    ToolFormat::Harmony,
    ToolFormat::Lfm2,
    ToolFormat::Olmo3,
    ToolFormat::KimiK2,
    ToolFormat::Nemotron,
    ToolFormat::Granite,
    ToolFormat::Phi4Mini,
    ToolFormat::Hunyuan,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_split_of_any_soup_gives_the_same(
        format in 0..ALL.len(),
        picks in proptest::collection::vec(0usize..1000, 0..24),
        cuts in proptest::collection::vec(0usize..400, 0..12),
        thinks in any::<bool>(),
        start in prop_oneof![Just(Start::Turn), Just(Start::Reasoning), Just(Start::Answer)],
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
        // Without calls and reasoning nothing is lost.
        if whole.calls.is_empty() && !thinks && format != ToolFormat::Harmony {
            prop_assert_eq!(whole.content, text);
        }
    }
}
