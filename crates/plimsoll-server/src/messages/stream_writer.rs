//! A message as Anthropic's stream: blocks that begin, grow and stop one after the other, then the stop reason.

use plimsoll_engine::Delta;
use serde::Serialize;
use serde_json::value::RawValue;

use super::blocks::{Message, UNSIGNED, input, stop_reason};
use super::{Counts, error};
use crate::conversation::active::{ActiveRequest, PromptDetails, Usage};
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
use crate::conversation::stream::StreamWriter;
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::sse::Events;

/// The state of a streamed message.
pub(crate) struct MessageStream {
    /// Whether the client marks prompt parts for caching.
    caches: bool,
    reading: ReplyReader,
    /// The kind of the open block, and the number of blocks begun.
    open: Option<Kind>,
    begun: usize,
    end: Option<(&'static str, Option<String>)>,
    caller: Caller,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    ToolUse,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    Ping,
    ContentBlockStart { index: usize, content_block: Start<'a> },
    ContentBlockDelta { index: usize, delta: More<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: End<'a>, usage: Counts },
    MessageStop,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Start<'a> {
    Thinking { thinking: &'static str, signature: &'static str },
    Text { text: &'static str },
    ToolUse { id: &'a str, name: &'a str, input: Box<RawValue> },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::enum_variant_names)] // Anthropic's names
enum More<'a> {
    ThinkingDelta { thinking: &'a str },
    SignatureDelta { signature: &'static str },
    TextDelta { text: &'a str },
    InputJsonDelta { partial_json: &'a str },
}

#[derive(Serialize)]
struct End<'a> {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }

    fn send(&self, out: &mut Events) {
        out.push_named(self.name(), self);
    }
}

impl MessageStream {
    pub fn new(request: &ActiveRequest, caches: bool) -> Self {
        let reading = ReplyReader::new(&request.submission.rules);
        Self { caches, reading, open: None, begun: 0, end: None, caller: Caller::current() }
    }

    fn part(&mut self, part: &Part, out: &mut Events) {
        let (kind, more) = match part {
            Part::Reasoning(text) => (Kind::Thinking, More::ThinkingDelta { thinking: text }),
            Part::Content(text) => (Kind::Text, More::TextDelta { text }),
            Part::Arguments { text, .. } => (Kind::ToolUse, More::InputJsonDelta { partial_json: text }),
            Part::Call { id, name, .. } => {
                self.stop(out);
                self.start(Kind::ToolUse, Start::ToolUse { id, name, input: input("") }, out);
                return;
            }
        };
        if self.open != Some(kind) {
            self.stop(out);
            let start = match kind {
                Kind::Thinking => Start::Thinking { thinking: "", signature: "" },
                // Arguments come after their call, which has begun the block.
                Kind::Text | Kind::ToolUse => Start::Text { text: "" },
            };
            self.start(kind, start, out);
        }
        self.more(more, out);
    }

    fn start(&mut self, kind: Kind, content_block: Start<'_>, out: &mut Events) {
        self.open = Some(kind);
        self.begun += 1;
        Event::ContentBlockStart { index: self.begun - 1, content_block }.send(out);
    }

    fn more(&self, delta: More<'_>, out: &mut Events) {
        Event::ContentBlockDelta { index: self.begun.saturating_sub(1), delta }.send(out);
    }

    fn stop(&mut self, out: &mut Events) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.more(More::SignatureDelta { signature: UNSIGNED }, out);
        }
        Event::ContentBlockStop { index: self.begun.saturating_sub(1) }.send(out);
    }
}

impl StreamWriter for MessageStream {
    fn open(&mut self, request: &ActiveRequest, out: &mut Events) {
        let prompt_tokens = request.submission.prompts[0].ids.len() as u64;
        let prompt_tokens_details = PromptDetails { cached_tokens: 0 };
        let nothing = Usage {
            prompt_tokens,
            completion_tokens: 0,
            total_tokens: prompt_tokens,
            prompt_tokens_details,
            speculation: None,
        };
        Event::MessageStart { message: Message::begun(request, nothing, self.caches) }.send(out);
        Event::Ping.send(out);
    }

    fn delta(&mut self, request: &ActiveRequest, _choice: usize, delta: Delta, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        let parts = self.reading.read(delta.text, end, &request.state.server.ids);
        for part in &parts {
            self.part(part, out);
        }
        if let Some(reason) = delta.finish {
            let (reason, matched) = stop_reason(request, &self.reading, reason, delta.stop_reason.as_deref());
            self.end = Some((reason, matched.map(str::to_owned)));
        }
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        self.stop(out);
        let (stop_reason, stop_sequence) = match &self.end {
            Some((reason, matched)) => (Some(*reason), matched.as_deref()),
            None => (None, None),
        };
        let delta = End { stop_reason, stop_sequence };
        Event::MessageDelta { delta, usage: Counts::of(request.usage(), self.caches, &request.submission.pins) }
            .send(out);
        Event::MessageStop.send(out);
    }

    fn fail(&mut self, _request: &ActiveRequest, error: &ApiError, out: &mut Events) {
        out.push_text("error", &error::body(error, Some(&self.caller.request_id)));
    }

    fn end(&self, _out: &mut Events) {}

    fn keep_alive(&self, out: &mut Events) {
        Event::Ping.send(out);
    }
}
