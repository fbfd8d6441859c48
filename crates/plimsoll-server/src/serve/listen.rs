//! The server's life: listen, accept a bounded number of connections, and end in an orderly way.

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::SocketAddr;
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
use plimsoll_engine::EngineHandle;
use plimsoll_memory::broken;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout, timeout_at};

use crate::http::error::{ApiError, ServeError};
use crate::serve::connection::{ClientSocket, LINGER, has_unread, hung_up, prepare};
use crate::serve::middleware::Peer;
use crate::serve::router::router;
use crate::state::config::{
    CONNECTION_BUFFER_BYTES, HEAD_BYTES, LOOKER_BUFFER_BYTES, LOOKERS_MAX, SOCKET_BUFFER_BYTES, Served, ServerConfig,
};
use crate::state::model::ModelState;
use crate::state::server::{Phase, ServerState, reached};

/// Connections the system may queue before they are accepted.
const BACKLOG: i32 = 256;

/// Connections that cannot be accepted are logged no more often than this.
const COMPLAINT_EVERY: Duration = Duration::from_secs(10);

/// How often a connection is checked for a peer that has gone while unread input hides it.
const HANG_UP_CHECK: Duration = Duration::from_secs(2);

/// A connection above the limit has this long to send the head of its request.
const LOOKER_PATIENCE: Duration = Duration::from_secs(1);

/// At the end, connections that the system has queued are accepted for this long.
const DOORSTEP: Duration = Duration::from_millis(20);

/// After the cut, error events have this long to reach their clients.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Each message tells the server to end. After the first it drains; after another it does not wait for running
/// requests. When all senders are dropped, it drains as after the first.
pub type Told = mpsc::Receiver<()>;

/// Listens where the configuration says.
///
/// # Errors
/// [`ServeError::Bind`] when the name does not resolve or the address is taken.
pub async fn bind(config: &ServerConfig) -> Result<TcpListener, ServeError> {
    let address = config.address();
    let failed = |reason| ServeError::Bind { address: address.clone(), reason };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for candidate in lookup_host((config.host.as_str(), config.port)).await.map_err(failed)? {
        match listen(candidate) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Connections inherit it: what a client may pile up in the kernel before it is read.
    socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Serves until it is told to end, then drains. New requests are refused. Running requests may finish within
/// `config.drain_deadline`. Those left then, or at a second message, end with an error.
///
/// # Errors
/// [`ServeError::Config`] when the limits contradict each other. Trouble with single connections is no error.
pub async fn serve(listener: TcpListener, served: Served, config: ServerConfig, told: Told) -> Result<(), ServeError> {
    let state = ModelState::new(served, config)?;
    let (server, engine) = (Arc::clone(&state.server), state.served.engine.clone());
    run(listener, &server, router(state), || engine.drain(), told).await;
    let_go(&[&engine]).await;
    Ok(())
}

/// Waits until the engines have ended requests without a reader, so that these are in the last counts. At most
/// [`LAST_WORDS`].
pub(crate) async fn let_go(engines: &[&EngineHandle]) {
    let idle = async {
        while !engines.iter().all(|engine| engine.idle()) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    if timeout(LAST_WORDS, idle).await.is_err() {
        tracing::warn!("requests without a reader are still in the engine");
    }
}

/// Serves until it is told to end, then calls `begin_drain` and waits for running requests. New connections are
/// answered meanwhile, one request each. The answer is a 503 as a rule; health, metrics and running requests can be
/// read, and running requests cancelled.
pub(crate) async fn run(
    listener: TcpListener,
    state: &Arc<ServerState>,
    router: Router,
    begin_drain: impl FnOnce(),
    mut told: Told,
) {
    let [permits, lookers] = [state.config.max_connections as usize, LOOKERS_MAX].map(|n| Arc::new(Semaphore::new(n)));
    let mut middleware = Door { state, router, permits, lookers, listener, complained: None };
    let (mut connections, mut late) = (JoinSet::new(), JoinSet::new());
    tokio::select! {
        _ = told.recv() => {}
        never = middleware.admit_all(&mut connections, Phase::Draining) => match never {},
    }
    let deadline = tokio::select! {
        deadline = drain(state, begin_drain, connections, &mut told) => deadline,
        never = middleware.admit_all(&mut late, Phase::Cut) => match never {},
    };
    // All running requests have ended. Connections that the system has queued are still answered.
    state.phase.send_replace(Phase::Cut);
    let _ = timeout(DOORSTEP, middleware.admit_all(&mut late, Phase::Cut)).await;
    drop(middleware);
    // They have what is left of the time for last words, or at least for a lingering answer.
    end(late, deadline.max(Instant::now() + LINGER)).await;
    if let Some(recorder) = &state.recorder {
        recorder.flush();
    }
}

/// Where connections come in.
struct Door<'a> {
    state: &'a Arc<ServerState>,
    router: Router,
    permits: Arc<Semaphore>,
    /// Places for connections above the limit ([`Role::Looker`]).
    lookers: Arc<Semaphore>,
    listener: TcpListener,
    complained: Option<Instant>,
}

impl Door<'_> {
    /// Lets connections in, which may stay up to a phase, and forgets those that have ended.
    async fn admit_all(&mut self, connections: &mut JoinSet<()>, until: Phase) -> Infallible {
        loop {
            tokio::select! {
                Some(_) = connections.join_next() => {}
                accepted = self.listener.accept() => match accepted {
                    Ok(peer) => self.admit(connections, peer, until),
                    Err(error) => {
                        // Out of descriptors, usually: a moment lets others close. It may last, and twenty lines a second would fill a disk.
                        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAINT_EVERY) {
                            self.complained = Some(Instant::now());
                            tracing::warn!(%error, "connections cannot be accepted");
                        }
                        sleep(Duration::from_millis(50)).await;
                    }
                },
            }
        }
    }

    fn admit(&self, connections: &mut JoinSet<()>, (stream, peer): (TcpStream, SocketAddr), until: Phase) {
        let limit = self.state.config.max_connections;
        let place = |permits: &Arc<Semaphore>| Arc::clone(permits).try_acquire_owned().ok();
        let client = place(&self.permits).map(|permit| (permit, Role::Client));
        let Some((permit, role)) = client.or_else(|| Some((place(&self.lookers)?, Role::Looker))) else {
            self.state.metrics.refused_connections.inc();
            return refuse(&stream, limit);
        };
        if let Err(error) = prepare(&stream, self.state.config.write_timeout) {
            // The peer has gone already; a broken option would be seen in every connection.
            tracing::debug!(%error, "a connection could not be prepared");
        }
        let open = Open::new(self.state, permit);
        connections.spawn(connection(open, self.router.clone(), (stream, peer), role, until));
    }
}

