//! The host heap, counted: a global allocator that wraps the system's and keeps two numbers.
//!
//! The binary installs it. It costs two relaxed atomic additions per call and lets the ledger say what the
//! heap holds, and a test say that serving does not make it grow. When the system refuses, a block of the emergency reserve in its keeping is
//! given back and the call is tried again, so that the failure can be handled instead of ending the process.
//!
//! Bytes are counted as the system's allocator lays them out ([`chunk_bytes`]), not as they were asked for: a token's report of
//! eight bytes takes thirty-two, and a plan that says eight is not true.

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
/// Bytes in use beyond which the process ends. A process that only computes on foreign input sets it; a server never does.
static END_BEYOND: AtomicU64 = AtomicU64::new(u64::MAX);
/// The emergency reserve in the heap's keeping. Nobody allocates while holding the lock: a refused allocation takes it.
static RESERVE: Mutex<Option<EmergencyReserve>> = Mutex::new(None);
/// Whether there is one, and how many of its slices are missing; asked without the lock.
static ARMED: AtomicBool = AtomicBool::new(false);
static MISSING: AtomicUsize = AtomicUsize::new(0);
static SLICES_RELEASED: AtomicU64 = AtomicU64::new(0);
/// How many have given it up on purpose and would not have it back yet.
static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);
/// Held by who brings a slice back: two at once would map one too many.
static RESTORING: Mutex<()> = Mutex::new(());
/// Who is woken when a slice was given up.
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

/// Forgets the peak: from here on it is counted anew, from what is in use now.
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

/// How often the heap was asked for memory.
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}

/// Gives the heap a emergency reserve, of which every refused allocation costs a slice. Returns the one it had. Does not allocate.
pub fn arm(emergency_reserve: EmergencyReserve) -> Option<EmergencyReserve> {
    let mut keeping = keeping();
    MISSING.store(BLOCKS - emergency_reserve.left(), Relaxed);
    ARMED.store(true, Relaxed);
    keeping.replace(emergency_reserve)
}

/// Takes the emergency reserve back, with the slices that it has left.
pub fn disarm() -> Option<EmergencyReserve> {
    let mut keeping = keeping();
    ARMED.store(false, Relaxed);
    MISSING.store(0, Relaxed);
    keeping.take()
}

/// Whether a emergency reserve is in the heap's keeping, however much is left of it.
pub fn armed() -> bool {
    ARMED.load(Relaxed)
}

/// Slices of the emergency reserve that were given up and are not back yet; 0 without one.
pub fn reserve_blocks_missing() -> usize {
    MISSING.load(Relaxed)
}

/// How many refused allocations have cost a slice of a emergency reserve since the process started.
pub fn blocks_released() -> u64 {
    SLICES_RELEASED.load(Relaxed)
}

/// That the emergency reserve was given up on purpose: until this is dropped nobody brings it back, whoever else has room for it.
#[derive(Debug)]
#[must_use = "dropped, it lets the emergency reserve come back"]
pub struct GivenUp(());

impl Drop for GivenUp {
    fn drop(&mut self) {
        GIVEN_UP.fetch_sub(1, Relaxed);
    }
}

/// Gives all of the emergency reserve back to the system: there is nothing cheaper left to give.
pub fn give_up_reserve() -> GivenUp {
    GIVEN_UP.fetch_add(1, Relaxed);
    if let Some(emergency_reserve) = &mut *keeping() {
        while emergency_reserve.give().is_some() {}
        MISSING.store(BLOCKS, Relaxed);
    }
    GivenUp(())
}

/// Brings one block of the emergency reserve back if one is missing, nobody has given it up on purpose, and `room` bytes would still be free
/// where it needs them and as many again. Says whether all are there now.
///
/// # Errors
/// When the system refuses.
pub fn restore_reserve(room: u64) -> Result<bool, OutOfMemory> {
    let _alone = match RESTORING.try_lock() {
        Ok(alone) => alone,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Ok(reserve_blocks_missing() == 0),
    };
    let Some((ledger, bytes)) = keeping().as_ref().and_then(EmergencyReserve::wants) else { return Ok(true) };
    let given_up = || GIVEN_UP.load(Relaxed) > 0;
    if given_up() || bytes.saturating_mul(2) > room {
        return Ok(false);
    }
    // Without the lock: an error takes words, and words take memory.
    let slice = EmergencyReserve::map_block(&ledger, bytes)?;
    let mut keeping = keeping();
    let Some(emergency_reserve) = &mut *keeping else { return Ok(true) };
    // Whoever gives it up counts first, then takes the lock.
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

/// A thread's place among those that are unparked when a refused allocation has cost a slice, for as long as this lives.
#[derive(Debug)]
#[must_use = "dropped, it lets the thread sleep"]
pub struct Woken(ThreadId);

/// From now on this thread is unparked when a refused allocation has cost a slice.
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
        // Nobody was woken for what was given up at this moment.
        watchers.iter().for_each(Thread::unpark);
    }
}

fn keeping() -> MutexGuard<'static, Option<EmergencyReserve>> {
    RESERVE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn watchers() -> MutexGuard<'static, Vec<Thread>> {
    WATCHERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// After a refused call for `bytes`: gives a block of the emergency reserve back to the system. False when there was none, or when a slice was
/// given for this call before and all that is left could not make up for it.
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
        // Whoever comes at this moment looks at the emergency reserve anyway, and whoever goes wakes the others.
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

/// Asks the system, and again after each block of the emergency reserve that is given for it. `refused`: a test has the first one refused.
fn insist(bytes: usize, refused: bool, mut ask: impl FnMut() -> *mut u8) -> *mut u8 {
    let mut pointer = if refused { null_mut() } else { ask() };
    let mut again = false;
    while pointer.is_null() && release_reserve(bytes, again) {
        pointer = ask();
        again = true;
    }
    pointer
}

/// Hands memory that was freed but is still kept by the system's allocator back to the system. Costs milliseconds.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: glibc's `malloc_trim` takes its own locks and touches free memory only.
        unsafe { libc::malloc_trim(0) };
    }
}

/// What the heap has of the process's memory: what is in use, but for what was reserved and never touched, what was freed and not
/// given back, and the rests of pages. What is in use where the system does not tell; 0 where [`CountingHeap`] is not installed.
pub fn resident(touched: &Touched) -> u64 {
    whole(touched).map_or_else(in_use, |whole| whole.saturating_sub(touched.reserved))
}

/// What the heap has and nobody uses: freed and not given back, and the rests of pages; 0 where the system does not tell.
pub fn kept(touched: &Touched) -> u64 {
    whole(touched).map_or(0, |whole| whole.saturating_sub(in_use()))
}

/// The allocator's heaps and the buffers it has mapped alone, touched or not.
fn whole(touched: &Touched) -> Option<u64> {
    // The allocator counts its mappings in 32 bits.
    let wrapped = in_use() > touched.heaps + u64::from(u32::MAX);
    touched.mapped.filter(|_| in_use() > 0 && touched.heaps > 0 && !wrapped).map(|mapped| touched.heaps + mapped)
}

/// Bytes of the buffers that are mappings of their own, in no heap.
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
