//! The counted host heap: a global allocator that wraps the system's and counts bytes in use, their peak, and calls.
//!
//! The binary installs it. It costs a few relaxed atomic additions a call. With it the ledger can state the heap's bytes, and tests can
//! check that serving does not make the heap grow. When the system refuses a call, the heap gives a block of its emergency reserve back and
//! tries again. The failure can then be handled instead of ending the process.
//!
//! Bytes are counted as the system's allocator lays them out ([`chunk_bytes`]), not as requested: a buffer of eight bytes takes thirty-two.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::{Thread, ThreadId};

use crate::emergency_reserve::BLOCKS;
use crate::host::Touched;
use crate::{EmergencyReserve, OutOfMemory, faults, large};

pub use crate::chunk::chunk_bytes;

static IN_USE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Bytes in use beyond which the process ends. A process that only computes on untrusted input sets it; a server never does.
static END_BEYOND: AtomicU64 = AtomicU64::new(u64::MAX);
/// The heap's emergency reserve. Code that holds this lock must not allocate: a refused allocation takes it.
static RESERVE: Mutex<Option<EmergencyReserve>> = Mutex::new(None);
/// Whether there is a reserve, and how many of its blocks are missing. Both are read without the lock.
static ARMED: AtomicBool = AtomicBool::new(false);
static MISSING: AtomicUsize = AtomicUsize::new(0);
static SLICES_RELEASED: AtomicU64 = AtomicU64::new(0);
/// The number of live [`GivenUp`] guards. While it is above zero, the reserve is not restored.
static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);
/// Held while a block is restored. Two threads restoring at once would map one block too many.
static RESTORING: Mutex<()> = Mutex::new(());
/// The threads to unpark when a block is given up.
static WATCHERS: Mutex<Vec<Thread>> = Mutex::new(Vec::new());

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

/// Forgets the peak: it is counted again from the bytes in use now.
pub fn restart_peak() {
    PEAK.store(in_use(), Relaxed);
}

/// The exit status of a process that needed more heap than [`end_process_beyond`] allows.
pub const EXIT_BEYOND: i32 = 97;

/// Ends this process with status [`EXIT_BEYOND`] as soon as a call would bring the heap above `bytes` in use.
///
/// The check runs before the system allocator is asked, so the process never holds more. It needs [`CountingHeap`] as the
/// global allocator.
pub fn end_process_beyond(bytes: u64) {
    END_BEYOND.store(bytes, Relaxed);
}

/// Number of calls that asked the heap for memory.
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}

/// Installs the heap's emergency reserve and returns the previous one. Does not allocate.
///
/// A refused allocation gives blocks of the reserve back to the system until it succeeds or the rest cannot help.
pub fn arm(emergency_reserve: EmergencyReserve) -> Option<EmergencyReserve> {
    let mut keeping = keeping();
    MISSING.store(BLOCKS - emergency_reserve.left(), Relaxed);
    ARMED.store(true, Relaxed);
    keeping.replace(emergency_reserve)
}

/// Removes the emergency reserve from the heap and returns it with the blocks it has left.
pub fn disarm() -> Option<EmergencyReserve> {
    let mut keeping = keeping();
    ARMED.store(false, Relaxed);
    MISSING.store(0, Relaxed);
    keeping.take()
}

/// Whether the heap has an emergency reserve, even one with no blocks left.
pub fn armed() -> bool {
    ARMED.load(Relaxed)
}

/// Blocks of the emergency reserve that were given up and are not restored yet; 0 without a reserve.
pub fn reserve_blocks_missing() -> usize {
    MISSING.load(Relaxed)
}

/// How many refused allocations have used the emergency reserve since the process started.
pub fn blocks_released() -> u64 {
    SLICES_RELEASED.load(Relaxed)
}

/// A guard: the emergency reserve was given up on purpose. [`restore_reserve`] restores nothing until all guards are
/// dropped, however much room there is.
#[derive(Debug)]
#[must_use = "dropped, it lets the emergency reserve come back"]
pub struct GivenUp(());

