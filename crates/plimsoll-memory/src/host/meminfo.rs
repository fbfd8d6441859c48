//! `/proc/meminfo`: the whole machine's memory, and the part still available.
//!
//! On macOS the same numbers come from the system's own tools. Cgroups are not read here.

use super::{Root, kib_field};

/// The machine's memory in bytes; a field is `None` where the system does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemInfo {
    /// All usable memory of the machine.
    pub total: Option<u64>,
    /// Bytes that could be allocated without swapping, by the kernel's own estimate.
    pub available: Option<u64>,
    /// All swap space.
    pub swap_total: Option<u64>,
    /// Unused swap space.
    pub swap_free: Option<u64>,
}

impl MemInfo {
    /// Reads the machine's memory; every field is `None` on a system that is neither Linux nor macOS.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        #[cfg(target_os = "macos")]
        if root.is_system() {
            return super::macos::read();
        }
        root.text("/proc/meminfo").map_or_else(Self::default, |text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let total = kib_field(text, "MemTotal");
        // Kernels before 3.14 have no MemAvailable. The estimate is then free memory plus the inactive part of the page cache.
        let available = kib_field(text, "MemAvailable").or_else(|| {
            let inactive = kib_field(text, "Inactive(file)").unwrap_or(0);
            kib_field(text, "MemFree").map(|free| free.saturating_add(inactive))
        });
        Self {
            total,
            available: available.map(|a| a.min(total.unwrap_or(u64::MAX))),
            swap_total: kib_field(text, "SwapTotal"),
            swap_free: kib_field(text, "SwapFree"),
        }
    }
}
