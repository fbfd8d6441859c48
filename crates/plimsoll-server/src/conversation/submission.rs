//! A tokenized request: prompts, parameters and the checks that need no engine. `submit.rs` submits it.

use std::sync::Arc;

use arrayvec::ArrayVec;
use plimsoll_engine::constraint::Grammar;
use plimsoll_engine::{MediaItem, Pin};

use crate::conversation::params::Common;
use crate::conversation::reply_reader::ReplyRules;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, CONTEXT_LENGTH};
use crate::media::Measured;
use crate::state::model::ModelState;
use crate::state::record::Entry;

/// One prompt as token ids; with its text if the answer repeats it.
#[derive(Debug)]
pub(crate) struct TokenizedPrompt {
    pub ids: Vec<u32>,
    pub echo: Option<String>,
    /// The numbers of special tokens that the tokenizer added before and after the text.
    pub around: (usize, usize),
}

impl TokenizedPrompt {
    /// Returns whether a token is part of the text.
    pub fn has_text(&self, index: usize) -> bool {
        let (before, after) = self.around;
        (before..self.ids.len().saturating_sub(after)).contains(&index)
    }
}

/// A tokenized request of any API. [`Submission::start`] turns it into an active request.
#[derive(Debug)]
pub(crate) struct Submission {
    pub prompts: Vec<TokenizedPrompt>,
    pub common: Common,
    /// Alternatives per generated token, if requested.
    pub logprobs: Option<u32>,
    /// Alternatives per prompt token, if requested or needed for an echo.
    pub prompt_logprobs: Option<u32>,
    /// Generated tokens if the client names no number; none for the rest of the context.
    pub default_max_tokens: Option<u32>,
    /// The field that holds the prompt, for errors.
    pub prompt_param: &'static str,
    /// The field that holds the number of tokens to generate, for errors.
    pub length_param: &'static str,
    /// Special tokens that the reply parser needs as text.
    pub kept_special_ids: Vec<u32>,
    /// The grammar that replies must match.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// The rules by which replies are read.
    pub rules: ReplyRules,
    /// The share of the byte budget that the prompts hold until the answer is complete.
    pub held_prompt: Option<Held>,
    /// The media of the one prompt. They are measured, but not decoded yet.
    pub measured: Vec<Measured>,
    /// The share of the byte budget that their files hold.
    pub held_files: Option<Held>,
    /// The decoded media, which the placeholders of the one prompt stand for.
    pub media: Vec<MediaItem>,
    /// Whether a client's limit beyond the rest of the context is reduced to that rest.
    pub clamps_max_tokens: bool,
    /// Whether the stream repeats its whole output at its end; bytes are then reserved as for a whole answer.
    pub repeats_output: bool,
    /// Prefixes of the one prompt that the cache must keep.
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
}

impl Submission {
    /// A submission of one text to continue, in the field `prompt`, with as many tokens as the context has left.
    pub fn of_text(common: Common, ids: Vec<u32>, state: &ModelState) -> ApiResult<Self> {
        state.check_length("prompt", ids.len())?;
        Self::of_prompts(common, vec![TokenizedPrompt { ids, echo: None, around: (0, 0) }], state)
    }

    /// A submission of texts to continue, in the field `prompt`, without a conversation.
    pub fn of_prompts(mut common: Common, prompts: Vec<TokenizedPrompt>, state: &ModelState) -> ApiResult<Self> {
        let format = common.output_format.take();
        let grammar = format.map(|format| format.grammar(&state.grammars, "", None)).transpose()?;
        Ok(Self {
            prompts,
            logprobs: None,
            prompt_logprobs: common.prompt_logprobs,
            default_max_tokens: state.served.default_max_tokens,
            prompt_param: "prompt",
            length_param: "max_tokens",
            kept_special_ids: Vec::new(),
            grammar,
            rules: ReplyRules::plain(),
            held_prompt: None,
            measured: Vec::new(),
            held_files: None,
            media: Vec::new(),
            clamps_max_tokens: false,
            repeats_output: false,
            pins: ArrayVec::new(),
            common,
        })
    }

    /// A submission without a prompt, for a response whose first turn comes later.
    pub fn waiting(common: Common, state: &ModelState) -> ApiResult<Self> {
        let common = Common { output_format: None, ..common };
        Ok(Self { repeats_output: true, ..Self::of_prompts(common, Vec::new(), state)? })
    }

    /// Returns the heap bytes of the prompts and parameters.
    pub fn bytes(&self) -> u64 {
        let of =
            |prompt: &TokenizedPrompt| size_of_val(prompt.ids.as_slice()) + prompt.echo.as_ref().map_or(0, String::len);
        self.common.bytes() + self.prompts.iter().map(|prompt| of(prompt) as u64).sum::<u64>()
    }

    /// Returns the number of sequences that this request generates: `n` for each prompt.
    pub fn choices(&self) -> usize {
        self.prompts.len().saturating_mul(self.common.n as usize)
    }

    /// Returns the prompt of a choice.
    pub fn prompt(&self, choice: usize) -> &TokenizedPrompt {
        &self.prompts[choice / self.common.n as usize]
    }

    /// Returns whether the answer reports each token.
    pub fn reports_tokens(&self) -> bool {
        self.logprobs.is_some() || self.common.return_token_ids
    }

    /// Returns the number of tokens to generate, or an error if the prompt does not fit into the context.
    /// [`ChatRequest::prepare`](super::ChatRequest::prepare) calls it first, before media are decoded. `start` calls it again for the
    /// value. The engine's `Request::check` repeats the check for callers without a server.
    pub fn max_tokens(&self, state: &ModelState, prompt: &TokenizedPrompt) -> ApiResult<u32> {
        let context = u64::from(state.served.engine.limits().max_req_total_len);
        let in_prompt = prompt.ids.len() as u64;
        let rest = context.saturating_sub(in_prompt);
        let asked = self.common.max_tokens;
        let echo_only = asked == Some(0) && self.prompt_logprobs.is_some();
        let least = if self.clamps_max_tokens { 1 } else { asked.unwrap_or(1) };
        let needed = if echo_only { 0 } else { u64::from(least) };
        if in_prompt + needed > context {
            // Clients look for this text, and then shorten the conversation.
            let message = match self.clamps_max_tokens {
                true => format!(
                    "prompt is too long: {in_prompt} tokens > {} maximum, which leaves {needed} of this model's {context} for the answer",
                    context - needed
                ),
                false => format!(
                    "this model's maximum context length is {context} tokens; the request has {in_prompt} in the prompt and asks for {needed} more"
                ),
            };
            let of_length = !self.clamps_max_tokens && asked.is_some_and(|n| n > 1);
            let param = if of_length { self.length_param } else { self.prompt_param };
            return Err(ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::invalid(param, message) });
        }
        let default = self.default_max_tokens.map_or(rest, |n| rest.min(u64::from(n)));
        let most = u32::try_from(if self.clamps_max_tokens { rest } else { default }).unwrap_or(u32::MAX);
        Ok(asked.map_or(most, |asked| if self.clamps_max_tokens { asked.min(most) } else { asked }))
    }

    /// Begins this request's line in the trace. None if requests are not recorded.
    pub fn record(&self, state: &ModelState, api: &'static str) -> Option<Entry> {
        let recorder = state.server.recorder.as_ref().filter(|_| !self.prompts.is_empty())?;
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
