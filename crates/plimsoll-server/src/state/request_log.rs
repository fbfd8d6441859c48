//! One structured line per request, whichever way it ends. The line never has content.

use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::http::HeaderValue;
use axum::response::Response;
use plimsoll_engine::{FinishReason, Snapshot, Watch};

use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::otlp::{Asked, Record, TRACED_CHOICES};
use crate::state::counters::Ended;
use crate::state::model::ModelState;
use crate::state::record::Entry;
use crate::state::spans::Spans;

/// The data of a request's line, which is written on drop.
pub(crate) struct RequestLog {
    id: String,
    api: &'static str,
    stream: bool,
    caller: Caller,
    ended: Ended,
    choices: usize,
    prompt_tokens: u64,
    output_tokens: u64,
    /// The time of arrival. Reading, fetching and decoding before submission count.
    started: Instant,
    first_token: Option<Instant>,
    reason: &'static str,
    turn: Turn,
    /// The data for the request's spans, if it is traced.
    spans: Option<Box<Spans>>,
}

/// A turn of the model, and its line in the trace if requests are recorded.
struct Turn {
    entry: Option<Entry>,
    started: Instant,
    first_token: Option<Instant>,
    /// Output tokens of the turns before.
    output_before: u64,
}

impl Turn {
    fn new(started: Instant, output_before: u64) -> Self {
        Self { entry: None, started, first_token: None, output_before }
    }

    /// Ends the line in the trace.
    fn end(&mut self, reason: &'static str, output_tokens: u64) {
        let Some(entry) = self.entry.take() else { return };
        let ms = |at: Instant| at.duration_since(self.started).as_secs_f64() * 1000.0;
        entry.end(reason, output_tokens - self.output_before, self.first_token.map(ms), ms(Instant::now()));
    }
}

impl RequestLog {
    /// The log of a request that is not streamed.
    pub fn new(
        state: &ModelState,
        id: &str,
        api: &'static str,
        choices: usize,
        prompt_tokens: u64,
        caller: Caller,
    ) -> Self {
        let started = caller.arrived();
        let spans = Spans::begin(state, caller.parent);
        caller.logged.store(true, Ordering::Relaxed);
        Self {
            caller,
            ended: state.server.metrics.ended.clone(),
            id: id.into(),
            api,
            stream: false,
            choices,
            prompt_tokens,
            output_tokens: 0,
            started,
            first_token: None,
            // A client that disconnects reports no end: this stands unless another end is reported.
            reason: "aborted",
            turn: Turn::new(started, 0),
            spans,
        }
    }

    /// Adds the request's sampling, and views of its choices' progress.
    pub fn watching(mut self, asked: Asked, watches: impl Iterator<Item = Watch>) -> Self {
        if let Some(spans) = &mut self.spans {
            spans.asked = Some(asked);
            spans.watches.extend(watches.take(TRACED_CHOICES));
        }
        self
    }

    /// Reports that a choice, or one input of a pooled request, has ended.
    pub fn choice_ended(&mut self, choice: usize, finish: Option<FinishReason>, progress: Option<Snapshot>) {
        if let Some(spans) = self.spans.as_mut().filter(|_| choice < TRACED_CHOICES) {
            spans.finished[choice] = finish;
            spans.parts[choice] = progress.map(Into::into).or(spans.parts[choice]);
        }
    }

    /// Reads the progress and drops the views, so that they no longer keep the requests' bytes. The answer's reader is gone.
    pub fn unwatch(&mut self) {
        self.spans.iter_mut().for_each(|spans| spans.unwatch());
    }

    /// Adds a line in the trace, if requests are recorded.
    pub fn recorded(mut self, entry: Option<Entry>) -> Self {
        self.turn.entry = entry;
        self
    }

    /// Begins another turn of the model: its prompt, its choices and its own line in the trace.
    pub fn turn(&mut self, prompt_tokens: u64, choices: usize, entry: Option<Entry>) {
        self.prompt_tokens += prompt_tokens;
        self.choices = choices;
        self.turn = Turn { entry, ..Turn::new(Instant::now(), self.output_tokens) };
    }

