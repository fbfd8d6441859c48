//! A generation as a stream of server-sent events that always ends with its terminator.
//!
//! The body is pulled by the connection: nothing is read from the engine before the client has room for it. What the
//! client has not taken waits in the engine's outbox, where admission has reserved its bytes.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::unfold;
use plimsoll_engine::Delta;
use plimsoll_memory::broken;
use tokio::time::timeout;

use crate::conversation::active::{ActiveRequest, Event, Usage};
use crate::http::error::ApiError;
use crate::http::sse::{Events, HEADERS};

/// How one API spells a stream.
pub(crate) trait Shape: Send + 'static {
    /// What comes before any output.
    fn open(&mut self, out: &mut Events);
    /// Output of one choice; `usage` is what has been counted so far.
    fn delta(&mut self, choice: usize, delta: Delta, usage: Usage, out: &mut Events);
    /// What comes after all choices have ended well.
    fn close(&mut self, usage: Usage, out: &mut Events);
    /// What comes after a request has failed.
    fn fail(&mut self, error: &ApiError, _usage: Usage, out: &mut Events) {
        out.error(error);
    }
    /// The terminator, whatever the end; none where the last event is known by its name.
    fn end(&self, out: &mut Events) {
        out.done();
    }
    /// What shows on a quiet stream that it lives.
    fn quiet(&self, out: &mut Events) {
        out.comment();
    }
}

/// The last bytes of a stream, with what holds their share of the budget.
struct Last<S> {
    bytes: Bytes,
    _shape: S,
}

impl<S> AsRef<[u8]> for Last<S> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

struct Running<S> {
    active_request: ActiveRequest,
    shape: S,
    opened: bool,
}

/// The streamed answer.
pub(crate) fn response(active_request: ActiveRequest, shape: impl Shape, keep_alive: std::time::Duration) -> Response {
    let running = Running { active_request, shape, opened: false };
    let stream = unfold(Some(running), move |running| async move {
        let mut running = running?;
        let mut out = Events::default();
        let ended = match AssertUnwindSafe(running.advance(&mut out, keep_alive)).catch_unwind().await {
            Ok(ended) => ended,
            Err(_) => {
                let error = running.active_request.panicked();
                if catch_unwind(AssertUnwindSafe(|| running.fail(&error, &mut out))).is_err() {
                    out.error(&error);
                    out.done();
                }
                true
            }
        };
        if !ended {
            return Some((Ok::<_, Infallible>(out.into_bytes()), Some(running)));
        }
        // The generation goes before the last bytes are handed over; what the answer holds, when they are sent.
        let Running { active_request, shape, .. } = running;
        if broken("V-7") {
            std::mem::forget(active_request);
        } else {
            drop(active_request);
        }
        Some((Ok(Bytes::from_owner(Last { bytes: out.into_bytes(), _shape: shape })), None))
    });
    (HEADERS, Body::from_stream(stream)).into_response()
}

impl<S: Shape> Running<S> {
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.shape.fail(error, self.active_request.usage(), out);
        if !broken("V-43") {
            self.shape.end(out);
        }
    }

    /// Waits until there is something to send. True when it is the last.
    async fn advance(&mut self, out: &mut Events, keep_alive: std::time::Duration) -> bool {
        if !std::mem::replace(&mut self.opened, true) {
            self.shape.open(out);
            return false;
        }
        while out.is_empty() {
            let Ok(event) = timeout(keep_alive, self.active_request.next()).await else {
                self.shape.quiet(out);
                return false;
            };
            match event {
                Event::Delta(choice, delta) => self.shape.delta(choice, delta, self.active_request.usage(), out),
                Event::Done => {
                    self.shape.close(self.active_request.usage(), out);
                    self.shape.end(out);
                    return true;
                }
                Event::Failed(error) => {
                    self.fail(&error, out);
                    return true;
                }
            }
        }
        false
    }
}
