//! A chat answer that is not streamed, and what its shape shares with the stream.

use std::sync::Arc;

use axum::response::Response;
use plimsoll_text::Tokenizer;
use serde::Serialize;

use super::reading::{Call, Reading, Reply, Rules};
use super::request::Asked;
use crate::app::App;
use crate::choices::{Collected, ids};
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
    pub rules: Rules,
    pub app: Arc<App>,
}

impl Context {
    pub fn new(app: &Arc<App>, id: String, asked: Asked) -> Self {
        let tokenizer = Arc::clone(&app.served.tokenizer);
        let Asked { draft, rules } = asked;
        Self { id, created: crate::models::now_s(), tokenizer, draft, rules, app: Arc::clone(app) }
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
    /// Null where there are only calls or thoughts.
    content: Option<String>,
    refusal: Option<&'a str>,
    /// The thoughts, under the name that DeepSeek gave them and the one that newer servers do.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

impl Message<'_> {
    fn new(reply: Reply) -> Self {
        let reasoning = Some(reply.reasoning).filter(|text| !text.is_empty());
        let silent = reply.content.is_empty() && (reasoning.is_some() || !reply.calls.is_empty());
        Self {
            role: "assistant",
            content: (!silent).then_some(reply.content),
            refusal: None,
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls: reply.calls,
        }
    }
}

/// The whole answer.
pub(crate) fn whole(context: &Context, mut collected: Vec<Collected>, usage: Usage, held: Option<Held>) -> Response {
    let draft = &context.draft;
    let prompt = &draft.prompts[0].ids;
    let report = |choice: &Collected| PromptReport::new(context.spelling(), prompt, &choice.prompt_logprobs);
    let prompt_logprobs = draft.common.prompt_logprobs.and_then(|_| collected.first().map(report));
    let answer = Answer {
        id: &context.id,
        object: "chat.completion",
        created: context.created,
        model: &draft.common.model,
        choices: collected.iter_mut().enumerate().map(|(i, choice)| one(context, i, choice)).collect(),
        usage,
        prompt_logprobs,
        prompt_token_ids: draft.common.return_token_ids.then_some(prompt),
    };
    json(&answer, held)
}

fn one<'a>(context: &Context, index: usize, collected: &'a mut Collected) -> Choice<'a> {
    let draft = &context.draft;
    let mut reading = Reading::new(&context.rules);
    let parts = reading.read(std::mem::take(&mut collected.text), true, &context.app.ids);
    Choice {
        index,
        message: Message::new(Reply::of(parts)),
        logprobs: draft.logprobs.map(|_| ChatLogprobs::new(context.spelling(), &collected.tokens)),
        finish_reason: collected.finish.map(|reason| reading.finish_name(reason)),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: draft.common.return_token_ids.then(|| ids(&collected.tokens)),
    }
}
