//! The answer of a model's handlers, which uses the model until it is sent.

use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use super::{InUse, Loaded};
use crate::http::error::{ApiError, ApiResult};
use crate::state::background::ModelUse;

/// The future of a use of a model, ready when the model is loaded.
pub(super) type Entering = Pin<Box<dyn Future<Output = ApiResult<(Loaded, InUse)>> + Send>>;

/// The handlers' answer, which uses the model until it is sent.
pub(super) async fn answer(loaded: Loaded, user: InUse, mut request: Request) -> Response {
    let user = Arc::new(user);
    // For work that continues after the answer.
    request.extensions_mut().insert(ModelUse(Arc::<InUse>::clone(&user)));
    match TowerToHyperService::new(loaded.routes).call(request).await {
        Ok(response) => {
            ApiError::count_invalid(&response, &loaded.state.served.engine.metrics().refused_invalid);
            response.map(|body| Body::new(Using { body, _user: user })).into_response()
        }
        Err(never) => match never {},
    }
}

/// A body that keeps its model in use. On drop, the rest of the request is dropped before the use ends.
struct Using {
    body: Body,
    _user: Arc<InUse>,
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

/// Returns the next bytes of a body; none at its end, or after an error.
pub(super) async fn next_bytes(body: &mut Body) -> Option<Bytes> {
    loop {
        if let Ok(data) = body.frame().await?.ok()?.into_data() {
            return Some(data);
        }
    }
}
