//! The watching thread and what it looks after: the ledger report, the emergency reserve, the host of several engines.

pub mod host;
pub mod ledger_report;
pub(crate) mod reserve;
pub(crate) mod thread;
