//! Signals that end a server.

use std::time::{Duration, Instant};

#[cfg(unix)]
use plimsoll_memory::host::{OwnProcess, Root};
use plimsoll_server::StopSignals;
use sd_notify::NotifyState;

use super::serving::notify;

/// A signal within this time after the first is the same one, sent to the process and to its group.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// Listens for Ctrl-C, SIGTERM and SIGHUP from now on. Sends a message for the first signal, and one for a later signal.
/// Call it in the HTTP runtime.
pub fn told() -> std::io::Result<StopSignals> {
    let mut signals = Signals::new()?;
    let (tell, told) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        signals.next().await;
        let first = Instant::now();
        notify(&[NotifyState::Stopping]);
        let _ = tell.send(()).await;
        loop {
            signals.next().await;
            if first.elapsed() >= SAME_SIGNAL {
                break;
            }
        }
        tracing::warn!("told to end again: what still runs is ended now");
        let _ = tell.send(()).await;
    });
    Ok(told)
}

/// Ends the process on a signal that arrives before it serves. Only the first process of a container (process ID 1) needs this:
/// the system drops signals to it that it does not listen for.
pub struct Early {
    _serving: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Early {
    /// Listens from now on.
    pub fn new() -> std::io::Result<Self> {
        if std::process::id() != 1 {
            return Ok(Self { _serving: None });
        }
        let (serving, serves) = tokio::sync::oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = runtime.block_on(async { Signals::new() })?;
        let wait = async move {
            tokio::select! {
                biased;
                _ = serves => {}
                () = signals.next() => {
                    tracing::info!("told to end before it was ready");
                    std::process::exit(0);
                }
            }
        };
        std::thread::Builder::new().name("plimsoll-early".into()).spawn(move || runtime.block_on(wait))?;
        Ok(Self { _serving: Some(serving) })
    }
}

/// The signals that end the server.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// SIGHUP: the terminal has gone. None where the process ignores it (`nohup`).
    hangup: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let survives = OwnProcess::ignores_hangup(&Root::system()).unwrap_or(true);
        let hangup = (!survives).then(|| signal(SignalKind::hangup())).transpose()?;
        let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
        Ok(Self { interrupt: interrupt?, terminate: terminate?, hangup })
    }

    async fn next(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! { _ = self.interrupt.recv() => {}, _ = self.terminate.recv() => {}, _ = hangup => {} }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        // Without the signal there is nothing to wait for but the end of the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
