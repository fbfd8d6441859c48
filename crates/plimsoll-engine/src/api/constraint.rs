//! Structured output. The engine gets the mask of allowed tokens from a grammar and reports the chosen token. The output
//! ends when nothing can follow. The grammars themselves are in `plimsoll-grammar`.

use std::fmt::Debug;
use std::time::Duration;

use thiserror::Error;

/// A grammar that any number of requests may use.
pub trait Grammar: Debug + Send + Sync {
    /// Begins one output. Called when a request is submitted, not on the engine thread.
    ///
    /// # Errors
    ///
    /// The message for the client.
    fn begin(&self) -> Result<Box<dyn Constraint>, String>;

    /// Most host bytes that an output of `max_tokens` tokens takes.
    fn bytes_max(&self, max_tokens: u32) -> u64;
}

/// The reason why an output cannot continue.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unfit {
    /// The output cannot follow its grammar; the text is for the client.
    #[error("{0}")]
    Grammar(String),
    /// Other requests use the memory or the thread that it needs. The text is for the client, which may try again.
    #[error("{0}")]
    Memory(String),
}

/// The grammar's state for one output.
pub trait Constraint: Send {
    /// The allowed next tokens as a bit mask, 32 a word, token 0 in the lowest bit of the first. Includes tokens that
    /// end the output, if it may end. None: all tokens are allowed.
    ///
    /// # Errors
    ///
    /// [`Unfit`].
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit>;

    /// Whether the next token is the most likely of the allowed ones, whatever the request's sampling parameters.
    fn takes_most_likely(&self) -> bool {
        false
    }

    /// Whisper's timestamps: all tokens from this id on count as one group. If the group is more likely than each allowed token before that
    /// id, one of the group is the next token. None: every token counts by itself.
    fn grouped_from(&self) -> Option<u32> {
        None
    }

    /// The log-probability of this token is reported with the next token, after the request's alternatives. The report
    /// is part of [`Grammar::bytes_max`].
    fn also_report(&self) -> Option<u32> {
        None
    }

    /// Whether [`Self::allowed`] and [`Self::accept`] return without waiting. Waits for the mask, for `patience` at
    /// most.
    fn mask_ready(&mut self, patience: Duration) -> bool {
        let _ = patience;
        true
    }

    /// Counts the work done for this grammar's masks. While it grows, a request that waits for a mask is making
    /// progress.
    fn moved(&self) -> u64 {
        0
    }

    /// Advances by the next token, which was allowed and did not end the output.
    ///
    /// # Errors
    ///
    /// [`Unfit`].
    fn accept(&mut self, token: u32) -> Result<(), Unfit>;

    /// Whether nothing can follow: the output ends here.
    fn complete(&self) -> bool;
}
