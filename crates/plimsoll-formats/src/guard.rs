//! A guard over mapped files: pages that the system can no longer read become zeros, and the mapping is marked.
//!
//! A read of a mapped page fails with SIGBUS if the file was cut or the disk does not deliver the page. By default this ends the process.
//! Here the handler maps zeros over the rest of the mapping, and the reader calls [`Guard::has_lost`] afterwards. A SIGBUS of another
//! origin goes to the handler that was installed before. This module does not interpret the contents of files.

use std::io::{self, Error};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Most mapped files at a time: two checkpoints with the most files that one may have.
const GUARDS_MAX: usize = 8192;

/// One mapping's addresses; none while `end` is 0.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static SLOTS: [Slot; GUARDS_MAX] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), lost: AtomicBool::new(false) } }; GUARDS_MAX];
/// The lock that is held while slots change, and by the handler while it searches them. No mapped byte is read under the lock, so the
/// handler cannot wait for its own thread.
static LOCKED: AtomicBool = AtomicBool::new(false);
static HANDLER: OnceLock<Result<Handler, i32>> = OnceLock::new();

/// The values that the signal handler needs: the page size in bytes, and the handler before it.
struct Handler {
    page: usize,
    before: libc::sigaction,
}

/// A mapping that is watched until this is dropped. Drop it before the mapping is unmapped.
pub(crate) struct Guard(&'static Slot);

impl Guard {
    /// Watches the mapping of `bytes`.
    pub(crate) fn new(bytes: &[u8]) -> io::Result<Guard> {
        let handler = HANDLER.get_or_init(Handler::install).as_ref().map_err(|code| Error::from_raw_os_error(*code))?;
        let Range { start, end } = bytes.as_ptr_range();
        let (start, end) = (start.addr(), end.addr().next_multiple_of(handler.page));
        let free = locked(|| {
            let slot = SLOTS.iter().find(|slot| slot.end.load(Relaxed) == 0)?;
            slot.lost.store(false, Relaxed);
            slot.start.store(start, Relaxed);
            slot.end.store(end, Relaxed);
            Some(slot)
        });
        free.map(Guard).ok_or_else(|| Error::other(format!("{GUARDS_MAX} files are mapped already, the most allowed")))
    }

    /// Whether a part of the mapping could not be read and was replaced with zeros.
    pub(crate) fn has_lost(&self) -> bool {
        self.0.lost.load(Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        locked(|| self.0.end.store(0, Relaxed));
    }
}

fn locked<T>(act: impl FnOnce() -> T) -> T {
    while LOCKED.swap(true, Acquire) {
        std::hint::spin_loop();
    }
    let result = act();
    LOCKED.store(false, Release);
    result
}

impl Handler {
    fn install() -> Result<Handler, i32> {
        let failed = || Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        // SAFETY: all zeros is a `sigaction`, the system writes `before` and reads `ours`, and the handler has the signature that goes
        // with SA_SIGINFO. It calls nothing but what may be called in a handler (`on_bus_error`).
        unsafe {
            let (mut before, mut ours) = (std::mem::zeroed::<libc::sigaction>(), std::mem::zeroed::<libc::sigaction>());
            ours.sa_sigaction = on_bus_error as *const () as usize;
            // Other threads' stacks may be small; the standard library gives each thread a stack for signals.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).map_err(|_| failed())?;
            if libc::sigaction(libc::SIGBUS, &raw const ours, &raw mut before) != 0 {
                return Err(failed());
            }
            Ok(Handler { page, before })
        }
    }
}

/// Maps zeros over a guarded mapping that cannot be read, from the requested page to the end. In a file that was cut, all pages after it
/// are gone as well.
extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let Some(Ok(handler)) = HANDLER.get() else { return };
    // SAFETY: with SA_SIGINFO the system passes a valid `info`.
    let sent = unsafe { (*info).si_code } <= 0;
    if sent {
        // A process sent the signal; no read caused it. There is no address, and nothing to repair here.
        // SAFETY: what the system wrote when this handler was installed is valid, and `raise` may be called in a handler.
        unsafe {
            libc::sigaction(signal, &raw const handler.before, std::ptr::null_mut());
            libc::raise(signal);
        }
        return;
    }
    // SAFETY: as above, and a fault has an address.
    let at = unsafe { (*info).si_addr() }.addr();
    let mended = locked(|| {
        let Some(slot) = SLOTS.iter().find(|slot| (slot.start.load(Relaxed)..slot.end.load(Relaxed)).contains(&at))
        else {
            return false;
        };
        let from = at - at % handler.page;
        let (place, length) = (std::ptr::without_provenance_mut(from), slot.end.load(Relaxed) - from);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED;
        // SAFETY: the pages are the rest of one guarded mapping, which lives at least as long as its slot is taken; it
        // is only ever read, by this process through shared references, to which zeros are as good as any bytes of a
        // file that another process writes.
        let mapped = unsafe { libc::mmap(place, length, libc::PROT_READ, flags, -1, 0) };
        slot.lost.store(true, Release);
        mapped != libc::MAP_FAILED
    });
    if !mended {
        // SAFETY: what the system wrote when this handler was installed is valid. The instruction runs again and faults again.
        unsafe { libc::sigaction(signal, &raw const handler.before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_are_bounded_and_come_back() {
        let byte = [0u8];
        let guards: Vec<Guard> = std::iter::from_fn(|| Guard::new(&byte).ok()).take(GUARDS_MAX + 1).collect();
        assert_eq!(guards.len(), GUARDS_MAX);
        assert!(Guard::new(&byte).err().unwrap().to_string().contains("8192 files are mapped already"));
        assert!(!guards[0].has_lost());
        drop(guards);
        assert!(Guard::new(&byte).is_ok());
    }
}
