//! The record of a finished request, and its spans: the request with `prepare`, `queue`, `prefill` and `decode` below it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use plimsoll_engine::{FinishReason, Snapshot};

use super::Trace;
use super::proto::{ArrayValue, Code, KeyValue, Kind, Span, Status, Value, attribute};

/// The most choices of a request that have spans of their own.
pub(crate) const CHOICES: usize = 4;
/// The longest text of an attribute, in bytes; model names have no other limit.
const TEXT_BYTES: usize = 128;

/// The times at which the engine worked on one choice, or on one input of a pooled request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub submitted: Instant,
    pub scheduled: Option<Duration>,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    pub generated: u32,
    pub cached: u32,
}

impl From<Snapshot> for Choice {
    fn from(of: Snapshot) -> Self {
        Self {
            submitted: of.arrived,
            scheduled: of.scheduled,
            first_token: of.first_token,
            last_token: of.last_token,
            generated: of.generated_tokens,
            cached: of.cached_tokens,
        }
    }
}

/// The sampling parameters of a request; a pooled request has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub max_tokens: Option<u32>,
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: i64,
}

/// The record of a request that has ended.
#[derive(Debug)]
pub(crate) struct Record {
    pub trace: Trace,
    pub api: &'static str,
    pub model: String,
    /// The id in the answer.
    pub id: String,
    pub request_id: Arc<str>,
    pub route: Arc<str>,
    pub stream: bool,
    pub choices: usize,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub reason: &'static str,
    pub asked: Option<Asked>,
    pub finished: [Option<FinishReason>; CHOICES],
    pub started: Instant,
    pub first_token: Option<Instant>,
    pub ended: Instant,
    pub parts: [Option<Choice>; CHOICES],
}

/// Text for an attribute, cut to [`TEXT_BYTES`].
pub(crate) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES)]
}

/// Returns the operation's name in the GenAI conventions.
fn operation(api: &str) -> &'static str {
    match api {
        "completions" | "infill" | "ollama_generate" => "text_completion",
        "embeddings" | "cohere_embed" | "ollama_embed" | "rerank" | "score" => "embeddings",
        _ => "chat",
    }
}

/// Converts instants to OTLP's times.
struct Clock {
    now: Instant,
    unix: Duration,
}

impl Clock {
    fn new() -> Self {
        Self { now: Instant::now(), unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() }
    }

