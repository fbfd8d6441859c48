//! What our own commands read: streams of servers, traces, lists of models. And what the client of MCP reads.

use plimsoll::fuzzed::{Events, models};
use plimsoll_engine::trace::{Trace, TraceError, burst_gpt, mooncake};
use plimsoll_server::fuzzed::mcp;

use crate::scratch::Scratch;
use crate::{MIB, within};

/// A stream of events; the first byte says how it comes in.
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

/// An answer of an MCP server, as a stream and as one message; the first byte says how it comes in.
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
    // A block that is left out has a few words in its place.
    assert!(found.text.is_none_or(|text| text <= 64 * bytes.len()));
}

/// A trace, in each of the formats that are read.
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
    // A short line stands for a prompt of up to 16 million tokens, which is a block for every 64 of them.
    read(|text| burst_gpt(text), 1 << 20);
}

/// A file that lists models.
pub(crate) fn models_file(data: &[u8]) {
    let dir = Scratch::new();
    let path = dir.write("models.toml", data);
    // Every table is read as a command line.
    match within(256 * data.len() + 64 * MIB, || models(&path)) {
        Ok(count) => assert!(count <= data.len()),
        Err(words) => assert!(!words.is_empty()),
    }
}
