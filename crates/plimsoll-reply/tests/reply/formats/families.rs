//! Formats of single families: calls between markers as JSON lists, in sections and in lines of Python.

use plimsoll_reply::{ReasoningFormat, Spec, Start, ToolFormat as F};

use super::{ALL, brief, parts, read, spec};

const ONE: &[&str] = &[r#"weather({"city": "Paris"})"#];
const TWO: &[&str] = &[r#"weather({"city": "Paris"})"#, r#"f({"days": 3})"#];
const LIST: &str = r#"[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {"days": 3}}]"#;
const KIMI: &str = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Paris\"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{\"days\": 3}<|tool_call_end|><|tool_calls_section_end|>";

/// Two calls as each family writes them.
fn two_calls() -> Vec<(F, String)> {
    vec![
        (F::Nemotron, format!("<TOOLCALL>{LIST}</TOOLCALL>")),
        (F::Granite, format!("<|tool_call|>{LIST}")),
        (F::Granite, format!("<tool_call>{LIST}")),
        (F::Phi4Mini, format!("<|tool_call|>{LIST}<|/tool_call|>")),
        (F::Phi4Mini, format!("functools{LIST}")),
        (F::Hunyuan, format!("<tool_calls>{LIST}</tool_calls>")),
        (F::Hunyuan, format!("<tool_calls>\n{LIST}\n</tool_calls>")),
        (F::Hermes, format!("<tool_call>{LIST}</tool_call>")),
        (F::KimiK2, KIMI.into()),
        (F::Olmo3, "<function_calls>weather(city=\"Paris\")\nf(days=3)</function_calls>".into()),
        (F::Olmo3, "<function_calls>\nweather(city='Paris')\nf(days=3)\n</function_calls>\n".into()),
        (F::Olmo3, "<function_calls>[weather(city='Paris'), f(days=3)]</function_calls>".into()),
    ]
}

fn owned(calls: &[&str]) -> Vec<String> {
    calls.iter().map(|call| (*call).to_owned()).collect()
}

#[test]
fn several_calls_are_read_with_text_before_them() {
    for (format, text) in two_calls() {
        assert_eq!(brief(format, &text), (String::new(), owned(TWO)), "{format:?} {text}");
        let after_text = format!("Let me see.\n\n{text}");
        assert_eq!(brief(format, &after_text), ("Let me see.".into(), owned(TWO)), "{format:?} {after_text}");
    }
}

#[test]
fn calls_are_read_after_reasoning() {
    for (format, text) in two_calls() {
        for (start, head) in [(Start::Turn, "<think>\nHm.\n</think>\n\n"), (Start::Reasoning, "Hm.</think>")] {
            let spec = Spec { reasoning: Some(ReasoningFormat::Think), start, ..spec(format) };
            let parts = read(&spec, &format!("{head}{text}"));
            assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("Hm.", ""), "{format:?} {text}");
            assert_eq!(parts.calls.len(), 2, "{format:?} {text}");
        }
        // In the reasoning, a call is text.
        let spec = Spec { reasoning: Some(ReasoningFormat::Think), start: Start::Reasoning, ..spec(format) };
        let parts = read(&spec, &text);
        assert_eq!((parts.reasoning.as_str(), parts.calls.len()), (text.as_str(), 0), "{format:?}");
    }
}

#[test]
fn a_reply_may_be_cut_at_any_byte() {
    for (format, text) in two_calls() {
        let text = format!("é {text} so");
        let whole = parts(&spec(format), &[&text]);
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            assert_eq!(parts(&spec(format), &[&text[..at], &text[at..]]), whole, "{format:?} {text} at {at}");
        }
    }
}

