//! Pages about several models: one list, one ledger, one status, each with every model's name.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use plimsoll_engine::report::{LedgerReport, Pools};
use plimsoll_engine::{CacheReport, EngineHandle};
use serde::Serialize;
use tokio::time::timeout;

use super::{Registry, Slot, State as Standing};
use crate::http::error::{ApiError, ApiResult};
use crate::http::json::json;
use crate::http::path::Name;
use crate::ollama::catalog::{self, Entry};
use crate::ops::cache::CLEAR_TIMEOUT;
use crate::ops::health::healthy_page;
use crate::ops::memory::with_http;
use crate::ops::metrics::{Exposition, page};
use crate::ops::models::{Model, listed};
use crate::ops::status::Status;
use crate::state::config::About;
use crate::state::model::ModelState;

fn model<'a>(registry: &Registry, slot: &'a Slot, id: &'a str) -> Model<'a> {
    let inner = slot.inner();
    let served = match &inner.state {
        Standing::Loaded(loaded) => Some(&loaded.state.served),
        _ => None,
    };
    Model::new(id, slot.name(), registry.created_s, served, Some(inner.state.name()))
}

/// `GET /`: the index page.
pub(super) async fn index(State(registry): State<Arc<Registry>>) -> Response {
    let names = registry.slots.iter().flat_map(|slot| &slot.listed.names);
    crate::ops::index::page(&registry.server, names.map(String::as_str).collect())
}

/// Lists every name of every model.
pub(super) async fn list(State(registry): State<Arc<Registry>>) -> Response {
    let names = registry.slots.iter().flat_map(|slot| slot.listed.names.iter().map(move |name| (slot, name)));
    listed(names.map(|(slot, name)| model(&registry, slot, name)).collect())
}

/// Describes the model with one name; 404 when the server does not know it.
pub(super) async fn one(State(registry): State<Arc<Registry>>, Name(id): Name) -> ApiResult<Response> {
    let slot = &registry.slots[registry.find(Some(&id))?];
    Ok(json(&model(&registry, slot, &id), None))
}

/// `GET /api/tags`: every name of every model. Details of a model's files are only known while it is loaded.
pub(super) async fn tags(State(registry): State<Arc<Registry>>) -> Response {
    let unknown = About::default();
    let loaded = registry.slots.iter().map(Slot::loaded).collect::<Vec<_>>();
    let mut entries = Vec::new();
    for (slot, served) in registry.slots.iter().zip(&loaded) {
        let about = served.as_ref().map_or(&unknown, |state| &state.served.about);
        entries.extend(slot.listed.names.iter().map(|name| Entry::tag(name, registry.created_s, about)));
    }
    catalog::listed(entries)
}

/// `GET /api/ps`: the models that are loaded.
pub(super) async fn ps(State(registry): State<Arc<Registry>>) -> Response {
    let loaded: Vec<_> = registry.slots.iter().filter_map(|slot| Some((slot, slot.loaded()?))).collect();
    let entries = loaded.iter().map(|(slot, state)| {
        let idle = slot.inner().used.elapsed();
        let expires = slot.listed.idle_after.map(|after| SystemTime::now() + after.saturating_sub(idle));
        Entry::running(slot.name(), &state.served, expires)
    });
    catalog::listed(entries.collect())
}

/// 200 when every engine makes progress; otherwise 503 with the name of an engine that does not.
pub(super) async fn health(State(registry): State<Arc<Registry>>) -> ApiResult<Response> {
    healthy(&registry, "healthy")
}

/// 200 when the server takes new requests.
pub(super) async fn ready(State(registry): State<Arc<Registry>>) -> ApiResult<Response> {
    if registry.server.draining() {
        return Err(ApiError::shutting_down());
    }
    healthy(&registry, "ready")
}

fn healthy(registry: &Registry, status: &'static str) -> ApiResult<Response> {
    let models = registry.loaded();
    if let Some(ill) = models.iter().find(|state| !state.served.engine.healthy()) {
        let (name, limit) = (ill.label.as_deref().unwrap_or_default(), ill.served.engine.stall_limit().as_secs_f32());
        let message = format!("the engine of `{name}` has stopped or made no progress for {limit} s");
        return Err(ApiError::unavailable(message, 5));
    }
    Ok(healthy_page(models.iter().map(|state| &state.served.engine), status))
}

fn engines(models: &[Arc<ModelState>]) -> Vec<&EngineHandle> {
    models.iter().map(|state| &state.served.engine).collect()
}

/// The ledger and its models.
#[derive(Serialize)]
struct Memory<'a> {
    /// The sum over the models, with the memory that they share.
    #[serde(flatten)]
    whole: LedgerReport,
    models: Vec<Part<'a>>,
}

