//! The server's side: starts a process for a file, and ends it if it takes too long.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use plimsoll_memory::Bytes;
use plimsoll_memory::child::{OwnedChild, isolate};
use plimsoll_memory::heap::EXIT_BEYOND;

use crate::{DocumentError, PROCESS_BYTES, SANDBOX_ARGUMENT, STACK_BYTES, TEXT_BYTES_MAX};

/// The interval at which a waiting caller checks whether its client has left.
const LOOK: Duration = Duration::from_millis(20);

/// Reads documents, one process for each.
#[derive(Clone, Debug)]
pub struct Reader {
    program: PathBuf,
    heap_bytes: u64,
    time: Duration,
}

impl Reader {
    /// A reader that runs `program` with `heap_bytes` of heap for a file, and `time`.
    #[must_use]
    pub fn new(program: PathBuf, heap_bytes: u64, time: Duration) -> Self {
        Self { program, heap_bytes, time }
    }

    /// Returns the memory of one process with this much heap.
    #[must_use]
    pub const fn process_bytes(heap_bytes: u64) -> u64 {
        heap_bytes + STACK_BYTES as u64 + PROCESS_BYTES
    }

    /// Returns the text of a PDF. Blocks. `gone` returns whether the client has left.
    ///
    /// # Errors
    /// The file has no text that can be read within the limits.
    pub fn text(&self, file: &[u8], gone: &dyn Fn() -> bool) -> Result<String, DocumentError> {
        let failed = |error: std::io::Error| DocumentError::Process(error.to_string());
        let mut command = Command::new(&self.program);
        isolate(command.arg(SANDBOX_ARGUMENT).arg(self.heap_bytes.to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = OwnedChild::from(command.spawn().map_err(failed)?);
        let (Some(mut input), Some(output)) = (running.stdin.take(), running.stdout.take()) else {
            return Err(DocumentError::Process("it has no pipes".into()));
        };
        let (done, is_done) = channel();
        let thread = || std::thread::Builder::new().name("plimsoll-pdf".into());
        let answer = std::thread::scope(|scope| {
            // Both threads end at the latest with the process, whose end closes its pipes. A process that has ended reads no more; its
            // status has the reason.
            let writing = thread().spawn_scoped(scope, move || drop(input.write_all(file)));
            let reading = thread().spawn_scoped(scope, move || {
                let mut answer = Vec::new();
                // A text of control characters is six times as long in JSON.
                let read = output.take(6 * TEXT_BYTES_MAX as u64 + 1024).read_to_end(&mut answer);
                let _ = done.send(read.map(|_| answer));
            });
            let started = writing.and(reading).map_err(failed);
            let answer = started.and_then(|_| self.wait(&mut running, &is_done, gone));
            drop(running);
            answer
        });
        serde_json::from_slice(&answer?).map_err(|error| DocumentError::Process(error.to_string()))?
    }

    fn wait(
        &self,
        running: &mut OwnedChild,
        is_done: &std::sync::mpsc::Receiver<std::io::Result<Vec<u8>>>,
        gone: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, DocumentError> {
        let until = Instant::now() + self.time;
        loop {
            match is_done.recv_timeout(LOOK) {
                Ok(Ok(answer)) if !answer.is_empty() => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if gone() => {
                    return Err(DocumentError::Process("the client has left".into()));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => return Err(DocumentError::Limit(format!("{:?}", self.time))),
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return Err(self.ended(running)),
            }
        }
    }

    /// Returns the reason why the process has ended without an answer.
    fn ended(&self, running: &mut OwnedChild) -> DocumentError {
        match running.wait() {
            Ok(status) if status.code() == Some(EXIT_BEYOND) => {
                DocumentError::Limit(format!("{} of memory (--document-bytes)", Bytes(self.heap_bytes)))
            }
            // A stack overflow ends the process by a signal.
            Ok(status) if status.code().is_none() => {
                DocumentError::Limit(format!("{} of stack", Bytes(STACK_BYTES as u64)))
            }
            Ok(status) => DocumentError::Process(format!("it ended with {status}")),
            Err(error) => DocumentError::Process(error.to_string()),
        }
    }
}
