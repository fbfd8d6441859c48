//! Finds the model that a request's body names, and calls that model's handlers.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use tokio::time::timeout;

use super::answer::{Entering, answer};
use super::{Registry, waiting};
use crate::http::body::{BodyKind, EarlyBody, PARSED_FACTOR, ReadBody, read_body};
use crate::http::error::ApiResult;
use crate::http::fields::Fields;
use crate::http::form;
use crate::{ollama, transcriptions};

/// The wait for a model after which a streaming request gets its stream with comments. Before that, an error still has its own status.
const PATIENCE: Duration = Duration::from_secs(1);

/// The handler of every route with a model in its body.
pub(super) async fn handle(State(registry): State<Arc<Registry>>, request: Request) -> ApiResult<Response> {
    let (mut head, body) = request.into_parts();
    let server = &registry.server;
    let kind = transcriptions::body_kind(head.uri.path());
    let body = read_body(kind, &head.headers, body, &server.bytes, server.config.body_limits()).await?;
    let boundary = match kind {
        BodyKind::Json => None,
        BodyKind::Form => Some(form::boundary(&head.headers)?),
    };
    let (body, model, streams) = look(&registry, head.uri.path(), boundary, body).await?;
    let index = registry.find(model.as_deref())?;
    head.extensions.insert(EarlyBody::new(body));
    let request = Request::from_parts(head, Body::empty());
    let mut entering: Entering = Box::pin(Arc::clone(&registry).ensure(index));
    if !streams {
        let (loaded, user) = entering.await?;
        return Ok(answer(loaded, user, request).await);
    }
    match timeout(PATIENCE, &mut entering).await {
        Ok(entered) => {
            let (loaded, user) = entered?;
            Ok(answer(loaded, user, request).await)
        }
        Err(_) => Ok(waiting::response(&registry.server, entering, request)),
    }
}

/// Reads from a body the model's name, and whether it asks for a stream. The handler reports errors in either field.
async fn look(
    registry: &Arc<Registry>,
    path: &str,
    boundary: Option<String>,
    body: ReadBody,
) -> ApiResult<(ReadBody, Option<String>, bool)> {
    // Older clients of Ollama name the field `name`.
    let (also, by_default) = (ollama::owns(path).then_some("name"), ollama::streams_by_default(path));
    let server = Arc::clone(&registry.server);
    let worker = Arc::clone(&registry.server);
    let look = move || {
        let parsed = body.bytes.len() as u64 * PARSED_FACTOR;
        server
            .parsing
            .with(parsed, || {
                let form = match boundary {
                    Some(boundary) => Some(transcriptions::request::texts(&body.bytes, &boundary)?),
                    None => None,
                };
                let mut fields = Fields::of_body(form.as_ref().map_or(&body.bytes, |json| json.as_bytes()))?;
                let mut model = fields.take::<String>("model")?;
                if let Some(also) = also.filter(|_| model.is_none()) {
                    model = fields.take(also)?;
                }
                let streams = fields.take::<bool>("stream")?.unwrap_or(by_default);
                Ok((model, streams))
            })
            .map(|(model, streams)| (body, model, streams))
    };
    worker.on_text_worker(look).await
}
