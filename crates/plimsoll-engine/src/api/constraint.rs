//! Constraints: output that must have a form. The engine asks which tokens may come next, tells which one came, and ends
//! the output when nothing can follow. What a form is, is not known here.

use std::fmt::Debug;
use std::time::Duration;

use thiserror::Error;

/// A form that any number of requests may be held to.
pub trait Grammar: Debug + Send + Sync {
    /// Begins one output. Called where a request is submitted, not on the engine thread.
    ///
    /// # Errors
    ///
    /// Why not now, in words for the client.
    fn begin(&self) -> Result<Box<dyn Constraint>, String>;

    /// Bytes on the host that an output of so many tokens takes at most.
    fn bytes_max(&self, max_tokens: u32) -> u64;
}

/// Why an output cannot go on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unfit {
    /// The output cannot follow its grammar; the text is for the client.
    #[error("{0}")]
    Form(String),
    /// Other requests use the memory or the thread that it needs; the text is for the client, which may try again.
    #[error("{0}")]
    Room(String),
}

/// One output on its way.
pub trait Constraint: Send {
    /// The tokens that may come next as a bit mask, 32 a word, token 0 in the lowest bit of the first; those that end output
    /// are among them where it may end. None for any.
    ///
    /// # Errors
    ///
    /// [`Unfit`].
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit>;

    /// Whether neither [`Self::allowed`] nor [`Self::accept`] will keep its caller waiting. A form that is quick as a rule says so beforehand;
    /// one that has taken long waits for `patience` at most.
    fn mask_ready(&mut self, patience: Duration) -> bool {
        let _ = patience;
        true
    }

    /// Counts the work done for this grammar's masks. While it grows, a request that waits for a mask is making
    /// progress.
    fn moved(&self) -> u64 {
        0
    }

    /// Takes the next token, which was allowed and did not end the output.
    ///
    /// # Errors
    ///
    /// [`Unfit`].
    fn accept(&mut self, token: u32) -> Result<(), Unfit>;

    /// Whether nothing can follow: the output ends here.
    fn complete(&self) -> bool;
}
