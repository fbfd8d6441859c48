//! One conversation: a request of Chat, Messages, Responses, Ollama's chat or transcriptions. Each API parses its own body and writes its
//! own reply. The code between is here: prompt, grammar, submission, reply parsing.

pub(crate) mod active;
mod adapt;
pub(crate) mod answer_bytes;
pub(crate) mod cache_control;
pub(crate) mod choices;
pub(crate) mod clock;
pub(crate) mod content;
pub(crate) mod custom;
mod grammar;
pub(crate) mod infill;
pub(crate) mod logprobs;
pub(crate) mod output_format;
pub(crate) mod params;
pub(crate) mod prompt;
pub(crate) mod prompt_input;
pub(crate) mod reply_reader;
pub(crate) mod stream;
pub(crate) mod submission;
pub(crate) mod submit;
mod tally;
pub(crate) mod tools;

use std::sync::Arc;

use arrayvec::ArrayVec;
use prompt::{Conversation, RenderedPrompt};
use reply_reader::ReplyRules;

use crate::conversation::cache_control::Marks;
use crate::conversation::params::Common;
use crate::conversation::submission::{Submission, TokenizedPrompt};
use crate::http::budget::Held;
use crate::http::error::ApiResult;
use crate::media::Measured;
use crate::state::model::ModelState;

/// A parsed request for one reply to a conversation.
#[derive(Clone)]
pub(crate) struct ChatRequest {
    pub conversation: Conversation,
    pub common: Common,
    /// Alternatives per generated token, if requested.
    pub logprobs: Option<u32>,
    /// Whether the tokenizer adds its own special tokens; templates write them themselves.
    pub add_special: bool,
    pub include_reasoning: bool,
    pub budget: Option<ReasoningBudget>,
    /// The beginning of tool call ids in this API.
    pub call_prefix: &'static str,
    /// The field that holds the number of tokens to generate, for errors.
    pub length_param: &'static str,
    /// See [`Submission`].
    pub clamps_max_tokens: bool,
    /// See [`Submission`].
    pub repeats_output: bool,
    /// Whether the oldest turns of a conversation longer than the context are left out.
    pub drops_oldest: bool,
    /// The client's cache marks.
    pub marks: Marks,
}

/// A limit on reasoning tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReasoningBudget {
    /// The field that sets it.
    pub param: &'static str,
    pub tokens: u32,
}

impl ChatRequest {
    /// Returns about the heap bytes of the request.
    pub fn bytes(&self) -> u64 {
        self.conversation.bytes() + self.common.bytes()
    }

    /// Fetches media, then runs [`Self::prepare`] on a text worker. `held` is the byte share of the parsed body, which the submission takes
    /// over.
    pub async fn prepare_on_worker(self, state: &Arc<ModelState>, held: Held) -> ApiResult<Submission> {
        let (submission, ()) = self.prepare_on_worker_with(state, held, || (0, ())).await?;
        Ok(submission)
    }

    /// Like [`Self::prepare_on_worker`]. `extra` runs on the same worker once the prompt fits. Its first value is added to the bytes held.
    pub async fn prepare_on_worker_with<T: Send + 'static>(
        mut self,
        state: &Arc<ModelState>,
        mut held: Held,
        extra: impl FnOnce() -> (u64, T) + Send + 'static,
    ) -> ApiResult<(Submission, T)> {
        self.conversation.fetch(state, &mut held).await?;
        let own = Arc::clone(state);
        let work = move || {
            let mut submission = self.prepare(&own)?;
            let (bytes, value) = extra();
            let files = submission.measured.iter().map(Measured::file_bytes).sum();
            held.become_bytes(submission.bytes() + bytes + files)?;
            submission.held_files = Some(held.split(files));
            submission.held_prompt = Some(held);
            Ok((submission, value))
        };
        state.server.on_text_worker(work).await
    }

    /// Returns the most tokens of the prompt. An answer without a length gets a quarter of the context.
    fn room(&self, state: &ModelState) -> usize {
        let context = state.served.engine.limits().max_req_total_len;
        let answer = match self.common.max_tokens {
            Some(asked) if !self.clamps_max_tokens => asked.max(1),
            asked => asked.unwrap_or(context / 4).clamp(1, (context / 2).max(1)),
        };
        context.saturating_sub(answer) as usize
    }

    /// Renders, tokenizes and builds the grammar. Runs on a text worker.
    pub(crate) fn prepare(self, state: &ModelState) -> ApiResult<Submission> {
        let room = self.drops_oldest.then(|| self.room(state));
        let Self { mut conversation, mut common, .. } = self;
        let RenderedPrompt { text, ids, media } = conversation.prompt_within(state, self.add_special, room)?;
        let pins = match self.marks.any() {
            true => self.marks.pins(state, (&text, &ids), !media.is_empty(), self.add_special),
            false => ArrayVec::new(),
        };
        // Only the grammar needs it.
        let output_format = common.output_format.take();
        let (structured, stops) = (output_format.is_some(), !common.stop.is_empty());
        let rules =
            ReplyRules::new(state, &conversation, &text, structured, stops, self.include_reasoning, self.call_prefix);
        let grammar =
            grammar::grammar_of(state, conversation.tools.as_ref(), &rules, output_format.as_ref(), self.budget)?;
        let submission = Submission {
            prompts: vec![TokenizedPrompt { ids, echo: None, around: (0, 0) }],
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            default_max_tokens: state.served.default_max_tokens,
            prompt_param: conversation.param,
            length_param: self.length_param,
            kept_special_ids: rules.kept_special_ids(state),
            grammar,
            rules,
            held_prompt: None,
            measured: media,
            held_files: None,
            media: Vec::new(),
            clamps_max_tokens: self.clamps_max_tokens,
            repeats_output: self.repeats_output,
            pins,
            common,
        };
        // Checked before any media are decoded.
        submission.max_tokens(state, &submission.prompts[0])?;
        Ok(submission)
    }
}
