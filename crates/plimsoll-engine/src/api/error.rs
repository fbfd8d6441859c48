//! Why a request is refused, and why it ends with an error.

use std::collections::TryReserveError;

use thiserror::Error;

use crate::api::constraint::Unfit;

/// Why a request was not accepted. The message is what the client reads.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Refusal {
    /// The request can never run on this server: 400.
    #[error("{message}")]
    Invalid {
        /// The field at fault, as the API names it.
        param: &'static str,
        /// The problem and the limit.
        message: String,
    },
    /// The server is full: 429 with Retry-After.
    #[error("{message}")]
    Full {
        /// The resource that is full, and its size.
        message: String,
        /// After this many seconds a retry has a chance.
        retry_after_s: u32,
    },
    /// The server is draining, or its engine has stopped: 503.
    #[error("{message}")]
    Unavailable {
        /// The reason.
        message: String,
        /// After this many seconds a retry has a chance.
        retry_after_s: u32,
    },
}

/// Why a request ends with an error.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Memory was refused. Reporting this error allocates nothing.
    Memory,
    /// The output cannot follow its grammar.
    Grammar(Unfit),
    /// Non-finite logits or hidden states. The cached pages they were computed from are invalid.
    NonFinite(String),
    /// Any other error.
    Other(String),
}

impl From<Unfit> for Failure {
    fn from(unfit: Unfit) -> Self {
        Self::Grammar(unfit)
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::Other(message)
    }
}

impl From<&str> for Failure {
    fn from(message: &str) -> Self {
        Self::Other(message.into())
    }
}

impl From<TryReserveError> for Failure {
    fn from(_: TryReserveError) -> Self {
        Self::Memory
    }
}
