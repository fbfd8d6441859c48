//! The result of a start-up.

use super::generations::Shape;
use super::report::ShadowReport;
use super::{SizingWarning, Target};

/// A running generation, and the numbers that led to it.
#[derive(Debug)]
pub struct Outcome<G> {
    /// The generation: built, tested and ready.
    pub generation: G,
    /// Its shape.
    pub shape: Shape,
    /// The longest request it serves.
    pub max_seq_len: u64,
    /// Bytes of the emergency reserve inside it.
    pub emergency_reserve_bytes: u64,
    /// Attempts at production size that were made, the successful one included.
    pub attempts: u32,
    /// KV tokens of the probe; `None` if there was none, because the size was pinned or the plan held.
    pub probe_tokens: Option<u64>,
    /// The arithmetic of this rank; `None` if pinned.
    pub target: Option<Target>,
    /// The most bytes held in the last self-test.
    pub peak_reserved: u64,
    /// Numbers that had to be corrected.
    pub warnings: Vec<SizingWarning>,
    /// The choice of auto mode; only in [`Mode::Shadow`](crate::sizing::config::Mode::Shadow).
    pub shadow: Option<ShadowReport>,
}
