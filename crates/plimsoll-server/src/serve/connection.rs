//! One connection: its protocol, the requests that it may send, and its end.

use std::convert::Infallible;
use std::future::{poll_fn, ready};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderValue, Method, header};
use axum::response::IntoResponse;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::http::error::ApiError;
use crate::serve::http2::{self, ConnectionState, Flow, FlowBody, Protocol, Streams};
use crate::serve::middleware::Peer;
use crate::serve::socket::{ClientSocket, has_unread, hung_up};
use crate::state::config::{CONNECTION_BUFFER_BYTES, HEAD_BYTES, PROBE_BUFFER_BYTES};
use crate::state::server::{ServerPhase, ServerState, reached};

/// The interval of checks for a peer that has disconnected while unread input hides it.
const HANG_UP_CHECK: Duration = Duration::from_secs(2);

/// A connection above the limit must send the head of its request within this time.
const PROBE_PATIENCE: Duration = Duration::from_secs(1);

/// The requests that a connection may send.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    /// A connection above the limit: one request, to read the server's state.
    Probe,
}

impl Role {
    /// Returns whether the role allows this request. An orchestrator restarts a server that refuses its probes.
    fn may<B>(self, request: &hyper::Request<B>) -> bool {
        const PROBE_PATHS: [&str; 5] = ["/health", "/ready", "/metrics", "/v1/status", "/v1/memory"];
        let probes =
            matches!(*request.method(), Method::GET | Method::HEAD) && PROBE_PATHS.contains(&request.uri().path());
        self == Role::Client || probes
    }
}

/// Returns the error for a connection above the limit.
fn crowded(limit: u32) -> ApiError {
    ApiError::unavailable(format!("{limit} connections are open, which is the limit (--max-connections)"), 1)
}

/// Answers a connection above the limit, without a task or buffers for it.
pub(crate) fn refuse(stream: &TcpStream, limit: u32) {
    let body = crowded(limit).body();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = stream.try_write(&[head.as_bytes(), &body].concat());
}

/// Serves a connection until it ends. From the phase `ends_at` on, only bytes that have arrived are read.
pub(crate) async fn connection(
    open: Open,
    router: Router,
    (stream, peer): (TcpStream, SocketAddr),
    role: Role,
    ends_at: ServerPhase,
) {
    let state = Arc::clone(&open.state);
    let patience = match role {
        Role::Client => state.config.header_timeout,
        Role::Probe => state.config.header_timeout.min(PROBE_PATIENCE),
    };
    let mut phase = state.phase.subscribe();
    let protocol = tokio::select! {
        protocol = http2::protocol(&stream, patience) => protocol,
        // The server is ending. HTTP/1 still answers a request that has arrived; HTTP/2 takes none.
        () = reached(&mut phase, ends_at) => Protocol::Http1,
    };
    let socket = Socket { stream: Arc::new(stream), peer: peer.ip() };
    match protocol {
        Protocol::Http1 => http1_connection(&open, router, socket, (role, patience), ends_at).await,
        Protocol::Http2 => http2_connection(&open, router, socket, (role, patience), ends_at).await,
        Protocol::Silent if role == Role::Probe => drop(state.metrics.refused_connections.inc()),
        Protocol::Silent => {}
    }
}

/// An accepted socket and the address of its peer.
struct Socket {
    stream: Arc<TcpStream>,
    peer: IpAddr,
}

