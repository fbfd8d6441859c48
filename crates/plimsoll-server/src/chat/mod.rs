//! `POST /v1/chat/completions`: messages in, a message out.

pub(crate) mod messages;
pub(crate) mod request;
mod respond;
mod shape;
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
    let mut request = submission.start(&state, state.server.ids.request("chatcmpl"), "chat").await?;
    if request.submission.common.stream {
        let shape = shape::ChatStream::new(&request);
        return Ok(stream::response(request, shape));
    }
    let collected = collect(&mut request).await?;
    Ok(respond::whole(request, collected))
}
