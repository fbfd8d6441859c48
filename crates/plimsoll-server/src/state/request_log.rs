//! One structured line per request, whatever way it ends. Never content.

use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::http::HeaderValue;
use axum::response::Response;

use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::state::counters::Ended;
use crate::state::model::ModelState;
use crate::state::record::Entry;

/// What is known of a request so far; the line is written when this is dropped.
pub(crate) struct RequestLog {
    id: String,
    api: &'static str,
    stream: bool,
    caller: Caller,
    ended: Ended,
    choices: usize,
    prompt_tokens: u64,
    output_tokens: u64,
    /// When it arrived; what was read, fetched and decoded before the engine was asked counts.
    started: Instant,
    first_token: Option<Instant>,
    reason: &'static str,
    entry: Option<Entry>,
}

impl RequestLog {
    /// For one that sends its answer whole.
    pub fn new(
        state: &ModelState,
        id: &str,
        api: &'static str,
        choices: usize,
        prompt_tokens: u64,
        caller: Caller,
    ) -> Self {
        let started = caller.arrived();
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
            entry: None,
        }
    }

    /// With a place in the trace, where one is recorded.
    pub fn recorded(mut self, entry: Option<Entry>) -> Self {
        self.entry = entry;
        self
    }

    /// For one that streams, or not.
    pub fn streaming(mut self, stream: bool) -> Self {
        self.stream = stream;
        self
    }

    pub fn tokens(&mut self, tokens: usize) {
        if tokens > 0 {
            self.first_token.get_or_insert_with(Instant::now);
            self.output_tokens += tokens as u64;
        }
    }

    pub fn ends(&mut self, reason: &'static str) {
        self.reason = reason;
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.ended.count(self.api, self.reason);
        let ms = |at: Instant| at.duration_since(self.started).as_secs_f64() * 1000.0;
        let (first, all) = (self.first_token.map(ms), ms(Instant::now()));
        if let Some(entry) = self.entry.take() {
            entry.end(self.reason, self.output_tokens, first, all);
        }
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
            "request"
        );
    }
}

/// A number for people: one digit behind the point.
pub(crate) fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// Longest name of a field in the log.
const PARAM_BYTES: usize = 64;

/// The line of a request that no model has answered: what it was refused for, and of its body the name of a known field at most.
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

/// A client's own text as the log may have it: short, without control characters.
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
