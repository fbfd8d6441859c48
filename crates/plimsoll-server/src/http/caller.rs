//! The client of a request. The middleware sets it in a task-local.
//!
//! Handlers read it there, so that no endpoint can forget to pass it on. Streams read it before they begin. Work on text workers cannot
//! read it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::http::rates::RateBuckets;
use crate::http::trace_parent::Parent;
use crate::http::unknown::Unknown;

tokio::task_local! {
    /// The client of the running handler.
    pub(crate) static CALLER: Caller;
}

/// A client and its request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    /// The request's `x-request-id`, from the client or made by the server.
    pub request_id: Arc<str>,
    /// The route.
    pub endpoint: Arc<str>,
    /// The number of the request's API key.
    pub key: Option<usize>,
    /// The client's rate limit, if there is one.
    pub rate_buckets: Option<Arc<RateBuckets>>,
    /// The time at which the request's head had been read; see [`Self::arrived`].
    pub since: Option<Instant>,
    /// The request's unknown fields; none outside of a request.
    pub unknown: Option<Arc<Unknown>>,
    /// The request's trace, from its `traceparent` header.
    pub parent: Option<Parent>,
    /// Whether the request has, or will have, its own line in the log.
    pub logged: Arc<AtomicBool>,
}

impl Caller {
    /// Returns the time of the request's arrival. Clients measure latency from there, so the time before the engine counts.
    pub fn arrived(&self) -> Instant {
        self.since.unwrap_or_else(Instant::now)
    }

    /// Returns the caller of the running handler; an empty default outside of handlers.
    pub fn current() -> Self {
        CALLER.try_with(Clone::clone).unwrap_or_default()
    }
}
