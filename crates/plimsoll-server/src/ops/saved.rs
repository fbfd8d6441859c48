//! `POST /v1/cache/save`, `POST /v1/cache/load`, `DELETE /v1/cache/saved/{name}`: prefixes that are kept on disk under a name.
//!
//! Both posts run the prompt for one token that is not part of the answer. A saved prefix thus enters and leaves the cache like any other.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Pin, SaveError, SavePrefixError};
use serde::Serialize;

use crate::conversation::choices::collect;
use crate::conversation::params::Common;
use crate::conversation::submission::Submission;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::http::json::json;
use crate::http::path::Name;
use crate::ops::tokenize::{Input, check_model};
use crate::state::model::ModelState;

/// The most characters of a name.
const NAME_CHARS_MAX: usize = 64;

#[derive(Serialize)]
struct Answer {
    object: &'static str,
    name: String,
    /// Tokens of the prompt.
    tokens: usize,
    /// Tokens of the prompt that came from the cache.
    cached_tokens: u64,
}

#[derive(Serialize)]
struct Removed {
    object: &'static str,
    name: String,
}

struct SaveRequest {
    name: String,
    input: Input,
    add_special: Option<bool>,
}

/// Computes a prompt and keeps its pages on disk under a name.
pub(crate) async fn save(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let parsed = state.on_body(request, |body, state| {
        let mut fields = Fields::of_body(&body.bytes)?;
        state.check_generates()?;
        check_model(&mut fields, state)?;
        let name = name(fields.required("name")?)?;
        let add_special = fields.take::<bool>("add_special_tokens")?;
        let input = Input::take(&mut fields, state)?;
        fields.finish()?;
        if input.has_media() {
            let message = "messages has media: a saved prefix holds text only";
            return Err(ApiError::unsupported("messages", message));
        }
        let held = body.keep(input.bytes())?;
        Ok((SaveRequest { name, input, add_special }, held))
    });
    let (SaveRequest { name, mut input, add_special }, mut held) = parsed.await?;
    input.fetch(&state, &mut held).await?;
    let own = Arc::clone(&state);
    let (_, ids) = state.server.on_text_worker(move || input.ids(&own, add_special)).await?;
    let label = name.clone();
    let (engine, prompt) = (state.served.engine.clone(), ids.clone());
    let saving = move || engine.save_prefix(&label, &prompt).map_err(refused);
    state.server.on_text_worker(saving).await?;
    let pin = Pin { tokens: ids.len(), minutes: Pin::SAVED };
    let ran = run(&state, ids, Some(pin), held).await;
    if ran.is_err() {
        forget(&state, name.clone()).await?;
    }
    let (tokens, cached_tokens) = ran?;
    Ok(json(&Answer { object: "cache.saved", name, tokens, cached_tokens }, None))
}

/// Brings a saved prefix into memory: reads its pages, and computes the missing ones.
pub(crate) async fn load(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let parsed = state.on_body(request, |body, state| {
        let mut fields = Fields::of_body(&body.bytes)?;
        state.check_generates()?;
        check_model(&mut fields, state)?;
        let name = name(fields.required("name")?)?;
        fields.finish()?;
        Ok((name, body.keep(0)?))
    });
    let (name, held) = parsed.await?;
    let (engine, label) = (state.served.engine.clone(), name.clone());
    let loading = move || match engine.saved_prefixes() {
        None => Err(refused(SavePrefixError::Off)),
        Some(_) => engine.load_prefix(&label).ok_or_else(|| unknown(&label)),
    };
    let ids = state.server.on_text_worker(loading).await?;
    let (tokens, cached_tokens) = run(&state, ids, None, held).await?;
    Ok(json(&Answer { object: "cache.loaded", name, tokens, cached_tokens }, None))
}

/// Removes a name. Its files are then evicted like any others.
pub(crate) async fn remove(State(state): State<Arc<ModelState>>, Name(label): Name) -> ApiResult<Response> {
    let name = name(label)?;
    match forget(&state, name.clone()).await? {
        true => Ok(json(&Removed { object: "cache.removed", name }, None)),
        false => Err(unknown(&name)),
    }
}

async fn forget(state: &Arc<ModelState>, name: String) -> ApiResult<bool> {
    let engine = state.served.engine.clone();
    state.server.on_text_worker(move || Ok(engine.remove_prefix(&name))).await
}

/// Checks a name: letters, digits, `.`, `_` and `-`.
fn name(name: String) -> ApiResult<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=NAME_CHARS_MAX).contains(&name.len()) && name.chars().all(good) {
        return Ok(name);
    }
    let message =
        format!("name is `{}`: use 1 to {NAME_CHARS_MAX} letters, digits, dots, dashes or underscores", quote(&name));
    Err(ApiError::invalid("name", message))
}

fn unknown(name: &str) -> ApiError {
    let message = format!("no prefix is saved as `{}`: GET /v1/cache lists those that are", quote(name));
    ApiError {
        code: Some("prefix_not_found"),
        param: Some("name".into()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

fn refused(error: SavePrefixError) -> ApiError {
    let message = error.to_string();
    match error {
        SavePrefixError::Off => ApiError::unsupported("name", message),
        SavePrefixError::Budget { .. } | SavePrefixError::Refused(SaveError::Full | SaveError::NoRoom(_)) => {
            ApiError { code: Some("cache_full"), ..ApiError::invalid("name", message) }
        }
        SavePrefixError::Refused(SaveError::Failed(_)) => ApiError::unavailable(message, 5),
    }
}

/// Runs a prompt for one token. Returns the number of its tokens, and of those that came from the cache.
async fn run(state: &Arc<ModelState>, ids: Vec<u32>, pin: Option<Pin>, mut held: Held) -> ApiResult<(usize, u64)> {
    let tokens = ids.len();
    let model = state.served.names[0].clone();
    let common =
        Common { max_tokens: Some(1), ignore_eos: true, ..Common::new(model, false, SamplingParams::greedy()) };
    let mut submission = Submission::of_text(common, ids, state)?;
    submission.pins = pin.into_iter().collect();
    held.become_bytes(submission.bytes())?;
    submission.held_prompt = Some(held);
    let mut active = submission.start(state, state.server.ids.request("cache"), "cache").await?;
    collect(&mut active).await?;
    Ok((tokens, active.usage().prompt_tokens_details.cached_tokens))
}
