//! `GET /v1/memory`: the engine's ledger report with the HTTP side's budget in it, as one JSON page.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::EngineHandle;
use plimsoll_engine::report::{LedgerReport, Share};

use crate::http::budget::ByteBudget;
use crate::http::json::json;
use crate::state::model::ModelState;

/// Reads everything now.
pub(crate) fn report(engine: &EngineHandle, http: &ByteBudget) -> LedgerReport {
    with_http(engine.report(), http)
}

/// A report with the HTTP side's budget in it.
pub(crate) fn with_http(mut report: LedgerReport, http: &ByteBudget) -> LedgerReport {
    report.pools.http_bytes = Some(Share { used: http.used(), total: http.limit() });
    report
}

/// The page.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>) -> Response {
    json(&report(&state.served.engine, &state.server.bytes), None)
}
