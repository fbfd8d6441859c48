//! A chat answer as a stream: the role, deltas, the finish reason, and usage if the client wants it.

use plimsoll_engine::Delta;
use serde::Serialize;

use crate::conversation::active::{ActiveRequest, Usage};
use crate::conversation::choices::ids;
use crate::conversation::logprobs::ChatLogprobs;
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
use crate::conversation::stream::StreamWriter;
use crate::http::sse::Events;

/// The state of a streamed chat answer.
pub(crate) struct ChatStream {
    choices: Vec<ReplyReader>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice<'a>],
    /// Absent, null or a value: OpenAI's streams tell the three apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct Choice<'a> {
    index: usize,
    delta: Piece<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
struct Piece<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[Call<'a>; 1]>,
}

/// A piece of a call: its id and name, or more of its arguments.
#[derive(Serialize)]
struct Call<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<Function<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<CustomCall<'a>>,
}

/// A call of a tool with plain-text input.
#[derive(Serialize)]
struct CustomCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    input: &'a str,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> Piece<'a> {
    fn of(part: &'a Part) -> Self {
        let call = |index: usize, id: Option<&'a str>, name: Option<&'a str>, text: &'a str, custom: bool| {
            let kind = name.map(|_| if custom { "custom" } else { "function" });
            let function = (!custom).then_some(Function { name, arguments: text });
            let custom = custom.then_some(CustomCall { name, input: text });
            Self { tool_calls: Some([Call { index, id, kind, function, custom }]), ..Self::default() }
        };
        match part {
            Part::Content(text) => Self { content: Some(text), ..Self::default() },
            Part::Reasoning(text) => Self { reasoning_content: Some(text), reasoning: Some(text), ..Self::default() },
            Part::Call { index, id, name, custom } => call(*index, Some(id), Some(name), "", *custom),
            Part::Arguments { index, text, custom } => call(*index, None, None, text, *custom),
        }
    }
}

impl ChatStream {
    pub fn new(request: &ActiveRequest) -> Self {
        let submission = &request.submission;
        let readings = std::iter::repeat_with(|| ReplyReader::new(&submission.rules));
        Self { choices: readings.take(submission.choices()).collect() }
    }
}

fn send(request: &ActiveRequest, choices: &[Choice<'_>], usage: Option<Option<Usage>>, first: bool, out: &mut Events) {
    let common = &request.submission.common;
    let prompt = &request.submission.prompts[0].ids;
    out.push(&Chunk {
        id: &request.id,
        object: "chat.completion.chunk",
        created: request.created,
        model: &common.model,
        choices,
        usage,
        prompt_token_ids: (first && common.return_token_ids).then_some(prompt),
    });
}

/// Returns the usage field of a chunk that is not the last.
fn usage(request: &ActiveRequest, so_far: Option<Usage>) -> Option<Option<Usage>> {
    let common = &request.submission.common;
    if common.continuous_usage { Some(so_far) } else { common.include_usage.then_some(None) }
}

impl StreamWriter for ChatStream {
    /// Sends the role of every choice at once, before the engine has a token. Time to first token is measured at the
    /// next chunk.
    fn open(&mut self, request: &ActiveRequest, out: &mut Events) {
        for index in 0..self.choices.len() {
            let delta = Piece { role: Some("assistant"), content: Some(""), ..Piece::default() };
            let choice = Choice { index, delta, ..Choice::default() };
            send(request, &[choice], usage(request, None), index == 0, out);
        }
    }

    fn delta(&mut self, request: &ActiveRequest, index: usize, delta: Delta, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        let parts = self.choices[index].read(delta.text, end, &request.state.server.ids);
        let submission = &request.submission;
        let so_far = usage(request, Some(request.usage()));
        let return_ids = submission.common.return_token_ids;
        let mut reports_tokens = submission.reports_tokens() && !delta.tokens.is_empty();
        let nothing = Part::Content(String::new());
        let shown = if parts.is_empty() && reports_tokens { std::slice::from_ref(&nothing) } else { &parts[..] };
        for part in shown {
            // All tokens of the delta go with its first piece.
            let reports = std::mem::take(&mut reports_tokens);
            let choice = Choice {
                index,
                delta: Piece::of(part),
                logprobs: submission
                    .logprobs
                    .filter(|_| reports)
                    .map(|_| ChatLogprobs::new(request.spelling(), &delta.tokens)),
                token_ids: (return_ids && reports).then(|| ids(&delta.tokens)),
                ..Choice::default()
            };
            send(request, &[choice], so_far, false, out);
        }
        if let Some(reason) = delta.finish {
            let finish_reason = Some(self.choices[index].finish_name(reason));
            let stop_reason = delta.stop_reason.as_deref();
            let choice = Choice { index, finish_reason, stop_reason, ..Choice::default() };
            send(request, &[choice], so_far, false, out);
        }
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        if request.submission.common.include_usage {
            send(request, &[], Some(Some(request.usage())), false, out);
        }
    }
}
