//! The sandbox: a child process in which grammars are compiled for trial and answers are validated.
//!
//! A grammar compiler and a validator compute on a client's input, and no check beforehand tells what the next schema costs.
//! So each job runs first in a process of its own, with a limit in bytes, in time and in stack. A job that needs more ends
//! that process and nothing else. What has passed here is compiled again in the server, at a cost that is then known.
//!
//! `Sandbox` is the server's side, [`serve`] the child's. The two talk in frames (`protocol`) over a socket pair.
//!
//! What must not be in here: what a schema means, and which tokens may come next.

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
pub use protocol::Breach;
pub(crate) use protocol::{Answer, Bounds, Request, Vocabulary};

use plimsoll_memory::child::{OwnedChild, isolate};
use protocol::{EXIT_BYTES, read_frame, write_frame};
use thiserror::Error;

/// The argument that makes the program the child's side.
pub const SANDBOX_ARGUMENT: &str = "grammar-sandbox";

/// What compiling one grammar may take. A schema of 500 properties takes 6 MiB of heap.
pub(crate) const COMPILING: Bounds = Bounds { heap_bytes: 12 << 20, stack_bytes: 8 << 20 };

/// What validating the documents of one step may take.
pub(crate) const VALIDATING: Bounds = Bounds { heap_bytes: 6 << 20, stack_bytes: 4 << 20 };

/// Memory of one sandbox process besides its job: the vocabulary, the program's own data, page tables. Measured: 2 MiB.
const PROCESS_BYTES_MAX: u64 = 3 << 20;

/// Memory of the two sandbox processes of a model, one for compiling and one for validating.
pub const SANDBOXES_BYTES_MAX: u64 = COMPILING.process_bytes() + VALIDATING.process_bytes();

impl Bounds {
    /// Memory of a process that runs jobs with these bounds.
    const fn process_bytes(self) -> u64 {
        PROCESS_BYTES_MAX + self.heap_bytes + self.stack_bytes as u64
    }
}

/// How often a caller that waits looks whether its client has left.
const LOOK: Duration = Duration::from_millis(20);

/// Why a job has no answer.
#[derive(Debug, Error)]
pub(crate) enum Fault {
    #[error("it needs more than {} MiB of memory", .0 >> 20)]
    Bytes(u64),
    #[error("it takes longer than {0:?}")]
    Time(Duration),
    #[error("it is nested too deeply: its stack of {} MiB ends", .0 >> 20)]
    Stack(usize),
    #[error("the client has left")]
    Gone,
    #[error("the sandbox process cannot be used: {0}")]
    Process(#[from] io::Error),
}

/// A child process that is started when the first job comes, and again after one that ended it.
pub(crate) struct Sandbox {
    program: PathBuf,
    vocabulary: Vocabulary,
    bounds: Bounds,
    running: Mutex<Option<Running>>,
    starts: AtomicU64,
}

struct Running {
    child: OwnedChild,
    stream: UnixStream,
    bounds: Bounds,
}

impl Sandbox {
    pub fn new(program: PathBuf, vocabulary: Vocabulary, bounds: Bounds) -> Self {
        Self { program, vocabulary, bounds, running: Mutex::default(), starts: AtomicU64::new(0) }
    }

    /// How often a process was started.
    pub fn starts(&self) -> u64 {
        self.starts.load(Relaxed)
    }

    /// Has one job done, behind those that came before it. `gone` says whether its client has left.
    pub fn run(&self, request: &Request<'_>, time: Duration, gone: &dyn Fn() -> bool) -> Result<Answer, Fault> {
        let mut running = self.running();
        if gone() {
            return Err(Fault::Gone);
        }
        if running.is_none() {
            *running = Some(self.start()?);
        }
        let Some(process) = running.as_mut() else { unreachable!("it was started") };
        let answer = process.ask(request, time, gone);
        if answer.is_err() {
            // Whatever it is doing, nothing more is wanted of it.
            *running = None;
        }
        answer
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<Running, Fault> {
        let (stream, theirs) = UnixStream::pair()?;
        let output: OwnedFd = theirs.try_clone()?.into();
        let mut command = Command::new(&self.program);
        isolate(command.arg(SANDBOX_ARGUMENT));
        command.stdin(OwnedFd::from(theirs)).stdout(output).stderr(Stdio::null());
        let child = command.spawn()?.into();
        self.starts.fetch_add(1, Relaxed);
        // The command holds the other end until it is dropped.
        drop(command);
        let mut running = Running { child, stream, bounds: self.bounds };
        running.ask(&Request::Setup(&self.vocabulary, self.bounds), START_TIME, &|| false)?;
        Ok(running)
    }
}

/// Time for the process to start and read the vocabulary. A machine with busy cores needs a fraction of it.
const START_TIME: Duration = Duration::from_secs(10);

impl Running {
    fn ask(&mut self, request: &Request<'_>, time: Duration, gone: &dyn Fn() -> bool) -> Result<Answer, Fault> {
        let until = Instant::now() + time;
        let frame = serde_json::to_vec(request).map_err(io::Error::from)?;
        self.stream.set_write_timeout(Some(time))?;
        if write_frame(&mut self.stream, &frame).is_err() {
            return Err(self.ended(time));
        }
        self.stream.set_read_timeout(Some(LOOK))?;
        let wait = |error: &io::Error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let mut stop = None;
        let read = read_frame(&mut self.stream, |error| {
            stop = match () {
                () if !wait(error) => return false,
                () if gone() => Some(Fault::Gone),
                () if Instant::now() >= until => Some(Fault::Time(time)),
                () => return true,
            };
            false
        });
        match (read, stop) {
            (Ok(Some(frame)), _) => Ok(serde_json::from_slice(&frame).map_err(io::Error::from)?),
            (_, Some(fault)) => Err(fault),
            (Ok(None) | Err(_), None) => Err(self.ended(time)),
        }
    }

    /// Why the process has ended, or does not take part any more.
    fn ended(&mut self, time: Duration) -> Fault {
        let status = match self.child.try_wait() {
            Ok(None) => {
                // Its end of the socket may be closed a moment before the process has gone.
                std::thread::sleep(LOOK);
                self.child.try_wait()
            }
            status => status,
        };
        match status {
            Ok(Some(status)) if status.code() == Some(EXIT_BYTES) => Fault::Bytes(self.bounds.heap_bytes),
            // A stack that ends is a signal.
            Ok(Some(status)) if status.code().is_none() => Fault::Stack(self.bounds.stack_bytes),
            Ok(Some(status)) => Fault::Process(io::Error::other(format!("it ended with {status}"))),
            Ok(None) => Fault::Time(time),
            Err(error) => Fault::Process(error),
        }
    }
}
