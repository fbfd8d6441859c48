//! Settings of the system's allocator that make it give freed memory back to the system.
//!
//! glibc adapts to the program: after a buffer of some megabytes was freed, buffers of that size come from a heap that glibc keeps. Eight
//! bodies of eight megabytes then cost 35 MiB for good, in no row of the ledger.

/// The least size of an allocation with a mapping of its own, which is unmapped when it is freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_FROM_BYTES: i32 = 128 << 10;

/// A heap's free end that is larger than this is given back at once.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const FREE_END_BYTES: i32 = 128 << 10;

/// The most heaps. Each keeps leftovers of its own, and few threads here allocate much at the same time.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HEAPS: i32 = 2;

/// Returns the number of heaps. Any heap but the first reserves 64 MiB of address space whatever it holds, and asks for twice as much to
/// choose from. Where address space is limited there is only the first.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn heaps() -> i32 {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::As).current.is_some() { 1 } else { HEAPS }
}

/// Makes glibc keep little of the freed memory. Call it before the first thread is started. Without glibc it does nothing.
pub fn keep_little() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let parameters = [
            (libc::M_TRIM_THRESHOLD, FREE_END_BYTES),
            (libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
            (libc::M_ARENA_MAX, heaps()),
        ];
        for (parameter, value) in parameters {
            // SAFETY: `mallopt` takes two integers, locks what it changes, and refuses values it does not know.
            let taken = unsafe { libc::mallopt(parameter, value) };
            debug_assert_eq!(taken, 1, "glibc refused parameter {parameter}");
        }
    }
}

/// The environment variable that glibc reads its settings from, before `main`.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Switches off the freed blocks that each thread keeps for itself. These are up to seven of every size up to 1 KiB, 230 KB a thread, and
/// they fill up over days. After 72,000 requests a server still grew by them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const NO_THREAD_CACHE: &str = "glibc.malloc.tcache_count=0";

/// Marks the restarted program, so that it does not restart itself forever. [`TUNABLES`] can be gone by then: glibc removes it for programs
/// with capabilities of their own, and a wrapper can remove it as well.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ANEW: &str = "_PLIMSOLL_STARTED_ANEW";

/// Returns the settings in this environment's [`TUNABLES`]. glibc before 2.39 replaces the colon after each setting with a zero in place.
/// All settings after the first then look like other variables.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn settings(environment: &str) -> Vec<String> {
    let mut entries = environment
        .split('\0')
        .map(|entry| entry.strip_prefix(TUNABLES).and_then(|set| set.strip_prefix('=')).ok_or(entry));
    let Some(first) = entries.find_map(Result::ok) else { return Vec::new() };
    let others = entries.map_while(|entry| entry.err().filter(|entry| entry.starts_with("glibc.")));
    let all = first.split(':').chain(others.flat_map(|entry| entry.split(':')));
    all.filter(|set| !set.is_empty()).map(str::to_owned).collect()
}

/// Restarts the program, as the same process, with threads that keep no freed blocks for themselves. glibc takes this setting from the
/// environment only. Returns if there is nothing to do or the restart fails. A setting of these caches that is already there stays. Call it
/// before anything that must not happen twice.
pub fn nothing_by_thread() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::os::unix::process::CommandExt;
        let environment = std::fs::read("/proc/self/environ").unwrap_or_default();
        let mut settings = settings(&String::from_utf8_lossy(&environment));
        if std::env::var_os(ANEW).is_some() || settings.iter().any(|set| set.starts_with("glibc.malloc.tcache_")) {
            return;
        }
        settings.push(NO_THREAD_CACHE.into());
        let mut words = std::env::args_os();
        let (Ok(own), Some(name)) = (std::env::current_exe(), words.next()) else { return };
        // A program that was started through the loader would restart the loader.
        if own.file_name().is_none_or(|own| own.to_string_lossy().starts_with("ld-")) {
            return;
        }
        // Returns only on failure. A server that keeps a little more memory is better than none, and the ledger shows the memory.
        let _ = std::process::Command::new(own)
            .arg0(name)
            .args(words)
            .env(TUNABLES, settings.join(":"))
            .env(ANEW, "1")
            .exec();
        // The attempt has restored the signal's default, which ends the process when a client disconnects.
        // SAFETY: `signal` takes any signal and one of its constants.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::settings;

    #[test]
    fn settings_are_read_whether_or_not_they_were_cut_up() {
        for (environment, expected) in [
            ("A=1\0B=2", &[][..]),
            ("A=1\0GLIBC_TUNABLES=glibc.a=1:glibc.b=2\0B=2", &["glibc.a=1", "glibc.b=2"]),
            (
                "GLIBC_TUNABLES=glibc.a=1\0glibc.b=2\0glibc.c=3:glibc.d=4\0B=2\0glibc.e=5",
                &["glibc.a=1", "glibc.b=2", "glibc.c=3", "glibc.d=4"],
            ),
            ("GLIBC_TUNABLES=\0GLIBC_TUNABLESX=glibc.a=1", &[]),
        ] {
            assert_eq!(settings(environment), expected, "{environment:?}");
        }
    }
}
