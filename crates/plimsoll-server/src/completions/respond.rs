//! A completion that is not streamed, and what its shape shares with the stream.

use std::sync::Arc;

use axum::response::Response;
use plimsoll_text::Tokenizer;
use serde::{Serialize, Serializer};

use super::request::Asked;
use crate::conversation::active::Usage;
use crate::conversation::choices::{Collected, finish_name, ids};
use crate::conversation::logprobs::{CompletionLogprobs, PromptReport, Spelling};
use crate::http::budget::Held;
use crate::http::json::json;
use crate::state::model::ModelState;

/// What every chunk of one answer repeats, and what was asked for.
pub(crate) struct ReplyContext {
    pub id: String,
    pub created: u64,
    pub tokenizer: Arc<Tokenizer>,
    pub asked: Asked,
}

impl ReplyContext {
    pub fn new(state: &ModelState, id: String, asked: Asked) -> Self {
        let tokenizer = Arc::clone(&state.served.tokenizer);
        Self { id, created: crate::http::ids::now_s(), tokenizer, asked }
    }

    pub fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: &self.tokenizer, as_ids: self.asked.draft.common.tokens_as_ids }
    }

    /// The prompt a choice belongs to.
    pub fn prompt(&self, choice: usize) -> &crate::conversation::submission::Prompt {
        &self.asked.draft.prompts[choice / self.asked.draft.common.n as usize]
    }
}

/// One choice, whole or as a piece of a stream.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Choice<'a> {
    pub index: usize,
    #[serde(serialize_with = "in_one")]
    pub text: [&'a str; 2],
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptReport>,
}

/// An echo, if there is one, and what comes behind it.
fn in_one<S: Serializer>([echo, text]: &[&str; 2], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{echo}{text}"))
}

/// The answer around its choices.
#[derive(Debug, Serialize)]
pub(crate) struct Answer<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: &'a [Choice<'a>],
    /// Absent, null or a value: OpenAI's streams tell the three apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

impl<'a> Answer<'a> {
    pub fn new(context: &'a ReplyContext, choices: &'a [Choice<'a>], usage: Option<Option<Usage>>) -> Self {
        let model = &context.asked.draft.common.model;
        Self { id: &context.id, object: "text_completion", created: context.created, model, choices, usage }
    }
}

/// The whole answer.
pub(crate) fn whole(context: &ReplyContext, collected: Vec<Collected>, usage: Usage, held: Option<Held>) -> Response {
    let choices: Vec<_> = collected.iter().enumerate().map(|(i, choice)| one(context, i, choice)).collect();
    json(&Answer::new(context, &choices, Some(Some(usage))), held)
}

fn one<'a>(context: &'a ReplyContext, index: usize, collected: &'a Collected) -> Choice<'a> {
    let common = &context.asked.draft.common;
    let prompt = context.prompt(index);
    Choice {
        index,
        text: [prompt.echo.as_deref().unwrap_or_default(), &collected.text],
        logprobs: context.asked.draft.logprobs.map(|_| logprobs(context, index, collected)),
        finish_reason: collected.finish.map(finish_name),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: common.return_token_ids.then(|| ids(&collected.tokens)),
        prompt_token_ids: common.return_token_ids.then_some(&prompt.ids[..]),
        prompt_logprobs: common
            .prompt_logprobs
            .map(|_| PromptReport::new(context.spelling(), &prompt.ids, &collected.prompt_logprobs)),
    }
}

fn logprobs(context: &ReplyContext, index: usize, collected: &Collected) -> CompletionLogprobs {
    let prompt = context.prompt(index);
    let mut logprobs = CompletionLogprobs::default();
    let echoed = prompt.echo.is_some();
    let before = if echoed { logprobs.add_prompt(context.spelling(), prompt, &collected.prompt_logprobs) } else { 0 };
    logprobs.add(context.spelling(), &collected.tokens, before);
    logprobs
}
