//! A chat answer as a stream: the role, deltas, the reason of the end, and usage if it was asked for.

use plimsoll_engine::Delta;
use serde::Serialize;

use crate::conversation::ReplyContext;
use crate::conversation::active::Usage;
use crate::conversation::choices::ids;
use crate::conversation::logprobs::ChatLogprobs;
use crate::conversation::reading::{Part, Reading, ReplyEnd};
use crate::conversation::stream::Shape;
use crate::http::budget::Held;
use crate::http::sse::Events;

/// The stream's state.
pub(crate) struct Stream {
    context: ReplyContext,
    choices: Vec<Reading>,
    /// What the readings may hold back.
    _held: Option<Held>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice<'a>],
    /// Absent, null or a value: OpenAI's streams tell the three apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct Choice<'a> {
    index: usize,
    delta: Piece<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
struct Piece<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[Call<'a>; 1]>,
}

/// A piece of a call: its head, or more of its arguments.
#[derive(Serialize)]
struct Call<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> Piece<'a> {
    fn of(part: &'a Part) -> Self {
        let call = |index: usize, id: Option<&'a str>, name: Option<&'a str>, arguments: &'a str| {
            let kind = name.map(|_| "function");
            let call = Call { index, id, kind, function: Function { name, arguments } };
            Self { tool_calls: Some([call]), ..Self::default() }
        };
        match part {
            Part::Content(text) => Self { content: Some(text), ..Self::default() },
            Part::Reasoning(text) => Self { reasoning_content: Some(text), reasoning: Some(text), ..Self::default() },
            Part::Call { index, id, name } => call(*index, Some(id), Some(name), ""),
            Part::Arguments { index, text } => call(*index, None, None, text),
        }
    }
}

impl Stream {
    pub fn new(context: ReplyContext, choices: usize, held: Option<Held>) -> Self {
        let choices = std::iter::repeat_with(|| Reading::new(&context.rules)).take(choices).collect();
        Self { context, choices, _held: held }
    }

    fn send(&self, choices: &[Choice<'_>], usage: Option<Option<Usage>>, first: bool, out: &mut Events) {
        let common = &self.context.draft.common;
        let prompt = &self.context.draft.prompts[0].ids;
        out.push(&Chunk {
            id: &self.context.id,
            object: "chat.completion.chunk",
            created: self.context.created,
            model: &common.model,
            choices,
            usage,
            prompt_token_ids: (first && common.return_token_ids).then_some(prompt),
        });
    }

    /// The usage field of a chunk that is not the last.
    fn usage(&self, so_far: Option<Usage>) -> Option<Option<Usage>> {
        let common = &self.context.draft.common;
        if common.continuous_usage { Some(so_far) } else { common.include_usage.then_some(None) }
    }
}

impl Shape for Stream {
    fn open(&mut self, out: &mut Events) {
        for index in 0..self.choices.len() {
            let delta = Piece { role: Some("assistant"), content: Some(""), ..Piece::default() };
            self.send(&[Choice { index, delta, ..Choice::default() }], self.usage(None), index == 0, out);
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, usage: Usage, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        let parts = self.choices[index].read(delta.text, end, &self.context.state.server.ids);
        let draft = &self.context.draft;
        let return_ids = draft.common.return_token_ids;
        let mut reports_tokens = draft.reports_tokens() && !delta.tokens.is_empty();
        let nothing = Part::Content(String::new());
        let shown = if parts.is_empty() && reports_tokens { std::slice::from_ref(&nothing) } else { &parts[..] };
        for part in shown {
            // All tokens of the delta go with its first piece.
            let reports = std::mem::take(&mut reports_tokens);
            let choice = Choice {
                index,
                delta: Piece::of(part),
                logprobs: draft
                    .logprobs
                    .filter(|_| reports)
                    .map(|_| ChatLogprobs::new(self.context.spelling(), &delta.tokens)),
                token_ids: (return_ids && reports).then(|| ids(&delta.tokens)),
                ..Choice::default()
            };
            self.send(&[choice], self.usage(Some(usage)), false, out);
        }
        if let Some(reason) = delta.finish {
            let finish_reason = Some(self.choices[index].finish_name(reason));
            let stop_reason = delta.stop_reason.as_deref();
            let choice = Choice { index, finish_reason, stop_reason, ..Choice::default() };
            self.send(&[choice], self.usage(Some(usage)), false, out);
        }
    }

    fn close(&mut self, usage: Usage, out: &mut Events) {
        if self.context.draft.common.include_usage {
            self.send(&[], Some(Some(usage)), false, out);
        }
    }
}
