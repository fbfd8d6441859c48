//! Memory in bytes: limits, plans and accounts.
//!
//! This crate has the host's limits, the plan, the ledger, mapped regions and the step arena's bookkeeping. **Architecture invariant:**
//! this crate knows nothing of models, kernels or requests; it deals in bytes.

pub mod bytes;
pub mod child;
mod chunk;
pub mod emergency_reserve;
pub mod faults;
pub mod heap;
mod held_file;
pub mod host;
mod large;
pub mod ledger;
pub mod malloc;
pub mod plan;
pub mod region;
pub mod signals;
pub mod sizing;
pub mod step;

pub use bytes::{Bytes, BytesError};
pub use emergency_reserve::EmergencyReserve;
pub use held_file::HeldFile;
pub use ledger::{Component, Ledger};
pub use plan::{DeviceLimit, Plan, PlanLine};
pub use region::{OutOfMemory, Region};