/// What a connection may ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Client,
    /// A connection above the limit: it has one request, to read the server's state.
    Looker,
}

impl Role {
    /// Whether it may ask that. A probe that is refused has the server restarted when most depend on it.
    fn may<B>(self, request: &hyper::Request<B>) -> bool {
        const LOOKS: [&str; 5] = ["/health", "/ready", "/metrics", "/v1/status", "/v1/memory"];
        let looks = matches!(*request.method(), Method::GET | Method::HEAD) && LOOKS.contains(&request.uri().path());
        self == Role::Client || looks
    }
}

/// What one connection too many is told.
fn crowded(limit: u32) -> ApiError {
    ApiError::unavailable(format!("{limit} connections are open, which is the limit (--max-connections)"), 1)
}

/// Tells a connection that it is one too many, without spending anything on it.
fn refuse(stream: &TcpStream, limit: u32) {
    let body = crowded(limit).body();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = stream.try_write(&[head.as_bytes(), &body].concat());
}

/// Serves a connection until it ends; from a phase on nothing more is read from it than has come.
async fn connection(open: Open, router: Router, (stream, peer): (TcpStream, SocketAddr), role: Role, until: Phase) {
    let state = Arc::clone(&open.state);
    let stream = Arc::new(stream);
    let unread = Arc::new(AtomicBool::new(false));
    let socket = TokioIo::new(ClientSocket::new(Arc::clone(&stream), state.config.write_timeout, Arc::clone(&unread)));
    let routes = TowerToHyperService::new(router);
    let server = Arc::clone(&state);
    let asked = Arc::new(AtomicBool::new(role == Role::Client));
    let seen = Arc::clone(&asked);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Peer(peer.ip()));
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
            // Our own answers say so when they were given before the request was read.
            if answer.headers().contains_key(header::CONNECTION) {
                unread.store(true, Ordering::Release);
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let (patience, buffer) = match role {
        Role::Client => (state.config.header_timeout, CONNECTION_BUFFER_BYTES),
        Role::Looker => (state.config.header_timeout.min(LOOKER_PATIENCE), LOOKER_BUFFER_BYTES),
    };
    let connection = http1::Builder::new()
        // One that comes while the server drains has its answer, and ends.
        .keep_alive(until == Phase::Draining && role == Role::Client)
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(buffer)
        .max_header_size(HEAD_BYTES)
        .serve_connection(socket, service);
    tokio::pin!(connection);
    let mut phase = state.phase.subscribe();
    let mut ending = false;
    let mut check = interval(HANG_UP_CHECK);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = connection.as_mut() => break,
            () = reached(&mut phase, until), if !ending => {
                ending = true;
                // A request that lies there unread would be closed with the connection: it is taken up first.
                if has_unread(&stream) && stream.readable().await.is_ok() {
                    tokio::select! {
                        biased;
                        _ = connection.as_mut() => break,
                        () = ready(()) => {}
                    }
                }
                connection.as_mut().graceful_shutdown();
            }
            _ = check.tick() => if hung_up(&stream) && !broken("V-28") { break },
        }
    }
    if !asked.load(Ordering::Relaxed) {
        // A connection above the limit that sent no request in time.
        state.metrics.refused_connections.inc();
    }
}

/// A connection's place, given back on drop.
struct Open {
    state: Arc<ServerState>,
    _permit: OwnedSemaphorePermit,
}

impl Open {
    fn new(state: &Arc<ServerState>, permit: OwnedSemaphorePermit) -> Self {
        state.metrics.connections.fetch_add(1, Ordering::Relaxed);
        Self { state: Arc::clone(state), _permit: permit }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.state.metrics.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns until when there is time for last words to others.
async fn drain(state: &ServerState, begin: impl FnOnce(), mut connections: JoinSet<()>, told: &mut Told) -> Instant {
    let enter = |phase: Phase, phases: &watch::Sender<Phase>| {
        phases.send_replace(phase);
        tracing::info!(?phase, open = state.metrics.connections.load(Ordering::Relaxed), "shutting down");
    };
    enter(Phase::Draining, &state.phase);
    begin();
    tokio::select! {
        () = all(&mut connections) => return Instant::now() + LAST_WORDS,
        () = sleep(state.config.drain_deadline) => {}
        Some(()) = told.recv() => {}
    }
    enter(Phase::Cut, &state.phase);
    let deadline = Instant::now() + LAST_WORDS;
    end(connections, deadline).await;
    deadline
}

/// Ends what does not end by itself in time.
async fn end(mut connections: JoinSet<()>, deadline: Instant) {
    if timeout_at(deadline.into(), all(&mut connections)).await.is_err() {
        connections.shutdown().await;
    }
}

async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}
