//! Errors of grammars.

use thiserror::Error;

/// Why a grammar is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GrammarError {
    /// The grammar is invalid or too complex. A retry fails again.
    #[error("{0}")]
    Invalid(String),
    /// Grammars in use take the whole budget. A retry may succeed.
    #[error("all {0} bytes for grammars (--grammar-bytes) are in use; try again later")]
    Full(u64),
    /// The system refuses a thread or a process. A retry may succeed.
    #[error("the system has no thread or process for structured output ({0}); try again later")]
    NoThread(String),
    /// The client disconnected while its grammar was compiled.
    #[error("the client disconnected while its grammar was compiled")]
    ClientDisconnected,
}
