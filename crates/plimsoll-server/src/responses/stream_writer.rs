//! A response in progress: items that are added, grow and end, numbered events for each step, and the object at the end. An answer that is
//! not streamed takes the same steps without sending events.

mod mcp;

use std::sync::Arc;

use bytes::Bytes;
use plimsoll_engine::{Delta, FinishReason};
use serde::Serialize;

use super::mcp_run::McpRun;
use super::object::{Counts, Echo, Failure, Object, Output, Part, Reason, Shown, Status, What};
use super::unreported::Unreported;
use crate::conversation::active::ActiveRequest;
use crate::conversation::logprobs::{ChatLogprobs, ChatToken};
use crate::conversation::reply_reader::{self, ReplyEnd, ReplyReader};
use crate::conversation::stream::StreamWriter;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, CANCELLED};
use crate::http::ids::{Ids, now_s};
use crate::http::sse::Events;
use crate::state::response_store::{Begun, Kept};

/// The state of a response.
pub(crate) struct Responding {
    echo: Echo,
    /// The input that the store keeps. None if nothing is stored.
    items: Option<Arc<str>>,
    unreported: Unreported,
    reading: ReplyReader,
    output: Vec<Output>,
    teller: Teller,
    /// The API key of the client.
    key: Option<usize>,
    finish: Option<FinishReason>,
    /// Makes the response visible in the store while it is in progress.
    begun: Option<Begun>,
    /// None without MCP servers.
    mcp: Option<Box<McpRun>>,
    /// Reasoning tokens of earlier turns.
    reasoning_before: u64,
    /// Whether the call that is being read is beyond `max_tool_calls`.
    ignores: bool,
}

/// Numbers the events, and sends them if the answer is streamed.
struct Teller {
    streams: bool,
    sequence: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    body: Body<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Response {
        response: &'a Object<'a>,
    },
    Item {
        output_index: usize,
        item: Shown<'a>,
    },
    Part {
        output_index: usize,
        content_index: usize,
        item_id: &'a str,
        part: Part<'a>,
    },
    Delta {
        output_index: usize,
        #[serde(skip_serializing_if = "Option::is_none")]
        content_index: Option<usize>,
        item_id: &'a str,
        delta: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<&'a [ChatToken]>,
    },
    TextDone {
        output_index: usize,
        content_index: usize,
        item_id: &'a str,
        text: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<&'a [ChatToken]>,
    },
    ArgumentsDone {
        output_index: usize,
        item_id: &'a str,
        name: &'a str,
        arguments: &'a str,
    },
    McpArgumentsDone {
        output_index: usize,
        item_id: &'a str,
        arguments: &'a str,
    },
    Step {
        output_index: usize,
        item_id: &'a str,
    },
    InputDone {
        output_index: usize,
        item_id: &'a str,
        input: &'a str,
    },
}

impl Teller {
    fn tell(&mut self, kind: &'static str, body: Body<'_>, out: &mut Events) {
        if self.streams {
            out.push_named(kind, &Event { kind, sequence_number: self.sequence, body });
            self.sequence += 1;
        }
    }
}

/// Returns the object of a response that has no output yet.
fn begun<'a>(request: &'a ActiveRequest, echo: &'a Echo) -> Object<'a> {
    Object::begun(&request.id, request.created, &request.submission.common.model, echo)
}

impl Responding {
    pub fn new(request: &ActiveRequest, echo: Echo, items: Option<Arc<str>>) -> Self {
        let reading = ReplyReader::new(&request.submission.rules);
        let teller = Teller { streams: request.submission.common.stream, sequence: 0 };
        let key = Caller::current().key;
        let begun = items.is_some().then(|| {
            let object = begun(request, &echo);
            // Serialized as at the end of the response.
            let text = serde_json::to_vec(&object).unwrap_or_default().into_boxed_slice();
            request.state.server.responses.begins(&request.id, key, text.into())
        });
        Self {
            echo,
            items,
            unreported: Unreported::default(),
            reading,
            output: Vec::new(),
            teller,
            key,
            finish: None,
            begun,
            mcp: None,
            reasoning_before: 0,
            ignores: false,
        }
    }

    /// Returns the API key of the client.
    pub fn key(&self) -> Option<usize> {
        self.key
    }

    /// Returns the object of a response in the background, before it has begun.
    pub fn queued(&self, request: &ActiveRequest) -> Bytes {
        let object = Object { status: Status::Queued, ..begun(request, &self.echo) };
        // Serialized as at the end of the response.
        serde_json::to_vec(&object).unwrap_or_default().into()
    }