impl Drop for GivenUp {
    fn drop(&mut self) {
        GIVEN_UP.fetch_sub(1, Relaxed);
    }
}

/// Gives the whole emergency reserve back to the system. The caller has nothing cheaper left to free.
pub fn give_up_reserve() -> GivenUp {
    GIVEN_UP.fetch_add(1, Relaxed);
    if let Some(emergency_reserve) = &mut *keeping() {
        while emergency_reserve.give().is_some() {}
        MISSING.store(BLOCKS, Relaxed);
    }
    GivenUp(())
}

/// Restores one missing block of the emergency reserve. Returns whether no block is missing now.
///
/// It restores nothing while a [`GivenUp`] guard lives, or when `room` is less than twice the block's size.
///
/// # Errors
/// When the system refuses.
pub fn restore_reserve(room: u64) -> Result<bool, OutOfMemory> {
    let _alone = match RESTORING.try_lock() {
        Ok(alone) => alone,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Ok(reserve_blocks_missing() == 0),
    };
    let Some((ledger, bytes)) = keeping().as_ref().and_then(EmergencyReserve::missing) else { return Ok(true) };
    let given_up = || GIVEN_UP.load(Relaxed) > 0;
    if given_up() || bytes.saturating_mul(2) > room {
        return Ok(false);
    }
    // Map without the lock: an error allocates its message.
    let slice = EmergencyReserve::map_block(&ledger, bytes)?;
    let mut keeping = keeping();
    let Some(emergency_reserve) = &mut *keeping else { return Ok(true) };
    // Check again under the lock: `give_up_reserve` raises `GIVEN_UP` before it takes the lock.
    if given_up() {
        drop((keeping, slice));
        return Ok(false);
    }
    let too_many = emergency_reserve.put(&ledger, slice);
    let left = emergency_reserve.left();
    MISSING.store(BLOCKS - left, Relaxed);
    drop((keeping, too_many));
    Ok(left == BLOCKS)
}

/// A guard: while it lives, its thread is unparked when a refused allocation has used a block of the reserve.
#[derive(Debug)]
#[must_use = "dropped, it lets the thread sleep"]
pub struct Woken(ThreadId);

/// Registers this thread to be unparked when a refused allocation has used a block of the reserve.
pub fn wake_me() -> Woken {
    let me = std::thread::current();
    let id = me.id();
    watchers().push(me);
    Woken(id)
}

impl Drop for Woken {
    fn drop(&mut self) {
        let mut watchers = watchers();
        if let Some(at) = watchers.iter().position(|thread| thread.id() == self.0) {
            watchers.swap_remove(at);
        }
        // A refused allocation that found this lock taken has unparked no thread. Unpark the others here.
        watchers.iter().for_each(Thread::unpark);
    }
}

fn keeping() -> MutexGuard<'static, Option<EmergencyReserve>> {
    RESERVE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn watchers() -> MutexGuard<'static, Vec<Thread>> {
    WATCHERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// After a refused call for `bytes`: gives a block of the emergency reserve back to the system.
///
/// Returns false when no block is left. Also returns false when this call has used a block (`again`) and the blocks
/// left are together smaller than `bytes`.
#[cold]
fn release_reserve(bytes: usize, again: bool) -> bool {
    if !armed() {
        return false;
    }
    let mut keeping = keeping();
    let Some(emergency_reserve) = &mut *keeping else { return false };
    if again && bytes as u64 > emergency_reserve.left_bytes() {
        return false;
    }
    let released = emergency_reserve.give().is_some();
    MISSING.store(BLOCKS - emergency_reserve.left(), Relaxed);
    drop(keeping);
    if released {
        SLICES_RELEASED.fetch_add(u64::from(!again), Relaxed);
        // `try_lock`: `wake_me` may allocate under this lock. A thread that registers now checks the reserve
        // afterwards. A thread that leaves now unparks the others itself.
        if let Ok(watchers) = WATCHERS.try_lock() {
            watchers.iter().for_each(Thread::unpark);
        }
    }
    released
}

