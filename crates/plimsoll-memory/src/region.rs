//! Regions: the only way to take device memory on the host, always through the ledger.
//!
//! A region is one anonymous mapping that belongs to one component, is 64-byte (page) aligned and zeroed, and gives
//! its bytes back to the operating system when it is dropped.

use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};
use thiserror::Error;

use crate::{Bytes, Component, Ledger, faults};

/// The largest page size of the supported systems (Linux on aarch64 with 64 KiB pages).
const OS_PAGE: usize = 64 << 10;

/// Bytes that justify a thread; a multiple of the largest pages.
const TOUCH_SHARE: usize = 32 << 20;

/// The reason why a region was not mapped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The operating system refused.
    #[error("{component}: the system refused {}: {reason}", Bytes(*bytes))]
    Refused {
        /// The component that asked.
        component: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// The system's error text.
        reason: String,
    },
    /// The server is ready: device memory is fixed from here on.
    #[error("{component}: {} asked for after ready; the plan is sealed", Bytes(*bytes))]
    Sealed {
        /// The component that asked.
        component: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
}

/// One anonymous mapping owned by one component.
#[derive(Debug)]
pub struct Region {
    /// Unmapped before `entry` is released: for a moment the ledger counts more than exists, never less.
    map: MmapRaw,
    entry: Entry,
}

/// The region's entry in the ledger.
#[derive(Debug)]
struct Entry {
    component: Component,
    ledger: Arc<Ledger>,
    /// Bytes committed in the ledger. `None` for an elastic mapping: the ledger has its addresses and counts its pages.
    bytes: Option<u64>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.bytes.into_iter().for_each(|bytes| self.ledger.release(self.component, bytes));
    }
}

impl Region {
    /// Maps `bytes` zeroed bytes for `component` and enters them in the ledger.
    ///
    /// With `touch` every page is written once, so that the memory really exists (pinned mode). Without it pages appear on first use
    /// (elastic mode), and the ledger counts the pages that exist.
    pub fn map(ledger: &Arc<Ledger>, component: Component, bytes: u64, touch: bool) -> Result<Self, OutOfMemory> {
        let name = component.name();
        if !ledger.count_allocation() {
            return Err(OutOfMemory::Sealed { component: name, bytes });
        }
        Self::mapped(ledger, component, bytes, touch)
    }

    fn mapped(ledger: &Arc<Ledger>, component: Component, bytes: u64, touch: bool) -> Result<Self, OutOfMemory> {
        let refused = |reason: String| OutOfMemory::Refused { component: component.name(), bytes, reason };
        if faults::refuses_region(component) {
            return Err(refused("a test asked for it".into()));
        }
        let len = usize::try_from(bytes).map_err(|e| refused(e.to_string()))?;
        // The system refuses a mapping of zero bytes, but a component may have zero bytes.
        let mut map = MmapMut::map_anon(len.max(1)).map_err(|e| refused(e.to_string()))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // only a hint: without it the pages are small ones
        faults::region(map.len() as u64, 0);
        let entered = (touch || bytes == 0).then_some(bytes);
        let entry = Entry { component, ledger: Arc::clone(ledger), bytes: entered };
        entered.into_iter().for_each(|bytes| ledger.commit(component, bytes));
        if touch {
            write_pages(&mut map);
        }
        let region = Self { map: map.into(), entry };
        if entered.is_none() {
            ledger.open(component, region.addresses());
        }
        Ok(region)
    }

    fn addresses(&self) -> std::ops::Range<u64> {
        let start = self.map.as_ptr() as u64;
        start..start + self.map.len() as u64
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Never true: the smallest mapping is one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`, and every byte of it was zeroed by the system.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.map.len()) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` is the only way to it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.map.len()) }
    }

    /// The address of the first byte, for callers that divide the region among threads. Unlike [`Region::bytes_mut`] it makes no reference
    /// to the whole region. Such a reference would invalidate every pointer into the region that was taken before.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Maps and touches bytes that the plan reserves for `component` alone, before or after the seal. The emergency reserve uses it.
    pub(crate) fn map_planned(ledger: &Arc<Ledger>, component: Component, bytes: u64) -> Result<Self, OutOfMemory> {
        Self::mapped(ledger, component, bytes, true)
    }

    /// Gives back the physical pages that lie wholly inside `range`; they read as zero afterwards.
    pub fn decommit(&mut self, range: std::ops::Range<usize>) {
        // Rounded inwards: the system would round outwards, into pages of a neighbour.
        let (start, end) = (range.start.next_multiple_of(OS_PAGE), range.end.min(self.map.len()) / OS_PAGE * OS_PAGE);
        if start >= end {
            return;
        }
        let range = start..end;
        #[cfg(target_os = "linux")]
        {
            // SAFETY: the mapping is anonymous and private, `&mut self` proves that no view into it exists, and zero
            // bytes are valid for every use of a region.
            let _ = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }
}

