//! `POST /v1/audio/transcriptions`: what is said in an audio file, by a model that takes audio.
//!
//! The form becomes a conversation of one message: the audio, and the instruction to transcribe it. Qwen3-ASR, which only
//! transcribes, gets the audio alone.

mod languages;
pub(crate) mod request;
mod respond;
mod tagged;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::choices::collect;
use crate::conversation::stream;
use crate::http::body::BodyKind;
use crate::http::error::ApiResult;
use crate::http::form;
use crate::state::model::ModelState;

/// The route.
pub(crate) const PATH: &str = "/v1/audio/transcriptions";

/// What bodies a route takes.
pub(crate) fn body_kind(path: &str) -> BodyKind {
    if path == PATH { BodyKind::Form } else { BodyKind::Json }
}

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let headers = request.headers().clone();
    let parsed = state.on_body_of(BodyKind::Form, request, move |body, state| {
        let asked = request::parse(&body.bytes, &form::boundary(&headers)?, state)?;
        let held = body.keep(asked.chat.bytes())?;
        Ok((asked, held))
    });
    let (asked, held) = parsed.await?;
    let request::Transcription { chat, format, language, tagged } = asked;
    let submission = chat.prepare_on_worker(&state, held).await?;
    let heard = respond::Heard::of(&state, &submission);
    let mut request = submission.start(&state, state.server.ids.request("transcription"), "transcriptions").await?;
    if request.submission.common.stream {
        let shape = respond::Stream::new(&request, heard, tagged);
        return Ok(stream::response(request, shape));
    }
    let collected = collect(&mut request).await?;
    Ok(respond::whole(request, collected, (format, tagged), language, heard))
}
