//! Reading replies: a choice's text becomes reasoning, content and calls as the client is to see them.

use std::sync::Arc;

use plimsoll_engine::FinishReason;
use plimsoll_reply::{Event, HELD_BYTES_MAX, ReplyParser, Spec, ToolFormat};
use serde::Serialize;

use super::forced::forced_format;
use super::messages::Conversation;
use super::tools::ToolChoice;
use crate::app::App;
use crate::choices::finish_name;
use crate::ids::Ids;

/// How the replies of one request are read and shown.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub spec: Spec,
    pub include_reasoning: bool,
    /// At most one call; what follows it is not shown.
    one_call: bool,
}

impl Rules {
    /// The rules for a conversation whose prompt was rendered as `prompt`.
    pub fn new(app: &App, conversation: &Conversation, prompt: &str, include_reasoning: bool) -> Self {
        let formats = &app.served.formats;
        let reasoning = formats.reasoning.filter(|_| !conversation.thinking_off());
        let opened = conversation.ends_open() && reasoning.is_some_and(|format| format.opened_by(prompt));
        let tools = conversation.tools.as_ref().zip(formats.tools);
        let tools = tools.map(|(tools, format)| {
            let forced = tools.choice != ToolChoice::Auto;
            (if forced { forced_format(format) } else { format }, Arc::clone(&tools.known))
        });
        let one_call = conversation.tools.as_ref().is_some_and(|tools| !tools.parallel);
        Self { spec: Spec { reasoning, opened, tools }, include_reasoning, one_call }
    }

    /// Special tokens of the model whose text is needed for reading.
    pub fn kept_special_ids(&self, app: &App) -> Vec<u32> {
        let tokenizer = &app.served.tokenizer;
        let tools = self.spec.tools.iter().flat_map(|(format, _)| format.markers());
        let markers = tools.chain(self.spec.reasoning.iter().flat_map(|format| format.markers()));
        let ids = markers.filter_map(|marker| tokenizer.token_to_id(marker)).filter(|id| tokenizer.is_special(*id));
        let mut ids: Vec<u32> = ids.collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Bytes that reading one reply may hold back.
    pub fn reading_bytes(&self) -> u64 {
        if self.reads() { HELD_BYTES_MAX as u64 } else { 0 }
    }

    fn reads(&self) -> bool {
        self.spec.reasoning.is_some() || self.spec.tools.is_some()
    }
}

/// One reply being read.
#[derive(Debug)]
pub(crate) struct Reading {
    parser: Option<ReplyParser>,
    include_reasoning: bool,
    one_call: bool,
    short_ids: bool,
    /// Calls that have begun.
    calls: usize,
    over: bool,
}

/// A piece of a reply as clients see it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning(String),
    Content(String),
    Call { index: usize, id: String, name: String },
    Arguments { index: usize, text: String },
}

impl Reading {
    pub fn new(rules: &Rules) -> Self {
        Self {
            parser: rules.reads().then(|| ReplyParser::new(&rules.spec)),
            include_reasoning: rules.include_reasoning,
            one_call: rules.one_call,
            // Mistral's templates accept ids of nine characters only.
            short_ids: matches!(rules.spec.tools, Some((ToolFormat::Mistral, _))),
            calls: 0,
            over: false,
        }
    }

    /// Takes more of the reply, and its end.
    pub fn read(&mut self, text: String, ended: bool, ids: &Ids) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            return if text.is_empty() { Vec::new() } else { vec![Part::Content(text)] };
        };
        let mut events = Vec::new();
        parser.push(&text, &mut events);
        if ended {
            parser.finish(&mut events);
        }
        events.into_iter().filter_map(|event| self.part(event, ids)).collect()
    }

    fn part(&mut self, event: Event, ids: &Ids) -> Option<Part> {
        if self.over {
            return None;
        }
        match event {
            Event::Reasoning(text) => self.include_reasoning.then_some(Part::Reasoning(text)),
            Event::Content(text) => Some(Part::Content(text)),
            Event::CallBegin { name, id } => {
                self.calls += 1;
                let id = id.unwrap_or_else(|| ids.call(self.short_ids));
                Some(Part::Call { index: self.calls - 1, id, name })
            }
            Event::Arguments(text) => Some(Part::Arguments { index: self.calls.saturating_sub(1), text }),
            Event::CallEnd => {
                self.over = self.one_call;
                None
            }
        }
    }

    /// Why the reply ended, in the API's words.
    pub fn finish_name(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.calls > 0 => "tool_calls",
            reason => finish_name(reason),
        }
    }
}

/// A whole reply.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<Call>,
}

/// One call of a whole reply, in OpenAI's shape.
#[derive(Debug, Serialize)]
pub(crate) struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl Reply {
    pub fn of(parts: Vec<Part>) -> Self {
        let mut reply = Self::default();
        for part in parts {
            match part {
                Part::Reasoning(text) => reply.reasoning.push_str(&text),
                Part::Content(text) => reply.content.push_str(&text),
                Part::Call { id, name, .. } => {
                    let function = Function { name, arguments: String::new() };
                    reply.calls.push(Call { id, kind: "function", function });
                }
                Part::Arguments { text, .. } => {
                    if let Some(call) = reply.calls.last_mut() {
                        call.function.arguments.push_str(&text);
                    }
                }
            }
        }
        reply
    }
}
