//! `DELETE /v1/requests/{id}`: ends a running request.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::json::json;
use crate::http::path::Name;
use crate::state::server::ServerState;

#[derive(Serialize)]
struct Cancelled<'a> {
    id: &'a str,
    object: &'static str,
    cancelled: usize,
}

/// The handler.
pub(crate) async fn cancel(State(state): State<Arc<ServerState>>, Name(id): Name) -> ApiResult<Response> {
    match state.running.cancel(&id, Caller::current().key) {
        0 => {
            let message = format!("no request `{}` is running here; it may have ended", quote(&id));
            let error = ApiError::new(StatusCode::NOT_FOUND, message);
            Err(ApiError { code: Some("request_not_found"), param: Some("id".into()), ..error })
        }
        cancelled => Ok(json(&Cancelled { id: &id, object: "request.cancelled", cancelled }, None)),
    }
}
