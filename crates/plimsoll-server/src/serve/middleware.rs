//! The door that every request passes, whatever its route: its id, its key, its share of the minute, and what its answer is
//! marked with on the way out. Nothing of a body is read here.

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

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::http::rates::{Client, Who};
use crate::http::unknown::{self, Unknown};
use crate::messages;
use crate::state::request_log;
use crate::state::server::ServerState;

/// The address at the other end of the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub IpAddr);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest `x-request-id` that is echoed.
const REQUEST_ID_BYTES: usize = 128;

/// Lets a request in or turns it away, and counts the answer.
pub(crate) async fn around(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let origins = &state.config.origins;
    let reader = origins.reader(request.headers());
    let anthropics = messages::owns(request.uri().path());
    let arrived = Instant::now();
    let path: Arc<str> = request.extensions().get::<MatchedPath>().map_or("other", |path| path.as_str()).into();
    let (id, known) = request_id(&state, &request);
    let mut client = None;
    let logged = Arc::new(AtomicBool::new(false));
    let asks = asks_a_model(request.method(), &path);
    let admitted = known.and_then(|()| admit(&state, &request, &path, &id, &mut client));
    let unknown = Unknown::new(state.config.unknown_fields);
    let of = |caller| Caller {
        since: Some(arrived),
        logged: Arc::clone(&logged),
        unknown: Some(Arc::clone(&unknown)),
        ..caller
    };
    let admitted = admitted.map(of);
    let mut response = match (origins.preflight(request.method(), request.headers()), admitted) {
        (Some(answer), _) => answer,
        (None, Err(error)) => {
            state.metrics.turned_away(error.code.unwrap_or("other"));
            error.into_response()
        }
        (None, Ok(caller)) => {
            // A panic while an answer is shaped costs this answer, not the connection and those behind it.
            let answer = AssertUnwindSafe(caller.run(next.run(request))).catch_unwind().await;
            let answer = answer.unwrap_or_else(|_| state.panicked("answering").into_response());
            // Before it is reshaped: what is refused before the engine is asked counts beside what the engine refuses.
            state.invalid.iter().filter(|_| asks).for_each(|invalid| ApiError::count_invalid(&answer, invalid));
            answer
        }
    };
    let refused = response.status().is_client_error() || response.status().is_server_error();
    if refused && !logged.load(Ordering::Relaxed) {
        request_log::refused(&response, &id, &path);
    }
    if anthropics {
        response = messages::reshape(response, &id);
    }
    state.metrics.answered(&path, response.status().as_u16());
    let headers = response.headers_mut();
    client.into_iter().for_each(|client| client.mark(headers));
    origins.mark(reader, headers);
    headers.insert(REQUEST_ID, id);
    let (count, names) = unknown.told();
    state.metrics.unknown_fields.inc_by(count);
    names.into_iter().for_each(|names| drop(headers.insert(unknown::HEADER, names)));
    response
}

/// The client's id or one of ours; an error beside one of ours where the client's cannot be echoed.
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

/// What computes nothing, though it is a POST: ending and clearing.
const FREE: [&str; 2] = ["/v1/responses/{id}/cancel", "/v1/cache/clear"];

/// Whether a request asks something of a model. Unknown paths go by one name.
fn asks_a_model(method: &Method, path: &str) -> bool {
    method == Method::POST && !FREE.contains(&path) && path != "other"
}

/// Checks the key, and takes a request out of its bucket where it may cost work: only POST does.
fn admit(
    state: &ServerState,
    request: &Request,
    path: &Arc<str>,
    id: &HeaderValue,
    client: &mut Option<Arc<Client>>,
) -> ApiResult<Caller> {
    state.hosts.admit(request.version(), request.headers())?;
    let key = state.config.api_keys.admit(request.headers(), path)?;
    // A browser sends these for any page without asking first: they have no body.
    if FREE.contains(&&**path) && state.config.origins.foreign(request.headers()) {
        let message = "scripts of this origin may not do this; --allowed-origins names those that may";
        return Err(ApiError::new(StatusCode::FORBIDDEN, message));
    }
    if request.method() == Method::POST && !FREE.contains(&&**path) {
        let peer = request.extensions().get::<Peer>().map(|peer| Who::address(peer.0));
        let now = Instant::now();
        *client = key.map(Who::Key).or(peer).and_then(|who| state.rates.client(who, now));
        client.as_ref().map_or(Ok(()), |client| client.admit(now))?;
    }
    let request_id = id.to_str().unwrap_or("").into();
    Ok(Caller { request_id, endpoint: Arc::clone(path), key, client: client.clone(), ..Caller::default() })
}
