//! `POST /v1/completions`: text in, text out.

pub(crate) mod infill;
pub(crate) mod request;
mod respond;
mod stream_writer;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::choices::collect;
use crate::conversation::stream;
use crate::http::error::ApiResult;
use crate::state::model::ModelState;

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let parsed = state.on_body(request, |mut body, state| {
        let mut submission = request::parse(&mut body, state)?;
        submission.held_prompt = Some(body.keep(submission.bytes())?);
        Ok(submission)
    });
    let submission = parsed.await?;
    let mut active = submission.start(&state, state.server.ids.request("cmpl"), "completions").await?;
    if active.submission.common.stream {
        let writer = stream_writer::CompletionStream::new(&active);
        return Ok(stream::response(active, writer));
    }
    let collected = collect(&mut active).await?;
    Ok(respond::whole(active, collected))
}
