//! `POST /v1/completions`: text in, text out.

pub(crate) mod request;
mod respond;
mod shape;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::conversation::active::ActiveRequest;
use crate::conversation::choices::collect;
use crate::conversation::stream;
use crate::http::error::ApiResult;
use crate::state::model::ModelState;

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let asked = state.on_body(request, |mut body, state| {
        let mut asked = request::parse(&mut body, state)?;
        asked.draft.kept = Some(body.keep(asked.draft.bytes())?);
        Ok(asked)
    });
    let asked = asked.await?;
    let id = state.server.ids.request("cmpl");
    let mut started = asked.draft.start(&state, &id)?;
    let choices = started.readers.len();
    let mut active_request = ActiveRequest::new(&state, &id, "completions", &asked.draft, &mut started);
    let context = respond::ReplyContext::new(&state, id, asked);
    if context.asked.draft.common.stream {
        let keep_alive = state.server.config.keep_alive;
        return Ok(stream::response(active_request, shape::Stream::new(context, choices, started.held), keep_alive));
    }
    let collected = collect(&mut active_request, choices, context.asked.draft.reports_tokens()).await?;
    let held = active_request.all_held(started.held);
    Ok(respond::whole(&context, collected, active_request.usage(), held))
}
