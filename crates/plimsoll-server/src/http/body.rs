//! Reads request bodies under limits of size and time, and under the byte budget.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout, timeout_at};

use crate::http::budget::{ByteBudget, Held};
use crate::http::error::{ApiError, ApiResult};

/// Heap bytes of a connection's read buffer beyond its plan while a large body arrives: the copy shares pieces of it.
/// Measured: `tests/host_heap.rs`.
pub(crate) const ARRIVING_BYTES: u64 = 64 << 10;

/// Heap bytes per body byte during parsing: unescaped text in a list that grew by doubling, plus one copy; or token ids. Measured:
/// `tests/bodies.rs`.
pub(crate) const PARSED_FACTOR: u64 = 3;

/// The limits on one body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub max_bytes: u64,
    /// The time within which the whole body must arrive.
    pub within: Duration,
    /// The longest time between two pieces.
    pub gap: Duration,
}

/// The format of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyKind {
    /// JSON.
    Json,
    /// A form with files ([`crate::http::form`]).
    Form,
}

/// A whole body and the share of the budget it holds.
pub(crate) struct ReadBody {
    pub bytes: Vec<u8>,
    pub held: Held,
}

impl ReadBody {
    /// Adds a piece of the body. The buffer grows by an eighth at a time. The budget is charged for its capacity and [`ARRIVING_BYTES`].
    fn append(&mut self, data: &[u8]) -> ApiResult<()> {
        let (len, capacity) = (self.bytes.len(), self.bytes.capacity());
        if capacity - len < data.len() {
            let more = data.len().max(len / 8);
            let bytes = |capacity: usize| capacity as u64 + (capacity as u64).min(ARRIVING_BYTES);
            self.held.grow(bytes(len + more) - bytes(capacity))?;
            self.bytes.reserve_exact(more);
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Drops the body. The share becomes `bytes`, the size of its parsed form.
    pub fn keep(self, bytes: u64) -> ApiResult<Held> {
        let Self { bytes: body, mut held } = self;
        drop(body);
        held.become_bytes(bytes)?;
        Ok(held)
    }
}

/// A body that was read to find its model. The request's extensions carry it to that model's handler.
#[derive(Clone)]
pub(crate) struct EarlyBody(Arc<Mutex<Option<ReadBody>>>);

impl EarlyBody {
    pub fn new(body: ReadBody) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// Returns the body at the first call, then none.
    pub fn take(&self) -> Option<ReadBody> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads a body. Refuses a body over the limit by Content-Length, or while reading. Charges the budget for bytes
/// received, not announced.
pub(crate) async fn read_body(
    kind: BodyKind,
    headers: &HeaderMap,
    mut body: Body,
    budget: &Arc<ByteBudget>,
    limits: BodyLimits,
) -> ApiResult<ReadBody> {
    check_media_type(kind, headers)?;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    let most = limits.max_bytes;
    if announced.is_some_and(|bytes| bytes > most) {
        return Err(too_large(most));
    }
    let deadline = Instant::now() + limits.within;
    let mut read = ReadBody { bytes: Vec::new(), held: budget.hold(0)? };
    while let Some(frame) = next_frame(&mut body, deadline, limits.gap).await? {
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let total = read.bytes.len() as u64 + data.len() as u64;
        if total > most {
            return Err(too_large(most));
        }
        read.append(&data)?;
    }
    read.held.shrink_to(read.bytes.capacity() as u64);
    Ok(read)
}

type Frame = hyper::body::Frame<bytes::Bytes>;

async fn next_frame(body: &mut Body, deadline: Instant, gap: Duration) -> ApiResult<Option<Frame>> {
    let late = |what: String| ApiError { close: true, ..ApiError::new(StatusCode::REQUEST_TIMEOUT, what) };
    let within = timeout_at(deadline, timeout(gap, body.frame()));
    match within.await {
        Err(_) => Err(late("the request body took too long to arrive".into())),
        Ok(Err(_)) => Err(late(format!("no byte of the request body arrived for {} s", gap.as_secs_f32()))),
        Ok(Ok(None)) => Ok(None),
        Ok(Ok(Some(Ok(frame)))) => Ok(Some(frame)),
        Ok(Ok(Some(Err(error)))) => {
            let broken = ApiError::bad_body(format!("the request body ended early or is malformed: {error}"));
            Err(ApiError { close: true, ..broken })
        }
    }
}

/// Checks a body's media type. Careful programs name JSON as such; `curl -d` calls it a form, others send no type. A request from a
/// browser's page must name it: only then does the browser send a preflight request (CORS), and a form on a foreign page cannot send a
/// request. Browsers send forms with files without a preflight: the middleware refuses those of foreign pages.
fn check_media_type(kind: BodyKind, headers: &HeaderMap) -> ApiResult<()> {
    let refuse = |message: String| {
        let refused = ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
        Err(ApiError { close: true, code: Some("unsupported_media_type"), ..refused })
    };
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("");
    let said = text(header::CONTENT_TYPE).split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    let unnamed = ["", "application/x-www-form-urlencoded", "text/plain"].contains(&said.as_str());
    let (fits, needed) = match kind {
        BodyKind::Json => {
            let named = said == "application/json" || said.ends_with("+json");
            (named || unnamed && !from_page, "application/json")
        }
        BodyKind::Form => (said == "multipart/form-data", "multipart/form-data"),
    };
    if !fits {
        return refuse(format!("the request needs `Content-Type: {needed}`, not `{said}`"));
    }
    if headers.contains_key(header::CONTENT_ENCODING) && text(header::CONTENT_ENCODING) != "identity" {
        return refuse("compressed request bodies are not supported".into());
    }
    Ok(())
}

fn too_large(limit: u64) -> ApiError {
    let message = format!("the request body is larger than this server's limit of {limit} bytes (--max-body-bytes)");
    let error = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message);
    ApiError { close: true, code: Some("request_too_large"), ..error }
}
