//! The runtime that HTTP runs on. All its threads start before it serves, and stay.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use plimsoll_server::{HTTP_WORKERS, ServerConfig};
use tokio::runtime::Runtime;

/// The name of the runtime's threads.
const NAME: &str = "plimsoll-http";

/// Time after which an idle blocking thread ends: longer than any process lives.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A start waits at most this long for its threads.
const ALL_HERE: Duration = Duration::from_secs(30);

/// Builds the HTTP runtime and starts all its threads. They stay, so that the system cannot refuse a thread later.
pub fn http_runtime(config: &ServerConfig) -> anyhow::Result<Runtime> {
    let blocking = config.blocking_threads();
    let threads = HTTP_WORKERS + blocking;
    let refused = || format!("HTTP needs {threads} threads (see ulimit -u and the cgroup's pids.max)");
    // The threads are tested first: the runtime panics if the system refuses one.
    threads_are_had(threads).with_context(refused)?;
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(HTTP_WORKERS).max_blocking_threads(blocking).thread_keep_alive(FOR_EVER);
    let runtime = builder.thread_name(NAME).enable_all().build();
    let runtime = runtime.context("starting the HTTP runtime")?;
    // Each task waits for all others, so that each needs its own thread.
    let here = Arc::new((Mutex::new(0), Condvar::new()));
    let tasks: Vec<_> = (0..blocking)
        .map(|_| {
            let here = Arc::clone(&here);
            runtime.spawn_blocking(move || {
                let mut count = here.0.lock().unwrap_or_else(PoisonError::into_inner);
                *count += 1;
                here.1.notify_all();
                let waited = here.1.wait_timeout_while(count, ALL_HERE, |count| *count < blocking);
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            })
        })
        .collect();
    let all = runtime.block_on(async {
        let mut all = true;
        for task in tasks {
            all &= task.await.unwrap_or(false);
        }
        all
    });
    all.then_some(runtime).with_context(refused)
}

/// Starts this many threads at once and ends them. An error if the system refuses one.
pub fn threads_are_had(count: usize) -> std::io::Result<()> {
    let gate = Mutex::new(());
    let wait = || drop(gate.lock());
    std::thread::scope(|scope| {
        let _shut = gate.lock();
        (0..count).try_for_each(|_| std::thread::Builder::new().spawn_scoped(scope, wait).map(drop))
    })
}

/// Ends the runtime. Work on texts and media has one second to finish. What still runs then has no client left and ends
/// with the process.
pub fn end(runtime: tokio::runtime::Runtime) {
    runtime.shutdown_timeout(Duration::from_secs(1));
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    fn threads() -> usize {
        let names = std::fs::read_dir("/proc/self/task").unwrap();
        let names = names.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
        names.filter(|name| name.trim() == NAME).count()
    }

    #[test]
    fn work_that_comes_faster_than_it_goes_starts_no_threads() {
        let config = ServerConfig::default();
        let runtime = http_runtime(&config).unwrap();
        let all = HTTP_WORKERS + config.blocking_threads();
        assert_eq!(threads(), all);
        let slow: Vec<_> =
            (0..10 * all).map(|_| runtime.spawn_blocking(|| std::thread::sleep(Duration::from_millis(2)))).collect();
        assert_eq!(threads(), all);
        runtime.block_on(async {
            for task in slow {
                task.await.unwrap();
            }
        });
        assert_eq!(threads(), all);
    }
}
