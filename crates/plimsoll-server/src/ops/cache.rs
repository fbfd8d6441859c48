//! `GET /v1/cache`: the contents and counters of the prefix cache. `DELETE /v1/cache`: clears it before it answers.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::{CacheReport, SavedPrefix};
use serde::Serialize;
use tokio::time::timeout;

use crate::http::error::{ApiError, ApiResult};
use crate::http::json::json;
use crate::state::model::ModelState;

/// The longest wait for a step that is running.
pub(crate) const CLEAR_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    report: CacheReport,
    /// The prefixes saved under a name, with a cache on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<Vec<SavedPrefix>>,
}

#[derive(Serialize)]
struct Cleared {
    object: &'static str,
    before: CacheReport,
    after: CacheReport,
}

/// Reports the contents and counters of the cache.
pub(crate) async fn stats(State(state): State<Arc<ModelState>>) -> Response {
    let engine = &state.served.engine;
    json(&Report { report: engine.cache_report(), saved: engine.saved_prefixes() }, None)
}

/// Clears the cache, and answers when this is done: the pages are free by then.
pub(crate) async fn clear(State(state): State<Arc<ModelState>>) -> ApiResult<Response> {
    match timeout(CLEAR_TIMEOUT, state.served.engine.clear_cache()).await {
        Ok(Some((before, after))) => Ok(json(&Cleared { object: "cache.cleared", before, after }, None)),
        Ok(None) => Err(ApiError::unavailable("the engine has stopped", 5)),
        Err(_) => Err(ApiError::unavailable("the engine is still busy with a step; the cache is cleared after it", 5)),
    }
}
