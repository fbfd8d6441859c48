//! Reads request bodies under limits of size and time, and under the byte budget.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use plimsoll_memory::broken;
use tokio::time::{Instant, timeout, timeout_at};

use crate::http::budget::{ByteBudget, Held};
use crate::http::error::{ApiError, ApiResult};

/// What a connection's read buffer takes beyond its plan while a large body arrives: pieces of it are still shared with what is
/// being copied. Measured: `tests/host_heap.rs`.
pub(crate) const ARRIVING_BYTES: u64 = 64 << 10;

/// What a byte of a body may become while it is parsed: unescaped text in a list that grew by doubling, and a copy of it; or token
/// ids. Measured: `tests/bodies.rs`.
pub(crate) const PARSED_FACTOR: u64 = 3;

/// The limits on one body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub max_bytes: u64,
    /// The whole body must arrive within this time.
    pub within: Duration,
    /// The longest time between two pieces.
    pub gap: Duration,
}

/// A whole body and the share of the budget it holds.
pub(crate) struct ReadBody {
    pub bytes: Vec<u8>,
    pub held: Held,
}

impl ReadBody {
    /// Adds what has arrived. Room grows by an eighth, and what is held is that room, with what is on its way to it.
    fn append(&mut self, data: &[u8]) -> ApiResult<()> {
        let (len, room) = (self.bytes.len(), self.bytes.capacity());
        if room - len < data.len() {
            let more = data.len().max(len / 8);
            let arriving = |room: usize| room as u64 + (room as u64).min(ARRIVING_BYTES);
            self.held.grow(arriving(len + more) - arriving(room))?;
            self.bytes.reserve_exact(more);
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Drops the body and keeps a share for the `bytes` that were made of it.
    pub fn keep(self, bytes: u64) -> ApiResult<Held> {
        let Self { bytes: body, mut held } = self;
        drop(body);
        held.become_bytes(bytes)?;
        Ok(held)
    }
}

/// A body that was read to find the model it asks for, on its way to that model's handler in the request's extensions.
#[derive(Clone)]
pub(crate) struct EarlyBody(Arc<Mutex<Option<ReadBody>>>);

impl EarlyBody {
    pub fn new(body: ReadBody) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// The body, once.
    pub fn take(&self) -> Option<ReadBody> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads a JSON body. Too large is known from Content-Length before anything is read, or while reading; the budget
/// is charged for what has arrived, not for what was announced.
pub(crate) async fn read_json(
    headers: &HeaderMap,
    mut body: Body,
    budget: &Arc<ByteBudget>,
    limits: BodyLimits,
) -> ApiResult<ReadBody> {
    check_media_type(headers)?;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    let most = if broken("V-61") { u64::MAX } else { limits.max_bytes };
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

fn check_media_type(headers: &HeaderMap) -> ApiResult<()> {
    let refuse = |message: String| {
        let refused = ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
        Err(ApiError { close: true, code: Some("unsupported_media_type"), ..refused })
    };
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("");
    let kind = text(header::CONTENT_TYPE).split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if kind != "application/json" && !kind.ends_with("+json") {
        return refuse("the request needs `Content-Type: application/json`".into());
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
