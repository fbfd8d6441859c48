//! The readers of answers, without connections. Only `plimsoll-fuzz` uses this.

use super::rpc::{self, Heard, Messages};
use super::tools::{self, ToolSet};
use super::{LIST_BYTES_MAX, McpError};

/// The result of reading a stream: the replies to the server's requests, and the answer to request 1.
pub type Stream = (Vec<String>, Option<Result<String, String>>);

/// Reads a stream of events that arrives in pieces of `step` bytes.
#[must_use]
pub fn stream(bytes: &[u8], step: usize) -> Stream {
    let (mut messages, mut replies) = (Messages::new(1), Vec::new());
    let answer = bytes.chunks(step).find_map(|piece| messages.read(piece, &mut replies));
    let words = |error: McpError| error.to_string();
    (replies, answer.map(|answer| answer.map(|result| result.get().to_owned()).map_err(words)))
}

/// The number and bytes of listed tools, and the length of a call's text.
#[derive(Debug, Default)]
pub struct Found {
    /// Tools and their bytes, if the result is a list.
    pub tools: Option<(usize, u64)>,
    /// Bytes of the text, if the result is a call's.
    pub text: Option<usize>,
}

/// Reads a message as the answer to request 1. Reads its result both as a list of tools and as the answer to a call.
#[must_use]
pub fn message(bytes: &[u8]) -> Found {
    let mut found = Found::default();
    let _ = rpc::refusal(bytes);
    if let Heard::Answer(Ok(result)) = rpc::heard(bytes, 1) {
        let mut all = ToolSet { tools: Vec::new(), bytes: 0 };
        let page = tools::page(&result, &mut all, LIST_BYTES_MAX);
        found.tools = page.is_ok().then_some((all.tools.len(), all.bytes));
        found.text = tools::called(&result).ok().map(|called| called.text.len());
    }
    found
}
