//! A chat answer that is not streamed, and what its shape shares with the stream.

use std::sync::Arc;

use axum::response::Response;
use plimsoll_text::Tokenizer;
use serde::Serialize;

use crate::app::App;
use crate::choices::{Collected, finish_name, ids};
use crate::generation::Usage;
use crate::limits::Held;
use crate::logprobs::{ChatLogprobs, PromptReport, Spelling};
use crate::models::json;
use crate::submit::Draft;

/// What every chunk of one answer repeats, and what was asked for.
pub(crate) struct Context {
    pub id: String,
    pub created: u64,
    pub tokenizer: Arc<Tokenizer>,
    pub draft: Draft,
}

impl Context {
    pub fn new(app: &App, id: String, draft: Draft) -> Self {
        let tokenizer = Arc::clone(&app.served.tokenizer);
        Self { id, created: crate::models::now_s(), tokenizer, draft }
    }

    pub fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: &self.tokenizer, as_ids: self.draft.common.tokens_as_ids }
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

/// The whole answer.
pub(crate) fn whole(context: &Context, collected: &[Collected], usage: Usage, held: Option<Held>) -> Response {
    let draft = &context.draft;
    let prompt = &draft.prompts[0].ids;
    let report = |choice: &Collected| PromptReport::new(context.spelling(), prompt, &choice.prompt_logprobs);
    let answer = Answer {
        id: &context.id,
        object: "chat.completion",
        created: context.created,
        model: &draft.common.model,
        choices: collected.iter().enumerate().map(|(i, choice)| one(context, i, choice)).collect(),
        usage,
        prompt_logprobs: draft.common.prompt_logprobs.and_then(|_| collected.first().map(report)),
        prompt_token_ids: draft.common.return_token_ids.then_some(prompt),
    };
    json(&answer, held)
}

fn one<'a>(context: &Context, index: usize, collected: &'a Collected) -> Choice<'a> {
    let draft = &context.draft;
    Choice {
        index,
        message: Message { role: "assistant", content: &collected.text, refusal: None },
        logprobs: draft.logprobs.map(|_| ChatLogprobs::new(context.spelling(), &collected.tokens)),
        finish_reason: collected.finish.map(finish_name),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: draft.common.return_token_ids.then(|| ids(&collected.tokens)),
    }
}
