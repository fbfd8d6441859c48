//! One structured line per request, whatever way it ends. Never content.

use std::time::Instant;

use crate::app::App;
use crate::caller::Caller;
use crate::metrics::Ended;
use crate::record::Entry;

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
    pub fn new(app: &App, id: &str, api: &'static str, choices: usize, prompt_tokens: u64, caller: Caller) -> Self {
        let started = caller.arrived();
        Self {
            caller,
            ended: app.metrics.ended.clone(),
            id: id.into(),
            api,
            stream: false,
            choices,
            prompt_tokens,
            output_tokens: 0,
            started,
            first_token: None,
            // Nobody says goodbye when a client goes: this stands unless another end is reported.
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
            ttft_ms = first,
            duration_ms = all,
            reason = self.reason,
            "request"
        );
    }
}