/// One model of the ledger.
#[derive(Serialize)]
struct Part<'a> {
    model: &'a str,
    state: &'static str,
    /// The bytes that it plans when it is loaded; null before its first load.
    planned_bytes: Option<u64>,
    /// The number of its loads.
    loads: u64,
    /// Requests that it is answering.
    in_use: usize,
    /// Requests that wait until it is loaded.
    waiting: usize,
    idle_seconds: f64,
    /// The engine's own part of the ledger, while the model is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    ledger: Option<Own>,
}

/// The part of the ledger that belongs to one engine alone.
#[derive(Serialize)]
struct Own {
    committed_bytes: u64,
    components: Vec<plimsoll_engine::report::ComponentRow>,
    pools: Pools,
    degradation: plimsoll_engine::report::Degradation,
    requests: plimsoll_engine::report::Requests,
    steps: u64,
}

impl From<LedgerReport> for Own {
    fn from(report: LedgerReport) -> Self {
        let LedgerReport { committed_bytes, components, pools, degradation, requests, steps, .. } = report;
        // Components that the models share belong to no single model.
        let components = components.into_iter().filter(|row| row.planned_bytes > 0).collect();
        Self { committed_bytes, components, pools, degradation, requests, steps }
    }
}

fn part(slot: &Slot) -> Part<'_> {
    let inner = slot.inner();
    let engine = match &inner.state {
        Standing::Loaded(loaded) => Some(loaded.state.served.engine.clone()),
        _ => None,
    };
    let (state, planned, loads, in_use) = (inner.state.name(), inner.needed, inner.loads, inner.users);
    let idle_seconds = if in_use > 0 { 0.0 } else { inner.used.elapsed().as_secs_f64() };
    drop(inner);
    let waiting = *slot.waiting.borrow();
    let ledger = engine.map(|engine| engine.report().into());
    Part { model: slot.name(), state, planned_bytes: planned, loads, in_use, waiting, idle_seconds, ledger }
}

/// `GET /v1/memory`.
pub(super) async fn memory(State(registry): State<Arc<Registry>>) -> Response {
    let models = registry.loaded();
    let whole = with_http(registry.loader.report(&engines(&models)), &registry.server.bytes);
    json(&Memory { whole, models: registry.slots.iter().map(part).collect() }, None)
}

/// The status and its models.
#[derive(Serialize)]
struct Statuses<'a> {
    #[serde(flatten)]
    whole: Status,
    models: Vec<Part<'a>>,
}

/// `GET /v1/status`.
pub(super) async fn status(State(registry): State<Arc<Registry>>) -> Response {
    let models = registry.loaded();
    let engines = engines(&models);
    let report = with_http(registry.loader.report(&engines), &registry.server.bytes);
    // A request without a model name goes to the first model.
    let whole = Status::of(&registry.server, registry.slots[0].name().to_owned(), &engines, report);
    json(&Statuses { whole, models: registry.slots.iter().map(part).collect() }, None)
}

/// `GET /metrics`.
pub(super) async fn metrics(State(registry): State<Arc<Registry>>, headers: HeaderMap) -> ApiResult<Response> {
    let models = registry.loaded();
    let engines = engines(&models);
    let (whole, shared) = (registry.loader.report(&engines), registry.loader.shared_report(&engines));
    let shared = shared.components.into_iter().filter(|row| row.planned_bytes > 0).collect();
    page(
        Exposition::of(&headers),
        &registry.server,
        whole,
        shared,
        &models.iter().map(|state| &**state).collect::<Vec<_>>(),
    )
}

#[derive(Serialize)]
struct Caches<'a> {
    object: &'static str,
    models: Vec<Cache<'a>>,
}

#[derive(Serialize)]
struct Cache<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<CacheReport>,
    #[serde(rename = "cache")]
    now: CacheReport,
}

/// `GET /v1/cache`: the cache of each loaded model.
pub(super) async fn cache(State(registry): State<Arc<Registry>>) -> Response {
    let models = registry.loaded();
    let of = |state| Cache { model: label(state), before: None, now: state.served.engine.cache_report() };
    json(&Caches { object: "cache", models: models.iter().map(|state| of(&**state)).collect() }, None)
}

fn label(state: &ModelState) -> &str {
    state.label.as_deref().unwrap_or_default()
}

/// `DELETE /v1/cache`: clears the cache of every loaded model, and answers when this is done.
pub(super) async fn clear(State(registry): State<Arc<Registry>>) -> ApiResult<Response> {
    let loaded = registry.loaded();
    let mut models = Vec::new();
    for state in &loaded {
        match timeout(CLEAR_TIMEOUT, state.served.engine.clear_cache()).await {
            Ok(Some((before, now))) => models.push(Cache { model: label(state), before: Some(before), now }),
            // The model was unloaded meanwhile, and its cache with it.
            Ok(None) => {}
            Err(_) => {
                let message = format!("`{}` is still busy with a step; its cache is cleared after it", label(state));
                return Err(ApiError::unavailable(message, 5));
            }
        }
    }
    Ok(json(&Caches { object: "cache.cleared", models }, None))
}
