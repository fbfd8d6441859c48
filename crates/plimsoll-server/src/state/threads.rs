//! Threads for work that blocks. Work on text runs on a bounded number of the runtime's threads. Work that may wait long (another server, a
//! model that loads) gets a separate thread.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;

use tokio::sync::Semaphore;
use tokio::sync::oneshot::{Receiver, channel};

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::http::thread_value;
use crate::http::unknown::Unknown;

/// The permits of the text workers.
pub(crate) struct TextWorkers(Arc<Semaphore>);

impl TextWorkers {
    /// Allows `count` threads at once, at least one.
    pub fn new(count: u32) -> Self {
        Self(Arc::new(Semaphore::new(count.max(1) as usize)))
    }

    /// Runs `work` on a blocking thread. Returns none if it panicked.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> ApiResult<Option<T>> {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::shutting_down())?;
        let waits = Arc::new(());
        let client = Arc::downgrade(&waits);
        let unknown = Caller::current().unknown;
        let done = tokio::task::spawn_blocking(move || {
            // Held until the work is done, also if the client has disconnected.
            let _permit = permit;
            thread_value::during(&CLIENT, Some(client), || Unknown::during(unknown, work))
        });
        let done = done.await;
        drop(waits);
        Ok(done.ok())
    }
}

thread_local! {
    /// The client that this text worker works for. The request holds the strong reference.
    static CLIENT: RefCell<Option<Weak<()>>> = const { RefCell::new(None) };
}

/// Whether the client that this thread works for has left. False on threads without a client.
pub(crate) fn client_left() -> bool {
    CLIENT.with_borrow(|client| client.as_ref().is_some_and(|client| client.strong_count() == 0))
}

/// Runs `work` on a separate thread. The receiver fails if it panics.
///
/// # Errors
/// The system has no thread left.
pub(crate) fn spawn_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (sender, receiver) = channel();
    let body = move || drop(sender.send(work()));
    thread::Builder::new().name(name.into()).spawn(body).map(|_| receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_panics_leaves_no_client_behind() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let workers = TextWorkers::new(1);
        let panicked = runtime.block_on(workers.run(|| panic!("a test panics")));
        assert!(panicked.unwrap().is_none());
        // The only blocking thread runs work without a client.
        let left = runtime.block_on(runtime.spawn_blocking(client_left)).unwrap();
        assert!(!left, "the thread still works for a client that has left");
    }
}
