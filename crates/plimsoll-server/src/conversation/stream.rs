//! An active request as server-sent events, or as lines of JSON. The stream always ends with its terminator.
//!
//! The connection pulls the body, so output is read from the engine only when the client has room for it. Unread output
//! waits in the engine's outbox, where admission has reserved its bytes.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::unfold;
use plimsoll_engine::Delta;
use tokio::time::timeout;

use crate::conversation::active::{ActiveRequest, Event};
use crate::http::budget::Held;
use crate::http::error::ApiError;
use crate::http::sse::{self, Events};

/// The headers of a stream.
pub(crate) type StreamHeaders = [(HeaderName, HeaderValue); 3];

/// Writes the stream of one API.
pub(crate) trait StreamWriter: Send + 'static {
    /// The headers of the answer.
    const HEADERS: StreamHeaders = sse::HEADERS;

    /// Writes the end of a stream after its writer panicked.
    fn broken(error: &ApiError, out: &mut Events) {
        out.error(error);
        out.done();
    }
    /// Writes the events before any output.
    fn open(&mut self, request: &ActiveRequest, out: &mut Events);
    /// Writes output of one choice.
    fn delta(&mut self, request: &ActiveRequest, choice: usize, delta: Delta, out: &mut Events);
    /// Writes the events after all choices have finished.
    fn close(&mut self, request: &ActiveRequest, out: &mut Events);
    /// Writes the error of a failed request.
    fn fail(&mut self, _request: &ActiveRequest, error: &ApiError, out: &mut Events) {
        out.error(error);
    }
    /// Writes the terminator, after success and failure. Empty if the API's last event has its own name.
    fn end(&self, out: &mut Events) {
        out.done();
    }
    /// Waits for the next event and writes it. Returns true if it was the last. Cancel-safe.
    fn write_next(&mut self, request: &mut ActiveRequest, out: &mut Events) -> impl Future<Output = bool> + Send {
        async move {
            match request.next().await {
                Event::Delta(choice, delta) => {
                    self.delta(request, choice, delta, out);
                    return false;
                }
                Event::Done => self.close(request, out),
                Event::Failed(error) => self.fail(request, &error, out),
            }
            self.end(out);
            true
        }
    }
    /// Writes a keep-alive.
    fn keep_alive(&self, out: &mut Events) {
        out.comment();
    }
}

/// The last bytes of a stream, with the shares of the byte budget that are released when they are sent.
struct Last<S> {
    bytes: Bytes,
    _writer: S,
    _held: [Option<Held>; 2],
}

impl<S> AsRef<[u8]> for Last<S> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

struct StreamBody<S> {
    request: ActiveRequest,
    writer: S,
    opened: bool,
}

/// Returns the streamed answer.
pub(crate) fn response<S: StreamWriter>(request: ActiveRequest, writer: S) -> Response {
    let body = StreamBody { request, writer, opened: false };
    let stream = unfold(Some(body), move |body| async move {
        let mut body = body?;
        let mut out = Events::default();
        let ended = match AssertUnwindSafe(body.advance(&mut out)).catch_unwind().await {
            Ok(ended) => ended,
            Err(_) => {
                let error = body.request.panicked();
                if catch_unwind(AssertUnwindSafe(|| body.fail(&error, &mut out))).is_err() {
                    S::broken(&error, &mut out);
                }
                true
            }
        };
        if !ended {
            return Some((Ok::<_, Infallible>(out.into_bytes()), Some(body)));
        }
        // The request ends before the last bytes are handed over. Its byte shares are released when these are sent.
        let StreamBody { mut request, writer, .. } = body;
        let held = [request.take_held(), request.submission.held_prompt.take()];
        drop(request);
        Some((Ok(Bytes::from_owner(Last { bytes: out.into_bytes(), _writer: writer, _held: held })), None))
    });
    (S::HEADERS, Body::from_stream(stream)).into_response()
}

impl<S: StreamWriter> StreamBody<S> {
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.writer.fail(&self.request, error, out);
        self.writer.end(out);
    }

    /// Waits until there is something to send. Returns true if it is the last.
    async fn advance(&mut self, out: &mut Events) -> bool {
        if !std::mem::replace(&mut self.opened, true) {
            self.writer.open(&self.request, out);
            return false;
        }
        let keep_alive = self.request.state.server.config.keep_alive;
        while out.is_empty() {
            match timeout(keep_alive, self.writer.write_next(&mut self.request, out)).await {
                Ok(true) => return true,
                Ok(false) => {}
                Err(_) => {
                    self.writer.keep_alive(out);
                    return false;
                }
            }
        }
        false
    }
}
