//! Threads for work that blocks. Work on text runs on a bounded number of the runtime's.
//! Work that may wait long (another server, a model that loads) gets a thread of its own.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;

use tokio::sync::Semaphore;
use tokio::sync::oneshot::{Receiver, channel};

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::http::unknown::Unknown;

/// The permits of the text workers.
pub(crate) struct TextWorkers(Arc<Semaphore>);

impl TextWorkers {
    /// `count` threads at once, at least one.
    pub fn new(count: u32) -> Self {
        Self(Arc::new(Semaphore::new(count.max(1) as usize)))
    }

    /// Runs `work` on a blocking thread. None: it panicked.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> ApiResult<Option<T>> {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::unavailable("the server is shutting down", 5))?;
        let waits = Arc::new(());
        let client = Arc::downgrade(&waits);
        let unknown = Caller::current().unknown;
        let done = tokio::task::spawn_blocking(move || {
            // Held until the work is done, also if the client has disconnected.
            let _permit = permit;
            CLIENT.set(Some(client));
            let done = Unknown::during(unknown, work);
            CLIENT.set(None);
            done
        });
        let done = done.await;
        drop(waits);
        Ok(done.ok())
    }
}

thread_local! {
    /// The client that this text worker works for: the other end lives as long as its request.
    static CLIENT: RefCell<Option<Weak<()>>> = const { RefCell::new(None) };
}

/// Whether the client that this thread works for has left. False on threads that work for none.
pub(crate) fn client_left() -> bool {
    CLIENT.with_borrow(|client| client.as_ref().is_some_and(|client| client.strong_count() == 0))
}

/// Runs `work` on a thread of its own. The receiver fails if it panics.
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
