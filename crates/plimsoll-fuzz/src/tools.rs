//! Targets for the input of the project's own commands (streams of servers, traces, lists of models) and of MCP's client.

use plimsoll::fuzzed::{Events, models};
use plimsoll_engine::trace::{Trace, TraceError, burst_gpt, mooncake};
use plimsoll_server::fuzzed::mcp;

use crate::scratch::Scratch;
use crate::{MIB, within};

/// Reads a stream of events; the first byte gives the size of its pieces.
pub(crate) fn sse(data: &[u8]) {
    let Some((step, bytes)) = data.split_first() else { return };
    let read = |step: usize| {
        let (mut cut, mut events) = (Events::default(), Vec::new());
        for piece in bytes.chunks(step) {
            cut.push(piece);
            events.extend(std::iter::from_fn(|| cut.pop()));
        }
        (events, cut.take_rest())
    };
    let whole = within(64 * bytes.len() + MIB, || read(bytes.len().max(1)));
    assert_eq!(read(1 + usize::from(step % 7)), whole, "cut in pieces it reads differently");
}

/// Reads an answer of an MCP server, as a stream and as one message; the first byte gives the size of its pieces.
pub(crate) fn mcp(data: &[u8]) {
    let Some((step, bytes)) = data.split_first() else { return };
    let (replies, answer) = within(64 * bytes.len() + MIB, || mcp::stream(bytes, bytes.len().max(1)));
    assert_eq!(
        mcp::stream(bytes, 1 + usize::from(step % 7)),
        (replies.clone(), answer),
        "cut in pieces it reads differently"
    );
    assert!(replies.len() <= 16, "{} replies", replies.len());
    for reply in replies {
        let value: serde_json::Value = serde_json::from_str(&reply).expect("a reply is JSON");
        assert!(reply.len() <= 512 && value["id"] != serde_json::Value::Null, "{reply}");
    }
    let found = within(128 * bytes.len() + MIB, || mcp::message(bytes));
    if let Some((tools, held)) = found.tools {
        assert!(tools <= 128 && held <= 256 << 10, "{tools} tools of {held} bytes");
    }
    // A note of a few words replaces a block that is left out.
    assert!(found.text.is_none_or(|text| text <= 64 * bytes.len()));
}

/// Reads a trace in each of the supported formats.
pub(crate) fn trace(data: &[u8]) {
    let read = |how: fn(&[u8]) -> Result<Trace, TraceError>, factor: usize| {
        let Ok(trace) = within(factor * data.len() + MIB, || how(data)) else { return };
        assert!(trace.lines.is_sorted_by_key(|line| line.at_ms));
        for line in &trace.lines {
            line.output_each();
            for prompt in line.prompts.iter().filter(|prompt| prompt.tokens <= 1 << 16) {
                assert!(prompt.ids.is_some() || trace.ids(prompt, 7).iter().all(|id| *id < 7));
            }
        }
    };
    read(|text| Trace::read(text), 256);
    read(|text| mooncake(text), 256);
    // A short line stands for a prompt of up to 16 million tokens, with a block for every 64 of them.
    read(|text| burst_gpt(text), 1 << 20);
}

/// Reads a file that lists models.
pub(crate) fn models_file(data: &[u8]) {
    let dir = Scratch::new();
    let path = dir.write("models.toml", data);
    // Every table is read like a command line.
    match within(256 * data.len() + 64 * MIB, || models(&path)) {
        Ok(count) => assert!(count <= data.len()),
        Err(words) => assert!(!words.is_empty()),
    }
}
