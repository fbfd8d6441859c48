//! OpenAI's Responses API: `POST /v1/responses`, and the routes for a response afterwards.

mod background;
mod items;
mod mcp_items;
mod mcp_object;
mod mcp_run;
mod mcp_tools;
mod object;
mod prompt;
mod references;
pub(crate) mod request;
mod stream_writer;
mod tools;
mod unreported;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawQuery, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use self::request::ParsedBody;
use self::stream_writer::Responding;
use crate::conversation::active::ActiveRequest;
use crate::conversation::stream;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult, CANCELLED, quote};
use crate::http::json::{json, json_text};
use crate::http::path::Name;
use crate::http::sse::Events;
use crate::state::background::ModelUse;
use crate::state::model::ModelState;
use crate::state::response_store::Kept;
use crate::state::server::ServerState;

/// A cancelled response has this long to end: a stream ends when its client reads again.
const CANCEL_GRACE: Duration = Duration::from_secs(5);

/// The beginning of every response id.
const PREFIX: &str = "resp_";

/// Items of one page of a list by default, and at most.
const PAGE: usize = 20;
const PAGE_MAX: usize = 100;

/// `POST /v1/responses`.
pub(crate) async fn create(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let key = Caller::current().key;
    let model = request.extensions().get::<ModelUse>().cloned();
    let parsed = state.on_body(request, move |body, state| request::parse(body, state, key)).await?;
    let permit = parsed.background.then(|| state.server.background.take()).transpose()?;
    let id = format!("{PREFIX}{:016x}{:016x}", state.server.ids.next(), state.server.ids.next());
    let (mut request, mut responding) = begin(parsed, &state, id).await?;
    if let Some(permit) = permit {
        return background::start(request, responding, background::Place { permit, model });
    }
    if request.submission.common.stream {
        return Ok(stream::response(request, responding));
    }
    // The answer is not streamed: events are not sent.
    let mut nowhere = Events::default();
    loop {
        let error = match responding.advance(&mut request, &mut nowhere).await {
            None => continue,
            Some(Ok(())) => None,
            Some(Err(error)) if error.code == Some(CANCELLED) => Some(error),
            Some(Err(error)) => {
                responding.gone(&request);
                return Err(error);
            }
        };
        let text = responding.finish(&request, error.as_ref(), &mut nowhere);
        return Ok(json_text(text, request.take_held()));
    }
}

/// Submits the request. If MCP servers are asked first, prepares the request to wait for them.
async fn begin(parsed: ParsedBody, state: &Arc<ModelState>, id: String) -> ApiResult<(ActiveRequest, Responding)> {
    if parsed.waits() {
        let request::Waiting { submission, echo, items, run } = parsed.wait(state).await?;
        let active = submission.start(state, id, "responses").await?;
        let responding = Responding::new(&active, echo, items).with_mcp(run);
        return Ok((active, responding));
    }
    let (submission, echo, items) = parsed.prepare(state).await?;
    let active = submission.start(state, id, "responses").await?;
    let responding = Responding::new(&active, echo, items);
    Ok((active, responding))
}

#[derive(Serialize)]
struct Count {
    object: &'static str,
    input_tokens: usize,
}

/// `POST /v1/responses/input_tokens`: the number of tokens in the prompt that the same fields make at `/v1/responses`. MCP servers are
/// asked for their tools in the same way.
pub(crate) async fn input_tokens(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let key = Caller::current().key;
    let parsed = state.on_body(request, move |body, state| request::count(body, state, key));
    let (mut conversation, mut held, mcp) = parsed.await?;
    if let Some(asked) = mcp {
        mcp_run::add_tools(&state, asked, &mut conversation, &mut held).await?;
    }
    let input_tokens = conversation.count(&state, held).await?;
    Ok(json(&Count { object: "response.input_tokens", input_tokens }, None))
}

/// `GET /v1/responses/{id}`; with `stream`, the events of a response in the background.
pub(crate) async fn get(
    State(state): State<Arc<ServerState>>,
    Name(id): Name,
    RawQuery(query): RawQuery,
) -> ApiResult<Response> {
    let (mut streams, mut from) = (false, None);
    for (name, value) in pairs(query.as_deref()) {
        match (name, value) {
            ("stream", "true" | "false") => streams = value == "true",
            ("stream", _) => return Err(ApiError::invalid("stream", "stream must be true or false")),
            ("starting_after", _) => {
                let number = value.parse::<u32>().map_err(|_| {
                    ApiError::invalid("starting_after", "starting_after must be the sequence_number of an event")
                })?;
                from = Some(u64::from(number) + 1);
            }
            ("include_obfuscation", "false") => {}
            (other, _) => {
                let message = format!("the query's `{}` has no effect here", quote(other));
                return Err(ApiError::unsupported(quote(other), message));
            }
        }
    }
    if streams {
        return background::follow(&state, id, Caller::current().key, from.unwrap_or(0));
    }
    if from.is_some() {
        return Err(ApiError::invalid("starting_after", "starting_after needs stream=true"));
    }
    sent(&state, state.responses.look(&id, Caller::current().key).ok_or_else(|| unknown(&id))?)
}

