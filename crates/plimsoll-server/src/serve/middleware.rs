//! Runs around every route: request id, API key, rate limit, response headers, panic handling. It does not read the
//! body.

use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;

use crate::http::caller::{CALLER, Caller};
use crate::http::error::{ApiError, ApiResult};
use crate::http::rates::{ClientId, RateBuckets};
use crate::http::trace_parent::Parent;
use crate::http::unknown::{self, Unknown};
use crate::messages;
use crate::ollama;
use crate::state::request_log;
use crate::state::server::ServerState;
use crate::transcriptions;

/// The address of the connection's peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub IpAddr);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest `x-request-id` that is echoed, in bytes.
const REQUEST_ID_BYTES: usize = 128;

/// Checks a request, runs its handler and counts the answer.
pub(crate) async fn handle_request(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let origins = &state.config.origins;
    let reader = origins.reader(request.headers());
    let [anthropics, ollamas] = [messages::owns, ollama::owns].map(|owns| owns(request.uri().path()));
    let arrived = Instant::now();
    let path: Arc<str> = request.extensions().get::<MatchedPath>().map_or("other", |path| path.as_str()).into();
    let (id, id_check) = request_id(&state, &request);
    let mut rate_buckets = None;
    let logged = Arc::new(AtomicBool::new(false));
    let needs_model = needs_model(request.method(), &path);
    let checked = id_check.and_then(|()| check_request(&state, &request, &path, &id, &mut rate_buckets));
    let unknown = Unknown::new(state.config.unknown_fields);
    let complete = |caller| Caller {
        since: Some(arrived),
        logged: Arc::clone(&logged),
        unknown: Some(Arc::clone(&unknown)),
        ..caller
    };
    let checked = checked.map(complete);
    let mut response = match (origins.preflight(request.method(), request.headers()), checked) {
        (Some(answer), _) => answer,
        (None, Err(error)) => {
            state.metrics.turned_away(error.code.unwrap_or("other"));
            error.into_response()
        }
        (None, Ok(caller)) => {
            // A panic while an answer is written fails this answer only, not the connection.
            let answer = AssertUnwindSafe(CALLER.scope(caller, next.run(request))).catch_unwind().await;
            let answer = answer.unwrap_or_else(|_| state.panicked("answering").into_response());
            // Counted before the answer is reshaped, in the same metric as the engine's own refusals.
            state.invalid.iter().filter(|_| needs_model).for_each(|invalid| ApiError::count_invalid(&answer, invalid));
            answer
        }
    };
    let refused = response.status().is_client_error() || response.status().is_server_error();
    if refused && !logged.load(Ordering::Relaxed) {
        request_log::refused(&response, &id, &path);
    }
    if anthropics {
        response = messages::reshape(response, &id);
    } else if ollamas {
        response = ollama::reshape(response);
    }
    state.metrics.answered(&path, response.status().as_u16());
    let headers = response.headers_mut();
    rate_buckets.into_iter().for_each(|buckets| buckets.mark(headers));
    origins.mark(reader, headers);
    headers.insert(REQUEST_ID, id);
    let (count, names) = unknown.told();
    state.metrics.unknown_fields.inc_by(count);
    names.into_iter().for_each(|names| drop(headers.insert(unknown::HEADER, names)));
    response
}

/// Returns the client's id, or a new one. An id that cannot be echoed gives an error with a new id.
fn request_id(state: &ServerState, request: &Request) -> (HeaderValue, ApiResult<()>) {
    let ours = || HeaderValue::try_from(state.ids.request("req")).unwrap_or(HeaderValue::from_static("req"));
    match request.headers().get(&REQUEST_ID) {
        Some(id) if id.len() > REQUEST_ID_BYTES || id.to_str().is_err() => {
            let message = format!("x-request-id must be at most {REQUEST_ID_BYTES} visible ASCII characters");
            (ours(), Err(ApiError { close: true, ..ApiError::invalid("x-request-id", message) }))
        }
        Some(id) => (id.clone(), Ok(())),
        None => (ours(), Ok(())),
    }
}

/// A POST route that runs no model.
const CANCEL_PATH: &str = "/v1/responses/{id}/cancel";

/// Returns whether a request needs a model. Unknown paths share the name `other`.
fn needs_model(method: &Method, path: &str) -> bool {
    method == Method::POST && path != CANCEL_PATH && path != "other"
}

/// Checks host and key. A POST, which may cost work, takes one request from its client's rate limit.
fn check_request(
    state: &ServerState,
    request: &Request,
    path: &Arc<str>,
    id: &HeaderValue,
    rate_buckets: &mut Option<Arc<RateBuckets>>,
) -> ApiResult<Caller> {
    state.hosts.check(request.version(), request.headers())?;
    let key = state.config.api_keys.check(request.headers(), path)?;
    // A browser sends these for any page without a preflight request: one has no body, the others are forms.
    if [CANCEL_PATH, transcriptions::PATH, transcriptions::TRANSLATIONS].contains(&&**path)
        && state.config.origins.foreign(request.headers())
    {
        let message = "scripts of this origin may not do this; --allowed-origins names those that may";
        return Err(ApiError::new(StatusCode::FORBIDDEN, message));
    }
    if request.method() == Method::POST && &**path != CANCEL_PATH {
        let peer = request.extensions().get::<Peer>().map(|peer| ClientId::address(peer.0));
        let now = Instant::now();
        *rate_buckets = key.map(ClientId::Key).or(peer).and_then(|id| state.rates.buckets(id, now));
        rate_buckets.as_ref().map_or(Ok(()), |buckets| buckets.take_request(now))?;
    }
    let request_id = id.to_str().unwrap_or("").into();
    let parent = state.tracer.as_ref().and_then(|_| Parent::of(request.headers()));
    Ok(Caller {
        request_id,
        endpoint: Arc::clone(path),
        key,
        rate_buckets: rate_buckets.clone(),
        parent,
        ..Caller::default()
    })
}
