//! OpenTelemetry traces (`--otlp-endpoint`): the spans of each finished request, with the GenAI semantic conventions.
//!
//! A request puts its record into a bounded queue when it ends, and never waits. One thread makes spans of the records and posts them to
//! the collector. Records that do not fit into the queue, and batches that the collector does not take, are dropped and counted. No span
//! holds content, such as prompts and answers.

mod config;
mod export;
mod proto;
mod span;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

pub use config::{OtlpConfig, Sampler};
pub(crate) use span::{Asked, CHOICES as TRACED_CHOICES, Choice, Record, cut};

use crate::http::error::ServeError;
use crate::http::ids::Ids;
use crate::http::trace_parent::Parent;

/// The most records that wait for the exporter.
const QUEUE: usize = 512;
/// The most records of one export.
const BATCH: usize = 32;
/// Heap bytes of one record besides itself: ids, model, route.
const RECORD_HEAP_BYTES: usize = 512;
/// Heap bytes of one record's spans, as messages and encoded.
const SPANS_BYTES: usize = 24 << 10;
/// Heap bytes of the HTTP client with one connection, TLS included.
const CLIENT_BYTES: usize = 512 << 10;

/// Returns the most heap bytes of tracing. This includes the data of `running` requests for it: `live` bytes each and their texts.
pub(crate) fn heap_bytes_max(running: u32, live: usize) -> u64 {
    let record = size_of::<export::Message>() + size_of::<Record>() + RECORD_HEAP_BYTES;
    let running = running as usize * (live + RECORD_HEAP_BYTES);
    (QUEUE * record + BATCH * SPANS_BYTES + CLIENT_BYTES + running) as u64
}

/// Threads: the exporter, and one that resolves the collector's name for it.
pub(crate) const OTLP_THREADS: usize = 2;

/// A server that shuts down waits this long for the last export.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Counters for the metrics.
#[derive(Debug, Default)]
pub(crate) struct Exported {
    pub spans: AtomicU64,
    /// Spans that reached no collector.
    pub dropped: AtomicU64,
    /// Failed exports, including those that are retried.
    pub failures: AtomicU64,
}

/// The server's end of the exporter.
pub(crate) struct Tracer {
    sampler: Sampler,
    ids: Ids,
    sender: SyncSender<export::Message>,
    pub exported: Arc<Exported>,
}

impl Tracer {
    /// Starts the exporter.
    pub fn open(config: &OtlpConfig) -> Result<Self, ServeError> {
        let (sender, messages) = sync_channel(QUEUE);
        let exported = Arc::<Exported>::default();
        let exporter = export::Exporter::new(config, Arc::clone(&exported));
        let thread = std::thread::Builder::new().name("plimsoll-otlp".into());
        let spawned = thread.spawn(move || exporter.run(&messages));
        spawned.map_err(|error| ServeError::Config(format!("the thread that exports traces: {error}")))?;
        Ok(Self { sampler: config.sampler, ids: Ids::default(), sender, exported })
    }

    /// Returns the trace of a new request: the client's or a new one. None if it is not sampled.
    pub fn begin(&self, parent: Option<Parent>) -> Option<Trace> {
        let id = parent.map_or_else(|| self.id().to_be_bytes(), |parent| parent.trace_id);
        let sampled = self.sampler.samples(&id, parent.map(|parent| parent.sampled));
        sampled.then_some(Trace { id, parent: parent.map(|parent| parent.span_id) })
    }

    fn id(&self) -> u128 {
        (u128::from(self.ids.next()) << 64 | u128::from(self.ids.next())).max(1)
    }

    /// Queues the record of a request that has ended.
    pub fn end(&self, record: Record) {
        let spans = record.span_count();
        if self.sender.try_send(export::Message::Record(Box::new(record))).is_err() {
            self.exported.dropped.fetch_add(spans, Relaxed);
        }
    }

    /// Waits, for a short time at most, until all ended requests are exported.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.sender.try_send(export::Message::Flush(done)).is_ok() {
            // A slow collector does not delay the shutdown any longer: the remaining spans are lost.
            let _ = wait.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// The trace that a request belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trace {
    pub id: [u8; 16],
    /// The client's span.
    pub parent: Option<[u8; 8]>,
}

impl Trace {
    /// Returns the id in the form of logs and headers.
    pub fn text(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.id))
    }
}
