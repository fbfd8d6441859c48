//! What the engine and its clients say to each other: options, limits, output, progress, errors. It imports no other folder of the engine
//! but `sampling`.

pub(crate) mod admission;
pub mod backlog;
pub mod cancel;
pub mod constraint;
pub(crate) mod degradation;
pub(crate) mod error;
pub(crate) mod limits;
pub mod options;
pub(crate) mod output;
pub(crate) mod plan_error;
pub mod pooling;
pub mod progress;
pub(crate) mod start_error;
