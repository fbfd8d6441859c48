//! The sandbox: a child process that compiles grammars for trial and validates answers.
//!
//! The cost of a client's grammar or schema cannot be estimated before it is processed. So each job runs first in a
//! separate process with limits on bytes, time and stack. A job that exceeds a limit ends only that process. The server
//! then compiles a grammar that passed, at a known cost.
//!
//! `Sandbox` is the server's side, [`serve`] the child's. They exchange frames (`protocol`) over a socket pair.
//!
//! Out of scope: the meaning of a schema, and the tokens that may come next.

mod child;
mod protocol;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use child::serve;
pub use protocol::Violation;
pub(crate) use protocol::{Bounds, Response, SandboxRequest, Vocabulary};

use plimsoll_memory::child::{OwnedChild, isolate};
use protocol::{EXIT_HEAP_LIMIT, read_frame, write_frame};
use thiserror::Error;

/// The command-line argument that starts the program as a sandbox.
pub const SANDBOX_ARGUMENT: &str = "grammar-sandbox";

/// Limits of compiling one grammar. A schema of 500 properties takes 6 MiB of heap.
pub(crate) const COMPILING: Bounds = Bounds { heap_bytes: 12 << 20, stack_bytes: 8 << 20 };

/// Limits of validating the documents of one mask.
pub(crate) const VALIDATING: Bounds = Bounds { heap_bytes: 6 << 20, stack_bytes: 4 << 20 };

/// Most bytes of one sandbox process without its job: vocabulary, program data, page tables. Measured: 2 MiB.
const PROCESS_BYTES_MAX: u64 = 3 << 20;

/// Most bytes of a model's two sandbox processes: one for compiling, one for validating.
pub const SANDBOXES_BYTES_MAX: u64 = COMPILING.process_bytes() + VALIDATING.process_bytes();

impl Bounds {
    /// Most bytes of a process that runs jobs with these bounds.
    const fn process_bytes(self) -> u64 {
        PROCESS_BYTES_MAX + self.heap_bytes + self.stack_bytes as u64
    }
}

/// How often a waiting caller checks its client's connection.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Why a job has no response.
#[derive(Debug, Error)]
pub(crate) enum SandboxError {
    #[error("it needs more than {} MiB of memory", .0 >> 20)]
    Bytes(u64),
    #[error("it takes longer than {0:?}")]
    Time(Duration),
    #[error("it is nested too deeply: it needs more than {} MiB of stack", .0 >> 20)]
    Stack(usize),
    #[error("the client has disconnected")]
    ClientDisconnected,
    #[error("the sandbox process cannot be used: {0}")]
    Process(#[from] io::Error),
}

/// A child process. It starts with the first job, and again after a job that ended it.
pub(crate) struct Sandbox {
    program: PathBuf,
    vocabulary: Vocabulary,
    bounds: Bounds,
    running: Mutex<Option<SandboxProcess>>,
    starts: AtomicU64,
}

struct SandboxProcess {
    child: OwnedChild,
    stream: UnixStream,
    bounds: Bounds,
}

impl Sandbox {
    pub fn new(program: PathBuf, vocabulary: Vocabulary, bounds: Bounds) -> Self {
        Self { program, vocabulary, bounds, running: Mutex::default(), starts: AtomicU64::new(0) }
    }

    /// Processes started so far.
    pub fn starts(&self) -> u64 {
        self.starts.load(Relaxed)
    }

    /// Runs one job after those submitted before it. `client_left` says whether its client has disconnected.
    pub fn run(
        &self,
        request: &SandboxRequest<'_>,
        time: Duration,
        client_left: &dyn Fn() -> bool,
    ) -> Result<Response, SandboxError> {
        let mut running = self.running();
        if client_left() {
            return Err(SandboxError::ClientDisconnected);
        }
        if running.is_none() {
            *running = Some(self.start()?);
        }
        let Some(process) = running.as_mut() else { unreachable!("the process was started above") };
        let answer = process.call(request, time, client_left);
        if answer.is_err() {
            // Ends the process, which may still be busy.
            *running = None;
        }
        answer
    }

    fn running(&self) -> MutexGuard<'_, Option<SandboxProcess>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<SandboxProcess, SandboxError> {
        let (stream, child_stream) = UnixStream::pair()?;
        let output: OwnedFd = child_stream.try_clone()?.into();
        let mut command = Command::new(&self.program);
        isolate(command.arg(SANDBOX_ARGUMENT));
        command.stdin(OwnedFd::from(child_stream)).stdout(output).stderr(Stdio::null());
        let child = command.spawn()?.into();
        self.starts.fetch_add(1, Relaxed);
        // The command holds the other end until it is dropped.
        drop(command);
        let mut running = SandboxProcess { child, stream, bounds: self.bounds };
        running.call(&SandboxRequest::Setup(&self.vocabulary, self.bounds), START_TIME, &|| false)?;
        Ok(running)
    }
}

/// Time limit for the process to start and read the vocabulary. A machine with busy cores needs a fraction of it.
const START_TIME: Duration = Duration::from_secs(10);

impl SandboxProcess {
    fn call(
        &mut self,
        request: &SandboxRequest<'_>,
        time: Duration,
        client_left: &dyn Fn() -> bool,
    ) -> Result<Response, SandboxError> {
        let until = Instant::now() + time;
        let frame = serde_json::to_vec(request).map_err(io::Error::from)?;
        self.stream.set_write_timeout(Some(time))?;
        if write_frame(&mut self.stream, &frame).is_err() {
            return Err(self.exit_error(time));
        }
        self.stream.set_read_timeout(Some(POLL_INTERVAL))?;
        let wait = |error: &io::Error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let mut stop = None;
        let read = read_frame(&mut self.stream, |error| {
            stop = match () {
                () if !wait(error) => return false,
                () if client_left() => Some(SandboxError::ClientDisconnected),
                () if Instant::now() >= until => Some(SandboxError::Time(time)),
                () => return true,
            };
            false
        });
        match (read, stop) {
            (Ok(Some(frame)), _) => Ok(serde_json::from_slice(&frame).map_err(io::Error::from)?),
            (_, Some(fault)) => Err(fault),
            (Ok(None) | Err(_), None) => Err(self.exit_error(time)),
        }
    }

    /// Why the process has ended or stopped responding.
    fn exit_error(&mut self, time: Duration) -> SandboxError {
        let status = match self.child.try_wait() {
            Ok(None) => {
                // The socket may close a moment before the process ends.
                std::thread::sleep(POLL_INTERVAL);
                self.child.try_wait()
            }
            status => status,
        };
        match status {
            Ok(Some(status)) if status.code() == Some(EXIT_HEAP_LIMIT) => SandboxError::Bytes(self.bounds.heap_bytes),
            // A stack overflow is a signal.
            Ok(Some(status)) if status.code().is_none() => SandboxError::Stack(self.bounds.stack_bytes),
            Ok(Some(status)) => SandboxError::Process(io::Error::other(format!("the process ended with {status}"))),
            Ok(None) => SandboxError::Time(time),
            Err(error) => SandboxError::Process(error),
        }
    }
}
