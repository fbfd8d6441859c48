//! `POST /v1/completions`: text in, text out.

pub(crate) mod infill;
pub(crate) mod request;
mod respond;
mod shape;

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
    let mut request = submission.start(&state, state.server.ids.request("cmpl"), "completions").await?;
    if request.submission.common.stream {
        let shape = shape::CompletionStream::new(&request);
        return Ok(stream::response(request, shape));
    }
    let collected = collect(&mut request).await?;
    Ok(respond::whole(request, collected))
}
