//! Submits a request to the engine: one engine request for each choice.

use plimsoll_engine::{Reader, Request};

use crate::conversation::price::Meter;
use crate::conversation::submission::{Prompt, Submission};
use crate::http::budget::Held;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::state::model::ModelState;
use crate::state::running::Ticket;

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
