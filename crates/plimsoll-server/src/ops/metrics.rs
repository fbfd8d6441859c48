//! `GET /metrics`: the engine's counters, the ledger, the process and the HTTP side in Prometheus' formats.

mod engine;
mod exposition;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use plimsoll_engine::report::{ComponentRow, LedgerReport};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use engine::EngineValues;
pub(crate) use exposition::Exposition;
use exposition::joined;

use crate::http::error::{ApiError, ApiResult};
use crate::ops::memory::report;
use crate::state::media::pipeline::MediaPipeline;
use crate::state::model::ModelState;
use crate::state::server::ServerState;

/// The handler of a server with one model.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, headers: HeaderMap) -> ApiResult<Response> {
    let whole = report(&state.served.engine, &state.server.bytes);
    page(Exposition::of(&headers), &state.server, whole, Vec::new(), &[&state])
}

/// Returns the page: the server, the process from `whole`, the components that the models share, and every engine, with its model's label
/// if it has one.
pub(crate) fn page(
    exposition: Exposition,
    server: &ServerState,
    whole: LedgerReport,
    shared: Vec<ComponentRow>,
    models: &[&ModelState],
) -> ApiResult<Response> {
    let mut own = Registry::default();
    server.metrics.register(&mut own);
    register_mcp(server, &mut own);
    own.register_collector(Box::new(ServerValues::of(server, &whole, shared)));
    let mut texts = vec![text_of(&own)?];
    for state in models {
        let labels = state.label.iter().map(|label| (Cow::Borrowed("model"), Cow::Owned(label.to_string())));
        let mut registry = Registry::with_labels(labels);
        let engine = &state.served.engine;
        engine.metrics().register(&mut registry);
        register_media(&state.media_pipeline, &mut registry);
        registry
            .register_collector(Box::new(EngineValues { engine: engine.clone(), grammars: state.grammars.usage() }));
        texts.push(text_of(&registry)?);
    }
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(exposition.content_type())),
        (header::VARY, HeaderValue::from_static("accept")),
    ];
    Ok((headers, joined(&texts, exposition)).into_response())
}

fn register_media(media_pipeline: &MediaPipeline, registry: &mut Registry) {
    let media = &media_pipeline.counts;
    let (fetching, waiting) = media_pipeline.fetch_queue.counts();
    for (name, help, value) in [
        ("plimsoll_media_fetching", "Files that are being fetched", fetching),
        ("plimsoll_media_fetches_waiting", "Files that wait for their turn to be fetched", waiting),
    ] {
        let gauge: Gauge = Gauge::default();
        gauge.set(signed(value as u64));
        registry.register(name, help, gauge);
    }
    for (name, help, counter) in [
        ("plimsoll_media_prepared", "Images and videos whose pixels went to the engine", &media.prepared),
        ("plimsoll_media_windows", "Windows of long audio clips that went to the engine", &media.windows),
        ("plimsoll_media_refused", "Images and videos that were refused for what they are", &media.refused),
        ("plimsoll_media_fetched", "Files that were fetched from other servers", &media.fetched),
        ("plimsoll_media_fetched_bytes", "Bytes of them", &media.fetched_bytes),
        ("plimsoll_media_ffmpeg_runs", "Files that ffmpeg has read before they were measured", &media.ffmpeg_runs),
    ] {
        registry.register(name, help, counter.clone());
    }
}

fn register_mcp(server: &ServerState, registry: &mut Registry) {
    let Some(servers) = &server.mcp else { return };
    servers.counts.register(registry);
    for (name, help, value) in [
        ("plimsoll_mcp_running", "Exchanges with MCP servers that are running", servers.running()),
        ("plimsoll_mcp_cache_bytes", "Heap bytes of the cached tool lists of MCP servers", servers.cached_bytes()),
    ] {
        let gauge: Gauge = Gauge::default();
        gauge.set(signed(value));
        registry.register(name, help, gauge);
    }
}

fn text_of(registry: &Registry) -> ApiResult<String> {
    let mut text = String::new();
    encode(&mut text, registry).map_err(|_| ApiError::internal("the metrics could not be encoded"))?;
    Ok(text)
}

/// Reads one number of a component's row.
type Column = fn(&ComponentRow) -> u64;

