//! Whether the kernel lets memory be reserved before it is used: `vm.overcommit_memory`, and the rest of its limit.
//!
//! A plan reserves its pools when a server starts. Under strict accounting a reservation counts at once, whether or not a byte is touched.

use super::{Root, kib_field};

/// How the kernel counts reserved memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Overcommit {
    /// Reservations beyond [`Overcommit::limit`] are refused (`vm.overcommit_memory` is 2).
    pub strict: bool,
    /// Bytes that all processes may reserve together, if the kernel tells (`CommitLimit`).
    pub limit: Option<u64>,
    /// Bytes they have reserved (`Committed_AS`).
    pub reserved: Option<u64>,
}

impl Overcommit {
    /// Reads the setting; where there is none, `strict` is false.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let mode = root.text("/proc/sys/vm/overcommit_memory").unwrap_or_default();
        let info = root.text("/proc/meminfo").unwrap_or_default();
        Self {
            strict: mode.trim() == "2",
            limit: kib_field(&info, "CommitLimit"),
            reserved: kib_field(&info, "Committed_AS"),
        }
    }

    /// Bytes that may still be reserved; `None` where the kernel enforces no limit.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        let room = self.limit?.saturating_sub(self.reserved?);
        self.strict.then_some(room)
    }
}
