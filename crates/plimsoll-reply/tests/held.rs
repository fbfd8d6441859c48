//! A parser holds back no more than the server reserves for it.

use std::sync::Arc;

use plimsoll_memory::heap::{self, CountingHeap};
use plimsoll_reply::{HELD_BYTES_MAX, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat, Tools};
use serde_json::json;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

#[test]
fn a_reader_holds_no_more_than_is_reserved_for_it() {
    let tools = Arc::new(Tools::from_openai(&json!([{"type": "function", "function": {"name": "f"}}])));
    for (format, head, tail) in [
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": {\"a\": \"", "\"}, \"name\": \"f"),
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": \"", "\", \"id\": \"1\", \"name\": \"f"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"note\": \"", "\", \"id\": \"1\", \"more\": \""),
        (ToolFormat::Hermes, "<tool_call>{\"", "\": 1, \"arguments\": {"),
        (ToolFormat::Llama3, "{\"parameters\": {\"a\": \"", "\"}, \"name\": \"f"),
        (ToolFormat::Mistral, "[TOOL_CALLS]", ""),
        (ToolFormat::DeepSeek, "<｜tool▁call▁begin｜>", ""),
        (ToolFormat::QwenXml, "<function=f><parameter=days>", ""),
        (ToolFormat::Glm, "<tool_call>f\n<arg_key>", ""),
        (ToolFormat::Gemma4, "<|tool_call>call:f{a:", ""),
        (ToolFormat::Harmony, "<|channel|>", ""),
        (ToolFormat::Olmo3, "<function_calls>f(a=", ""),
        (ToolFormat::KimiK2, "<|tool_call_begin|>", ""),
        (ToolFormat::Nemotron, "<TOOLCALL>[{\"arguments\": {\"a\": \"", "\"}, \"name\": \"f"),
    ] {
        let reasoning = (format == ToolFormat::Harmony).then_some(ReasoningFormat::Harmony);
        let spec = Spec { reasoning, start: Start::Turn, tools: Some((format, Arc::clone(&tools))), ..Spec::default() };
        let before = heap::in_use();
        let (mut parser, mut events, mut most) = (ReplyParser::new(&spec), Vec::new(), 0);
        let mut push = |text: &str| {
            parser.push(text, &mut events);
            // Emitted text does not count as held.
            events.clear();
            most = most.max(heap::in_use() - before);
        };
        push(head);
        (0..HELD_BYTES_MAX - head.len() - tail.len()).for_each(|_| push("x"));
        tail.chars().for_each(|c| push(c.encode_utf8(&mut [0; 4])));
        (0..HELD_BYTES_MAX).for_each(|_| push("x"));
        println!("{format:?} {head}: {most}");
        assert!(most <= (HELD_BYTES_MAX + 4096) as u64, "{format:?} {head}: {most} bytes");
    }
}