/// Encodes every component's row of a report, as three families.
fn encode_rows(encoder: &mut DescriptorEncoder<'_>, rows: &[ComponentRow]) -> Result<(), fmt::Error> {
    let columns: [(&str, &str, Column); 3] = [
        ("plimsoll_memory_planned_bytes", "What the plan allows a component", |row| row.planned_bytes),
        ("plimsoll_memory_committed_bytes", "What a component holds", |row| row.committed_bytes),
        ("plimsoll_memory_peak_bytes", "The most a component ever held", |row| row.peak_bytes),
    ];
    for (name, help, column) in columns {
        let mut family = encoder.encode_descriptor(name, help, None, ConstGauge::new(0i64).metric_type())?;
        for row in rows {
            let labels = [("component", row.component)];
            ConstGauge::new(signed(column(row))).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// A name, its help text, and the value.
type Single<T> = (&'static str, &'static str, T);

/// Encodes each value as the metric that `metric` makes of it.
fn encode_each<T: Copy, M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    values: &[Single<T>],
    metric: impl Fn(T) -> M,
) -> Result<(), fmt::Error> {
    for (name, help, value) in values {
        let metric = metric(*value);
        metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
    }
    Ok(())
}

/// Values of server and process.
struct ServerValues {
    singles: [Single<i64>; 21],
    counters: [Single<u64>; 8],
    /// Rows of the components that several models share.
    rows: Vec<ComponentRow>,
}

impl fmt::Debug for ServerValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerValues")
    }
}

impl Collector for ServerValues {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        encode_each(&mut encoder, &self.singles, ConstGauge::new)?;
        encode_each(&mut encoder, &self.counters, ConstCounter::new)?;
        if self.rows.is_empty() { Ok(()) } else { encode_rows(&mut encoder, &self.rows) }
    }
}

impl ServerValues {
    fn of(server: &ServerState, page: &LedgerReport, rows: Vec<ComponentRow>) -> Self {
        let (process, responses) = (&page.process, server.responses.usage());
        let connections = server.metrics.connections.load(Ordering::Relaxed);
        let recorded = server.recorder.as_ref().map(|recorder| Arc::clone(&recorder.recorded)).unwrap_or_default();
        let exported = server.tracer.as_ref().map(|tracer| Arc::clone(&tracer.exported)).unwrap_or_default();
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let counters = [
            ("plimsoll_responses_evicted", "Responses dropped to make room", responses.evicted),
            ("plimsoll_response_logs_lost", "Event logs that did not fit the store", responses.logs_lost),
            ("plimsoll_trace_lines", "Requests recorded (--record)", read(&recorded.lines)),
            ("plimsoll_trace_bytes", "Bytes of the trace", read(&recorded.bytes)),
            ("plimsoll_trace_lines_lost", "Requests that could not be recorded", read(&recorded.lost)),
            ("plimsoll_otlp_spans_exported", "Spans that the collector took (--otlp-endpoint)", read(&exported.spans)),
            ("plimsoll_otlp_spans_dropped", "Spans that reached no collector", read(&exported.dropped)),
            ("plimsoll_otlp_export_failures", "Exports that failed, repeated ones included", read(&exported.failures)),
        ];
        let singles = [
            ("plimsoll_http_in_flight_bytes", "Bodies and unsent answers", signed(server.bytes.used())),
            ("plimsoll_http_in_flight_limit_bytes", "Limit of the above", signed(server.bytes.limit())),
            ("plimsoll_responses_stored", "Responses that can be gone on from", signed(responses.responses)),
            (
                "plimsoll_responses_in_background",
                "Responses made without a connection",
                signed(server.background.running()),
            ),
            ("plimsoll_response_store_bytes", "What stored responses and event logs hold", signed(responses.bytes)),
            ("plimsoll_response_store_limit_bytes", "Limit of the above", signed(responses.limit)),
            ("plimsoll_http_connections", "Open connections", signed(connections)),
            (
                "plimsoll_kv_events_readers",
                "Readers that follow the prefix cache",
                signed(read(&server.metrics.kv_readers)),
            ),
            ("plimsoll_memory_line_bytes", "The most this process may use", signed(page.line_bytes)),
            (
                "plimsoll_memory_device_line_bytes",
                "The most this process may use of a GPU's own memory; 0 without one",
                signed(page.device.as_ref().map_or(0, |device| device.line_bytes)),
            ),
            ("plimsoll_memory_unaccounted_bytes", "Process memory in no component", page.unaccounted_bytes),
            ("plimsoll_heap_in_use_bytes", "Heap bytes in use", signed(page.heap.in_use_bytes)),
            ("plimsoll_heap_resident_bytes", "Heap bytes in memory or swap", signed(page.heap.resident_bytes)),
            (
                "plimsoll_heap_kept_bytes",
                "Heap bytes freed and not given back by the allocator",
                signed(page.heap.kept_bytes),
            ),
            ("plimsoll_heap_peak_bytes", "The most heap bytes ever in use", signed(page.heap.peak_bytes)),
            ("plimsoll_process_anonymous_bytes", "Resident anonymous memory", signed(process.rss_anon)),
            ("plimsoll_process_file_bytes", "Resident file pages", signed(process.rss_file)),
            ("plimsoll_process_swap_bytes", "Swapped memory", signed(process.vm_swap)),
            ("plimsoll_process_peak_resident_bytes", "The most that was ever resident", signed(process.vm_hwm)),
            ("plimsoll_process_threads", "Threads", signed(process.threads)),
            ("plimsoll_process_open_fds", "Open file descriptors", signed(process.fds)),
        ];
        Self { singles, counters, rows }
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
