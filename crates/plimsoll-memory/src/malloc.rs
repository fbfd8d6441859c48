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

/// Heaps beside each other: each keeps leftovers of its own. Threads that allocate much at the same time are few here.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HEAPS: i32 = 2;

/// Any but the first reserves 64 MiB of address space whatever it holds, and asks for twice as much to choose from. Where address space
/// is what is short there is none.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn heaps() -> i32 {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::As).current.is_some() { 1 } else { HEAPS }
}

/// Tells glibc to keep little of what is freed. To be called before the first thread is started; elsewhere it does nothing.
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

/// The variable that glibc reads its settings from, before `main`.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TUNABLES: &str = "GLIBC_TUNABLES";

/// No blocks that each thread keeps for itself when it has freed them: up to seven of every size up to 1 KiB, 230 KB a thread, which
/// fill up over days. After 72,000 requests a server still grew by them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const NO_THREAD_CACHE: &str = "glibc.malloc.tcache_count=0";

/// Marks the restarted program, so that it does not restart itself for ever. [`TUNABLES`] may be gone by then: glibc
/// removes it for programs with capabilities of their own, and so may a wrapper.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ANEW: &str = "_PLIMSOLL_STARTED_ANEW";

/// The settings in this environment's [`TUNABLES`]. glibc before 2.39 ends each setting in place with a zero instead of
/// the colon: the settings behind the first look like variables of their own.
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

/// Restarts the program, as the same process, with threads that keep no freed blocks for themselves: glibc takes this
/// setting from the environment only. Returns if nothing is to be done or the restart fails. A setting of these caches
/// that is already there stays. Call it before anything that must not happen twice.
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
        // Started by the loader's name, that is what would be started.
        if own.file_name().is_none_or(|own| own.to_string_lossy().starts_with("ld-")) {
            return;
        }
        // Returns only if it failed: a server that keeps a little more is better than none, and the ledger says what it keeps.
        let _ = std::process::Command::new(own)
            .arg0(name)
            .args(words)
            .env(TUNABLES, settings.join(":"))
            .env(ANEW, "1")
            .exec();
        // The attempt has left the signal's default, by which a client that goes would end the process.
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
