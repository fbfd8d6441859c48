//! An answer as Anthropic's message, whole, and what its shape shares with the stream.

use axum::response::Response;
use plimsoll_engine::FinishReason;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Counts;
use crate::conversation::ReplyContext;
use crate::conversation::active::Usage;
use crate::conversation::choices::Collected;
use crate::conversation::reading::{Part, Reading, ReplyEnd};
use crate::http::budget::Held;
use crate::http::fields::no_json;
use crate::http::json::json;

/// What stands for a signature: thoughts are not signed here.
pub(crate) const UNSIGNED: &str = "unsigned";

/// What an answer is made with.
pub(crate) struct Answer {
    pub context: ReplyContext,
    /// The client marks what it wants cached.
    pub caches: bool,
}

/// A message, complete or about to begin.
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
    /// A message of which nothing is known yet but its prompt.
    pub fn begun(answer: &'a Answer, usage: Usage) -> Self {
        Self {
            id: &answer.context.id,
            kind: "message",
            role: "assistant",
            model: &answer.context.draft.common.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: Counts::of(usage, answer.caches),
        }
    }
}

impl Answer {
    /// Why the message ended, in Anthropic's words, and the stop sequence that ended it.
    pub fn stop<'a>(
        &self,
        reading: &Reading,
        reason: FinishReason,
        matched: Option<&'a str>,
    ) -> (&'static str, Option<&'a str>) {
        match (reason, matched) {
            (FinishReason::Length, _) if self.context_is_full() => ("model_context_window_exceeded", None),
            (FinishReason::Length, _) => ("max_tokens", None),
            (FinishReason::Stop, Some(matched)) => ("stop_sequence", Some(matched)),
            (FinishReason::Stop, None) if reading.has_called() => ("tool_use", None),
            (FinishReason::Stop, None) => ("end_turn", None),
        }
    }

    /// Whether the context had less room than the client asked for.
    fn context_is_full(&self) -> bool {
        let draft = &self.context.draft;
        let given = draft.max_tokens(&self.context.state, &draft.prompts[0]);
        given.is_ok_and(|given| draft.common.max_tokens.is_some_and(|asked| given < asked))
    }
}

/// The whole answer.
pub(crate) fn whole(answer: &Answer, collected: Collected, usage: Usage, held: Option<Held>) -> Response {
    let context = &answer.context;
    let mut reading = Reading::new(&context.rules);
    let end = ReplyEnd::of(collected.finish, collected.stop_reason.as_deref());
    let content = blocks(reading.read(collected.text, end, &context.state.server.ids));
    let stop = collected.finish.map(|reason| answer.stop(&reading, reason, collected.stop_reason.as_deref()));
    let (stop_reason, stop_sequence) = stop.map_or((None, None), |(reason, matched)| (Some(reason), matched));
    json(&Message { content, stop_reason, stop_sequence, ..Message::begun(answer, usage) }, held)
}

/// The parts of a reply as blocks, in their order.
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

/// Gives a call the arguments that were gathered for it.
fn give(last: Option<&mut Block>, arguments: &mut String) {
    if let Some(Block::ToolUse { input, .. }) = last {
        *input = self::input(arguments);
    }
    arguments.clear();
}

/// Arguments as an object. A stream hands on what the model wrote; here what is no object is put into one, under the name that
/// Anthropic's documentation gives to such text.
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
