//! `POST /v1/chat/completions`: messages in, a message out.

pub(crate) mod messages;
pub(crate) mod request;
mod respond;
mod stream_writer;
pub(crate) mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::choices::collect;
use crate::conversation::stream;
use crate::http::error::ApiResult;
use crate::state::model::ModelState;

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let parsed = state.on_body(request, |body, state| {
        let request = request::parse(&body.bytes, state)?;
        let held = body.keep(request.bytes())?;
        Ok((request, held))
    });
    let (request, held) = parsed.await?;
    let submission = request.prepare_on_worker(&state, held).await?;
    let mut active = submission.start(&state, state.server.ids.request("chatcmpl"), "chat").await?;
    if active.submission.common.stream {
        let writer = stream_writer::ChatStream::new(&active);
        return Ok(stream::response(active, writer));
    }
    let collected = collect(&mut active).await?;
    Ok(respond::whole(active, collected))
}
