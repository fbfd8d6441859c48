//! From a request's body to the model it asks for, and that model's handlers.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use tokio::time::timeout;

use super::{InUse, Loaded, Registry, waiting};
use crate::body::{EarlyBody, PARSED_FACTOR, ReadBody, read_json};
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;

/// A stream is told that it waits when its model is not there by then; before that, an error still has its own status.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a use of a model will be, once the model is there.
pub(super) type Entering = Pin<Box<dyn Future<Output = ApiResult<(Loaded, InUse)>> + Send>>;

/// The handler of every route that asks for a model.
pub(super) async fn handle(State(registry): State<Arc<Registry>>, request: Request) -> ApiResult<Response> {
    let (mut head, body) = request.into_parts();
    let server = &registry.server;
    let body = read_json(&head.headers, body, &server.bytes, server.config.body_limits()).await?;
    let (body, model, streams) = look(&registry, body).await?;
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

/// The model that a body names, and whether it asks for a stream. What is wrong with either is the handler's to say.
async fn look(registry: &Arc<Registry>, body: ReadBody) -> ApiResult<(ReadBody, Option<String>, bool)> {
    let server = Arc::clone(&registry.server);
    let worker = Arc::clone(&registry.server);
    let look = move || {
        let parsed = body.bytes.len() as u64 * PARSED_FACTOR;
        server
            .parsing
            .with(parsed, || {
                let mut fields = Fields::of_body(&body.bytes)?;
                let model = fields.take::<String>("model")?;
                let streams = fields.take::<bool>("stream")?.unwrap_or(false);
                Ok((model, streams))
            })
            .map(|(model, streams)| (body, model, streams))
    };
    worker.on_text_worker(look).await
}

/// The handlers' answer, which uses the model until it is sent.
pub(super) async fn answer(loaded: Loaded, user: InUse, request: Request) -> Response {
    match TowerToHyperService::new(loaded.routes).call(request).await {
        Ok(response) => {
            ApiError::count_invalid(&response, &loaded.state.served.engine.metrics().refused_invalid);
            response.map(|body| Body::new(Using { body, _user: user })).into_response()
        }
        Err(never) => match never {},
    }
}

/// A body that uses a model: what is left of the request goes first.
struct Using {
    body: Body,
    _user: InUse,
}

impl hyper::body::Body for Using {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The next bytes of a body; none at its end, or where it broke off.
pub(super) async fn next_bytes(body: &mut Body) -> Option<Bytes> {
    loop {
        if let Ok(data) = body.frame().await?.ok()?.into_data() {
            return Some(data);
        }
    }
}
