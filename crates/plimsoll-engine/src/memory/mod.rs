//! Memory: what everything takes, what is left, and what gives way when it is short.

pub(crate) mod degradation;
pub(crate) mod footprint;
pub mod governor;
pub mod host;
pub(crate) mod lease;
pub mod ledger_report;
pub(crate) mod process;
pub(crate) mod reserve;
pub(crate) mod trim;
pub(crate) mod watch;
