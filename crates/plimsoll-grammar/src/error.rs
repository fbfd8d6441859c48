//! Why there is no grammar.

use thiserror::Error;

/// Why there is no grammar.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GrammarError {
    /// The grammar cannot be served, now or later.
    #[error("{0}")]
    Invalid(String),
    /// Not now: the budget is taken by grammars in use.
    #[error("all {0} bytes for grammars (--grammar-bytes) are in use; try again later")]
    Full(u64),
    /// Not now: the system refuses a thread or a process.
    #[error("the system has no thread or process for constrained output ({0}); try again later")]
    NoThread(String),
    /// The client left while its grammar was compiled.
    #[error("the client left while its grammar was compiled")]
    Gone,
}
