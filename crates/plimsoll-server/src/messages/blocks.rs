//! A whole answer as Anthropic's message, and the types that it shares with the stream.

use axum::response::Response;
use plimsoll_engine::FinishReason;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Counts;
use crate::conversation::active::{ActiveRequest, Usage};
use crate::conversation::choices::Collected;
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
use crate::http::fields::no_json;
use crate::http::json::json;

/// The value of the signature field: this server does not sign reasoning.
pub(crate) const UNSIGNED: &str = "unsigned";

/// A message, complete or without content yet.
#[derive(Serialize)]
pub(crate) struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Counts,
}

/// A block of a message.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Block {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Box<RawValue> },
}

impl<'a> Message<'a> {
    /// Makes a message without content. `caches`: whether the client marks prompt parts for caching.
    pub fn begun(request: &'a ActiveRequest, usage: Usage, caches: bool) -> Self {
        Self {
            id: &request.id,
            kind: "message",
            role: "assistant",
            model: &request.submission.common.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: Counts::of(usage, caches, &request.submission.pins),
        }
    }
}

/// Returns Anthropic's stop reason, and the stop sequence that ended the message.
pub(crate) fn stop_reason<'a>(
    request: &ActiveRequest,
    reading: &ReplyReader,
    reason: FinishReason,
    matched: Option<&'a str>,
) -> (&'static str, Option<&'a str>) {
    match (reason, matched) {
        (FinishReason::Length, _) if context_is_full(request) => ("model_context_window_exceeded", None),
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::Stop, Some(matched)) => ("stop_sequence", Some(matched)),
        (FinishReason::Stop, None) if reading.has_called() => ("tool_use", None),
        (FinishReason::Stop, None) => ("end_turn", None),
    }
}

/// Returns whether the context had less room than the client asked for.
fn context_is_full(request: &ActiveRequest) -> bool {
    let submission = &request.submission;
    let given = submission.max_tokens(&request.state, &submission.prompts[0]);
    given.is_ok_and(|given| submission.common.max_tokens.is_some_and(|asked| given < asked))
}

/// Returns the whole answer. `caches`: whether the client marks prompt parts for caching.
pub(crate) fn whole(mut request: ActiveRequest, caches: bool, collected: Collected) -> Response {
    let held = request.take_held();
    let mut reading = ReplyReader::new(&request.submission.rules);
    let end = ReplyEnd::of(collected.finish, collected.stop_reason.as_deref());
    let content = blocks(reading.read(collected.text, end, &request.state.server.ids));
    let matched = collected.stop_reason.as_deref();
    let stop = collected.finish.map(|reason| stop_reason(&request, &reading, reason, matched));
    let (stop_reason, stop_sequence) = stop.map_or((None, None), |(reason, matched)| (Some(reason), matched));
    json(&Message { content, stop_reason, stop_sequence, ..Message::begun(&request, request.usage(), caches) }, held)
}

/// Converts the parts of a reply to blocks, in their order.
fn blocks(parts: Vec<Part>) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut arguments = String::new();
    for part in parts {
        match (part, blocks.last_mut()) {
            (Part::Reasoning(more), Some(Block::Thinking { thinking, .. })) => thinking.push_str(&more),
            (Part::Content(more), Some(Block::Text { text })) => text.push_str(&more),
            (Part::Arguments { text, .. }, _) => arguments.push_str(&text),
            (part, last) => {
                give(last, &mut arguments);
                blocks.push(match part {
                    Part::Reasoning(thinking) => Block::Thinking { thinking, signature: UNSIGNED },
                    Part::Content(text) => Block::Text { text },
                    Part::Call { id, name, .. } => Block::ToolUse { id, name, input: input("") },
                    Part::Arguments { .. } => unreachable!("arguments are gathered above"),
                });
            }
        }
    }
    give(blocks.last_mut(), &mut arguments);
    blocks
}

/// Gives the collected arguments to the last block, if it is a call, and clears them.
fn give(last: Option<&mut Block>, arguments: &mut String) {
    if let Some(Block::ToolUse { input, .. }) = last {
        *input = self::input(arguments);
    }
    arguments.clear();
}

/// Returns arguments as an object. Text that is not an object is put into one, under the name from Anthropic's documentation. A stream
/// sends the model's text unchanged.
pub(crate) fn input(arguments: &str) -> Box<RawValue> {
    let object = serde_json::from_str::<Box<RawValue>>(arguments).ok().filter(|raw| raw.get().starts_with('{'));
    object.unwrap_or_else(|| {
        let object = if arguments.is_empty() { json!({}) } else { no_json(arguments) };
        to_raw(&object)
    })
}

fn to_raw(value: &Value) -> Box<RawValue> {
    // A value made of strings can be written.
    serde_json::value::to_raw_value(value).unwrap_or_default()
}
