//! A stream that waits for its model: comments keep the connection alive. Then follows the handlers' stream, or an error in the form of its
//! API.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::unfold;
use serde::Serialize;
use tokio::time::timeout;

use super::answer::{Entering, answer, next_bytes};
use super::{InUse, Loaded};
use crate::http::caller::{CALLER, Caller};
use crate::http::error::{ApiError, ApiResult};
use crate::http::sse::{self, Events};
use crate::messages;
use crate::ollama;
use crate::state::server::ServerState;

enum Stage {
    Waiting { server: Arc<ServerState>, caller: Caller, entering: Entering, request: Box<Request> },
    Passing(Body),
    Over,
}

/// Returns the answer to a streaming request while its model is being loaded.
pub(super) fn response(server: &Arc<ServerState>, entering: Entering, request: Request) -> Response {
    let caller = Caller::current();
    let headers = if ollama::owns(request.uri().path()) { sse::LINE_HEADERS } else { sse::HEADERS };
    let first = Stage::Waiting { server: Arc::clone(server), caller, entering, request: Box::new(request) };
    let stream = unfold(first, |stage| async move {
        let (bytes, stage) = next(stage).await?;
        Some((Ok::<_, Infallible>(bytes), stage))
    });
    (headers, Body::from_stream(stream)).into_response()
}

async fn next(stage: Stage) -> Option<(Bytes, Stage)> {
    let mut body = match stage {
        Stage::Waiting { server, caller, mut entering, request } => {
            let Ok(entered) = timeout(server.config.keep_alive, &mut entering).await else {
                let mut out = Events::default();
                if ollama::owns(request.uri().path()) {
                    out.blank();
                } else {
                    out.comment();
                }
                return Some((out.into_bytes(), Stage::Waiting { server, caller, entering, request }));
            };
            let path = request.uri().path().to_owned();
            let id = Arc::clone(&caller.request_id);
            match begun(&server, caller, entered, *request).await {
                Ok(body) => body,
                Err(error) => return Some((last_words(&path, &id, &error), Stage::Over)),
            }
        }
        Stage::Passing(body) => body,
        Stage::Over => return None,
    };
    let bytes = next_bytes(&mut body).await?;
    Some((bytes, Stage::Passing(body)))
}

/// Returns the body of the model's answer.
async fn begun(
    server: &ServerState,
    caller: Caller,
    entered: ApiResult<(Loaded, InUse)>,
    request: Request,
) -> ApiResult<Body> {
    let (loaded, user) = entered?;
    let answering = CALLER.scope(caller, answer(loaded, user, request));
    let answered = AssertUnwindSafe(answering).catch_unwind().await;
    let mut response = answered.map_err(|_| server.panicked("answering"))?;
    response.extensions_mut().remove::<ApiError>().map_or_else(|| Ok(response.into_body()), Err)
}

/// Returns an error as the last events of a stream of the API at `path`.
fn last_words(path: &str, request_id: &str, error: &ApiError) -> Bytes {
    let mut out = Events::default();
    match path {
        "/v1/responses" => {
            let ApiError { message, param, code, .. } = error;
            out.push_named(
                "error",
                &Broken { kind: "error", code: *code, message, param: param.as_deref(), sequence_number: 0 },
            );
        }
        path if ollama::owns(path) => ollama::broken(error, &mut out),
        path if messages::owns(path) => out.push_text("error", &messages::error_body(error, Some(request_id))),
        _ => {
            out.error(error);
            out.done();
        }
    }
    out.into_bytes()
}

/// The error event of the Responses API.
#[derive(Serialize)]
struct Broken<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    code: Option<&'static str>,
    message: &'a str,
    param: Option<&'a str>,
    sequence_number: u32,
}