    fn ns(&self, at: Instant) -> u64 {
        let unix = self.unix.saturating_sub(self.now.saturating_duration_since(at));
        u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Record {
    /// Returns the number of spans of the record.
    pub fn span_count(&self) -> u64 {
        let of = |choice: &Choice| self.phases(choice).into_iter().flatten().count() as u64;
        1 + u64::from(self.submitted().is_some()) + self.parts.iter().flatten().map(of).sum::<u64>()
    }

    fn submitted(&self) -> Option<Instant> {
        self.parts.iter().flatten().map(|choice| choice.submitted).min()
    }

    /// Returns name, begin and end of each phase of a choice. A phase that is not over ends with the request.
    fn phases(&self, choice: &Choice) -> [Option<(&'static str, Instant, Instant)>; 3] {
        let at = |after: Option<Duration>| after.map(|after| (choice.submitted + after).min(self.ended));
        let (scheduled, first, last) = (at(choice.scheduled), at(choice.first_token), at(choice.last_token));
        let queue = ("queue", choice.submitted, scheduled.unwrap_or(self.ended));
        let prefill = scheduled.map(|begin| ("prefill", begin, first.unwrap_or(self.ended)));
        let decode = first.map(|begin| ("decode", begin, last.unwrap_or(begin)));
        [Some(queue), prefill, decode]
    }

    /// Returns the spans, the request's own first. `ids` gives each its id.
    pub fn spans(&self, mut ids: impl FnMut() -> [u8; 8]) -> Vec<Span> {
        let clock = Clock::new();
        let root = ids();
        let mut spans = Vec::with_capacity(self.span_count() as usize);
        spans.push(self.request_span(&clock, root));
        let mut child = |name: &str, begin: Instant, end: Instant, attributes: Vec<KeyValue>| Span {
            trace_id: self.trace.id.to_vec(),
            span_id: ids().to_vec(),
            parent_span_id: root.to_vec(),
            name: name.into(),
            kind: Kind::Internal.into(),
            start_time_unix_nano: clock.ns(begin),
            end_time_unix_nano: clock.ns(end),
            attributes,
            status: None,
            flags: 0x101,
        };
        if let Some(submitted) = self.submitted() {
            spans.push(child("prepare", self.started, submitted, Vec::new()));
        }
        for (index, choice) in self.parts.iter().enumerate() {
            let Some(choice) = choice else { continue };
            for (name, begin, end) in self.phases(choice).into_iter().flatten() {
                let mut attributes = vec![attribute("plimsoll.choice", Value::Int(index as i64))];
                match name {
                    "prefill" => attributes.push(attribute(CACHED, Value::Int(choice.cached.into()))),
                    "decode" => attributes.push(attribute(OUTPUT, Value::Int(choice.generated.into()))),
                    _ => {}
                }
                spans.push(child(name, begin, end, attributes));
            }
        }
        spans
    }

    fn request_span(&self, clock: &Clock, id: [u8; 8]) -> Span {
        let failed = matches!(self.reason, "failed" | "timeout" | "shutdown");
        let message = if failed { self.reason.into() } else { String::new() };
        let remote = if self.trace.parent.is_some() { 0x200 } else { 0 };
        Span {
            trace_id: self.trace.id.to_vec(),
            span_id: id.to_vec(),
            parent_span_id: self.trace.parent.map_or_else(Vec::new, |parent| parent.to_vec()),
            name: format!("{} {}", operation(self.api), self.model),
            kind: Kind::Server.into(),
            start_time_unix_nano: clock.ns(self.started),
            end_time_unix_nano: clock.ns(self.ended),
            attributes: self.attributes(),
            status: failed.then(|| Status { message, code: Code::Error.into() }),
            flags: 0x101 | remote,
        }
    }

    fn attributes(&self) -> Vec<KeyValue> {
        let text = |text: &str| Value::Text(cut(text).into());
        let count = |count: u64| Value::Int(i64::try_from(count).unwrap_or(i64::MAX));
        let cached: u64 = self.parts.iter().flatten().take(1).map(|choice| u64::from(choice.cached)).sum();
        let mut all = vec![
            attribute("gen_ai.operation.name", text(operation(self.api))),
            attribute("gen_ai.provider.name", text("plimsoll")),
            attribute("gen_ai.request.model", text(&self.model)),
            attribute("gen_ai.response.model", text(&self.model)),
            attribute("gen_ai.response.id", text(&self.id)),
            attribute("gen_ai.usage.input_tokens", count(self.prompt_tokens)),
            attribute(OUTPUT, count(self.output_tokens)),
            attribute(CACHED, count(cached)),
            attribute("http.route", text(&self.route)),
            attribute("plimsoll.api", text(self.api)),
            attribute("plimsoll.request_id", text(&self.request_id)),
            attribute("plimsoll.stream", Value::Bool(self.stream)),
            attribute("plimsoll.end", text(self.reason)),
        ];
        if self.choices != 1 {
            all.push(attribute("gen_ai.request.choice.count", count(self.choices as u64)));
        }
        let reasons: Vec<_> = self.finished.iter().flatten().map(|reason| text(reason.name()).into()).collect();
        if !reasons.is_empty() {
            all.push(attribute("gen_ai.response.finish_reasons", Value::Array(ArrayValue { values: reasons })));
        }
        if let Some(asked) = &self.asked {
            all.push(attribute("gen_ai.request.temperature", Value::Double(asked.temperature.into())));
            all.push(attribute("gen_ai.request.top_p", Value::Double(asked.top_p.into())));
            let top_k = (asked.top_k > 0).then(|| attribute("gen_ai.request.top_k", Value::Double(asked.top_k as f64)));
            let max = asked.max_tokens.map(|max| attribute("gen_ai.request.max_tokens", Value::Int(max.into())));
            all.extend(top_k.into_iter().chain(max));
        }
        if let Some(first) = self.first_token {
            let seconds = first.saturating_duration_since(self.started).as_secs_f64();
            all.push(attribute("gen_ai.response.time_to_first_chunk", Value::Double(seconds)));
        }
        if self.reason != "finished" {
            all.push(attribute("error.type", text(self.reason)));
        }
        all
    }
}

const CACHED: &str = "gen_ai.usage.cache_read.input_tokens";
const OUTPUT: &str = "gen_ai.usage.output_tokens";
