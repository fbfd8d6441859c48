//! HTTP/2 in clear text with prior knowledge (h2c): its detection, its limits, and streams that stall.
//!
//! An HTTP/2 connection counts as [`PLACES`] connections, and each request on it as one more. The memory planned for connections thus holds
//! for both protocols.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper_util::rt::TokioTimer;
use prometheus_client::metrics::counter::Counter;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::sleep;

use crate::serve::socket::hung_up;

/// The number of connections that one HTTP/2 connection counts as: its buffers, its window and the heads that have arrived.
pub(crate) const PLACES: u32 = 4;
/// The most requests on one connection at once.
pub(crate) const STREAMS_MAX: u32 = 32;
/// Requests after which a connection is closed, so that proxies spread their load anew.
pub(crate) const REQUESTS_MAX: usize = 10_000;
/// Bytes of one request head, as HTTP/2 counts them.
const HEAD_BYTES: u32 = 8 << 10;
/// The most bytes of a body that arrive before they are read, for one request and for all of a connection.
const STREAM_WINDOW_BYTES: u32 = 32 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 64 << 10;
/// The most bytes of one frame, and of each piece of a body.
const FRAME_BYTES: u32 = 16 << 10;
/// The most requests that a client may reset before they begin; one more closes the connection (CVE-2023-44487).
const RESETS_MAX: usize = 20;
/// The most tasks of one connection, including those of requests that were reset. One more closes the connection.
const TASKS_MAX: usize = 4 * STREAMS_MAX as usize;

/// An empty SETTINGS frame, and GOAWAY with ENHANCE_YOUR_CALM, for a connection above the limit.
pub(crate) const GOAWAY: [u8; 26] = [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xb];

/// The protocol of a connection, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
    /// The peer sent nothing in time, or closed the connection.
    Silent,
}

/// Peeks at the first bytes for at most `patience`. HTTP/2 begins with `PRI`, as no method of HTTP/1 does.
pub(crate) async fn protocol(stream: &TcpStream, patience: Duration) -> Protocol {
    const PREFACE: &[u8] = b"PRI";
    let begins = async {
        loop {
            let mut first = [0; PREFACE.len()];
            match stream.peek(&mut first).await {
                Err(_) | Ok(0) => return Protocol::Silent,
                Ok(n) if first[..n] != PREFACE[..n] => return Protocol::Http1,
                Ok(n) if n == PREFACE.len() => return Protocol::Http2,
                // Readiness does not tell when a third byte has arrived.
                Ok(_) if hung_up(stream) => return Protocol::Silent,
                Ok(_) => sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(patience, begins).await.unwrap_or(Protocol::Silent)
}

/// Copies the host from HTTP/2's `:authority` to `Host`, the only header that the host checks read.
pub(crate) fn name_host<B>(request: &mut hyper::Request<B>) {
    let authority = request.uri().authority().map(|authority| HeaderValue::from_str(authority.as_str()));
    if let Some(Ok(host)) = authority {
        request.headers_mut().insert(header::HOST, host);
    }
}

tokio::task_local! {
    /// The flow of the stream that the running task answers.
    static FLOW: Arc<Flow>;
}

/// The pieces of one stream that the client has not taken yet.
pub(crate) struct Flow {
    epoch: Instant,
    pieces: AtomicUsize,
    /// Milliseconds after the epoch at which the client last took a piece, or was first given one.
    moved_ms: AtomicU64,
    /// The stream's permit for one connection, once it has one.
    place: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Flow {
    fn new() -> Self {
        Self {
            epoch: Instant::now(),
            pieces: AtomicUsize::new(0),
            moved_ms: AtomicU64::new(0),
            place: Mutex::default(),
        }
    }

    /// Returns the flow of the stream that the running task answers.
    pub fn current() -> Arc<Self> {
        FLOW.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Self::new()))
    }

    fn moves(&self) {
        self.moved_ms.store(self.epoch.elapsed().as_millis() as u64, Ordering::Release);
    }

    fn waits(&self) -> bool {
        self.pieces.load(Ordering::Acquire) > 0
    }

    /// Returns whether pieces are waiting and the client has taken none for `patience`.
    fn stalled(&self, patience: Duration) -> bool {
        let moved = Duration::from_millis(self.moved_ms.load(Ordering::Acquire));
        self.waits() && self.epoch.elapsed().saturating_sub(moved) >= patience
    }

    /// Completes when the stream has stalled.
    async fn stalls(&self, patience: Duration) {
        while !self.stalled(patience) {
            sleep((patience / 4).max(Duration::from_millis(50))).await;
        }
    }
}

/// A piece of a body, in transit until it is dropped.
struct Piece {
    bytes: Bytes,
    flow: Arc<Flow>,
}

impl Piece {
    fn new(bytes: Bytes, flow: &Arc<Flow>) -> Self {
        if flow.pieces.fetch_add(1, Ordering::AcqRel) == 0 {
            flow.moves();
        }
        Self { bytes, flow: Arc::clone(flow) }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.flow.moves();
        self.flow.pieces.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An answer's body in pieces; dropping a piece shows that the client has taken it.
pub(crate) struct FlowBody {
    body: Body,
    rest: Bytes,
    flow: Arc<Flow>,
}

impl FlowBody {
    pub fn new(body: Body, flow: Arc<Flow>) -> Self {
        Self { body, rest: Bytes::new(), flow }
    }
}

impl hyper::body::Body for FlowBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                other => return Poll::Ready(other),
            }
        }
        let most = self.rest.len().min(FRAME_BYTES as usize);
        let piece = self.rest.split_to(most);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(Piece::new(piece, &self.flow))))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        match hint.exact() {
            Some(exact) => hint.set_exact(exact + rest),
            None => hint.set_lower(hint.lower() + rest),
        }
        hint
    }
}

