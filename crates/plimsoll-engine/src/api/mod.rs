//! Types that the engine and its callers exchange: options, limits, output, progress, errors. This folder imports no other folder of
//! the engine but `sampling`.

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