#[derive(Serialize)]
struct Deleted<'a> {
    id: &'a str,
    object: &'static str,
    deleted: bool,
}

/// `DELETE /v1/responses/{id}`.
pub(crate) async fn delete(State(state): State<Arc<ServerState>>, Name(id): Name) -> ApiResult<Response> {
    let key = Caller::current().key;
    if !state.responses.remove(&id, key) {
        if state.responses.look(&id, key).is_some() {
            let message =
                "the response is still being made: POST /v1/responses/{id}/cancel ends it, then it can be deleted";
            let error = ApiError::new(StatusCode::CONFLICT, message);
            return Err(ApiError { code: Some("response_in_progress"), ..error });
        }
        return Err(unknown(&id));
    }
    Ok(json(&Deleted { id: &id, object: "response", deleted: true }, None))
}

/// `POST /v1/responses/{id}/cancel`: ends a running response and returns it with its final status. An ended response stays unchanged.
pub(crate) async fn cancel(State(state): State<Arc<ServerState>>, Name(id): Name) -> ApiResult<Response> {
    if !id.starts_with(PREFIX) {
        return Err(unknown(&id));
    }
    let key = Caller::current().key;
    let end = state.responses.wait(&id);
    let running = state.running.cancel(&id, key) > 0;
    if let Some(kept) = state.responses.get(&id, key) {
        return sent(&state, kept.response);
    }
    if !running {
        return Err(unknown(&id));
    }
    match timeout(CANCEL_GRACE, end).await {
        Ok(Ok(response)) => sent(&state, response),
        Ok(Err(_)) => Err(unknown(&id)),
        Err(_) => {
            let message = "the response was cancelled; it ends when its client reads on, or has gone with it";
            Err(ApiError { code: Some("timeout"), ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, message) })
        }
    }
}

#[derive(Serialize)]
struct Page<'a> {
    object: &'static str,
    data: &'a [&'a RawValue],
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// `GET /v1/responses/{id}/input_items`: all items before the output, the newest first unless `order` says otherwise.
pub(crate) async fn input_items(
    State(state): State<Arc<ServerState>>,
    Name(id): Name,
    RawQuery(query): RawQuery,
) -> ApiResult<Response> {
    let (mut after, mut limit, mut newest_first) = (None, PAGE, true);
    for (name, value) in pairs(query.as_deref()) {
        match name {
            "after" => after = Some(value),
            "limit" => {
                let number = value.parse().ok().filter(|n| (1..=PAGE_MAX).contains(n));
                limit = number.ok_or_else(|| {
                    ApiError::invalid("limit", format!("limit must be a number from 1 to {PAGE_MAX}"))
                })?;
            }
            "order" if value == "asc" || value == "desc" => newest_first = value == "desc",
            "order" => return Err(ApiError::invalid("order", "order must be asc or desc")),
            other => {
                let message = format!("the query's `{}` has no effect here", quote(other));
                return Err(ApiError::unsupported(quote(other), message));
            }
        }
    }
    let kept = kept(&state, &id)?;
    let bytes = 3 * kept.items.len() as u64;
    state.bytes.ever_holds("id", bytes)?;
    let held = state.bytes.hold(bytes)?;
    let text = format!("[{}]", kept.items);
    let mut all: Vec<&RawValue> = serde_json::from_str(&text).map_err(|_| broken())?;
    if newest_first {
        all.reverse();
    }
    let from = match after {
        None => 0,
        Some(after) => {
            let at = all.iter().position(|item| id_of(item).as_deref() == Some(after));
            1 + at.ok_or_else(|| ApiError::invalid("after", format!("no item has the id `{}`", quote(after))))?
        }
    };
    let data = &all[from..(from + limit).min(all.len())];
    let page = Page {
        object: "list",
        data,
        first_id: data.first().and_then(|item| id_of(item)),
        last_id: data.last().and_then(|item| id_of(item)),
        has_more: from + data.len() < all.len(),
    };
    Ok(json(&page, Some(held)))
}

fn id_of(item: &RawValue) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Named {
        id: String,
    }
    serde_json::from_str::<Named>(item.get()).ok().map(|named| named.id)
}

/// Returns the pairs of a query. Ids and numbers need no decoding.
fn pairs(query: Option<&str>) -> impl Iterator<Item = (&str, &str)> {
    let all = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    all.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn kept(state: &ServerState, id: &str) -> ApiResult<Kept> {
    state.responses.get(id, Caller::current().key).ok_or_else(|| unknown(id))
}

/// Returns a stored text as an answer. The byte budget is charged until it is sent.
fn sent(state: &ServerState, text: Bytes) -> ApiResult<Response> {
    let held = state.bytes.hold(text.len() as u64)?;
    Ok(json_text(text, Some(held)))
}

fn unknown(id: &str) -> ApiError {
    let message = format!("no response `{}` is stored here; it may have been dropped or deleted", quote(id));
    let error = ApiError::new(StatusCode::NOT_FOUND, message);
    ApiError { code: Some("response_not_found"), param: Some("response_id".into()), ..error }
}

fn broken() -> ApiError {
    ApiError::internal("a stored response cannot be read")
}
