//! The server's life: listen, accept a bounded number of connections, drain and end.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use listenfd::ListenFd;
use plimsoll_engine::EngineHandle;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout, timeout_at};

use crate::http::error::ServeError;
use crate::serve::connection::{Open, Role, connection, refuse};
use crate::serve::router::router;
use crate::serve::socket::{LINGER, prepare};
use crate::state::config::{PROBES_MAX, SOCKET_BUFFER_BYTES, Served, ServerConfig};
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, ServerState};

/// Connections the system may queue before they are accepted.
const BACKLOG: i32 = 256;

/// Shortest time between two warnings that connections cannot be accepted.
const WARNING_EVERY: Duration = Duration::from_secs(10);

/// At the end, connections in the system's queue are accepted for this long.
const BACKLOG_DRAIN: Duration = Duration::from_millis(20);

/// After the cut, error events have this long to reach their clients.
const CLOSE_GRACE: Duration = Duration::from_secs(3);

/// Each message tells the server to stop. After the first it drains; after another it does not wait for running requests. When all senders
/// are dropped, it drains as after the first.
pub type StopSignals = mpsc::Receiver<()>;

/// Whether a service manager passed a socket to listen on (systemd's socket activation).
#[must_use]
pub fn has_passed_socket() -> bool {
    match &*passed() {
        Passed::Unchecked => is_named(),
        Passed::Checked(_) | Passed::Taken => true,
    }
}

/// Returns whether the environment names a passed socket. The check of the socket removes the variables.
fn is_named() -> bool {
    // A parent's sockets are inherited with its process number.
    let own = std::env::var("LISTEN_PID").map_or(true, |pid| pid.is_empty() || pid == std::process::id().to_string());
    own && std::env::var_os("LISTEN_FDS").is_some()
}

/// Listens on the socket that a service manager passed, or else on the configured address. A passed socket can be taken once.
///
/// # Errors
/// [`ServeError::Bind`] when the name does not resolve, the address is taken, or the passed socket cannot be used.
pub async fn bind(config: &ServerConfig) -> Result<TcpListener, ServeError> {
    if has_passed_socket() {
        check_passed_socket()?;
        let passed = std::mem::replace(&mut *passed(), Passed::Taken);
        let Passed::Checked(listener) = passed else {
            return Err(not_passed(io::Error::other("it was taken before")));
        };
        return TcpListener::from_std(listener).map_err(not_passed);
    }
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

/// The service manager's socket. It can be taken from the environment only once.
enum Passed {
    /// The environment has not been read yet.
    Unchecked,
    /// The socket is ready for [`bind`].
    Checked(std::net::TcpListener),
    Taken,
}

static PASSED: Mutex<Passed> = Mutex::new(Passed::Unchecked);

fn passed() -> MutexGuard<'static, Passed> {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn not_passed(reason: io::Error) -> ServeError {
    ServeError::Bind { address: "the socket of the service manager".into(), reason }
}

/// Checks the socket that a service manager passed, before a model is loaded. [`bind`] listens on it.
///
/// # Errors
/// [`ServeError::Bind`]: it is not exactly one listening TCP socket.
pub fn check_passed_socket() -> Result<(), ServeError> {
    let mut passed = passed();
    if matches!(*passed, Passed::Unchecked) {
        *passed = Passed::Checked(passed_socket().map_err(not_passed)?);
    }
    Ok(())
}

