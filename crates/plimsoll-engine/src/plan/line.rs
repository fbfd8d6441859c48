//! The memory limit that a plan is made under.

use plimsoll_memory::host::Remedy;

/// What this process may use: the line, less what peers use inside it.
#[derive(Clone, Debug)]
pub struct Line {
    /// Bytes.
    pub bytes: u64,
    /// Where the number comes from, for people.
    pub source: String,
    /// Whether the operator set it: then the pool fills the room.
    pub chosen: bool,
    /// What others use of the limit that it comes from.
    pub peers: u64,
    /// How that limit is raised.
    pub remedy: Remedy,
}

impl Line {
    /// A line of the operator's own: that of a budget, on this machine or another.
    pub fn of_budget(bytes: u64, source: impl Into<String>) -> Self {
        Self { bytes, source: source.into(), chosen: true, peers: 0, remedy: Remedy::Budget }
    }
}
