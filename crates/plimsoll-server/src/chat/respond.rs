//! A chat answer that is not streamed.

use axum::response::Response;
use serde::Serialize;

use crate::conversation::ReplyContext;
use crate::conversation::active::Usage;
use crate::conversation::choices::{Collected, ids};
use crate::conversation::logprobs::{ChatLogprobs, PromptReport};
use crate::conversation::reading::{Part, Reading, ReplyEnd};
use crate::http::budget::Held;
use crate::http::json::json;

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
pub(crate) fn whole(
    context: &ReplyContext,
    mut collected: Vec<Collected>,
    usage: Usage,
    held: Option<Held>,
) -> Response {
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

fn one<'a>(context: &ReplyContext, index: usize, collected: &'a mut Collected) -> Choice<'a> {
    let draft = &context.draft;
    let mut reading = Reading::new(&context.rules);
    let end = ReplyEnd::of(collected.finish, collected.stop_reason.as_deref());
    let parts = reading.read(std::mem::take(&mut collected.text), end, &context.state.server.ids);
    Choice {
        index,
        message: Message::new(Reply::of(parts)),
        logprobs: draft.logprobs.map(|_| ChatLogprobs::new(context.spelling(), &collected.tokens)),
        finish_reason: collected.finish.map(|reason| reading.finish_name(reason)),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: draft.common.return_token_ids.then(|| ids(&collected.tokens)),
    }
}

/// A whole reply.
#[derive(Debug, Default)]
struct Reply {
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

/// One call of a whole reply, in OpenAI's shape.
#[derive(Debug, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl Reply {
    fn of(parts: Vec<Part>) -> Self {
        let mut reply = Self::default();
        for part in parts {
            match part {
                Part::Reasoning(text) => reply.reasoning.push_str(&text),
                Part::Content(text) => reply.content.push_str(&text),
                Part::Call { id, name, .. } => {
                    let function = Function { name, arguments: String::new() };
                    reply.calls.push(Call { id, kind: "function", function });
                }
                Part::Arguments { text, .. } => {
                    if let Some(call) = reply.calls.last_mut() {
                        call.function.arguments.push_str(&text);
                    }
                }
            }
        }
        reply
    }
}
