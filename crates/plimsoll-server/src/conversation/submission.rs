//! What the engine is asked for: what every API makes of a body.

use std::sync::Arc;

use plimsoll_engine::MediaItem;
use plimsoll_engine::constraint::Grammar;
use plimsoll_memory::broken;

use crate::conversation::params::Common;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::state::model::ModelState;
use crate::state::record::Entry;

/// One prompt, as ids; with its text when the answer repeats it.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub ids: Vec<u32>,
    pub echo: Option<String>,
    /// How many of the ids, before the text and after it, are none of it: a tokenizer's own.
    pub around: (usize, usize),
}

impl Prompt {
    /// Whether a token is part of the text.
    pub fn has_text(&self, index: usize) -> bool {
        let (before, after) = self.around;
        (before..self.ids.len().saturating_sub(after)).contains(&index)
    }
}

/// All that is needed to start: what both APIs make of a body.
#[derive(Debug)]
pub(crate) struct Submission {
    pub prompts: Vec<Prompt>,
    pub common: Common,
    /// Alternatives per generated token, when asked for.
    pub logprobs: Option<u32>,
    /// Alternatives per prompt token, when asked for or needed for an echo.
    pub prompt_logprobs: Option<u32>,
    /// Generated tokens when the client names no number; none for the rest of the context.
    pub default_max_tokens: Option<u32>,
    /// The field that holds the prompt, for errors.
    pub prompt_param: &'static str,
    /// The field that holds the number of tokens to generate, for errors.
    pub length_param: &'static str,
    /// Special tokens that the reply parser needs as text.
    pub kept_special_ids: Vec<u32>,
    /// The form that replies must have.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Bytes that reading one reply may hold back.
    pub reading_bytes: u64,
    /// The share of the byte budget that the prompts hold until the answer is complete.
    pub kept: Option<Held>,
    /// What the placeholders of the one prompt stand for.
    pub media: Vec<MediaItem>,
    /// Where the client asks for more tokens than the context has left, that rest is generated.
    pub fills_context: bool,
    /// The stream repeats at its end what it has said, so that its output is held like a whole answer's.
    pub gathers: bool,
}

impl Submission {
    /// Bytes that the prompts take, and what is asked of them.
    pub fn bytes(&self) -> u64 {
        let of = |prompt: &Prompt| size_of_val(prompt.ids.as_slice()) + prompt.echo.as_ref().map_or(0, String::len);
        self.common.bytes() + self.prompts.iter().map(|prompt| of(prompt) as u64).sum::<u64>()
    }

    /// Whether the answer says of each token what it is.
    pub fn reports_tokens(&self) -> bool {
        self.logprobs.is_some() || self.common.return_token_ids
    }

    /// The number of tokens to generate, and the error when prompt and output do not fit into the context.
    pub fn max_tokens(&self, state: &ModelState, prompt: &Prompt) -> ApiResult<u32> {
        let context = u64::from(state.served.engine.limits().max_req_total_len);
        let in_prompt = prompt.ids.len() as u64;
        let rest = context.saturating_sub(in_prompt);
        let asked = self.common.max_tokens;
        let echo_only = asked == Some(0) && self.prompt_logprobs.is_some();
        let least = if self.fills_context { 1 } else { asked.unwrap_or(1) };
        let needed = if echo_only { 0 } else { u64::from(least) };
        if in_prompt + needed > context && !broken("T-56") {
            // In the words that clients look for, to shorten what they have said.
            let message = match self.fills_context {
                true => format!(
                    "prompt is too long: {in_prompt} tokens > {} maximum, which leaves {needed} of this model's {context} for the answer",
                    context - needed
                ),
                false => format!(
                    "this model's maximum context length is {context} tokens; the request has {in_prompt} in the prompt and asks for {needed} more"
                ),
            };
            let of_length = !self.fills_context && asked.is_some_and(|n| n > 1);
            let param = if of_length { self.length_param } else { self.prompt_param };
            return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) });
        }
        let default = self.default_max_tokens.map_or(rest, |n| rest.min(u64::from(n)));
        let most = u32::try_from(if self.fills_context { rest } else { default }).unwrap_or(u32::MAX);
        Ok(asked.map_or(most, |asked| if self.fills_context { asked.min(most) } else { asked }))
    }

    /// Its line in the trace, from now on; none where none is recorded.
    pub fn record(&self, state: &ModelState, api: &'static str) -> Option<Entry> {
        let recorder = state.server.recorder.as_ref()?;
        let common = &self.common;
        let ids = self.prompts.iter().map(|prompt| prompt.ids.as_slice());
        let mut entry = recorder.prompts(state.label.as_deref(), api, ids, &self.media)?;
        let line = &mut entry.line;
        (line.stream, line.n, line.max_tokens) = (common.stream, common.n, common.max_tokens);
        let sampling = &common.sampling;
        (line.temperature, line.top_p, line.top_k) = (sampling.temperature, sampling.top_p, sampling.top_k);
        (line.logprobs, line.prompt_logprobs) = (self.logprobs, self.prompt_logprobs);
        (line.stop, line.form) = (common.stop.len() as u32, self.grammar.is_some());
        line.salt = recorder.salt(common.cache_salt);
        Some(entry)
    }
}
