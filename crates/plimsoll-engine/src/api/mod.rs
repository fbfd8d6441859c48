//! What a client of the engine sees: requests, limits, output, errors, the handle.

pub(crate) mod admission;
pub mod backlog;
pub mod cancel;
pub mod constraint;
pub(crate) mod error;
pub mod handle;
pub(crate) mod limits;
pub mod options;
pub mod outbox;
pub(crate) mod output;
pub mod pooling;
pub mod progress;
pub mod request;
