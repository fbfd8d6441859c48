//! `GET /metrics`: the engine's counters, the ledger, the process and the HTTP side as Prometheus reads them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use plimsoll_engine::EngineHandle;
use plimsoll_engine::report::{ComponentRow, LedgerReport};
use plimsoll_grammar::Grammars;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::limits::ByteBudget;
use crate::media::Counts;
use crate::memory::report;
use crate::responses::store::ResponseStore;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answer {
    path: String,
    code: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct End {
    api: &'static str,
    reason: &'static str,
}

/// How generations have ended, by API and reason; both are words of ours.
#[derive(Clone, Default)]
pub(crate) struct Ended(Family<End, Counter>);

impl Ended {
    pub fn count(&self, api: &'static str, reason: &'static str) {
        self.0.get_or_create(&End { api, reason }).inc();
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Turned {
    reason: &'static str,
}

/// Everything `/metrics` shows.
pub(crate) struct Metrics {
    registry: Registry,
    answers: Family<Answer, Counter>,
    turned_away: Family<Turned, Counter>,
    /// How generations have ended: finished, aborted (the client went), cancelled, timeout, shutdown, failed.
    pub ended: Ended,
    /// Open connections, counted by the accept loop.
    pub connections: Arc<AtomicU64>,
    /// Connections that were told 503 because too many were open.
    pub refused_connections: Counter,
}

impl Metrics {
    pub fn new(
        engine: &EngineHandle,
        bytes: &Arc<ByteBudget>,
        grammars: &Arc<Grammars>,
        responses: &Arc<ResponseStore>,
        media: &Counts,
    ) -> Self {
        let mut registry = Registry::default();
        engine.metrics().register(&mut registry);
        let (answers, refused_connections) = (Family::default(), Counter::default());
        registry.register("plimsoll_http_answers", "HTTP answers by route and status", answers.clone());
        let help = "Connections refused because too many were open";
        registry.register("plimsoll_http_connections_refused", help, refused_connections.clone());
        let (ended, turned_away) = (Ended::default(), Family::default());
        registry.register("plimsoll_generations_ended", "Generations by API and the way they ended", ended.0.clone());
        let help = "Requests turned away before their body was read, by reason";
        registry.register("plimsoll_http_turned_away", help, turned_away.clone());
        for (name, help, counter) in [
            ("plimsoll_media_prepared", "Images and videos whose pixels went to the engine", &media.prepared),
            ("plimsoll_media_refused", "Images and videos that were refused for what they are", &media.refused),
            ("plimsoll_media_fetched", "Files that were fetched from other servers", &media.fetched),
            ("plimsoll_media_fetched_bytes", "Bytes of them", &media.fetched_bytes),
        ] {
            registry.register(name, help, counter.clone());
        }
        let connections = Arc::new(AtomicU64::new(0));
        let gauges = Gauges {
            engine: engine.clone(),
            bytes: Arc::clone(bytes),
            grammars: Arc::clone(grammars),
            responses: Arc::clone(responses),
            connections: Arc::clone(&connections),
        };
        registry.register_collector(Box::new(gauges));
        Self { registry, answers, turned_away, ended, connections, refused_connections }
    }

    /// Counts a request that did not get past the door.
    pub fn turned_away(&self, reason: &'static str) {
        self.turned_away.get_or_create(&Turned { reason }).inc();
    }

    /// Counts an answer. Routes and statuses are few; unknown paths are counted as one.
    pub fn answered(&self, path: &str, code: u16) {
        self.answers.get_or_create(&Answer { path: path.into(), code: code.into() }).inc();
    }
}

/// The page.
pub(crate) async fn handle(State(app): State<Arc<App>>) -> ApiResult<Response> {
    let mut text = String::new();
    encode(&mut text, &app.metrics.registry).map_err(|_| ApiError::internal("the metrics could not be encoded"))?;
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// One number of a component's row.
type Column = fn(&ComponentRow) -> u64;

/// Values that are read when they are asked for.
struct Gauges {
    engine: EngineHandle,
    bytes: Arc<ByteBudget>,
    grammars: Arc<Grammars>,
    responses: Arc<ResponseStore>,
    connections: Arc<AtomicU64>,
}

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let page = report(&self.engine, &self.bytes);
        for (name, help, value) in self.singles(&page) {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        let columns: [(&str, &str, Column); 3] = [
            ("plimsoll_memory_planned_bytes", "What the plan allows a component", |row| row.planned_bytes),
            ("plimsoll_memory_committed_bytes", "What a component holds", |row| row.committed_bytes),
            ("plimsoll_memory_peak_bytes", "The most a component ever held", |row| row.peak_bytes),
        ];
        for (name, help, column) in columns {
            let mut family = encoder.encode_descriptor(name, help, None, ConstGauge::new(0i64).metric_type())?;
            for row in &page.components {
                let labels = [("component", row.component)];
                ConstGauge::new(signed(column(row))).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

impl Gauges {
    fn singles(&self, page: &LedgerReport) -> [(&'static str, &'static str, i64); 39] {
        let status = self.engine.status();
        let read = |value: &AtomicU64| signed(value.load(Ordering::Relaxed));
        let (process, pools) = (&page.process, &page.pools);
        let grammars = self.grammars.usage();
        let responses = self.responses.usage();
        [
            ("plimsoll_requests_running", "Requests that hold a slot", read(&status.running)),
            ("plimsoll_requests_waiting", "Requests that wait for a slot", read(&status.waiting)),
            ("plimsoll_requests_in_system", "Requests accepted and not yet ended", signed(pools.requests.in_system)),
            ("plimsoll_kv_pages_used", "Pages in use, those of the prefix index included", read(&status.pages_used)),
            ("plimsoll_kv_pages_total", "Pages of the pool", read(&status.pages_total)),
            ("plimsoll_kv_pages_cached", "Pages held by the prefix index alone", read(&status.pages_cached)),
            ("plimsoll_state_slots_used", "State slots held or kept as checkpoints", read(&status.slots_used)),
            ("plimsoll_state_slots_total", "State slots of the pool", read(&status.slots_total)),
            ("plimsoll_state_slots_kept", "State slots kept as checkpoints", read(&status.slots_kept)),
            ("plimsoll_engine_steps", "Steps taken since start", read(&status.steps)),
            ("plimsoll_engine_stalled", "1 while the engine makes no progress", i64::from(!self.engine.healthy())),
            ("plimsoll_host_reserved_bytes", "Host bytes reserved by requests", signed(pools.host_bytes.used)),
            ("plimsoll_host_limit_bytes", "Host bytes requests may reserve", signed(pools.host_bytes.total)),
            ("plimsoll_http_in_flight_bytes", "Bodies and unsent answers", signed(self.bytes.used())),
            ("plimsoll_http_in_flight_limit_bytes", "Limit of the above", signed(self.bytes.limit())),
            ("plimsoll_grammar_bytes", "What constrained output holds", signed(grammars.used)),
            ("plimsoll_grammar_limit_bytes", "Limit of the above", signed(grammars.limit)),
            ("plimsoll_grammars", "Compiled grammars", signed(grammars.grammars)),
            ("plimsoll_grammars_compiled", "Grammars compiled since start", signed(grammars.compiled)),
            ("plimsoll_grammar_hits", "Requests that found their grammar compiled", signed(grammars.hits)),
            ("plimsoll_grammars_evicted", "Grammars dropped to make room", signed(grammars.evicted)),
            ("plimsoll_responses_stored", "Responses that can be gone on from", signed(responses.responses)),
            ("plimsoll_response_store_bytes", "What stored responses hold", signed(responses.bytes)),
            ("plimsoll_response_store_limit_bytes", "Limit of the above", signed(responses.limit)),
            ("plimsoll_responses_evicted", "Responses dropped to make room", signed(responses.evicted)),
            ("plimsoll_http_connections", "Open connections", read(&self.connections)),
            ("plimsoll_memory_line_bytes", "The most this process may use", signed(page.line_bytes)),
            ("plimsoll_memory_unaccounted_bytes", "Process memory in no component", page.unaccounted_bytes),
            (
                "plimsoll_device_allocations",
                "Device allocations before ready",
                signed(page.device_allocations.before_ready),
            ),
            (
                "plimsoll_device_allocations_after_ready",
                "Device allocations after ready",
                signed(page.device_allocations.after_ready),
            ),
            ("plimsoll_heap_in_use_bytes", "Heap bytes in use", signed(page.heap.in_use_bytes)),
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
        ]
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
