//! A response while it is made: items that are added, grow and are done, numbered events for each step, and the object
//! at the end. An answer that is not streamed takes the same steps without sending events.

use std::sync::Arc;

use bytes::Bytes;
use plimsoll_engine::{Delta, FinishReason};
use serde::Serialize;

use super::object::{Counts, Echo, Failure, Object, Output, Part, Reason, Shown, Status, What};
use super::unreported::Unreported;
use crate::conversation::ReplyContext;
use crate::conversation::active::Usage;
use crate::conversation::logprobs::{ChatLogprobs, ChatToken};
use crate::conversation::reading::{self, Reading, ReplyEnd};
use crate::conversation::stream::Shape;
use crate::http::budget::Held;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, CANCELLED};
use crate::http::ids::now_s;
use crate::http::sse::Events;
use crate::state::response_store::{Begun, Kept};

/// The state of a response.
pub(crate) struct Responding {
    context: ReplyContext,
    echo: Echo,
    /// What the store keeps of the input, if it keeps anything.
    items: Option<Arc<str>>,
    logprobs: bool,
    unreported: Unreported,
    reading: Reading,
    output: Vec<Output>,
    teller: Teller,
    /// The API key of the client.
    key: Option<usize>,
    finish: Option<FinishReason>,
    /// It can be asked for while it is made.
    begun: Option<Begun>,
    /// What the answer may hold until it is sent.
    _held: Option<Held>,
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
}

impl Teller {
    fn tell(&mut self, kind: &'static str, body: Body<'_>, out: &mut Events) {
        if self.streams {
            out.push_named(kind, &Event { kind, sequence_number: self.sequence, body });
            self.sequence += 1;
        }
    }
}

impl Responding {
    pub fn new(context: ReplyContext, echo: Echo, items: Option<Arc<str>>, logprobs: bool, held: Option<Held>) -> Self {
        let reading = Reading::new(&context.rules);
        let teller = Teller { streams: context.draft.common.stream, sequence: 0 };
        let key = Caller::current().key;
        let begun = items.is_some().then(|| {
            let object = Object::begun(&context.id, context.created, &context.draft.common.model, &echo);
            // As at its end.
            let text = serde_json::to_vec(&object).unwrap_or_default().into_boxed_slice();
            context.state.server.responses.begins(&context.id, key, text.into())
        });
        Self {
            context,
            echo,
            items,
            logprobs,
            unreported: Unreported::default(),
            reading,
            output: Vec::new(),
            teller,
            key,
            finish: None,
            begun,
            _held: held,
        }
    }

    /// Takes what one delta brings.
    pub fn take(&mut self, delta: Delta, out: &mut Events) {
        let end = ReplyEnd::of(delta.finish, delta.stop_reason.as_deref());
        let parts = self.reading.read(delta.text, end, &self.context.state.server.ids);
        self.reading.count_thoughts(&delta.tokens);
        if self.logprobs {
            let reports = ChatLogprobs::new(self.context.spelling(), &delta.tokens).content;
            self.unreported.add(&delta.tokens, reports);
        }
        let (taken, past) = self.reading.taken_and_past();
        let mut contents = 0;
        for part in parts {
            let is_content = matches!(part, reading::Part::Content(_));
            let reports = match self.reading.spans().get(contents).filter(|_| is_content) {
                Some(span) => self.unreported.of(span, taken),
                None => Vec::new(),
            };
            contents += usize::from(is_content);
            self.part(part, reports, out);
        }
        // What was thought and called has no place to be reported.
        self.unreported.drop_before(past, taken);
        self.finish = delta.finish.or(self.finish);
    }

    /// A piece of the answer, with the reports of its tokens if it is text.
    fn part(&mut self, part: reading::Part, reports: Vec<ChatToken>, out: &mut Events) {
        if let reading::Part::Call { id, name, .. } = part {
            let (namespace, name) = self.echo.apart(name);
            let what = What::Call { call_id: id, namespace, name, arguments: String::new() };
            return self.begin("fc", what, out);
        }
        match (&part, self.output.last().filter(|last| last.status == Status::InProgress).map(|last| &last.what)) {
            (reading::Part::Reasoning(_), Some(What::Thoughts { .. }))
            | (reading::Part::Content(_), Some(What::Text { .. })) => {}
            (reading::Part::Reasoning(_), _) => self.begin("rs", What::Thoughts { text: String::new() }, out),
            (reading::Part::Content(_), _) => {
                self.begin("msg", What::Text { text: String::new(), logprobs: Vec::new() }, out);
            }
            _ => {}
        }
        let output_index = self.output.len().saturating_sub(1);
        let Some(Output { id, what, .. }) = self.output.last_mut() else { return };
        let item_id = id.as_str();
        let (kind, content_index, delta, logprobs) = match (&part, what) {
            (reading::Part::Reasoning(more), What::Thoughts { text }) => {
                text.push_str(more);
                ("response.reasoning_text.delta", Some(0), more, None)
            }
            (reading::Part::Content(more), What::Text { text, logprobs: all }) => {
                text.push_str(more);
                let before = all.len();
                all.extend(reports);
                ("response.output_text.delta", Some(0), more, Some(&all[before..]))
            }
            (reading::Part::Arguments { text: more, .. }, What::Call { arguments, .. }) => {
                arguments.push_str(more);
                ("response.function_call_arguments.delta", None, more, None)
            }
            // Arguments come after their call.
            _ => return,
        };
        self.teller.tell(kind, Body::Delta { output_index, content_index, item_id, delta, logprobs }, out);
    }

