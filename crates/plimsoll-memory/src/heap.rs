//! The host heap, counted: a global allocator that wraps the system's and keeps two numbers.
//!
//! The binary installs it. It costs two relaxed atomic additions per call and lets the ledger say what the
//! heap holds, and a test say that serving does not make it grow. When the system refuses, the canary in its keeping is
//! given back and the call is tried once more, so that the failure can be handled instead of ending the process.
//!
//! Bytes are counted as the system's allocator lays them out ([`chunk_bytes`]), not as they were asked for: a token's report of
//! eight bytes takes thirty-two, and a plan that says eight is not true.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use crate::{Region, faults};

static IN_USE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// The canary in the heap's keeping. Nobody allocates while holding the lock: a refused allocation takes it.
static CANARY: Mutex<Option<Region>> = Mutex::new(None);
/// Whether there is one; asked without the lock.
static ARMED: AtomicBool = AtomicBool::new(false);
static CANARIES_RELEASED: AtomicU64 = AtomicU64::new(0);

/// What glibc's allocator takes for `bytes`: a header of one word, multiples of 16, never less than 32. Other allocators are
/// within a few per cent of it for anything but the smallest sizes.
pub const fn chunk_bytes(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        1..=24 => 32,
        _ => (bytes.saturating_add(8)).div_ceil(16).saturating_mul(16),
    }
}

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

/// Forgets the peak: from here on it is counted anew, from what is in use now.
pub fn restart_peak() {
    PEAK.store(in_use(), Relaxed);
}

/// How often the heap was asked for memory.
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}

/// Gives the heap a canary to release on the first failed allocation. Returns the one it had. Does not allocate.
pub fn arm(canary: Region) -> Option<Region> {
    let before = keeping().replace(canary);
    ARMED.store(true, Relaxed);
    before
}

/// Takes the canary back, if it is still there.
pub fn disarm() -> Option<Region> {
    ARMED.store(false, Relaxed);
    keeping().take()
}

/// Whether a canary is in the heap's keeping.
pub fn armed() -> bool {
    ARMED.load(Relaxed)
}

/// How often a failed allocation has cost the canary since the process started.
pub fn canaries_released() -> u64 {
    CANARIES_RELEASED.load(Relaxed)
}

fn keeping() -> MutexGuard<'static, Option<Region>> {
    CANARY.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// After a refused call: gives the canary back to the system. False when there was none.
#[cold]
fn release_canary() -> bool {
    if !ARMED.swap(false, AcqRel) {
        return false;
    }
    let canary = keeping().take();
    let released = canary.is_some();
    CANARIES_RELEASED.fetch_add(u64::from(released), Relaxed);
    released
}

/// Hands memory that was freed but is still kept by the system's allocator back to the system. Costs milliseconds.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: glibc's `malloc_trim` takes its own locks and touches free memory only.
        unsafe { malloc_trim(0) };
    }
}

fn shrank(bytes: usize) {
    IN_USE.fetch_sub(chunk_bytes(bytes) as u64, Relaxed);
}

fn grew(bytes: usize) {
    let bytes = chunk_bytes(bytes) as u64;
    let now = IN_USE.fetch_add(bytes, Relaxed) + bytes;
    CALLS.fetch_add(1, Relaxed);
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every call is handed to the system allocator unchanged, a second time if the first was refused (in tests: by
// `faults`, without asking the system) and a canary could be given up in between; only counters are kept beside it.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let refused = faults::refuses_heap();
        // SAFETY: the caller upholds `GlobalAlloc::alloc`'s contract, which is `System`'s too.
        let mut pointer = if refused { null_mut() } else { unsafe { System.alloc(layout) } };
        if pointer.is_null() && release_canary() {
            // SAFETY: as above; a refused call has changed nothing.
            pointer = unsafe { System.alloc(layout) };
        }
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
        shrank(layout.size());
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let refused = faults::refuses_heap();
        // SAFETY: as above.
        let mut pointer = if refused { null_mut() } else { unsafe { System.alloc_zeroed(layout) } };
        if pointer.is_null() && release_canary() {
            // SAFETY: as above; a refused call has changed nothing.
            pointer = unsafe { System.alloc_zeroed(layout) };
        }
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let refused = faults::refuses_heap();
        // SAFETY: as above.
        let mut moved = if refused { null_mut() } else { unsafe { System.realloc(pointer, layout, size) } };
        if moved.is_null() && release_canary() {
            // SAFETY: as above; a refused call has left `pointer` as it was.
            moved = unsafe { System.realloc(pointer, layout, size) };
        }
        if !moved.is_null() {
            shrank(layout.size());
            grew(size);
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::chunk_bytes;

    #[test]
    fn chunks_are_what_glibc_says() {
        let sizes = [(0, 0), (1, 32), (24, 32), (25, 48), (40, 48), (41, 64), (4096, 4112), (4104, 4112)];
        for (asked, taken) in sizes {
            assert_eq!(chunk_bytes(asked), taken, "{asked}");
        }
        assert!(chunk_bytes(usize::MAX) > 0, "no overflow");
    }
}
