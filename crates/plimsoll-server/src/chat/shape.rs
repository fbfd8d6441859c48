//! A chat answer as a stream: the role, deltas, the reason of the end, and usage if it was asked for.

use plimsoll_engine::Delta;
use serde::Serialize;

use super::respond::Context;
use crate::choices::{finish_name, ids};
use crate::generation::Usage;
use crate::logprobs::ChatLogprobs;
use crate::sse::{Events, Shape};

/// The stream's state.
pub(crate) struct Stream {
    context: Context,
    choices: usize,
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
}

impl Stream {
    pub fn new(context: Context, choices: usize) -> Self {
        Self { context, choices }
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
        for index in 0..self.choices {
            let delta = Piece { role: Some("assistant"), content: Some("") };
            self.send(&[Choice { index, delta, ..Choice::default() }], self.usage(None), index == 0, out);
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, usage: Usage, out: &mut Events) {
        let draft = &self.context.draft;
        let return_ids = draft.common.return_token_ids;
        let reports_tokens = (draft.logprobs.is_some() || return_ids) && !delta.tokens.is_empty();
        if !delta.text.is_empty() || reports_tokens {
            let choice = Choice {
                index,
                delta: Piece { role: None, content: Some(&delta.text) },
                logprobs: draft.logprobs.map(|_| ChatLogprobs::new(self.context.spelling(), &delta.tokens)),
                token_ids: return_ids.then(|| ids(&delta.tokens)),
                ..Choice::default()
            };
            self.send(&[choice], self.usage(Some(usage)), false, out);
        }
        if let Some(reason) = delta.finish {
            let (finish_reason, stop_reason) = (Some(finish_name(reason)), delta.stop_reason.as_deref());
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