/// Takes the one socket of `LISTEN_FDS`.
fn passed_socket() -> io::Result<std::net::TcpListener> {
    let mut passed = ListenFd::from_env();
    if passed.len() != 1 {
        let message = format!("it passed {} sockets to this process; exactly 1 is needed", passed.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let missing = || io::Error::new(io::ErrorKind::InvalidInput, "it passed no TCP socket that listens");
    let listener = passed.take_tcp_listener(0)?.ok_or_else(missing)?;
    if !SockRef::from(&listener).is_listener()? {
        return Err(missing());
    }
    SockRef::from(&listener).set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Connections inherit this: the most bytes from a client that the kernel buffers before they are read.
    socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Serves until it is told to stop, then drains. New requests are refused. Running requests may finish within `config.drain_deadline`.
/// Requests still running then, or at a second message, end with an error.
///
/// # Errors
/// [`ServeError::Config`] when the limits contradict each other. A failing connection is not an error of the server.
pub async fn serve(
    listener: TcpListener,
    served: Served,
    config: ServerConfig,
    told: StopSignals,
) -> Result<(), ServeError> {
    let state = ModelState::new(served, config)?;
    let (server, engine) = (Arc::clone(&state.server), state.served.engine.clone());
    run(listener, &server, router(state), || engine.drain(), told).await;
    let_go(&[&engine]).await;
    Ok(())
}

/// Waits at most [`CLOSE_GRACE`] until the engines have ended requests without a reader, so that the last counts include these.
pub(crate) async fn let_go(engines: &[&EngineHandle]) {
    let idle = async {
        while !engines.iter().all(|engine| engine.idle()) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    if timeout(CLOSE_GRACE, idle).await.is_err() {
        tracing::warn!("requests without a reader are still in the engine");
    }
}

/// Serves until it is told to stop, then calls `begin_drain` and waits for running requests. New connections are answered meanwhile, one
/// request each. The answer is normally a 503. Health, metrics and running requests can still be read, and running requests cancelled.
pub(crate) async fn run(
    listener: TcpListener,
    state: &Arc<ServerState>,
    router: Router,
    begin_drain: impl FnOnce(),
    mut told: StopSignals,
) {
    let [permits, probes] = [state.config.max_connections as usize, PROBES_MAX].map(|n| Arc::new(Semaphore::new(n)));
    let mut acceptor = Acceptor { state, router, permits, probes, listener, last_warning: None };
    let (mut connections, mut late) = (JoinSet::new(), JoinSet::new());
    tokio::select! {
        _ = told.recv() => {}
        never = acceptor.accept_all(&mut connections, ServerPhase::Draining) => match never {},
    }
    let deadline = tokio::select! {
        deadline = drain(state, begin_drain, connections, &mut told) => deadline,
        never = acceptor.accept_all(&mut late, ServerPhase::Cut) => match never {},
    };
    // All running requests have ended. Connections that the system has queued are still answered.
    state.phase.send_replace(ServerPhase::Cut);
    let _ = timeout(BACKLOG_DRAIN, acceptor.accept_all(&mut late, ServerPhase::Cut)).await;
    drop(acceptor);
    // These connections have the rest of the grace period, and at least the time to read an answer.
    end(late, deadline.max(Instant::now() + LINGER)).await;
    if let Some(recorder) = &state.recorder {
        recorder.flush();
    }
    if let Some(tracer) = &state.tracer {
        tracer.flush();
    }
}

/// The accept loop.
struct Acceptor<'a> {
    state: &'a Arc<ServerState>,
    router: Router,
    permits: Arc<Semaphore>,
    /// Permits of connections above the limit ([`Role::Probe`]).
    probes: Arc<Semaphore>,
    listener: TcpListener,
    last_warning: Option<Instant>,
}

impl Acceptor<'_> {
    /// Accepts connections, which end in the phase `until`, and removes those that have ended.
    async fn accept_all(&mut self, connections: &mut JoinSet<()>, ends_at: ServerPhase) -> Infallible {
        loop {
            tokio::select! {
                Some(_) = connections.join_next() => {}
                accepted = self.listener.accept() => match accepted {
                    Ok(peer) => self.accept(connections, peer, ends_at),
                    Err(error) => {
                        // Usually the process has no descriptors left, so this waits until other connections close. This may take long, so
                        // the log is limited.
                        if self.last_warning.is_none_or(|at| at.elapsed() >= WARNING_EVERY) {
                            self.last_warning = Some(Instant::now());
                            tracing::warn!(%error, "connections cannot be accepted");
                        }
                        sleep(Duration::from_millis(50)).await;
                    }
                },
            }
        }
    }

    fn accept(&self, connections: &mut JoinSet<()>, (stream, peer): (TcpStream, SocketAddr), ends_at: ServerPhase) {
        let limit = self.state.config.max_connections;
        let take = |permits: &Arc<Semaphore>| Arc::clone(permits).try_acquire_owned().ok();
        let client = take(&self.permits).map(|permit| (permit, Role::Client));
        let Some((permit, role)) = client.or_else(|| Some((take(&self.probes)?, Role::Probe))) else {
            self.state.metrics.refused_connections.inc();
            return refuse(&stream, limit);
        };
        if let Err(error) = prepare(&stream, self.state.config.write_timeout) {
            // The peer has disconnected already. A broken option would fail in every connection.
            tracing::debug!(%error, "a connection could not be prepared");
        }
        let open = Open::new(self.state, &self.permits, permit);
        connections.spawn(connection(open, self.router.clone(), (stream, peer), role, ends_at));
    }
}

/// Drains the connections, and returns the end of the grace period.
async fn drain(
    state: &ServerState,
    begin: impl FnOnce(),
    mut connections: JoinSet<()>,
    told: &mut StopSignals,
) -> Instant {
    let enter = |phase: ServerPhase, phases: &watch::Sender<ServerPhase>| {
        phases.send_replace(phase);
        tracing::info!(?phase, open = state.metrics.connections.load(Ordering::Relaxed), "shutting down");
    };
    enter(ServerPhase::Draining, &state.phase);
    begin();
    let done = async {
        all(&mut connections).await;
        state.background.idle().await;
    };
    tokio::select! {
        () = done => return Instant::now() + CLOSE_GRACE,
        () = sleep(state.config.drain_deadline) => {}
        Some(()) = told.recv() => {}
    }
    enter(ServerPhase::Cut, &state.phase);
    let deadline = Instant::now() + CLOSE_GRACE;
    end(connections, deadline).await;
    if timeout_at(deadline.into(), state.background.idle()).await.is_err() {
        tracing::warn!(running = state.background.running(), "responses in the background have not ended");
    }
    deadline
}

/// Waits for connections until the deadline, then closes the rest.
async fn end(mut connections: JoinSet<()>, deadline: Instant) {
    if timeout_at(deadline.into(), all(&mut connections)).await.is_err() {
        connections.shutdown().await;
    }
}

async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}