async fn http1_connection(
    open: &Open,
    router: Router,
    at: Socket,
    (role, patience): (Role, Duration),
    ends_at: ServerPhase,
) {
    let (state, Socket { stream, peer }) = (Arc::clone(&open.state), at);
    let unread = Arc::new(AtomicBool::new(false));
    let socket = TokioIo::new(ClientSocket::new(Arc::clone(&stream), state.config.write_timeout, Arc::clone(&unread)));
    let routes = TowerToHyperService::new(router);
    let server = Arc::clone(&state);
    let has_request = Arc::new(AtomicBool::new(role == Role::Client));
    let seen = Arc::clone(&has_request);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        seen.store(true, Ordering::Relaxed);
        let answer = role.may(&request).then(|| routes.call(request));
        let (server, unread) = (Arc::clone(&server), Arc::clone(&unread));
        async move {
            let answer = match answer {
                Some(answer) => answer.await?,
                None => {
                    server.metrics.refused_connections.inc();
                    let mut answer = crowded(server.config.max_connections).into_response();
                    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                    answer
                }
            };
            // Answers that are sent before the request was read close the connection.
            if answer.headers().contains_key(header::CONNECTION) {
                unread.store(true, Ordering::Release);
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        // While the server drains, a connection gets one answer.
        .keep_alive(ends_at == ServerPhase::Draining && role == Role::Client)
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(if role == Role::Client { CONNECTION_BUFFER_BYTES } else { PROBE_BUFFER_BYTES })
        .max_header_size(HEAD_BYTES)
        .serve_connection(socket, service);
    drive(connection, http1::Connection::graceful_shutdown, &stream, &state, ends_at, || ConnectionState::Open).await;
    if !has_request.load(Ordering::Relaxed) {
        // This connection above the limit sent no request in time.
        state.metrics.refused_connections.inc();
    }
}

async fn http2_connection(
    open: &Open,
    router: Router,
    at: Socket,
    (role, idle): (Role, Duration),
    ends_at: ServerPhase,
) {
    let (state, Socket { stream, peer }) = (Arc::clone(&open.state), at);
    // The client's input after the last answer is read for a short time, so that the answer arrives.
    let unread = Arc::new(AtomicBool::new(true));
    let mut socket = ClientSocket::new(Arc::clone(&stream), state.config.write_timeout, unread);
    let places = Arc::clone(&open.permits).try_acquire_many_owned(http2::PLACES - 1);
    let (Ok(_places), Role::Client) = (places, role) else {
        state.metrics.refused_connections.inc();
        let _ = stream.try_write(&http2::GOAWAY);
        let _ = poll_fn(|cx| Pin::new(&mut socket).poll_shutdown(cx)).await;
        return;
    };
    let socket = TokioIo::new(socket);
    let (_alive, closed) = watch::channel(());
    let (patience, stalled) = (state.config.write_timeout, state.metrics.stalled_streams.clone());
    let streams = Streams::new(closed, Arc::clone(&open.permits), patience, stalled);
    let routes = TowerToHyperService::new(router);
    let (server, own) = (Arc::clone(&state), streams.clone());
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        http2::name_host(&mut request);
        let (routes, server, own) = (routes.clone(), Arc::clone(&server), own.clone());
        async move {
            let flow = Flow::current();
            let answer = match own.takes_place(&flow) {
                true => routes.call(request).await?,
                false => {
                    server.metrics.refused_connections.inc();
                    crowded(server.config.max_connections).into_response()
                }
            };
            Ok::<_, Infallible>(answer.map(|body| FlowBody::new(body, flow)))
        }
    });
    let connection = streams.builder().serve_connection(socket, service);
    let drain = hyper::server::conn::http2::Connection::graceful_shutdown;
    drive(connection, drain, &stream, &state, ends_at, || streams.connection_state(idle)).await;
}

/// Runs a connection until it ends, its peer has disconnected or `state_now` is closed.
async fn drive<C: Future>(
    connection: C,
    drain: impl Fn(Pin<&mut C>),
    stream: &TcpStream,
    state: &ServerState,
    ends_at: ServerPhase,
    state_now: impl Fn() -> ConnectionState,
) {
    tokio::pin!(connection);
    let mut phase = state.phase.subscribe();
    let mut ending = None;
    let mut check = interval(HANG_UP_CHECK);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = connection.as_mut() => break,
            () = reached(&mut phase, ends_at), if ending.is_none() => {
                ending = Some(Instant::now());
                // An unread request would be closed with the connection, so it is read first.
                if has_unread(stream) && stream.readable().await.is_ok() {
                    tokio::select! {
                        biased;
                        _ = connection.as_mut() => break,
                        () = ready(()) => {}
                    }
                }
                drain(connection.as_mut());
            }
            _ = check.tick() => match state_now() {
                _ if hung_up(stream) => break,
                ConnectionState::Closes => break,
                ConnectionState::Drains | ConnectionState::Idle if ending.is_none() => {
                    ending = Some(Instant::now());
                    drain(connection.as_mut());
                }
                // The client keeps an idle connection open beyond the write timeout.
                ConnectionState::Idle if ending.is_some_and(|since| since.elapsed() >= state.config.write_timeout) => break,
                _ => {}
            }
        }
    }
}

/// A connection's permit, given back on drop.
pub(crate) struct Open {
    state: Arc<ServerState>,
    /// Permits for further places, which an HTTP/2 connection needs.
    permits: Arc<Semaphore>,
    _permit: OwnedSemaphorePermit,
}

impl Open {
    pub fn new(state: &Arc<ServerState>, permits: &Arc<Semaphore>, permit: OwnedSemaphorePermit) -> Self {
        state.metrics.connections.fetch_add(1, Ordering::Relaxed);
        Self { state: Arc::clone(state), permits: Arc::clone(permits), _permit: permit }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.state.metrics.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
