//! Scheduling: which rows of which sequences a step computes.

pub(crate) mod prefill_budget;
pub mod scheduler;
