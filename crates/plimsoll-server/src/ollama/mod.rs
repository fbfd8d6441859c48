//! Ollama's API below `/api`, so that its clients work unchanged. `/api/chat` and `/api/generate` are here, the routes about models in
//! `catalog`, embeddings in `pooling`.
//!
//! A body becomes the same [`ChatRequest`](crate::conversation::ChatRequest) or [`Submission`](crate::conversation::submission::Submission)
//! as at `/v1`. Only fields, answers and errors have Ollama's form: streams are lines of JSON, `stream` is on by default, durations are in
//! nanoseconds.

pub(crate) mod catalog;
mod error;
mod messages;
pub(crate) mod options;
pub(crate) mod request;
mod respond;
mod stream_writer;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::clock::Clock;
use crate::conversation::stream;
use crate::http::caller::Caller;
use crate::http::error::ApiResult;
use crate::state::model::ModelState;
use request::Work;
use respond::{Reply, loaded};

pub(crate) use error::{broken, owns, reshape};

/// The two routes that generate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Generate,
}

impl Route {
    /// Returns the name in logs and traces.
    fn name(self) -> &'static str {
        match self {
            Self::Chat => "ollama_chat",
            Self::Generate => "ollama_generate",
        }
    }
}

/// Returns whether the route at `path` streams by default.
pub(crate) fn streams_by_default(path: &str) -> bool {
    matches!(path, "/api/chat" | "/api/generate" | "/api/pull")
}

/// `POST /api/chat`.
pub(crate) async fn chat(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    generation(&state, request, Route::Chat).await
}

/// `POST /api/generate`.
pub(crate) async fn generate(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    generation(&state, request, Route::Generate).await
}

async fn generation(state: &Arc<ModelState>, request: Request, route: Route) -> ApiResult<Response> {
    let clock = Clock::new(Caller::current().arrived());
    let asked = state.on_body(request, move |body, state| {
        let work = match route {
            Route::Chat => request::chat(&body.bytes, state)?,
            Route::Generate => request::generate(&body.bytes, state)?,
        };
        let held = body.keep(work.bytes())?;
        Ok((work, held))
    });
    let (work, held) = asked.await?;
    let submission = match work {
        Work::Load { model, stream } => return Ok(loaded(route, &model, stream)),
        Work::Turn(turn) => turn.prepare_on_worker(state, held).await?,
        Work::Text(mut submission) => {
            submission.held_prompt = Some(held);
            *submission
        }
    };
    let mut active = submission.start(state, state.server.ids.request("ollama"), route.name()).await?;
    if active.submission.common.stream {
        let writer = stream_writer::Stream::new(route, &active, clock);
        return Ok(stream::response(active, writer));
    }
    let mut reply = Reply::new(&active, clock);
    active.each(|active, _, delta| reply.take(active, delta)).await?;
    Ok(reply.whole(route, active))
}
