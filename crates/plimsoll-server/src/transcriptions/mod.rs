//! `POST /v1/audio/transcriptions`: a transcript of an audio file, by a model that takes audio.
//!
//! The form becomes a conversation of one message: the audio, and the instruction to transcribe it. Qwen3-ASR, which only
//! transcribes, gets the audio alone. Whisper gets a prompt of tokens, and also answers `POST /v1/audio/translations`.
//!
//! | file | job |
//! | --- | --- |
//! | `request` | reads the form |
//! | `whisper` | writes Whisper's prompts, and says which tokens may follow |
//! | `times`, `masks` | the rules of its times, and the tokens they allow |
//! | `windows` | has a clip transcribed window by window, with times |
//! | `segments` | cuts a window's tokens into segments |
//! | `timed`, `subtitles` | write their answers |
//! | `tagged` | takes a language off the beginning of an answer |
//! | `respond` | writes the answers without times |

mod languages;
mod masks;
pub(crate) mod request;
mod respond;
mod segments;
mod subtitles;
mod tagged;
mod timed;
mod times;
mod whisper;
mod windows;

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

/// The route for a transcript in English.
pub(crate) const TRANSLATIONS: &str = "/v1/audio/translations";

/// The kind of transcript that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// A transcript in the language of the audio.
    Transcribe,
    /// A transcript in English.
    Translate,
}

impl Task {
    fn name(self) -> &'static str {
        if self == Task::Translate { "translate" } else { "transcribe" }
    }

    /// Returns the name of the task's token in Whisper's vocabulary.
    fn token(self) -> &'static str {
        if self == Task::Translate { "<|translate|>" } else { "<|transcribe|>" }
    }
}

/// Returns the kind of body that a route takes.
pub(crate) fn body_kind(path: &str) -> BodyKind {
    if [PATH, TRANSLATIONS].contains(&path) { BodyKind::Form } else { BodyKind::Json }
}

/// The handler of transcriptions.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    answer(state, request, Task::Transcribe).await
}

/// The handler of translations.
pub(crate) async fn translate(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    answer(state, request, Task::Translate).await
}

async fn answer(state: Arc<ModelState>, request: Request, task: Task) -> ApiResult<Response> {
    let headers = request.headers().clone();
    let parsed = state.on_body_of(BodyKind::Form, request, move |body, state| {
        let asked = request::parse(&body.bytes, &form::boundary(&headers)?, task, state)?;
        let held = body.keep(asked.chat.bytes())?;
        Ok((asked, held))
    });
    let (asked, held) = parsed.await?;
    let request::Transcription { chat, format, language, heading, grammar, windows } = asked;
    let mut submission = chat.prepare_on_worker(&state, held).await?;
    let form = respond::Form { task, format, heading, language };
    if let Some(prompts) = windows.filter(|_| submission.measured.iter().any(|medium| medium.windowed.is_some())) {
        return timed::answer(&state, submission, prompts, form).await;
    }
    submission.grammar = grammar;
    let audio = respond::AudioLength::of(&state, &submission);
    let mut active = submission.start(&state, state.server.ids.request("transcription"), "transcriptions").await?;
    if active.submission.common.stream {
        let writer = respond::Stream::new(&active, audio, heading);
        return Ok(stream::response(active, writer));
    }
    let collected = collect(&mut active).await?;
    Ok(respond::whole(active, collected, &form, audio))
}
