//! `GET /health`, `/ready` and `/version`: whether the server is alive, whether it can produce a token, and its version.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::EngineHandle;
use serde::Serialize;

use crate::http::error::{ApiError, ApiResult};
use crate::http::json::json;
use crate::state::model::ModelState;
use crate::state::server::ServerPhase;

#[derive(Serialize)]
struct Healthy {
    status: &'static str,
    steps: u64,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

/// 200 if the engine has made progress lately or had nothing to do; otherwise 503 with the reason.
pub(crate) async fn health(State(state): State<Arc<ModelState>>) -> ApiResult<Response> {
    let engine = &state.served.engine;
    if !engine.healthy() {
        let limit = engine.stall_limit().as_secs_f32();
        let message = format!("the engine has stopped or made no progress for {limit} s");
        return Err(ApiError::unavailable(message, 5));
    }
    Ok(healthy(&state, "healthy"))
}

/// 200 if the server takes new requests: it is healthy and not shutting down.
pub(crate) async fn ready(State(state): State<Arc<ModelState>>) -> ApiResult<Response> {
    if state.served.engine.draining() || *state.server.phase.borrow() != ServerPhase::Serving {
        return Err(ApiError::shutting_down());
    }
    health(State(Arc::clone(&state))).await?;
    Ok(healthy(&state, "ready"))
}

fn healthy(state: &ModelState, status: &'static str) -> Response {
    healthy_page(std::iter::once(&state.served.engine), status)
}

/// Returns the answer of a server whose engines are all healthy. Callers check that first.
pub(crate) fn healthy_page<'a>(engines: impl Iterator<Item = &'a EngineHandle>, status: &'static str) -> Response {
    let steps = engines.map(|engine| engine.status().steps.load(std::sync::atomic::Ordering::Relaxed)).sum();
    json(&Healthy { status, steps }, None)
}

/// Returns the version of this build.
pub(crate) async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") }, None)
}
