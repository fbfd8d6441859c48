//! The size of the KV pool: measured, not guessed.
//!
//! Start-up is plan → probe → size → build → self-test. [`target_tokens`] is the arithmetic, and [`joint`] splits the budget between KV
//! pages and recurrent state. [`auto_profile`] drives the attempts over any [`Generations`], and [`diagnose`] explains a failure. This
//! module depends on no device, model or thread; a fake device runs all of it.

mod attempts;
mod checks;
mod config;
pub mod diagnose;
mod error;
mod events;
mod fraction;
mod generations;
pub mod joint;
mod outcome;
mod pinned;
mod planned;
mod pools;
mod report;
mod run;
mod shadow;
mod start;
mod target;

pub use attempts::ATTEMPTS_MAX;
pub use checks::{LargestDecode, PoolPhase, check_sizes, largest_decode, max_decode_batch};
pub use config::{Mode, ProfileConfig, StatePool};
pub use error::SizingError;
pub use events::Event;
pub use fraction::{Fraction, FractionError};
pub use generations::{
    Component, DeviceNow, Failure, Generations, Measured, OutOfMemory, PoolCount, Released, ScalesWith, Shape,
};
pub use joint::{JointError, JointInput, JointSplit};
pub use outcome::Outcome;
pub use pools::own_size;
pub use report::ShadowReport;
pub use shadow::dry_run;
pub use start::auto_profile;
pub use target::{
    EMERGENCY_RESERVE_BYTES, PROBE_FLOOR_TOKENS, SizingInput, SizingWarning, Target, probe_tokens, target_tokens,
};
