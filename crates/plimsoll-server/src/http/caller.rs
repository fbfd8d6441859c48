//! The client behind a request: facts from the middleware that handlers do not pass on as arguments.
//!
//! A task-local holds them while a handler runs, so that no endpoint can forget to pass them on. Streams read it before
//! they begin. Work on text workers cannot read it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::http::rates::Client;
use crate::http::unknown::Unknown;

tokio::task_local! {
    static CALLER: Caller;
}

/// What is known of the client and its request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    /// The request's `x-request-id`, the client's own or the one it was given.
    pub request_id: Arc<str>,
    /// The route.
    pub endpoint: Arc<str>,
    /// The number of the API key it came with.
    pub key: Option<usize>,
    /// What it has left in this minute, where that is limited.
    pub client: Option<Arc<Client>>,
    /// When its head had been read; see [`Self::arrived`].
    pub since: Option<Instant>,
    /// Its unknown fields; none outside of a request.
    pub unknown: Option<Arc<Unknown>>,
    /// The request has, or will have, its own line in the log.
    pub logged: Arc<AtomicBool>,
}

impl Caller {
    /// Runs a handler on behalf of this caller.
    pub async fn run<T>(self, handler: impl Future<Output = T>) -> T {
        CALLER.scope(self, handler).await
    }

    /// When its request arrived: what clients measure begins there, whatever is done before the engine is asked.
    pub fn arrived(&self) -> Instant {
        self.since.unwrap_or_else(Instant::now)
    }

    /// The caller of the running handler; an empty default outside of handlers.
    pub fn current() -> Self {
        CALLER.try_with(Clone::clone).unwrap_or_default()
    }
}
