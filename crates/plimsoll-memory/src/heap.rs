//! The host heap, counted: a global allocator that wraps the system's and keeps two numbers.
//!
//! The binary installs it. It costs two relaxed atomic additions per call and lets the ledger say what the
//! heap holds, and a test say that serving does not make it grow.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static IN_USE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

/// The system allocator with a count of bytes in use, their peak, and calls.
pub struct CountingHeap;

/// Bytes in use on the heap now; 0 where [`CountingHeap`] is not installed.
pub fn in_use() -> u64 {
    IN_USE.load(Relaxed)
}

/// The most bytes that were ever in use on the heap.
pub fn peak() -> u64 {
    PEAK.load(Relaxed)
}

/// How often the heap was asked for memory.
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}

fn grew(bytes: usize) {
    let now = IN_USE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    CALLS.fetch_add(1, Relaxed);
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every call is handed to the system allocator unchanged; only counters are kept beside it.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds `GlobalAlloc::alloc`'s contract, which is `System`'s too.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
        IN_USE.fetch_sub(layout.size() as u64, Relaxed);
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            IN_USE.fetch_sub(layout.size() as u64, Relaxed);
            grew(size);
        }
        moved
    }
}
