//! The addresses of the heap's large buffers. The system's allocator maps each by itself. If more was reserved than was ever written (a
//! vector that doubled), only the touched part is memory.
//!
//! The table has a fixed size and no locks, because the allocator cannot allocate for it. A buffer that finds no place in it counts as
//! touched in full.

use std::ops::Range;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::chunk::chunk_bytes;

/// The least size at which glibc can map a buffer by itself.
const LARGE_BYTES: usize = 128 << 10;
/// Number of places in the table.
const PLACES: usize = 512;
/// Bytes that the allocator writes before such a buffer.
const HEADER_BYTES: usize = 16;

/// The address value of a place that a thread is about to fill.
const TAKEN: usize = 1;

/// A buffer's address, 0 for none, and its size in bytes, which is stored before the address.
struct Place {
    address: AtomicUsize,
    bytes: AtomicUsize,
}

static TABLE: [Place; PLACES] = [const { Place { address: AtomicUsize::new(0), bytes: AtomicUsize::new(0) } }; PLACES];

/// Enters a buffer that was just allocated.
#[inline]
pub(crate) fn came(pointer: *mut u8, bytes: usize) {
    if chunk_bytes(bytes) >= LARGE_BYTES {
        note(pointer.addr(), bytes);
    }
}

/// Removes a buffer that is about to be freed: afterwards its address may belong to another buffer.
#[inline]
pub(crate) fn goes(pointer: *mut u8, bytes: usize) {
    if chunk_bytes(bytes) >= LARGE_BYTES {
        strike(pointer.addr());
    }
}

/// Returns the entered buffers, with their headers. Others can be added or removed meanwhile.
pub(crate) fn all() -> impl Iterator<Item = Range<u64>> {
    TABLE.iter().filter_map(|place| {
        let (address, bytes) = (place.address.load(Acquire), place.bytes.load(Acquire));
        // Otherwise the size can belong to the next buffer.
        let there = address > TAKEN && place.address.load(Relaxed) == address;
        there.then(|| address.saturating_sub(HEADER_BYTES) as u64..address.saturating_add(bytes) as u64)
    })
}

#[cold]
fn note(address: usize, bytes: usize) {
    for place in &TABLE {
        if place.address.load(Relaxed) == 0 && place.address.compare_exchange(0, TAKEN, Acquire, Relaxed).is_ok() {
            place.bytes.store(bytes, Release);
            place.address.store(address, Release);
            return;
        }
    }
}

#[cold]
fn strike(address: usize) {
    if let Some(place) = TABLE.iter().find(|place| place.address.load(Relaxed) == address) {
        place.address.store(0, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the range of a buffer in [`all`].
    fn listed(address: usize) -> Option<Range<u64>> {
        all().find(|range| range.start as usize == address - HEADER_BYTES)
    }

    #[test]
    fn large_buffers_are_listed_while_they_live_and_a_full_table_forgets() {
        let at = |n: usize| std::ptr::without_provenance_mut::<u8>(0x10_0000 + n * 0x10_0000);
        came(at(0), LARGE_BYTES);
        came(at(1), 1000);
        assert_eq!(listed(at(0).addr()), Some(0x0f_fff0..0x12_0000));
        assert_eq!(listed(at(1).addr()), None, "no large one");
        (2..PLACES + 9).for_each(|n| came(at(n), 1 << 20));
        assert_eq!(all().count(), PLACES);
        (0..PLACES + 9).for_each(|n| goes(at(n), 1 << 20));
        assert_eq!(all().count(), 0, "what was forgotten is not missed");
    }
}
