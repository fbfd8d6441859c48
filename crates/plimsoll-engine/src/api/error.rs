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
        /// What is wrong and what the limit is.
        message: String,
    },
    /// The server is full: 429 with Retry-After.
    #[error("{message}")]
    Full {
        /// What is full and how large it is.
        message: String,
        /// After this many seconds a retry has a chance.
        retry_after_s: u32,
    },
    /// The server is draining, or its engine has stopped: 503.
    #[error("{message}")]
    Unavailable {
        /// Why.
        message: String,
        /// After this many seconds a retry has a chance.
        retry_after_s: u32,
    },
}

/// Why a request ends with an error.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Memory was refused; saying so takes none.
    Memory,
    /// The form that its output must have ends it.
    Form(Unfit),
    /// What was computed is no number, in words: what it was computed from is not to be trusted.
    Numbers(String),
    /// Anything else, in words.
    Words(String),
}

impl From<Unfit> for Failure {
    fn from(unfit: Unfit) -> Self {
        Self::Form(unfit)
    }
}

impl From<String> for Failure {
    fn from(words: String) -> Self {
        Self::Words(words)
    }
}

impl From<&str> for Failure {
    fn from(words: &str) -> Self {
        Self::Words(words.into())
    }
}

impl From<TryReserveError> for Failure {
    fn from(_: TryReserveError) -> Self {
        Self::Memory
    }
}