/// Ends the process if `bytes` more exceed the limit of [`end_process_beyond`].
fn check_end(bytes: usize) {
    if in_use().saturating_add(chunk_bytes(bytes) as u64) > END_BEYOND.load(Relaxed) {
        end_process();
    }
}

#[cold]
fn end_process() -> ! {
    #[cfg(unix)]
    // SAFETY: `_exit` ends the process at once. It runs no destructors and takes no locks.
    unsafe {
        libc::_exit(EXIT_BEYOND)
    }
    #[cfg(not(unix))]
    std::process::abort()
}

/// Calls `ask`, and again after each block of the emergency reserve that is given up for this call. With `refused`, a test makes the first
/// call fail.
fn insist(bytes: usize, refused: bool, mut ask: impl FnMut() -> *mut u8) -> *mut u8 {
    let mut pointer = if refused { null_mut() } else { ask() };
    let mut again = false;
    while pointer.is_null() && release_reserve(bytes, again) {
        pointer = ask();
        again = true;
    }
    pointer
}

/// Gives freed memory that the system's allocator keeps back to the system. Takes milliseconds.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: glibc's `malloc_trim` takes its own locks and touches free memory only.
        unsafe { libc::malloc_trim(0) };
    }
}

/// Bytes of the process's memory that belong to the heap: bytes in use, freed bytes that were not given back, and the unused ends of pages.
/// Reserved bytes that were never touched do not count. Returns [`in_use`] where the system does not tell; 0 where [`CountingHeap`] is not
/// installed.
pub fn resident(touched: &Touched) -> u64 {
    whole(touched).map_or_else(in_use, |whole| whole.saturating_sub(touched.reserved))
}

/// Bytes that the heap holds and that are not in use: freed memory that the allocator keeps, and the unused ends of pages. 0 where the
/// system does not tell.
pub fn kept(touched: &Touched) -> u64 {
    whole(touched).map_or(0, |whole| whole.saturating_sub(in_use()))
}

/// Bytes of the allocator's heaps, and of the buffers that it has mapped alone, touched or not.
fn whole(touched: &Touched) -> Option<u64> {
    // The allocator counts the bytes of its mappings in 32 bits, so the count can have wrapped.
    let wrapped = in_use() > touched.heaps + u64::from(u32::MAX);
    touched.mapped.filter(|_| in_use() > 0 && touched.heaps > 0 && !wrapped).map(|mapped| touched.heaps + mapped)
}

/// Bytes of the buffers that have a mapping of their own, outside every heap.
pub(crate) fn mapped_alone() -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `mallinfo` takes its own locks and reads the allocator's books.
        let books = unsafe { libc::mallinfo() };
        Some(u64::from(books.hblkhd.cast_unsigned()))
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
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

// SAFETY: every call is handed to the system allocator unchanged, again if it was refused (in tests: by `faults`, without
// asking the system) and a block of the emergency reserve could be given up in between; only counters and a table are kept beside it.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check_end(layout.size());
        // SAFETY: the caller upholds `GlobalAlloc::alloc`'s contract, which is `System`'s too; a refused call has changed nothing.
        let pointer = insist(layout.size(), faults::refuses_heap(armed), || unsafe { System.alloc(layout) });
        if !pointer.is_null() {
            large::came(pointer, layout.size());
            grew(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        large::goes(pointer, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
        shrank(layout.size());
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check_end(layout.size());
        // SAFETY: as above.
        let pointer = insist(layout.size(), faults::refuses_heap(armed), || unsafe { System.alloc_zeroed(layout) });
        if !pointer.is_null() {
            large::came(pointer, layout.size());
            grew(layout.size());
        }
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        check_end(size.saturating_sub(layout.size()));
        large::goes(pointer, layout.size());
        // SAFETY: as above; a refused call has left `pointer` as it was.
        let moved = insist(size, faults::refuses_heap(armed), || unsafe { System.realloc(pointer, layout, size) });
        if moved.is_null() {
            large::came(pointer, layout.size());
        } else {
            large::came(moved, size);
            shrank(layout.size());
            grew(size);
        }
        moved
    }
}
