//! A completion that is not streamed, and the types that it shares with the stream.

use axum::response::Response;
use plimsoll_engine::FinishReason;
use serde::{Serialize, Serializer};

use crate::conversation::active::{ActiveRequest, Usage};
use crate::conversation::choices::{Collected, ids};
use crate::conversation::logprobs::{CompletionLogprobs, PromptReport};
use crate::http::json::json;

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

/// Writes an echo, if there is one, and the text after it.
fn in_one<S: Serializer>([echo, text]: &[&str; 2], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{echo}{text}"))
}

/// The answer with its choices.
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
    pub fn new(request: &'a ActiveRequest, choices: &'a [Choice<'a>], usage: Option<Option<Usage>>) -> Self {
        let model = &request.submission.common.model;
        Self { id: &request.id, object: "text_completion", created: request.created, model, choices, usage }
    }
}

/// Returns the whole answer.
pub(crate) fn whole(mut request: ActiveRequest, collected: Vec<Collected>) -> Response {
    let held = request.take_held();
    let choices: Vec<_> = collected.iter().enumerate().map(|(i, choice)| one(&request, i, choice)).collect();
    json(&Answer::new(&request, &choices, Some(Some(request.usage()))), held)
}

fn one<'a>(request: &'a ActiveRequest, index: usize, collected: &'a Collected) -> Choice<'a> {
    let common = &request.submission.common;
    let prompt = request.submission.prompt(index);
    Choice {
        index,
        text: [prompt.echo.as_deref().unwrap_or_default(), &collected.text],
        logprobs: request.submission.logprobs.map(|_| logprobs(request, index, collected)),
        finish_reason: collected.finish.map(FinishReason::name),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: common.return_token_ids.then(|| ids(&collected.tokens)),
        prompt_token_ids: common.return_token_ids.then_some(&prompt.ids[..]),
        prompt_logprobs: common
            .prompt_logprobs
            .map(|_| PromptReport::new(request.spelling(), &prompt.ids, &collected.prompt_logprobs)),
    }
}

fn logprobs(request: &ActiveRequest, index: usize, collected: &Collected) -> CompletionLogprobs {
    let prompt = request.submission.prompt(index);
    let mut logprobs = CompletionLogprobs::default();
    let echoed = prompt.echo.is_some();
    let before = if echoed { logprobs.add_prompt(request.spelling(), prompt, &collected.prompt_logprobs) } else { 0 };
    logprobs.add(request.spelling(), &collected.tokens, before);
    logprobs
}
