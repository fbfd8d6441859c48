//! `GET /v1/status`: every request in progress, with its current memory, and the engine's totals.
//!
//! The handler never waits: an operator uses this page when the server seems stuck.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::cache_stats::DiskReport;
use plimsoll_engine::report::{Degradation, Pools};
use plimsoll_engine::{EngineHandle, LedgerReport, RequestPhase, Snapshot};
use serde::Serialize;

use crate::http::json::json;
use crate::ops::memory::report;
use crate::state::model::ModelState;
use crate::state::running::{Entry, RunningModel};
use crate::state::server::ServerState;

#[derive(Serialize)]
pub(crate) struct Status {
    object: &'static str,
    model: String,
    /// Whether the model, or any of several, writes text.
    generates: bool,
    /// Whether the model, or any of several, takes images.
    images: bool,
    /// The most bytes of a request body.
    max_body_bytes: u64,
    uptime_seconds: f64,
    healthy: bool,
    draining: bool,
    totals: Totals,
    pools: Pools,
    degradation: Degradation,
    /// The prefix cache on disk, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskReport>,
    /// Oldest first.
    requests: Vec<Row>,
}

#[derive(Serialize)]
struct Totals {
    running: u64,
    waiting: u64,
    /// Requests in progress over HTTP, including those that have nothing left to compute.
    answering: usize,
    /// The sum over the rows.
    memory_bytes: u64,
    tokens_per_second: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    generated_tokens: u64,
    finished: u64,
    aborted: u64,
    failed: u64,
    steps: u64,
}

/// One request; counts are sums over its choices.
#[derive(Serialize)]
struct Row {
    id: String,
    request_id: String,
    endpoint: String,
    /// The model of the request, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    stream: bool,
    /// The phase of the choice that is furthest behind.
    phase: &'static str,
    choices: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    computed_tokens: u64,
    generated_tokens: u64,
    /// Pages, state slots and heap together. A page that several share counts for each of them.
    memory_bytes: u64,
    kv_pages: u64,
    kv_bytes: u64,
    state_slots: u64,
    state_bytes: u64,
    host_bytes: u64,
    age_seconds: f64,
    /// Sum over the choices that have begun; null before the second token.
    tokens_per_second: Option<f64>,
}

impl Row {
    fn of(entry: &Entry) -> Self {
        let RunningModel { page_bytes, window_page_bytes, slot_bytes, .. } = entry.model;
        let looks = entry.looks();
        let sum = |of: fn(&Snapshot) -> u64| looks.iter().map(of).sum::<u64>();
        let (kv_pages, state_slots) = (sum(|look| look.kv_pages.into()), sum(|look| look.state_slots.into()));
        let window_bytes = sum(|look| look.window_pages.into()) * window_page_bytes;
        let (kv_bytes, state_bytes) = (kv_pages * page_bytes + window_bytes, state_slots * slot_bytes);
        let host_bytes = sum(|look| look.host_bytes);
        let speeds = looks.iter().filter_map(|look| look.tokens_per_second);
        Self {
            id: entry.id.clone(),
            request_id: entry.caller.request_id.to_string(),
            endpoint: entry.caller.endpoint.to_string(),
            model: entry.model.name.as_ref().map(ToString::to_string),
            stream: entry.stream,
            // Embedding requests submit their inputs one by one and have no choices to inspect: they count as in prefill.
            phase: looks.iter().map(|look| look.phase).min().unwrap_or(RequestPhase::Prefill).name(),
            choices: looks.len(),
            prompt_tokens: sum(|look| look.prompt_tokens.into()),
            cached_tokens: sum(|look| look.cached_tokens.into()),
            computed_tokens: sum(|look| look.computed_tokens.into()),
            generated_tokens: sum(|look| look.generated_tokens.into()),
            memory_bytes: kv_bytes + state_bytes + host_bytes,
            kv_pages,
            kv_bytes,
            state_slots,
            state_bytes,
            host_bytes,
            age_seconds: entry.started.elapsed().as_secs_f64(),
            tokens_per_second: speeds.reduce(|sum, speed| sum + speed),
        }
    }
}

impl Totals {
    /// Makes the totals. Counters come from `page`, which includes engines that have been unloaded.
    fn of(page: &LedgerReport, rows: &[Row]) -> Self {
        let LedgerReport { pools, requests, tokens, steps, .. } = page;
        Self {
            running: pools.requests.running,
            waiting: pools.requests.waiting,
            answering: rows.len(),
            memory_bytes: rows.iter().map(|row| row.memory_bytes).sum(),
            tokens_per_second: rows.iter().filter_map(|row| row.tokens_per_second).fold(0.0, |sum, speed| sum + speed),
            prompt_tokens: tokens.prompt,
            cached_tokens: tokens.cached,
            generated_tokens: tokens.generated,
            finished: requests.finished,
            aborted: requests.aborted,
            failed: requests.failed,
            steps: *steps,
        }
    }
}

/// The handler of a server with one model.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>) -> Response {
    let engine = &state.served.engine;
    let page = report(engine, &state.server.bytes);
    let status = Status::of(&state.server, state.served.names[0].clone(), &[engine], page);
    json(&Status { generates: state.served.generates(), ..status }, None)
}

impl Status {
    /// `page`: the memory report over all engines.
    pub fn of(server: &ServerState, model: String, engines: &[&EngineHandle], page: LedgerReport) -> Self {
        let requests: Vec<Row> = server.running.all().iter().map(|entry| Row::of(entry)).collect();
        Self {
            object: "status",
            model,
            images: engines.iter().any(|engine| engine.media().is_some_and(|spec| spec.image.is_some())),
            generates: engines.is_empty() || engines.iter().any(|engine| !engine.limits().encoder),
            max_body_bytes: server.config.max_body_bytes,
            uptime_seconds: server.started.elapsed().as_secs_f64(),
            healthy: engines.iter().all(|engine| engine.healthy()),
            draining: server.draining() || engines.iter().any(|engine| engine.draining()),
            totals: Totals::of(&page, &requests),
            pools: page.pools,
            degradation: page.degradation,
            disk: engines.iter().find_map(|engine| engine.cache_report().disk),
            requests,
        }
    }
}
