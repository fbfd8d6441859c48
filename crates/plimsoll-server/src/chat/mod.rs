//! `POST /v1/chat/completions`: messages in, a message out.

pub(crate) mod messages;
pub(crate) mod request;
mod respond;
mod shape;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::app::App;
use crate::choices::collect;
use crate::error::ApiResult;
use crate::sse;
use crate::turn::{Begun, begin};

/// The handler.
pub(crate) async fn handle(State(app): State<Arc<App>>, request: Request) -> ApiResult<Response> {
    let asked = app.on_body(request, |body, app| {
        let ask = request::parse(&body.bytes, app)?;
        let held = body.keep(ask.bytes())?;
        Ok((ask, held))
    });
    let (ask, held) = asked.await?;
    let (turn, ()) = ask.turn(&app, held, || (0, ())).await?;
    let id = app.ids.request("chatcmpl");
    let Begun { context, mut generation, held, choices } = begin(&app, id, "chat", turn).await?;
    if context.draft.common.stream {
        let keep_alive = app.config.keep_alive;
        return Ok(sse::response(generation, shape::Stream::new(context, choices, held), keep_alive));
    }
    let collected = collect(&mut generation, choices, context.draft.reports_tokens()).await?;
    let held = generation.all_held(held);
    Ok(respond::whole(&context, collected, generation.usage(), held))
}
