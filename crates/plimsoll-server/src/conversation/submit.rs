//! Submits a [`Submission`] to the engine: one engine request for each choice.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_engine::{Reader, Request, SubmitKind};

use crate::conversation::active::ActiveRequest;
use crate::conversation::submission::{Submission, TokenizedPrompt};
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::media;
use crate::state::model::ModelState;

impl Submission {
    /// Decodes the media and submits one engine request per choice. `id` is the id in the answer. If the engine refuses a request, the
    /// earlier ones are dropped, which aborts them.
    pub async fn start(mut self, state: &Arc<ModelState>, id: String, api: &'static str) -> ApiResult<ActiveRequest> {
        self.decode(state).await?;
        let bytes = self.reserve_answer_bytes(state)?;
        let readers = self.submit(state, Caller::current().arrived(), false)?;
        let watches = readers.iter().map(Reader::watch).collect();
        let guard = state.server.running.add(&id, self.common.stream, watches, state.of_running())?;
        Ok(ActiveRequest::new(state, id, api, self, readers, guard, bytes))
    }

    /// Decodes the media that are not decoded yet.
    pub async fn decode(&mut self, state: &Arc<ModelState>) -> ApiResult<()> {
        if self.measured.is_empty() {
            return Ok(());
        }
        self.media = media::prepare(state, std::mem::take(&mut self.measured), self.held_files.take()).await?;
        Ok(())
    }

    /// Submits one engine request per choice. `again`: earlier turns of the same request have run.
    pub fn submit(&self, state: &ModelState, received: Instant, again: bool) -> ApiResult<Vec<Reader>> {
        let (n, choices) = (self.common.n, self.choices() as u64);
        let limit = state.choices_max();
        if choices > u64::from(limit) {
            let prompts = self.prompts.len();
            let message =
                format!("{prompts} prompts with n = {n} are {choices} sequences, more than the limit of {limit}");
            return Err(ApiError::invalid(self.prompt_param, message));
        }
        let mut readers = Vec::with_capacity(choices as usize);
        for prompt in &self.prompts {
            let max_tokens = self.max_tokens(state, prompt)?;
            for _ in 0..n {
                let request = self.request(readers.len() as u32, prompt, max_tokens, received);
                let engine = &state.served.engine;
                let reader = engine.submit_as(if again { SubmitKind::Turn } else { SubmitKind::New }, request);
                readers.push(reader.map_err(|refusal| self.named(refusal.into()))?);
            }
        }
        Ok(readers)
    }

    fn request(&self, choice: u32, prompt: &TokenizedPrompt, max_tokens: u32, received: Instant) -> Request {
        let common = &self.common;
        let mut sampling = common.sampling.clone();
        // Choices of one prompt differ by their seed; the first keeps the client's.
        sampling.seed = sampling.seed.wrapping_add(u64::from(choice % common.n.max(1)));
        Request {
            received: Some(received),
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
            speculate: common.speculate,
            cache_salt: common.cache_salt,
            embed: None,
            media: self.media.clone(),
            pins: self.pins.clone(),
        }
    }

    /// Replaces the engine's field names `prompt` and `max_tokens` in an error with those of the API.
    fn named(&self, mut error: ApiError) -> ApiError {
        match error.param.as_deref() {
            Some("prompt") => error.param = Some(self.prompt_param.into()),
            Some("max_tokens") => error.param = Some(self.length_param.into()),
            _ => {}
        }
        error
    }
}
