//! How the system's allocator is told to behave, so that what is freed is the system's again.
//!
//! glibc learns from what it sees: once a program has freed a buffer of some megabytes, buffers of that size are taken from a
//! heap that is kept. Eight bodies of eight megabytes then cost 35 MiB for good, in no row of the ledger.

/// From this size on every allocation is a mapping of its own, which goes when it is freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_FROM_BYTES: i32 = 128 << 10;

/// A heap's free end that is larger than this goes back at once.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const FREE_END_BYTES: i32 = 128 << 10;

/// Heaps beside each other: each keeps leftovers of its own and reserves 64 MiB of address space. Threads that allocate much at
/// the same time are few here.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HEAPS: i32 = 2;

/// Tells glibc to keep little of what is freed. To be called before the first thread is started; elsewhere it does nothing.
pub fn keep_little() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let parameters = [
            (libc::M_TRIM_THRESHOLD, FREE_END_BYTES),
            (libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
            (libc::M_ARENA_MAX, HEAPS),
        ];
        for (parameter, value) in parameters {
            // SAFETY: `mallopt` takes two integers, locks what it changes, and refuses values it does not know.
            let taken = unsafe { libc::mallopt(parameter, value) };
            debug_assert_eq!(taken, 1, "glibc refused parameter {parameter}");
        }
    }
}
