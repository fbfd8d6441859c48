//! `GET /v1/memory`: the engine's ledger report with the HTTP side's budget, as one JSON page.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::EngineHandle;
use plimsoll_engine::report::{LedgerReport, Share};

use crate::http::budget::ByteBudget;
use crate::http::json::json;
use crate::state::model::ModelState;

/// Returns the current report.
pub(crate) fn report(engine: &EngineHandle, http: &ByteBudget) -> LedgerReport {
    with_http(engine.report(), http)
}

/// Adds the HTTP side's budget to a report.
pub(crate) fn with_http(mut report: LedgerReport, http: &ByteBudget) -> LedgerReport {
    report.pools.http_bytes = Some(Share { used: http.used(), total: http.limit() });
    report
}

/// The handler of the page.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>) -> Response {
    json(&report(&state.served.engine, &state.server.bytes), None)
}
