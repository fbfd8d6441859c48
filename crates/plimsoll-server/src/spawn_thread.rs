//! Threads for what may wait long: other servers, a model that loads. Those of the runtime are counted, and every request needs one of them.

use std::io;
use std::thread;

use tokio::sync::oneshot::{Receiver, channel};

/// Does something on a thread of its own, which ends with it. The receiver fails when it panics.
///
/// # Errors
/// The system has no thread left.
pub fn spawn_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (sender, receiver) = channel();
    let body = move || drop(sender.send(work()));
    thread::Builder::new().name(name.into()).spawn(body).map(|_| receiver)
}
