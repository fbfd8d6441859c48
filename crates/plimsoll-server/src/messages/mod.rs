//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod blocks;
mod content;
mod error;
pub(crate) mod request;
mod shape;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Serialize;

use crate::conversation::active::Usage;
use crate::conversation::choices::collect;
use crate::conversation::{StartedChat, begin, stream};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::json::json;
use crate::state::model::ModelState;

pub(crate) use error::{body as error_body, owns, reshape};

/// The versions of the API. They differ in what is refused: the newer one has no `temperature`, `top_p` and `top_k`. Models here
/// have them, so they work in either.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// `POST /v1/messages`.
pub(crate) async fn create(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    check_version(request.headers())?;
    let asked = state.on_body(request, |body, state| {
        let (ask, caches) = request::parse(&body.bytes, state)?;
        let held = body.keep(ask.bytes())?;
        Ok((ask, caches, held))
    });
    let (ask, caches, held) = asked.await?;
    let (turn, ()) = ask.turn(&state, held, || (0, ())).await?;
    let id = state.server.ids.named("msg");
    let StartedChat { context, mut active_request, held, choices } = begin(&state, id, "messages", turn).await?;
    let answer = blocks::Answer { context, caches };
    if answer.context.draft.common.stream {
        let keep_alive = state.server.config.keep_alive;
        return Ok(stream::response(active_request, shape::Stream::new(answer, held), keep_alive));
    }
    let mut collected = collect(&mut active_request, choices, false).await?;
    let (usage, held) = (active_request.usage(), active_request.all_held(held));
    // One choice was asked for.
    let only = collected.pop().ok_or_else(|| ApiError::internal("the engine gave no answer"))?;
    Ok(blocks::whole(&answer, only, usage, held))
}

#[derive(Serialize)]
struct Count {
    input_tokens: usize,
}

/// `POST /v1/messages/count_tokens`: the tokens of the prompt that the same fields make at `/v1/messages`.
pub(crate) async fn count_tokens(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    check_version(request.headers())?;
    let asked = state.on_body(request, |body, state| {
        let conversation = request::count(&body.bytes, state)?;
        let held = body.keep(conversation.bytes())?;
        Ok((conversation, held))
    });
    let (conversation, held) = asked.await?;
    Ok(json(&Count { input_tokens: conversation.count(&state, held).await? }, None))
}

/// `anthropic-beta` needs no check: what a beta adds to a body is refused field by field.
fn check_version(headers: &HeaderMap) -> ApiResult<()> {
    match headers.get("anthropic-version").map(|version| version.to_str().unwrap_or("")) {
        None => Ok(()),
        Some(known) if VERSIONS.contains(&known) => Ok(()),
        Some(other) => {
            let message = format!("anthropic-version is `{}`; this server has {}", quote(other), VERSIONS.join(", "));
            // Nothing of the body has been read.
            Err(ApiError { close: true, ..ApiError::unsupported("anthropic-version", message) })
        }
    }
}

/// Anthropic's counts.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Counts {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
    service_tier: &'static str,
}

impl Counts {
    /// `input_tokens` leaves out what came from the cache, as Anthropic's does, where the client marks what it wants cached;
    /// one that marks nothing sees the whole prompt, which is what `count_tokens` says.
    fn of(usage: Usage, caches: bool) -> Self {
        let cached = if caches { usage.prompt_tokens_details.cached_tokens } else { 0 };
        Self {
            input_tokens: usage.prompt_tokens - cached.min(usage.prompt_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
            service_tier: "standard",
        }
    }
}
