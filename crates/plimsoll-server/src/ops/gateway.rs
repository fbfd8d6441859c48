//! Pages that gateways read before they send requests: the server and its model (`/server_info`, `/model_info`) and the
//! load (`/v1/loads`, `/get_load`).
//!
//! Routes and fields have SGLang's names, which gateways know. Fields without a meaning here are left out. Only a
//! server with one model has these routes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::EngineHandle;
use plimsoll_engine::cache::PAGE_TOKENS;
use serde::Serialize;

use crate::http::json::json;
use crate::state::model::ModelState;

#[derive(Serialize)]
struct ServerInfo<'a> {
    version: &'static str,
    model_path: &'a str,
    served_model_name: &'a str,
    tokenizer_path: &'a str,
    /// Always 1 for these two: one process computes the whole model.
    tp_size: u32,
    dp_size: u32,
    /// Tokens of a page of the KV cache.
    page_size: usize,
    context_length: u32,
    max_total_num_tokens: u64,
    max_total_tokens: u64,
    max_prefill_tokens: u32,
    max_running_requests: u32,
    max_queued_requests: u32,
    disable_radix_cache: bool,
    /// Whether `/v1/kv_events` reports the contents of the prefix cache.
    kv_events: bool,
    status: &'static str,
}

#[derive(Serialize)]
struct ModelInfo<'a> {
    model_path: &'a str,
    tokenizer_path: &'a str,
    served_model_name: &'a str,
    is_generation: bool,
    has_image_understanding: bool,
    has_audio_understanding: bool,
    max_context_length: u32,
    vocab_size: u32,
    eos_token_ids: &'a [u32],
}

/// The current load.
#[derive(Clone, Copy, Serialize)]
struct Load {
    dp_rank: u32,
    num_running_reqs: u64,
    num_waiting_reqs: u64,
    num_total_reqs: u64,
    /// Tokens in pages that requests hold; pages that only the prefix cache holds count as free.
    num_used_tokens: u64,
    max_total_num_tokens: u64,
    token_usage: f64,
    max_running_requests: u32,
    /// Running requests, divided by the most that may run.
    utilization: f64,
    /// The share of cached tokens among all prompt tokens since start.
    cache_hit_rate: f64,
}

#[derive(Serialize)]
struct Loads {
    timestamp: f64,
    version: &'static str,
    dp_rank_count: usize,
    loads: [Load; 1],
    aggregate: Aggregate,
}

#[derive(Serialize)]
struct Aggregate {
    total_running_reqs: u64,
    total_waiting_reqs: u64,
    total_reqs: u64,
    avg_token_usage: f64,
    avg_utilization: f64,
}

/// The load in the form of older gateways.
#[derive(Serialize)]
struct OldLoad {
    dp_rank: u32,
    num_reqs: u64,
    num_waiting_reqs: u64,
    num_tokens: u64,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the share of the pool's pages that requests hold, or of its window pages, if that is more. Pages that only the prefix cache
/// holds are given up as soon as a request needs them.
pub(crate) fn kv_usage(engine: &EngineHandle) -> f64 {
    let status = engine.status();
    let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
    let windows = read(&status.windows_used).saturating_sub(read(&status.windows_cached));
    share(used_pages(engine), read(&status.pages_total)).max(share(windows, read(&status.windows_total)))
}

fn used_pages(engine: &EngineHandle) -> u64 {
    let status = engine.status();
    let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
    // The two numbers are read at different moments.
    read(&status.pages_used).saturating_sub(read(&status.pages_cached))
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl Load {
    fn of(engine: &EngineHandle) -> Self {
        let (status, limits, cache) = (engine.status(), engine.limits(), engine.cache_report());
        let (running, waiting) = (status.running.load(Ordering::Relaxed), status.waiting.load(Ordering::Relaxed));
        Self {
            dp_rank: 0,
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_total_reqs: running + waiting,
            num_used_tokens: used_pages(engine) * PAGE_TOKENS as u64,
            max_total_num_tokens: limits.max_total_token_num,
            token_usage: kv_usage(engine),
            max_running_requests: limits.running_max_req_size,
            utilization: share(running, limits.running_max_req_size.into()),
            cache_hit_rate: share(cache.hit_tokens, cache.hit_tokens + cache.miss_tokens),
        }
    }
}

/// `GET /server_info`, also under its older name.
pub(crate) async fn server_info(State(state): State<Arc<ModelState>>) -> Response {
    let engine = &state.served.engine;
    let (limits, name) = (engine.limits(), &state.served.names[0]);
    let serving = !engine.draining() && !state.server.draining();
    let info = ServerInfo {
        version: VERSION,
        model_path: name,
        served_model_name: name,
        tokenizer_path: name,
        tp_size: 1,
        dp_size: 1,
        page_size: PAGE_TOKENS,
        context_length: limits.max_req_total_len,
        max_total_num_tokens: limits.max_total_token_num,
        max_total_tokens: limits.max_total_token_num,
        max_prefill_tokens: limits.batch_max_tokens,
        max_running_requests: limits.running_max_req_size,
        max_queued_requests: limits.max_waiting,
        disable_radix_cache: !engine.cache_report().enabled,
        kv_events: engine.kv_event_log().is_some(),
        status: if serving { "ready" } else { "draining" },
    };
    json(&info, None)
}

/// `GET /model_info`, also under its older name.
pub(crate) async fn model_info(State(state): State<Arc<ModelState>>) -> Response {
    let engine = &state.served.engine;
    let (limits, name) = (engine.limits(), &state.served.names[0]);
    let info = ModelInfo {
        model_path: name,
        tokenizer_path: name,
        served_model_name: name,
        is_generation: state.served.generates(),
        has_image_understanding: engine.media().is_some_and(|media| media.image.is_some()),
        has_audio_understanding: engine.media().is_some_and(|media| media.audio.is_some()),
        max_context_length: limits.max_req_total_len,
        vocab_size: limits.vocab_size,
        eos_token_ids: engine.eos(),
    };
    json(&info, None)
}

/// `GET /v1/loads`.
pub(crate) async fn loads(State(state): State<Arc<ModelState>>) -> Response {
    let load = Load::of(&state.served.engine);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let aggregate = Aggregate {
        total_running_reqs: load.num_running_reqs,
        total_waiting_reqs: load.num_waiting_reqs,
        total_reqs: load.num_total_reqs,
        avg_token_usage: load.token_usage,
        avg_utilization: load.utilization,
    };
    let timestamp = since_1970.as_secs_f64();
    json(&Loads { timestamp, version: VERSION, dp_rank_count: 1, loads: [load], aggregate }, None)
}

/// `GET /get_load`.
pub(crate) async fn get_load(State(state): State<Arc<ModelState>>) -> Response {
    let load = Load::of(&state.served.engine);
    let old = OldLoad {
        dp_rank: 0,
        num_reqs: load.num_total_reqs,
        num_waiting_reqs: load.num_waiting_reqs,
        num_tokens: load.num_used_tokens,
    };
    json(&[old], None)
}
