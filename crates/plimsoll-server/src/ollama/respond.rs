//! A whole answer in Ollama's form, and the lines that it shares with the stream.

use axum::response::{IntoResponse, Response};
use plimsoll_engine::{Delta, FinishReason, TokenOut};
use serde::Serialize;
use serde_json::value::RawValue;

use super::Route;
use crate::conversation::active::ActiveRequest;
use crate::conversation::clock::{Clock, Counts, now};
use crate::conversation::logprobs::{ChatLogprobs, ChatToken};
use crate::conversation::reply_reader::{Part, ReplyEnd, ReplyReader};
use crate::http::json::json;
use crate::http::sse::{Events, LINE_HEADERS};
use crate::messages::input;

/// One line of a stream, or the whole answer.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    model: &'a str,
    created_at: String,
    #[serde(flatten)]
    said: Said<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<ChatToken>>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    #[serde(flatten)]
    counts: Option<Counts>,
}

/// The content of a line in the form of its route.
#[derive(Serialize)]
#[serde(untagged)]
enum Said<'a> {
    Chat {
        message: Message<'a>,
    },
    Generate {
        response: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        thinking: &'a str,
    },
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    thinking: &'a str,
    #[serde(skip_serializing_if = "<[Call]>::is_empty")]
    tool_calls: &'a [Call],
}

/// A call, with its arguments as an object.
#[derive(Debug, Serialize)]
pub(super) struct Call {
    id: String,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    index: usize,
    name: String,
    arguments: Box<RawValue>,
}

/// A call with incomplete arguments.
#[derive(Debug)]
pub(super) struct OpenCall {
    index: usize,
    id: String,
    name: String,
    arguments: String,
}

impl OpenCall {
    fn close(self) -> Call {
        let Self { index, id, name, arguments } = self;
        Call { id, function: Function { index, name, arguments: input(&arguments) } }
    }
}

/// Texts and calls that have been read but not sent.
#[derive(Debug, Default)]
pub(super) struct Piece {
    content: String,
    thinking: String,
    calls: Vec<Call>,
    open: Option<OpenCall>,
}

impl Piece {
    /// Adds parsed parts of the reply.
    pub fn take(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Content(text) => self.content.push_str(&text),
                Part::Reasoning(text) => self.thinking.push_str(&text),
                Part::Call { index, id, name, .. } => {
                    self.close_call();
                    self.open = Some(OpenCall { index, id, name, arguments: String::new() });
                }
                Part::Arguments { text, .. } => {
                    if let Some(call) = &mut self.open {
                        call.arguments.push_str(&text);
                    }
                }
            }
        }
    }

    /// Ends the open call: it gets no more arguments.
    pub fn close_call(&mut self) {
        self.calls.extend(self.open.take().map(OpenCall::close));
    }

    /// Returns whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.thinking.is_empty() && self.calls.is_empty()
    }

    /// Removes the texts and calls that have been sent.
    pub fn clear(&mut self) {
        self.content.clear();
        self.thinking.clear();
        self.calls.clear();
    }
}

impl<'a> Line<'a> {
    /// Makes a line that is not the last.
    pub fn of(route: Route, model: &'a str, piece: &'a Piece) -> Self {
        let Piece { content, thinking, calls, .. } = piece;
        let said = match route {
            Route::Chat => Said::Chat { message: Message { role: "assistant", content, thinking, tool_calls: calls } },
            Route::Generate => Said::Generate { response: content, thinking },
        };
        Self { model, created_at: now(), said, logprobs: None, done: false, done_reason: None, counts: None }
    }

    /// Adds the reports of its tokens.
    pub fn with_logprobs(self, request: &ActiveRequest, tokens: &[TokenOut]) -> Self {
        Self { logprobs: Some(ChatLogprobs::new(request.spelling(), tokens).content), ..self }
    }

    /// Makes this the last line.
    pub fn last(self, reason: &'static str, counts: Option<Counts>) -> Self {
        Self { done: true, done_reason: Some(reason), counts, ..self }
    }
}

/// Returns the finish reason by Ollama's name: a reply that calls a tool has the reason of any other.
pub(super) fn reason(finish: Option<FinishReason>) -> &'static str {
    finish.map_or("stop", FinishReason::name)
}

/// Returns the answer to a request without a prompt: the model is loaded.
pub(super) fn loaded(route: Route, model: &str, stream: bool) -> Response {
    let nothing = Piece::default();
    let line = Line::of(route, model, &nothing).last("load", None);
    if !stream {
        return json(&line, None);
    }
    let mut out = Events::default();
    out.push_line(&line);
    (LINE_HEADERS, out.into_bytes()).into_response()
}

/// A whole answer in progress.
pub(super) struct Reply {
    reading: ReplyReader,
    clock: Clock,
    piece: Piece,
    tokens: Option<Vec<TokenOut>>,
    finish: Option<FinishReason>,
}

impl Reply {
    pub fn new(request: &ActiveRequest, clock: Clock) -> Self {
        let reading = ReplyReader::new(&request.submission.rules);
        let tokens = request.submission.logprobs.map(|_| Vec::new());
        Self { reading, clock, piece: Piece::default(), tokens, finish: None }
    }

    /// Adds a delta.
    pub fn take(&mut self, request: &ActiveRequest, delta: Delta) {
        self.clock.tokens(delta.tokens.len());
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        self.piece.take(self.reading.read(delta.text, end, &request.state.server.ids));
        self.finish = delta.finish.or(self.finish);
        if let Some(tokens) = &mut self.tokens {
            tokens.extend(delta.tokens);
        }
    }

    /// Returns the whole answer.
    pub fn whole(mut self, route: Route, mut request: ActiveRequest) -> Response {
        self.piece.close_call();
        let held = request.take_held();
        let counts = self.clock.counts(request.usage());
        let model = &request.submission.common.model;
        let mut line = Line::of(route, model, &self.piece).last(reason(self.finish), Some(counts));
        if let Some(tokens) = &self.tokens {
            line = line.with_logprobs(&request, tokens);
        }
        json(&line, held)
    }
}
