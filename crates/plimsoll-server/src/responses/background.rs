//! `background: true`: the response is made without a connection, and its stream can be resumed.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::unfold;
use memchr::memmem;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::stream_writer::Responding;
use crate::conversation::active::ActiveRequest;
use crate::conversation::stream::StreamWriter;
use crate::http::error::{ApiError, ApiResult};
use crate::http::sse::{self, Events};
use crate::state::background::ModelUse;
use crate::state::response_store::LogRead;
use crate::state::server::ServerState;

/// Resources of a response in the background, held until it has ended.
pub(super) struct Place {
    pub permit: OwnedSemaphorePermit,
    /// None on a server with one model.
    pub model: Option<ModelUse>,
}

/// Makes the response, even if the client disconnects, and returns the answer for now: the object, or the stream.
pub(super) fn start(request: ActiveRequest, mut responding: Responding, place: Place) -> ApiResult<Response> {
    let server = Arc::clone(&request.state.server);
    let (id, key) = (request.id.clone(), responding.key());
    if !request.submission.common.stream {
        let answer = super::sent(&server, responding.queued(&request))?;
        tokio::spawn(make(request, responding, place));
        return Ok(answer);
    }
    server.responses.log_begins(&id, key);
    let mut out = Events::default();
    responding.open(&request, &mut out);
    add(&server, &id, out);
    tokio::spawn(make(request, responding, place));
    follow(&server, id, key, 0)
}

/// Adds events to the log, one by one: their data has no empty line in it.
fn add(server: &ServerState, id: &str, out: Events) {
    const END: &[u8] = b"\n\n";
    if out.is_empty() {
        return;
    }
    let mut rest = out.into_bytes();
    let mut events = Vec::new();
    while let Some(at) = memmem::find(&rest, END) {
        // A copy, so that no event keeps the others' bytes.
        events.push(Bytes::copy_from_slice(&rest[..at + END.len()]));
        rest = rest.slice(at + END.len()..);
    }
    server.responses.log_add(id, &events);
}

/// Makes a response until it has ended.
async fn make(mut request: ActiveRequest, mut responding: Responding, place: Place) {
    let (server, id) = (Arc::clone(&request.state.server), request.id.clone());
    let done = AssertUnwindSafe(run(&mut request, &mut responding)).catch_unwind().await;
    if done.is_err() {
        let error = request.panicked();
        let failed = AssertUnwindSafe(|| {
            let mut out = Events::default();
            responding.finish(&request, Some(&error), &mut out);
            add(&server, &id, out);
        });
        if catch_unwind(failed).is_err() {
            responding.gone(&request);
        }
    }
    server.responses.log_ends(&id);
    // The request's bytes are released before its permit.
    drop((request, responding));
    let Place { permit, model } = place;
    drop((model, permit));
}

async fn run(request: &mut ActiveRequest, responding: &mut Responding) {
    let server = Arc::clone(&request.state.server);
    loop {
        let mut out = Events::default();
        let error = match responding.advance(request, &mut out).await {
            None => {
                add(&server, &request.id, out);
                continue;
            }
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error),
        };
        responding.finish(request, error.as_ref(), &mut out);
        add(&server, &request.id, out);
        return;
    }
}

/// Returns a stream of a response's events, beginning with the number `from`.
pub(super) fn follow(server: &Arc<ServerState>, id: String, key: Option<usize>, from: u64) -> ApiResult<Response> {
    if server.responses.log_read(&id, key, from).is_none() {
        if server.responses.look(&id, key).is_none() {
            return Err(super::unknown(&id));
        }
        let kept = crate::state::response_store::LOG_KEPT.as_secs();
        let message = format!(
            "stream: this response has no events to stream: it was not created with background and stream, or it ended more than {kept} s ago; leave out stream"
        );
        return Err(ApiError::invalid("stream", message));
    }
    let server = Arc::clone(server);
    let follower = Follower { server, id, key, next: from };
    let stream = unfold(Some(follower), |follower| async {
        let mut follower = follower?;
        let (bytes, is_last) = follower.read().await;
        Some((Ok::<_, Infallible>(bytes), (!is_last).then_some(follower)))
    });
    Ok((sse::HEADERS, Body::from_stream(stream)).into_response())
}

struct Follower {
    server: Arc<ServerState>,
    id: String,
    key: Option<usize>,
    next: u64,
}

/// The last event of a stream that cannot continue.
#[derive(Serialize)]
struct Lost {
    #[serde(rename = "type")]
    kind: &'static str,
    code: &'static str,
    message: &'static str,
    param: Option<()>,
    sequence_number: u64,
}

impl Follower {
    /// Returns the next events, and whether they are the last.
    async fn read(&mut self) -> (Bytes, bool) {
        loop {
            let Some(LogRead { bytes, next, ended, lost, mut grown }) =
                self.server.responses.log_read(&self.id, self.key, self.next)
            else {
                return (self.lost(), true);
            };
            if lost {
                return (self.lost(), true);
            }
            self.next = next;
            if !bytes.is_empty() || ended {
                return (bytes, ended);
            }
            if timeout(self.server.config.keep_alive, grown.changed()).await.is_err() {
                let mut out = Events::default();
                out.comment();
                return (out.into_bytes(), false);
            }
        }
    }

    fn lost(&self) -> Bytes {
        let message = "the events of this response took more bytes than the store has for them (--response-store-bytes); GET the response without stream";
        let mut out = Events::default();
        let lost = Lost { kind: "error", code: "events_lost", message, param: None, sequence_number: self.next };
        out.push_named("error", &lost);
        out.into_bytes()
    }
}
