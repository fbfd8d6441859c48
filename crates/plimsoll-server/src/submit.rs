//! From a validated body to running engine requests: the one way for both APIs.

use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_engine::{MediaItem, Reader, Request};
use plimsoll_memory::broken;

use crate::budget::Held;
use crate::caller::Caller;
use crate::error::{ApiError, ApiResult};
use crate::model_state::ModelState;
use crate::params::Common;
use crate::price::Meter;
use crate::running::Ticket;

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

/// What was started.
pub(crate) struct Submitted {
    /// One reader per choice: all choices of the first prompt, then those of the second.
    pub readers: Vec<Reader>,
    /// The share of the byte budget that the answer may need before it is sent.
    pub held: Option<Held>,
    /// What more it turns out to need; the generation takes it.
    pub meter: Option<Meter>,
    /// Its place among the requests that are being answered; the generation takes it.
    pub ticket: Option<Ticket>,
}

impl Submission {
    /// Bytes that the prompts take, and what is asked of them.
    pub fn bytes(&self) -> u64 {
        let of = |prompt: &Prompt| size_of_val(prompt.ids.as_slice()) + prompt.echo.as_ref().map_or(0, String::len);
        self.common.bytes() + self.prompts.iter().map(|prompt| of(prompt) as u64).sum::<u64>()
    }

    /// Submits one engine request per choice. When one is refused, those before it are dropped, hence aborted.
    pub fn start(&self, state: &ModelState, id: &str) -> ApiResult<Submitted> {
        let n = self.common.n;
        let choices = self.prompts.len() as u64 * u64::from(n);
        let limit = state.max_choices();
        if choices > u64::from(limit) {
            let prompts = self.prompts.len();
            let message =
                format!("{prompts} prompts with n = {n} are {choices} sequences, more than the limit of {limit}");
            return Err(ApiError::invalid(self.prompt_param, message));
        }
        let (held, meter) = self.hold(state)?;
        let arrived = Caller::current().arrived();
        let mut readers = Vec::with_capacity(choices as usize);
        for prompt in &self.prompts {
            let max_tokens = self.max_tokens(state, prompt)?;
            for _ in 0..n {
                let request = self.request(id, readers.len() as u32, prompt, max_tokens);
                let submitted = state.served.engine.submit_since(request, arrived);
                readers.push(submitted.map_err(|refusal| self.named(refusal.into()))?);
            }
        }
        let watches = readers.iter().map(Reader::watch).collect();
        let ticket = Some(state.enter(id, self.common.stream, watches)?);
        Ok(Submitted { readers, held, meter, ticket })
    }

    fn request(&self, id: &str, choice: u32, prompt: &Prompt, max_tokens: u32) -> Request {
        let common = &self.common;
        let mut sampling = common.sampling.clone();
        // Choices of one prompt differ by their seed; the first keeps the one that was asked for.
        sampling.seed = sampling.seed.wrapping_add(u64::from(choice % common.n.max(1)));
        Request {
            id: format!("{id}-{choice}"),
            prompt: prompt.ids.clone(),
            sampling,
            max_tokens,
            min_tokens: common.min_tokens,
            stop: common.stop.clone(),
            keep_stop: common.keep_stop,
            stop_token_ids: common.stop_token_ids.clone(),
            ignore_eos: common.ignore_eos,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            skip_special_tokens: common.skip_special_tokens,
            kept_special_ids: self.kept_special_ids.clone(),
            grammar: self.grammar.clone(),
            speculate: common.mtp,
            cache_salt: common.cache_salt,
            embed: None,
            media: self.media.clone(),
        }
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

    /// The engine says `prompt` and `max_tokens`; the APIs have words of their own.
    fn named(&self, mut error: ApiError) -> ApiError {
        match error.param.as_deref() {
            Some("prompt") => error.param = Some(self.prompt_param.into()),
            Some("max_tokens") => error.param = Some(self.length_param.into()),
            _ => {}
        }
        error
    }
}
