//! `GET /v1/kv_events`: the contents of the prefix cache and their changes, as a stream of events, for routers.
//!
//! A reader first gets the cached pages, then the changes. After a reconnect with `Last-Event-ID` it gets the events
//! that it missed. If the log no longer has them, the reader gets a `reset` event and then the cached pages. The number
//! of readers is limited, and each holds a fixed share of the byte budget. The log never waits for a reader, so a
//! stalled reader costs nothing more.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use plimsoll_engine::cache::{KvCursor, KvEvent, KvEventLog, PAGE_TOKENS};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::sse::{Events, HEADERS};
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, reached};

/// The most readers at once.
const READERS_MAX: u64 = 8;

/// The most events that are written at once.
const EVENTS_AT_ONCE: usize = 64;

/// The most bytes of one event: sixteen token ids of ten digits, three numbers of nineteen digits, a further number, an epoch twice, and
/// the field names.
const EVENT_BYTES: usize = 448;

/// An event in the stream.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Reset { epoch: u64, block_size: usize },
    Stored { seq: u64, hash: u64, parent: Option<u64>, tokens: &'a [u32] },
    Removed { seq: u64, hash: u64 },
}

/// A reader's place among the limited readers, given back on drop.
struct Place(Arc<AtomicU64>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn enter(readers: &Arc<AtomicU64>) -> ApiResult<Place> {
    let taken = readers.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < READERS_MAX).then_some(n + 1));
    taken.map(|_| Place(Arc::clone(readers))).map_err(|_| {
        ApiError::unavailable(format!("{READERS_MAX} readers follow the prefix cache already, which is the limit"), 5)
    })
}

/// Returns the position after the last event that a reader got, if it got it from this run of the server.
fn resumed(headers: &HeaderMap, kv_event_log: &KvEventLog) -> Option<KvCursor> {
    let (epoch, seq) = headers.get("last-event-id")?.to_str().ok()?.split_once('-')?;
    (epoch.parse() == Ok(kv_event_log.epoch())).then(|| seq.parse().map(KvCursor::after).ok()).flatten()
}

struct Reader {
    kv_event_log: Arc<KvEventLog>,
    cursor: KvCursor,
    events: Vec<KvEvent>,
    phase: watch::Receiver<ServerPhase>,
    keep_alive: std::time::Duration,
    /// Whether anything was sent yet. Something is sent at once, so that the reader knows that the stream has begun.
    opened: bool,
    _place: Place,
    _held: Held,
}

impl Reader {
    /// Returns the next bytes; none when the server is shutting down.
    async fn next(&mut self) -> Option<Events> {
        let mut out = Events::default();
        loop {
            self.kv_event_log.read(&mut self.cursor, EVENTS_AT_ONCE, &mut self.events);
            if !self.events.is_empty() {
                self.events.drain(..).for_each(|event| write(&event, self.kv_event_log.epoch(), &mut out));
                self.opened = true;
                return Some(out);
            }
            if !std::mem::replace(&mut self.opened, true) {
                out.comment();
                return Some(out);
            }
            let changed = self.kv_event_log.changed(&self.cursor);
            tokio::select! {
                () = reached(&mut self.phase, ServerPhase::Draining) => return None,
                waited = timeout(self.keep_alive, changed) => if waited.is_err() {
                    out.comment();
                    return Some(out);
                },
            }
        }
    }
}

fn write(event: &KvEvent, epoch: u64, out: &mut Events) {
    match event {
        KvEvent::Reset => out.push(&Line::Reset { epoch, block_size: PAGE_TOKENS }),
        KvEvent::Stored { seq, hash, parent, tokens } => {
            let line = Line::Stored { seq: *seq, hash: *hash, parent: *parent, tokens };
            out.push_numbered(format_args!("{epoch}-{seq}"), &line);
        }
        KvEvent::Removed { seq, hash } => {
            out.push_numbered(format_args!("{epoch}-{seq}"), &Line::Removed { seq: *seq, hash: *hash });
        }
    }
}

/// The handler of the stream.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, headers: HeaderMap) -> ApiResult<Response> {
    let Some(kv_event_log) = state.served.engine.kv_event_log() else {
        let message = "this server publishes no KV events: start it with --kv-events";
        return Err(ApiError { code: Some("kv_events_off"), ..ApiError::new(StatusCode::NOT_FOUND, message) });
    };
    let place = enter(&state.server.metrics.kv_readers)?;
    let held = state.server.bytes.hold((EVENTS_AT_ONCE * (EVENT_BYTES + size_of::<KvEvent>())) as u64)?;
    let reader = Reader {
        cursor: resumed(&headers, kv_event_log).unwrap_or_default(),
        kv_event_log: Arc::clone(kv_event_log),
        events: Vec::with_capacity(EVENTS_AT_ONCE + 1),
        phase: state.server.phase.subscribe(),
        keep_alive: state.server.config.keep_alive,
        opened: false,
        _place: place,
        _held: held,
    };
    let stream = unfold(reader, |mut reader| async move {
        let out = reader.next().await?;
        Some((Ok::<_, Infallible>(out.into_bytes()), reader))
    });
    Ok((HEADERS, Body::from_stream(stream)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_event_has_the_bytes_that_are_held_for_it() {
        let (big, tokens) = (u64::MAX >> 1, [u32::MAX; PAGE_TOKENS]);
        let event = KvEvent::Stored { seq: big, hash: big, parent: Some(big), tokens };
        let mut out = Events::default();
        write(&event, big, &mut out);
        let bytes = out.into_bytes().len();
        assert!(bytes <= EVENT_BYTES && bytes > EVENT_BYTES / 2, "{bytes}");
    }

    #[test]
    fn there_are_so_many_readers_and_no_more() {
        let readers = Arc::new(AtomicU64::new(0));
        let places: Vec<_> = (0..READERS_MAX).map(|_| enter(&readers).unwrap()).collect();
        assert_eq!(enter(&readers).err().unwrap().status, StatusCode::SERVICE_UNAVAILABLE);
        drop(places);
        assert!(enter(&readers).is_ok());
        assert_eq!(readers.load(Ordering::Relaxed), 0);
    }
}