    fn begin(&mut self, prefix: &str, what: What, out: &mut Events) {
        self.end_item(Status::Completed, out);
        let id = self.context.state.server.ids.named(prefix);
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

    /// Ends the item that is in progress, if one is.
    fn end_item(&mut self, status: Status, out: &mut Events) {
        let output_index = self.output.len().saturating_sub(1);
        let last = self.output.last_mut().filter(|last| last.status == Status::InProgress);
        let Some(output) = last else { return };
        output.status = status;
        let (item_id, content_index) = (output.id.as_str(), 0);
        let (kind, body) = match &output.what {
            What::Thoughts { text } => {
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
        };
        self.teller.tell(kind, body, out);
        if let Some(part) = output.part() {
            let body = Body::Part { output_index, content_index, item_id, part };
            self.teller.tell("response.content_part.done", body, out);
        }
        self.teller.tell("response.output_item.done", Body::Item { output_index, item: output.shown(false) }, out);
    }

    fn object(&self) -> Object<'_> {
        let context = &self.context;
        let begun = Object::begun(&context.id, context.created, &context.draft.common.model, &self.echo);
        Object { output: self.output.iter().map(|output| output.shown(false)).collect(), ..begun }
    }

    /// The response failed without an object: requests that wait for its end stop waiting.
    pub fn gone(&self) {
        self.context.state.server.responses.gone(&self.context.id);
    }

    /// Ends the response, keeps it if it is to be kept, and returns the object's text.
    pub fn finish(&mut self, error: Option<&ApiError>, usage: Usage, out: &mut Events) -> Bytes {
        let (kind, status) = match (error, self.finish) {
            (Some(error), _) if error.code == Some(CANCELLED) => ("response.incomplete", Status::Cancelled),
            (Some(_), _) => ("response.failed", Status::Failed),
            (None, Some(FinishReason::Length)) => ("response.incomplete", Status::Incomplete),
            (None, _) => ("response.completed", Status::Completed),
        };
        // Tokens without text, the last one's, say.
        if let Some(Output { what: What::Text { logprobs, .. }, status: Status::InProgress, .. }) =
            self.output.last_mut()
        {
            logprobs.extend(self.unreported.rest());
        }
        self.end_item(if status == Status::Completed { status } else { Status::Incomplete }, out);
        let cut = status == Status::Incomplete;
        let object = Object {
            status,
            completed_at: (status == Status::Completed).then(now_s),
            error: error.filter(|_| status == Status::Failed).map(Failure::of),
            incomplete_details: cut.then_some(Reason { reason: "max_output_tokens" }),
            usage: Some(Counts::of(usage, self.reading.thought_tokens())),
            ..self.object()
        };
        // Plain structs serialized into memory: this cannot fail. The store keeps it, and counts its length.
        let text = Bytes::from(serde_json::to_vec(&object).unwrap_or_default().into_boxed_slice());
        let event = Event { kind, sequence_number: self.teller.sequence, body: Body::Response { response: &object } };
        if self.teller.streams {
            out.push_named(kind, &event);
        }
        let responses = &self.context.state.server.responses;
        if let Some(items) = self.items.take() {
            responses.insert(&self.context.id, Kept { items, response: text.clone(), key: self.key });
            self.begun = None;
        }
        responses.ended(&self.context.id, &text);
        text
    }
}

impl Shape for Responding {
    fn open(&mut self, out: &mut Events) {
        for kind in ["response.created", "response.in_progress"] {
            let context = &self.context;
            let response = Object::begun(&context.id, context.created, &context.draft.common.model, &self.echo);
            self.teller.tell(kind, Body::Response { response: &response }, out);
        }
    }

    fn delta(&mut self, _choice: usize, delta: Delta, _usage: Usage, out: &mut Events) {
        self.take(delta, out);
    }

    fn close(&mut self, usage: Usage, out: &mut Events) {
        self.finish(None, usage, out);
    }

    fn fail(&mut self, error: &ApiError, usage: Usage, out: &mut Events) {
        self.finish(Some(error), usage, out);
    }

    fn end(&self, _out: &mut Events) {}
}
