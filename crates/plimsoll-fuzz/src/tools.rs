//! What our own commands read: streams of servers, traces, lists of models.

use plimsoll::fuzzed::{Events, models};
use plimsoll_engine::trace::{Trace, TraceError, burst_gpt, mooncake};

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
