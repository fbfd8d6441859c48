//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod blocks;
mod content;
mod error;
pub(crate) mod request;
mod stream_writer;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use plimsoll_engine::Pin;
use serde::Serialize;

use crate::conversation::active::Usage;
use crate::conversation::choices::collect;
use crate::conversation::stream;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::json::json;
use crate::state::model::ModelState;

pub(crate) use blocks::input;
pub(crate) use error::{body as error_body, owns, reshape};

/// The versions of the API. They differ in the fields that are refused: the newer one has no `temperature`, `top_p` and `top_k`. This
/// server accepts these fields in both versions.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// `POST /v1/messages`.
pub(crate) async fn create(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    check_version(request.headers())?;
    let parsed = state.on_body(request, |body, state| {
        let (request, caches) = request::parse(&body.bytes, state)?;
        let held = body.keep(request.bytes())?;
        Ok((request, caches, held))
    });
    let (request, caches, held) = parsed.await?;
    let submission = request.prepare_on_worker(&state, held).await?;
    let mut active = submission.start(&state, state.server.ids.named("msg"), "messages").await?;
    if active.submission.common.stream {
        let writer = stream_writer::MessageStream::new(&active, caches);
        return Ok(stream::response(active, writer));
    }
    let mut collected = collect(&mut active).await?;
    // The API has one choice only.
    let only = collected.pop().ok_or_else(|| ApiError::internal("the engine gave no answer"))?;
    Ok(blocks::whole(active, caches, only))
}

#[derive(Serialize)]
struct Count {
    input_tokens: usize,
}

/// `POST /v1/messages/count_tokens`: the number of tokens in the prompt that the same fields make at `/v1/messages`.
pub(crate) async fn count_tokens(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    check_version(request.headers())?;
    let parsed = state.on_body(request, |body, state| {
        let conversation = request::count(&body.bytes, state)?;
        let held = body.keep(conversation.bytes())?;
        Ok((conversation, held))
    });
    let (conversation, held) = parsed.await?;
    Ok(json(&Count { input_tokens: conversation.count(&state, held).await? }, None))
}

/// Checks the API version. `anthropic-beta` needs no check: the fields that a beta adds to a body are refused one by one.
fn check_version(headers: &HeaderMap) -> ApiResult<()> {
    match headers.get("anthropic-version").map(|version| version.to_str().unwrap_or("")) {
        None => Ok(()),
        Some(known) if VERSIONS.contains(&known) => Ok(()),
        Some(other) => {
            let message = format!("anthropic-version is `{}`; this server has {}", quote(other), VERSIONS.join(", "));
            // The body has not been read.
            Err(ApiError { close: true, ..ApiError::unsupported("anthropic-version", message) })
        }
    }
}

/// Anthropic's token counts.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Counts {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    cache_creation: Creation,
    output_tokens: u64,
    service_tier: &'static str,
}

/// Tokens that were computed and pinned, by the pin's lifetime.
#[derive(Clone, Copy, Debug, Serialize)]
struct Creation {
    ephemeral_5m_input_tokens: u64,
    ephemeral_1h_input_tokens: u64,
}

impl Counts {
    /// If the client marks prompt parts for caching, `input_tokens` leaves out the tokens found in the cache, and those that entered it up
    /// to the last mark, as Anthropic's does. Otherwise it is the whole prompt, as `count_tokens` reports.
    fn of(usage: Usage, caches: bool, pins: &[Pin]) -> Self {
        let cached = if caches { usage.prompt_tokens_details.cached_tokens } else { 0 };
        let entered = |pins: &mut dyn Iterator<Item = &Pin>| {
            let tokens = pins.map(|pin| pin.tokens as u64).max().unwrap_or(0);
            tokens.min(usage.prompt_tokens).saturating_sub(cached)
        };
        let (all, hour) = (entered(&mut pins.iter()), entered(&mut pins.iter().filter(|pin| pin.minutes > 5)));
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(cached + all),
            cache_creation_input_tokens: all,
            cache_read_input_tokens: cached,
            cache_creation: Creation { ephemeral_5m_input_tokens: all - hour, ephemeral_1h_input_tokens: hour },
            output_tokens: usage.completion_tokens,
            service_tier: "standard",
        }
    }
}
