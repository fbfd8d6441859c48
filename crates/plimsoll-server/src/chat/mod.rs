//! `POST /v1/chat/completions`: messages in, a message out.

pub(crate) mod messages;
pub(crate) mod request;
mod respond;
mod shape;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::choices::collect;
use crate::conversation::{StartedChat, begin, stream};
use crate::http::error::ApiResult;
use crate::state::model::ModelState;

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let asked = state.on_body(request, |body, state| {
        let ask = request::parse(&body.bytes, state)?;
        let held = body.keep(ask.bytes())?;
        Ok((ask, held))
    });
    let (ask, held) = asked.await?;
    let (turn, ()) = ask.turn(&state, held, || (0, ())).await?;
    let id = state.server.ids.request("chatcmpl");
    let StartedChat { context, mut active_request, held, choices } = begin(&state, id, "chat", turn).await?;
    if context.draft.common.stream {
        let keep_alive = state.server.config.keep_alive;
        return Ok(stream::response(active_request, shape::Stream::new(context, choices, held), keep_alive));
    }
    let collected = collect(&mut active_request, choices, context.draft.reports_tokens()).await?;
    let held = active_request.all_held(held);
    Ok(respond::whole(&context, collected, active_request.usage(), held))
}