#[test]
fn variants_of_the_families_are_read() {
    for (format, text, content, calls) in [
        (F::Nemotron, r#"<TOOLCALL>{"name": "weather", "arguments": {"city": "Paris"}}</TOOLCALL>"#, "", ONE),
        (
            F::Nemotron,
            r#"<TOOLCALL>[{"name": "f", "arguments": "{\"days\": 3}"}]</TOOLCALL> Done."#,
            "Done.",
            &TWO[1..],
        ),
        (F::Nemotron, r#"<TOOLCALL>[{"name": "f"}]</TOOLCALL><TOOLCALL>[{"name": "f"}]"#, "", &["f({})", "f({})"]),
        (F::Nemotron, r#"<TOOLCALL>[{"name": "f"}, </TOOLCALL>"#, ", ", &["f({})"]),
        (F::Nemotron, r#"<TOOLCALL>[{"name": "f"}, "#, "", &["f({})"]),
        (F::Granite, r#"<|tool_call|> [{"name": "f"}] So."#, "So.", &["f({})"]),
        (F::Granite, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &["f({})"]),
        (F::Phi4Mini, r#"functools[{"name": "f"}]"#, "", &["f({})"]),
        (F::Phi4Mini, r#"<|tool_call|>{"name": "f"}<|/tool_call|>"#, "", &["f({})"]),
        (F::Phi4Mini, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &["f({})"]),
        (F::Hunyuan, r#"<tool_calls>[{"name": "f"}]"#, "", &["f({})"]),
        (
            F::Olmo3,
            "<function_calls>f(city=null, days=true)</function_calls>",
            "",
            &[r#"f({"city": null, "days": true})"#],
        ),
        (F::Olmo3, "<function_calls>f()\n", "", &["f({})"]),
        (F::KimiK2, "<|tool_call_begin|>weather:0<|tool_call_argument_begin|> {\"city\": \"Paris\"}", "", ONE),
        (
            F::KimiK2,
            "<|tool_call_begin|>functions.a.b:0<|tool_call_argument_begin|>{}<|tool_call_end|>.",
            ".",
            &["a.b({})"],
        ),
    ] {
        assert_eq!(brief(format, text), (content.to_owned(), owned(calls)), "{format:?} {text}");
    }
}

/// Text that is not a call is content, to the last character.
#[test]
fn text_that_only_resembles_calls_stays_content() {
    for (format, text) in [
        (F::Nemotron, "<TOOLCALL>[]</TOOLCALL>"),
        (F::Nemotron, "<TOOLCALL>[ ,"),
        (F::Nemotron, "<TOOLCALL>[{\"x\": 1}]</TOOLCALL> so"),
        (F::Nemotron, "<TOOLCALL> nothing </TOOLCALL>"),
        (F::Nemotron, "<TOOLCALL>[{\"name\": \"f\""),
        (F::Nemotron, "the tag </TOOLCALL> alone <TOOLCA"),
        (F::Granite, "<|tool_call|>[1, 2]"),
        (F::Granite, "<|tool_call|>[[{\"name\": \"f\"}]]"),
        (F::Phi4Mini, "import functools\n\n@functools.cache\ndef f():"),
        (F::Phi4Mini, "functools [1]"),
        (F::Hunyuan, "<tool_calls>\n<tool_call>f</tool_call>\n</tool_calls>"),
        (F::Olmo3, "<function_calls>\n</function_calls>"),
        (F::Olmo3, "<function_calls>two words</function_calls>"),
        (F::KimiK2, "<|tool_calls_section_begin|> none <|tool_calls_section_end|>"),
        (F::KimiK2, "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
        (F::KimiK2, "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}"),
    ] {
        assert_eq!(brief(format, text), (text.to_owned(), vec![]), "{format:?}");
    }
}

/// A call stays one after its name was emitted. Its arguments are the model's text.
#[test]
fn broken_json_is_passed_on_as_arguments() {
    for (format, text, content, call) in [
        (F::Nemotron, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {bad}}]</TOOLCALL> so", "so", "f({bad}}])"),
        (F::Nemotron, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"a\": \"cu", "", "f({\"a\": \"cu)"),
        // One brace too many.
        (F::Nemotron, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {}}}]</TOOLCALL>", "}]</TOOLCALL>", "f({})"),
        (F::Granite, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {no}}]", "", "f({no}}])"),
        (
            F::Phi4Mini,
            "functools[{\"name\": \"f\", \"arguments\": {import functools}}]<|/tool_call|>.",
            ".",
            "f({import functools}}])",
        ),
        (F::Hunyuan, "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"a\": x}}]</tool_calls>", "", "f({\"a\": x}}])"),
        (F::Olmo3, "<function_calls>f('x')</function_calls>", "", "f({'x'))"),
        (F::Olmo3, "<function_calls>f()\nso it goes", "so it goes", "f({})"),
        (F::KimiK2, "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{no<|tool_call_end|>!", "!", "f({no)"),
    ] {
        assert_eq!(brief(format, text), (content.to_owned(), vec![call.to_owned()]), "{format:?} {text}");
    }
}

/// Kimi's template shows the model the ids of earlier calls: the number belongs to the conversation.
#[test]
fn ids_with_names_are_kept_while_they_count_up() {
    let call = |id: &str| format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>");
    for (ids, kept) in [
        (vec!["functions.f:0", "functions.f:1"], vec![Some("functions.f:0"), Some("functions.f:1")]),
        (vec!["functions.f:7", "functions.f:7", "f:8"], vec![Some("functions.f:7"), None, Some("f:8")]),
        (vec!["functions.f", "functions.f:x"], vec![None, None]),
    ] {
        let text: String = ids.iter().map(|id| call(id)).collect();
        let parts = read(&spec(F::KimiK2), &text);
        let found: Vec<Option<&str>> = parts.calls.iter().map(|(_, id, _)| id.as_deref()).collect();
        assert_eq!(found, kept, "{text}");
    }
}

/// A stop string between the calls of a list cuts no call.
#[test]
fn a_stop_string_after_a_call_keeps_it() {
    for (format, text, cut) in [
        (F::Nemotron, r#"<TOOLCALL>[{"name": "f", "arguments": {}}, "#, r#"<TOOLCALL>[{"name": "f", "arg"#),
        (F::Olmo3, "<function_calls>f()\n", "<function_calls>f("),
    ] {
        let mut parser = plimsoll_reply::ReplyParser::new(&spec(format));
        let mut events = Vec::new();
        parser.push(text, &mut events);
        assert!(!parser.stop(&mut events), "{format:?}");
        parser = plimsoll_reply::ReplyParser::new(&spec(format));
        parser.push(cut, &mut events);
        assert!(parser.stop(&mut events), "{format:?}");
    }
}

#[test]
fn every_format_has_markers_and_is_chosen_by_its_name() {
    assert!(ALL.iter().all(|format| !format.markers().is_empty()));
    for (name, format) in [
        ("olmo3", F::Olmo3),
        ("kimi_k2", F::KimiK2),
        ("nemotron_json", F::Nemotron),
        ("granite", F::Granite),
        ("granite4", F::Hermes),
        ("phi4_mini_json", F::Phi4Mini),
        ("hunyuan_a13b", F::Hunyuan),
        ("ernie45", F::Hermes),
        ("poolside_v1", F::Glm),
    ] {
        assert_eq!(name.parse::<F>(), Ok(format));
    }
}