    /// Adds one delta to the response.
    pub fn take(&mut self, request: &ActiveRequest, delta: Delta, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        let parts = self.reading.read(delta.text, end, &request.state.server.ids);
        self.reading.count_reasoning(&delta.tokens);
        if request.submission.logprobs.is_some() {
            let reports = ChatLogprobs::new(request.spelling(), &delta.tokens).content;
            self.unreported.add(&delta.tokens, reports);
        }
        let (taken, past) = self.reading.taken_and_past();
        let mut contents = 0;
        for part in parts {
            let is_content = matches!(part, reply_reader::Part::Content(_));
            let reports = match self.reading.spans().get(contents).filter(|_| is_content) {
                Some(span) => self.unreported.of(span, taken),
                None => Vec::new(),
            };
            contents += usize::from(is_content);
            self.part(&request.state.server.ids, part, reports, out);
        }
        // Tokens of reasoning and calls are not reported.
        self.unreported.drop_before(past, taken);
        self.finish = delta.finish.or(self.finish);
    }

    /// Takes a piece of the answer, with the reports of its tokens if it is text.
    fn part(&mut self, ids: &Ids, part: reply_reader::Part, reports: Vec<ChatToken>, out: &mut Events) {
        if matches!(part, reply_reader::Part::Call { .. }) {
            self.ignores = false;
        }
        if let reply_reader::Part::Call { id, name, custom: true, .. } = part {
            return self.begin(ids.named("ctc"), What::Custom { call_id: id, name, input: String::new() }, out);
        }
        if let reply_reader::Part::Call { name, .. } = &part
            && self.calls_mcp(ids, name, out)
        {
            return;
        }
        if let reply_reader::Part::Call { id, name, .. } = part {
            let (namespace, name) = self.echo.apart(name);
            let what = What::Call { call_id: id, namespace, name, arguments: String::new() };
            return self.begin(ids.named("fc"), what, out);
        }
        match (&part, self.output.last().filter(|last| last.status == Status::InProgress).map(|last| &last.what)) {
            (reply_reader::Part::Reasoning(_), Some(What::Reasoning { .. }))
            | (reply_reader::Part::Content(_), Some(What::Text { .. })) => {}
            (reply_reader::Part::Reasoning(_), _) => {
                self.begin(ids.named("rs"), What::Reasoning { text: String::new() }, out)
            }
            (reply_reader::Part::Content(_), _) => {
                self.begin(ids.named("msg"), What::Text { text: String::new(), logprobs: Vec::new() }, out);
            }
            _ => {}
        }
        if self.ignores && matches!(part, reply_reader::Part::Arguments { .. }) {
            return;
        }
        let output_index = self.output.len().saturating_sub(1);
        let Some(Output { id, what, .. }) = self.output.last_mut() else { return };
        let item_id = id.as_str();
        let (kind, content_index, delta, logprobs) = match (&part, what) {
            (reply_reader::Part::Reasoning(more), What::Reasoning { text }) => {
                text.push_str(more);
                ("response.reasoning_text.delta", Some(0), more, None)
            }
            (reply_reader::Part::Content(more), What::Text { text, logprobs: all }) => {
                text.push_str(more);
                let before = all.len();
                all.extend(reports);
                ("response.output_text.delta", Some(0), more, Some(&all[before..]))
            }
            (reply_reader::Part::Arguments { text: more, .. }, What::Call { arguments, .. }) => {
                arguments.push_str(more);
                ("response.function_call_arguments.delta", None, more, None)
            }
            (reply_reader::Part::Arguments { text: more, .. }, What::Custom { input, .. }) => {
                input.push_str(more);
                ("response.custom_tool_call_input.delta", None, more, None)
            }
            (reply_reader::Part::Arguments { text: more, .. }, What::McpCall(call)) => {
                call.arguments.push_str(more);
                ("response.mcp_call_arguments.delta", None, more, None)
            }
            (reply_reader::Part::Arguments { text: more, .. }, What::McpRequest { arguments, .. }) => {
                arguments.push_str(more);
                return;
            }
            // Arguments come after their call.
            _ => return,
        };
        self.teller.tell(kind, Body::Delta { output_index, content_index, item_id, delta, logprobs }, out);
    }

    fn begin(&mut self, id: String, what: What, out: &mut Events) {
        self.end_item(Status::Completed, out);
        let output_index = self.output.len();
        let output = Output { id, status: Status::InProgress, what };
        let added = "response.output_item.added";
        self.teller.tell(added, Body::Item { output_index, item: output.shown(true) }, out);
        if let Some(part) = output.part() {
            let body = Body::Part { output_index, content_index: 0, item_id: &output.id, part };
            self.teller.tell("response.content_part.added", body, out);
        }
        self.output.push(output);
    }