/// The streams of one connection. Also runs their tasks.
#[derive(Clone)]
pub(crate) struct Streams(Arc<StreamsState>);

struct StreamsState {
    patience: Duration,
    places: Arc<Semaphore>,
    stalled: Counter,
    /// The number of running tasks.
    tasks: AtomicUsize,
    /// Whether too many tasks ran at once.
    crowded: AtomicBool,
    requests: AtomicUsize,
    idle_since: Mutex<Instant>,
    /// Streams with a complete answer whose pieces the client has not all taken.
    answered: Mutex<Vec<Arc<Flow>>>,
    /// Closed with the connection.
    open: watch::Receiver<()>,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionState {
    Open,
    /// It takes no more requests.
    Drains,
    /// It takes no more requests, and none is left to answer.
    Idle,
    Closes,
}

impl Streams {
    /// `open`: its sender lives as long as the connection. `patience`: the longest time that a client may take nothing.
    pub fn new(open: watch::Receiver<()>, places: Arc<Semaphore>, patience: Duration, stalled: Counter) -> Self {
        Self(Arc::new(StreamsState {
            patience,
            places,
            stalled,
            tasks: AtomicUsize::new(0),
            crowded: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
            answered: Mutex::default(),
            open,
        }))
    }

    /// Returns a connection builder with the limits of this file.
    pub fn builder(&self) -> http2::Builder<Self> {
        let mut builder = http2::Builder::new(self.clone());
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS_MAX)
            .max_header_list_size(HEAD_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_send_buf_size(FRAME_BYTES as usize)
            .max_pending_accept_reset_streams(RESETS_MAX)
            .max_local_error_reset_streams(RESETS_MAX)
            .keep_alive_interval(self.0.patience.max(Duration::from_secs(1)))
            .keep_alive_timeout(self.0.patience.max(Duration::from_secs(1)));
        builder
    }

    /// Counts a request. Returns false when no connection permit is free.
    pub fn takes_place(&self, flow: &Flow) -> bool {
        self.0.requests.fetch_add(1, Ordering::AcqRel);
        let place = Arc::clone(&self.0.places).try_acquire_owned().ok();
        let taken = place.is_some();
        *flow.place.lock().unwrap_or_else(PoisonError::into_inner) = place;
        taken
    }

    /// Returns whether the connection stays open; an idle one ends after `idle`.
    pub fn connection_state(&self, idle: Duration) -> ConnectionState {
        let state = &self.0;
        let mut answered = state.answered.lock().unwrap_or_else(PoisonError::into_inner);
        answered.retain(|flow| flow.waits());
        if answered.iter().any(|flow| flow.stalled(state.patience)) {
            state.stalled.inc();
            return ConnectionState::Closes;
        }
        if state.crowded.load(Ordering::Acquire) {
            return ConnectionState::Closes;
        }
        let idle_for = state.idle_since.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        let is_idle = state.tasks.load(Ordering::Acquire) == 0 && answered.is_empty();
        match state.requests.load(Ordering::Acquire) {
            _ if is_idle && idle_for >= idle => ConnectionState::Idle,
            REQUESTS_MAX.. => ConnectionState::Drains,
            _ => ConnectionState::Open,
        }
    }
}

impl<F> Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    /// Runs a stream until it is answered, its client stalls, or the connection ends.
    fn execute(&self, stream: F) {
        let streams = self.clone();
        let task = StreamTask { flow: Arc::new(Flow::new()), streams };
        if task.streams.0.tasks.fetch_add(1, Ordering::AcqRel) >= TASKS_MAX {
            task.streams.0.crowded.store(true, Ordering::Release);
            return;
        }
        tokio::spawn(async move {
            let mut open = task.streams.0.open.clone();
            tokio::select! {
                () = FLOW.scope(Arc::clone(&task.flow), stream) => {}
                // Dropping the stream resets it.
                () = task.flow.stalls(task.streams.0.patience) => drop(task.streams.0.stalled.inc()),
                _ = open.changed() => {}
            }
        });
    }
}

/// Ends the stream's part of the connection on drop.
struct StreamTask {
    streams: Streams,
    flow: Arc<Flow>,
}

impl Drop for StreamTask {
    fn drop(&mut self) {
        let StreamTask { streams, flow } = self;
        let state = &streams.0;
        if flow.waits() {
            state.answered.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(flow));
        }
        *state.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        state.tasks.fetch_sub(1, Ordering::AcqRel);
    }
}
