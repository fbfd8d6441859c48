//! A chat answer that is not streamed.

use axum::response::Response;
use serde::Serialize;

use crate::conversation::active::{ActiveRequest, Usage};
use crate::conversation::choices::{Collected, ids};
use crate::conversation::logprobs::{ChatLogprobs, PromptReport};
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
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
    /// Null if the message has only calls or reasoning.
    content: Option<String>,
    refusal: Option<&'a str>,
    /// Reasoning under DeepSeek's field name (`reasoning_content`) and under vLLM's (`reasoning`).
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

/// Returns the whole answer.
pub(crate) fn whole(mut request: ActiveRequest, mut collected: Vec<Collected>) -> Response {
    let held = request.take_held();
    let submission = &request.submission;
    let prompt = &submission.prompts[0].ids;
    let report = |choice: &Collected| PromptReport::new(request.spelling(), prompt, &choice.prompt_logprobs);
    let prompt_logprobs = submission.common.prompt_logprobs.and_then(|_| collected.first().map(report));
    let answer = Answer {
        id: &request.id,
        object: "chat.completion",
        created: request.created,
        model: &submission.common.model,
        choices: collected.iter_mut().enumerate().map(|(i, choice)| one(&request, i, choice)).collect(),
        usage: request.usage(),
        prompt_logprobs,
        prompt_token_ids: submission.common.return_token_ids.then_some(prompt),
    };
    json(&answer, held)
}

fn one<'a>(request: &ActiveRequest, index: usize, collected: &'a mut Collected) -> Choice<'a> {
    let submission = &request.submission;
    let mut reading = ReplyReader::new(&submission.rules);
    let end = ReplyEnd::of(collected.finish, collected.stop_reason.as_deref());
    let parts = reading.read(std::mem::take(&mut collected.text), end, &request.state.server.ids);
    Choice {
        index,
        message: Message::new(Reply::of(parts)),
        logprobs: submission.logprobs.map(|_| ChatLogprobs::new(request.spelling(), &collected.tokens)),
        finish_reason: collected.finish.map(|reason| reading.finish_name(reason)),
        stop_reason: collected.stop_reason.as_deref(),
        token_ids: submission.common.return_token_ids.then(|| ids(&collected.tokens)),
    }
}

/// A whole reply.
#[derive(Debug, Default)]
struct Reply {
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

/// One call of a whole reply, in OpenAI's form.
#[derive(Debug, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<Function>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<CustomCall>,
}

/// A call of a tool with plain-text input.
#[derive(Debug, Serialize)]
struct CustomCall {
    name: String,
    input: String,
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
                Part::Call { id, name, custom: true, .. } => {
                    let custom = Some(CustomCall { name, input: String::new() });
                    reply.calls.push(Call { id, kind: "custom", function: None, custom });
                }
                Part::Call { id, name, .. } => {
                    let function = Some(Function { name, arguments: String::new() });
                    reply.calls.push(Call { id, kind: "function", function, custom: None });
                }
                Part::Arguments { text, .. } => match reply.calls.last_mut() {
                    Some(Call { function: Some(function), .. }) => function.arguments.push_str(&text),
                    Some(Call { custom: Some(custom), .. }) => custom.input.push_str(&text),
                    _ => {}
                },
            }
        }
        reply
    }
}