    /// Ends the item that is in progress, if there is one.
    fn end_item(&mut self, status: Status, out: &mut Events) {
        let output_index = self.output.len().saturating_sub(1);
        let last = self.output.last_mut().filter(|last| last.status == Status::InProgress);
        let Some(output) = last else { return };
        match output.what {
            // The item ends with the result of the call.
            What::McpCall(_) => return self.arguments_end(output_index, out),
            What::McpRequest { .. } => return self.request_ends(status, out),
            What::McpTools { .. } => return,
            _ => output.status = status,
        }
        let (item_id, content_index) = (output.id.as_str(), 0);
        let (kind, body) = match &output.what {
            What::Reasoning { text } => {
                let body = Body::TextDone { output_index, content_index, item_id, text, logprobs: None };
                ("response.reasoning_text.done", body)
            }
            What::Text { text, logprobs } => {
                let body = Body::TextDone { output_index, content_index, item_id, text, logprobs: Some(logprobs) };
                ("response.output_text.done", body)
            }
            What::Call { name, arguments, .. } => {
                let body = Body::ArgumentsDone { output_index, item_id, name, arguments };
                ("response.function_call_arguments.done", body)
            }
            What::Custom { input, .. } => {
                ("response.custom_tool_call_input.done", Body::InputDone { output_index, item_id, input })
            }
            What::McpCall(_) | What::McpRequest { .. } | What::McpTools { .. } => return,
        };
        self.teller.tell(kind, body, out);
        if let Some(part) = output.part() {
            let body = Body::Part { output_index, content_index, item_id, part };
            self.teller.tell("response.content_part.done", body, out);
        }
        self.teller.tell("response.output_item.done", Body::Item { output_index, item: output.shown(false) }, out);
    }

    fn object<'a>(&'a self, request: &'a ActiveRequest) -> Object<'a> {
        let output = self.output.iter().map(|output| output.shown(false)).collect();
        Object { output, ..begun(request, &self.echo) }
    }

    /// Adds the log-probabilities of tokens without text, such as the last one.
    fn end_text(&mut self) {
        if let Some(Output { what: What::Text { logprobs, .. }, status: Status::InProgress, .. }) =
            self.output.last_mut()
        {
            logprobs.extend(self.unreported.rest());
        }
    }

    /// Reports that the response failed without an object: requests that wait for its end stop waiting.
    pub fn gone(&self, request: &ActiveRequest) {
        request.state.server.responses.gone(&request.id);
    }

    /// Ends the response, stores it if the client asks for that, and returns the object's text.
    pub fn finish(&mut self, request: &ActiveRequest, error: Option<&ApiError>, out: &mut Events) -> Bytes {
        let (kind, status) = match (error, self.finish) {
            (Some(error), _) if error.code == Some(CANCELLED) => ("response.incomplete", Status::Cancelled),
            (Some(_), _) => ("response.failed", Status::Failed),
            (None, Some(FinishReason::Length)) => ("response.incomplete", Status::Incomplete),
            (None, _) => ("response.completed", Status::Completed),
        };
        self.end_text();
        self.end_item(if status == Status::Completed { status } else { Status::Incomplete }, out);
        self.close_mcp(out);
        let cut = status == Status::Incomplete;
        let object = Object {
            status,
            completed_at: (status == Status::Completed).then(now_s),
            error: error.filter(|_| status == Status::Failed).map(Failure::of),
            incomplete_details: cut.then_some(Reason { reason: "max_output_tokens" }),
            usage: Some(Counts::of(request.usage(), self.reasoning_before + self.reading.reasoning_tokens())),
            ..self.object(request)
        };
        // Plain structs serialized into memory: this cannot fail. The store keeps the text, and counts its length.
        let text = Bytes::from(serde_json::to_vec(&object).unwrap_or_default().into_boxed_slice());
        let event = Event { kind, sequence_number: self.teller.sequence, body: Body::Response { response: &object } };
        if self.teller.streams {
            out.push_named(kind, &event);
        }
        let responses = &request.state.server.responses;
        if let Some(items) = self.items.take() {
            responses.insert(&request.id, Kept { items, response: text.clone(), key: self.key });
            self.begun = None;
        }
        responses.ended(&request.id, &text);
        text
    }
}

impl StreamWriter for Responding {
    fn open(&mut self, request: &ActiveRequest, out: &mut Events) {
        let queued = [("response.created", Status::Queued), ("response.queued", Status::Queued)];
        let created = [("response.created", Status::InProgress)];
        let begins = if self.echo.background { &queued[..] } else { &created };
        for (kind, status) in begins.iter().chain(&[("response.in_progress", Status::InProgress)]) {
            let response = Object { status: *status, ..begun(request, &self.echo) };
            self.teller.tell(kind, Body::Response { response: &response }, out);
        }
    }

    async fn write_next(&mut self, request: &mut ActiveRequest, out: &mut Events) -> bool {
        match self.advance(request, out).await {
            None => return false,
            Some(Ok(())) => self.finish(request, None, out),
            Some(Err(error)) => self.finish(request, Some(&error), out),
        };
        true
    }

    fn delta(&mut self, request: &ActiveRequest, _choice: usize, delta: Delta, out: &mut Events) {
        self.take(request, delta, out);
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        self.finish(request, None, out);
    }

    fn fail(&mut self, request: &ActiveRequest, error: &ApiError, out: &mut Events) {
        self.finish(request, Some(error), out);
    }

    fn end(&self, _out: &mut Events) {}
}