    /// Ends the model's turn but not the request: another end is still to be reported.
    pub fn turn_ended(&mut self) {
        self.turn.end("finished", self.output_tokens);
        self.reason = "aborted";
    }

    /// Sets whether the answer is streamed.
    pub fn streaming(mut self, stream: bool) -> Self {
        self.stream = stream;
        self
    }

    pub fn tokens(&mut self, tokens: usize) {
        if tokens > 0 {
            let first = *self.turn.first_token.get_or_insert_with(Instant::now);
            self.first_token.get_or_insert(first);
            self.output_tokens += tokens as u64;
        }
    }

    pub fn ends(&mut self, reason: &'static str) {
        self.reason = reason;
    }

    /// Hands the request's record to the exporter.
    fn export(&mut self, mut spans: Spans, ended: Instant) {
        spans.unwatch();
        let Spans { server, trace, model, asked, finished, parts, .. } = spans;
        let record = Record {
            trace,
            api: self.api,
            model,
            id: std::mem::take(&mut self.id),
            request_id: self.caller.request_id.clone(),
            route: self.caller.endpoint.clone(),
            stream: self.stream,
            choices: self.choices,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            reason: self.reason,
            asked,
            finished,
            started: self.started,
            first_token: self.first_token,
            ended,
            parts,
        };
        if let Some(tracer) = &server.tracer {
            tracer.end(record);
        }
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.ended.count(self.api, self.reason);
        let ms = |at: Instant| at.duration_since(self.started).as_secs_f64() * 1000.0;
        let ended = Instant::now();
        let (first, all) = (self.first_token.map(ms), ms(ended));
        self.turn.end(self.reason, self.output_tokens);
        tracing::info!(
            id = %self.id,
            request_id = %self.caller.request_id,
            key = self.caller.key,
            api = self.api,
            stream = self.stream,
            choices = self.choices,
            prompt_tokens = self.prompt_tokens,
            output_tokens = self.output_tokens,
            ttft_ms = first.map(tenths),
            duration_ms = tenths(all),
            reason = self.reason,
            trace_id = self.spans.as_ref().map(|spans| spans.trace.text()),
            "request"
        );
        if let Some(spans) = self.spans.take() {
            self.export(*spans, ended);
        }
    }
}

/// Rounds a number for people to one decimal place.
pub(crate) fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// The longest name of a field in the log, in bytes.
const PARAM_BYTES: usize = 64;

/// Logs a request that was refused before it reached a model. The line has the reason and at most the name of a known field.
pub(crate) fn refused(response: &Response, id: &HeaderValue, route: &str) {
    let error = response.extensions().get::<ApiError>();
    let status = response.status();
    let reason = error.and_then(|error| error.code).or(status.canonical_reason()).unwrap_or("other");
    // The name of an unknown field is the client's own word.
    let known = error.filter(|error| error.code != Some("unknown_field"));
    let param = known.and_then(|error| error.param.as_deref()).map(plain);
    let id = plain(id.to_str().unwrap_or_default());
    tracing::info!(id, route, status = status.as_u16(), reason, param, "request refused");
}

/// A client's own text in a form fit for the log: short, without control characters.
fn plain(text: &str) -> String {
    let visible = text.chars().map(|c| if c.is_ascii_graphic() { c } else { '?' });
    visible.take(PARAM_BYTES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_wrote_is_short_and_printable_in_the_log() {
        assert_eq!(plain("messages[0].role"), "messages[0].role");
        assert_eq!(plain("a\n\u{1b}[31mé b"), "a??[31m??b");
        assert_eq!(plain(&"x".repeat(200)).len(), PARAM_BYTES);
    }

    #[test]
    fn numbers_are_rounded() {
        assert_eq!((tenths(12.345_678), tenths(0.04), tenths(1234.95)), (12.3, 0.0, 1235.0));
    }
}
