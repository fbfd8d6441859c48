//! The routes of a server.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};

use crate::http::access::PAGE_FILES;
use crate::http::error::{ApiError, quote};
use crate::ollama::catalog;
use crate::ops::models;
use crate::ops::{
    cache, cancel, gateway, health, index, kv_events, memory, metrics, openapi, page, saved, status, tokenize,
};
use crate::serve::middleware;
use crate::state::model::ModelState;
use crate::state::server::ServerState;
use crate::{chat, completions, messages, ollama, pooling, responses, transcriptions};

/// Every route of a server with one model.
pub(crate) fn router(state: Arc<ModelState>) -> Router {
    let pages = Router::new()
        .route("/v1", get(index::handle))
        .route("/v1/", get(index::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(metrics::handle))
        .route("/v1/memory", get(memory::handle))
        .route("/v1/status", get(status::handle))
        .route("/tokenizer_info", get(tokenize::info))
        .route("/api/tags", get(catalog::tags))
        .route("/api/ps", get(catalog::ps))
        .route("/v1/cache", get(cache::stats).delete(cache::clear))
        .route("/v1/cache/save", post(saved::save))
        .route("/v1/cache/load", post(saved::load))
        .route("/v1/cache/saved/{name}", delete(saved::remove))
        .route("/v1/kv_events", get(kv_events::handle))
        .route("/v1/loads", get(gateway::loads))
        .route("/get_load", get(gateway::get_load))
        .route("/server_info", get(gateway::server_info))
        .route("/get_server_info", get(gateway::server_info))
        .route("/model_info", get(gateway::model_info))
        .route("/get_model_info", get(gateway::model_info))
        .with_state(Arc::clone(&state));
    let server = Arc::clone(&state.server);
    with_middleware(server, pages.merge(model_routes(state)))
}

/// The routes of one model.
pub(crate) fn model_routes(state: Arc<ModelState>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/audio/transcriptions", post(transcriptions::handle))
        .route("/v1/audio/translations", post(transcriptions::translate))
        .route("/v1/embeddings", post(pooling::embeddings::handle))
        .route("/v1/rerank", post(pooling::rerank::handle))
        // The paths that Cohere's clients and gateways use.
        .route("/v2/rerank", post(pooling::rerank::handle))
        .route("/rerank", post(pooling::rerank::handle))
        .route("/v1/score", post(pooling::score::handle))
        .route("/score", post(pooling::score::handle))
        .route("/v2/embed", post(pooling::cohere::handle))
        .route("/infill", post(completions::infill::handle))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(pooling::ollama::embed))
        .route("/api/embeddings", post(pooling::ollama::embeddings))
        .route("/api/show", post(catalog::show))
        .route("/api/pull", post(catalog::pull))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .with_state(state)
}

/// Adds the routes without a model and the middleware to these routes.
pub(crate) fn with_middleware(server: Arc<ServerState>, routes: Router) -> Router {
    let own = Router::new()
        .route("/", get(page::index))
        .route(PAGE_FILES, get(page::file))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/requests/{id}", delete(cancel::cancel))
        .route("/version", get(health::version))
        .route("/api/version", get(catalog::version))
        .route("/api/delete", delete(catalog::delete))
        .route("/openapi.json", get(openapi::handle))
        .with_state(Arc::clone(&server));
    own.merge(routes)
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(server, middleware::handle_request))
}

async fn not_found(request: Request) -> ApiError {
    let message = format!("there is nothing at {}", quote(request.uri().path()));
    ApiError { close: true, code: Some("not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} is not allowed at {}", request.method(), quote(request.uri().path()));
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message);
    ApiError { close: true, code: Some("method_not_allowed"), ..error }
}
