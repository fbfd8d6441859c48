//! The exporter: a thread that posts batches of spans to the collector (OTLP over HTTP, protobuf).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread::sleep;
use std::time::{Duration, Instant};

use prost::Message as _;
use ureq::Agent;

use super::config::OtlpConfig;
use super::proto::{ExportRequest, ExportResponse, KeyValue, Resource, ResourceSpans, Scope, ScopeSpans, Span};
use super::span::Record;
use super::{BATCH, Exported};
use crate::http::ids::Ids;

/// The time for which a batch waits for more records.
const BATCH_DELAY: Duration = Duration::from_millis(500);
/// Attempts of one batch, and the pause before the second; each later pause is twice as long.
const ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The most bytes of an answer that are read.
const ANSWER_BYTES: u64 = 16 << 10;
/// Shortest time between two warnings.
const WARNING_EVERY: Duration = Duration::from_secs(60);
/// Bytes of the client's buffers, which bound an answer's head.
const BUFFER_BYTES: usize = 16 << 10;

/// A message to the exporter.
pub(crate) enum Message {
    Record(Box<Record>),
    /// Asks for an answer when everything before is exported.
    Flush(SyncSender<()>),
}

/// The thread's state.
pub(crate) struct Exporter {
    agent: Agent,
    url: String,
    headers: Vec<(String, String)>,
    resource: Vec<KeyValue>,
    exported: Arc<Exported>,
    ids: Ids,
    last_warning: Option<Instant>,
}

/// The reason why an export failed.
enum Failure {
    /// A retry may succeed.
    Passing(String),
    Final(String),
}

impl Exporter {
    pub fn new(config: &OtlpConfig, exported: Arc<Exported>) -> Self {
        let agent = Agent::config_builder()
            .timeout_global(Some(config.timeout))
            .http_status_as_error(false)
            // The headers may hold a key, which belongs to the configured address.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(1)
            .max_idle_connections_per_host(1)
            .input_buffer_size(BUFFER_BYTES)
            .output_buffer_size(BUFFER_BYTES)
            .max_response_header_size(BUFFER_BYTES)
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: Agent::new_with_config(agent),
            url: config.url.clone(),
            headers: config.headers.clone(),
            resource: config.resource_attributes(),
            exported,
            ids: Ids::default(),
            last_warning: None,
        }
    }

    /// Exports until the server and all its requests are dropped.
    pub fn run(mut self, messages: &Receiver<Message>) {
        let mut records = Vec::with_capacity(BATCH);
        while let Ok(first) = messages.recv() {
            let until = Instant::now() + BATCH_DELAY;
            let mut flush = None;
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    Message::Record(record) => records.push(*record),
                    Message::Flush(done) => flush = Some(done),
                }
                let left = until.saturating_duration_since(Instant::now());
                next = match records.len() < BATCH && flush.is_none() {
                    true => messages.recv_timeout(left).or_else(|error| match error {
                        // A batch that has waited long enough still takes the records already in the queue.
                        RecvTimeoutError::Timeout => messages.try_recv().map_err(drop),
                        RecvTimeoutError::Disconnected => Err(()),
                    }),
                    false => Err(()),
                }
                .ok();
            }
            if !records.is_empty() {
                self.export(&mut records);
            }
            // The receiver is gone if the flush has timed out.
            if let Some(done) = flush {
                let _ = done.try_send(());
            }
        }
    }

    /// Posts a batch, and counts its spans.
    fn export(&mut self, records: &mut Vec<Record>) {
        let ids = &self.ids;
        let id = || ids.next().max(1).to_be_bytes();
        let spans: Vec<Span> = records.drain(..).flat_map(|record| record.spans(id)).collect();
        let count = spans.len() as u64;
        let scope = Scope { name: "plimsoll".into(), version: env!("CARGO_PKG_VERSION").into() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
        let resource = Some(Resource { attributes: self.resource.clone() });
        let body = ExportRequest { resource_spans: vec![ResourceSpans { resource, scope_spans }] }.encode_to_vec();
        let mut pause = FIRST_PAUSE;
        for attempt in 1..=ATTEMPTS {
            let failure = match self.post(&body) {
                Ok(rejected) => {
                    let rejected = rejected.min(count);
                    self.exported.spans.fetch_add(count - rejected, Relaxed);
                    self.exported.dropped.fetch_add(rejected, Relaxed);
                    return;
                }
                Err(failure) => failure,
            };
            self.exported.failures.fetch_add(1, Relaxed);
            let (Failure::Passing(why) | Failure::Final(why)) = &failure;
            self.warn(why);
            if matches!(failure, Failure::Final(_)) || attempt == ATTEMPTS {
                break;
            }
            sleep(pause);
            pause *= 2;
        }
        self.exported.dropped.fetch_add(count, Relaxed);
    }

    /// Posts a batch once. Returns the number of spans that the collector rejected.
    fn post(&self, body: &[u8]) -> Result<u64, Failure> {
        let request = self.agent.post(&self.url).header("content-type", "application/x-protobuf");
        let request = self.headers.iter().fold(request, |request, (name, value)| request.header(name, value));
        let mut answer = request.send(body).map_err(|error| Failure::Passing(error.to_string()))?;
        let status = answer.status().as_u16();
        match status {
            200..=299 => {
                let read = answer.body_mut().with_config().limit(ANSWER_BYTES).read_to_vec();
                let said = read.ok().and_then(|read| ExportResponse::decode(&*read).ok());
                let partial = said.and_then(|said| said.partial_success);
                Ok(partial.map_or(0, |partial| u64::try_from(partial.rejected_spans).unwrap_or(0)))
            }
            429 | 502 | 503 | 504 => Err(Failure::Passing(format!("the collector answered {status}"))),
            _ => Err(Failure::Final(format!("the collector answered {status}"))),
        }
    }

    fn warn(&mut self, why: &str) {
        if self.last_warning.is_none_or(|at| at.elapsed() >= WARNING_EVERY) {
            self.last_warning = Some(Instant::now());
            tracing::warn!(
                url = self.url,
                "traces cannot be exported: {why}; check --otlp-endpoint and the collector (plimsoll_otlp_spans_dropped_total counts)"
            );
        }
    }
}
