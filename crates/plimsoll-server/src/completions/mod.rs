//! `POST /v1/completions`: text in, text out.

pub(crate) mod request;
mod respond;
mod shape;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::app::App;
use crate::choices::collect;
use crate::error::ApiResult;
use crate::generation::Generation;
use crate::sse;

/// The handler.
pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> ApiResult<Response> {
    let asked = app.on_body(request, |mut body, app| {
        let mut asked = request::parse(&mut body, app)?;
        asked.draft.kept = Some(body.keep(asked.draft.bytes())?);
        Ok(asked)
    });
    let asked = asked.await?;
    let id = app.ids.request("cmpl");
    let mut started = asked.draft.start(&app, &id)?;
    let choices = started.readers.len();
    let mut generation = Generation::new(&app, &id, "completions", &asked.draft, &mut started);
    let context = respond::Context::new(&app, id, asked);
    if context.asked.draft.common.stream {
        let keep_alive = app.config.keep_alive;
        return Ok(sse::response(generation, shape::Stream::new(context, choices, started.held), keep_alive));
    }
    let collected = collect(&mut generation, choices, context.asked.draft.reports_tokens()).await?;
    let held = generation.all_held(started.held);
    Ok(respond::whole(&context, collected, generation.usage(), held))
}