/// Writes every page once, on all cores: this is the longest part of a start.
fn write_pages(bytes: &mut [u8]) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = bytes.len().div_ceil(cores).next_multiple_of(TOUCH_SHARE);
    let write = |bytes: &mut [u8]| bytes.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
    let mut shares = bytes.chunks_mut(share);
    let all = std::thread::scope(|scope| {
        let first = shares.next();
        let all = shares.all(|share| std::thread::Builder::new().spawn_scoped(scope, move || write(share)).is_ok());
        first.map(write);
        all
    });
    if !all {
        // A thread could not be started. Writing pages that exist again takes no time.
        write(bytes);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        faults::region(0, self.map.len() as u64);
        if self.entry.bytes.is_none() {
            // The addresses still belong to this region here.
            self.entry.ledger.close(self.entry.component, &self.addresses());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_in_the_ledger_while_it_lives() {
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::KvPages, 1 << 20);
        let region = Region::map(&ledger, Component::KvPages, 1 << 20, true).unwrap();
        assert_eq!(region.bytes().iter().map(|b| *b as u64).sum::<u64>(), 0);
        assert_eq!(ledger.row(Component::KvPages).committed, 1 << 20);
        drop(region);
        assert_eq!(ledger.row(Component::KvPages).committed, 0);
        assert_eq!(ledger.row(Component::KvPages).peak, 1 << 20);
    }

    #[test]
    fn giving_a_range_back_leaves_its_neighbours_alone() {
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::KvPages, 1 << 20);
        let mut region = Region::map(&ledger, Component::KvPages, 1 << 20, true).unwrap();
        region.bytes_mut().fill(7);
        let (from, to) = (100_000, 400_001);
        region.decommit(from..to);
        assert!(region.bytes()[..from].iter().chain(&region.bytes()[to..]).all(|byte| *byte == 7));
        #[cfg(target_os = "linux")]
        assert!(region.bytes()[from..to].contains(&0), "nothing was given back");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn of_an_elastic_region_the_ledger_has_what_is_there() {
        const MIB: usize = 1 << 20;
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::KvPages, 64 << 20);
        let committed = || {
            ledger.look();
            ledger.row(Component::KvPages).committed as usize
        };
        let mut region = Region::map(&ledger, Component::KvPages, 64 << 20, false).unwrap();
        assert!(region.bytes().iter().all(|byte| *byte == 0));
        assert_eq!((committed(), ledger.mapped(Component::KvPages)), (0, 64 << 20), "what was only read is not there");
        region.bytes_mut()[8 * MIB..24 * MIB].fill(1);
        // The system may give pages of two megabytes.
        assert!((16 * MIB..=20 * MIB).contains(&committed()), "{}", committed());
        region.decommit(8 * MIB..16 * MIB);
        assert!((8 * MIB..=12 * MIB).contains(&committed()), "{}", committed());
        assert!(ledger.row(Component::KvPages).peak >= 16 << 20);
        drop(region);
        assert_eq!((committed(), ledger.mapped(Component::KvPages)), (0, 0));
        // A region that is touched at once is committed without `look`.
        let region = Region::map(&ledger, Component::KvPages, 1 << 20, true).unwrap();
        assert_eq!((committed(), ledger.mapped_total()), (1 << 20, 1 << 20));
        drop(region);
        assert_eq!(committed(), 0);
    }

    #[test]
    fn several_threads_write_every_page() {
        let mut bytes = vec![1; 5 * TOUCH_SHARE / 2 + 4097];
        write_pages(&mut bytes);
        let pages = bytes.chunks(4096);
        assert!(pages.enumerate().all(|(page, bytes)| bytes[0] == 0 || panic!("page {page} was not written")));
    }

    #[test]
    fn nothing_is_mapped_after_the_seal() {
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::KvPages, 4096);
        ledger.seal();
        let refused = Region::map(&ledger, Component::KvPages, 4096, false).unwrap_err();
        assert!(refused.to_string().contains("sealed"), "{refused}");
        assert_eq!(ledger.allocations(), (0, 1));
    }
}
