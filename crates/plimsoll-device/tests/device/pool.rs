//! The thread pool on real threads. Its interleavings are explored in `src/pool.rs`.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_device::ThreadPool;

#[test]
fn every_task_runs_exactly_once() {
    let mut pool = ThreadPool::new(4).unwrap();
    for tasks in [0, 1, 2, 3, 7, 64, 1000] {
        let counts: Vec<AtomicU64> = (0..tasks).map(|_| AtomicU64::new(0)).collect();
        pool.run(tasks, &|_, i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{tasks} tasks");
    }
}

#[test]
fn many_small_jobs_back_to_back_and_with_pauses() {
    let mut pool = ThreadPool::new(3).unwrap();
    let sum = AtomicU64::new(0);
    for round in 0..20_000u64 {
        pool.run(3, &|_, i| {
            sum.fetch_add(i as u64 + 1, Ordering::Relaxed);
        });
        if round % 4000 == 0 {
            std::thread::sleep(Duration::from_millis(2)); // long enough to park
        }
    }
    assert_eq!(sum.load(Ordering::Relaxed), 20_000 * 6);
}

#[test]
fn the_same_part_of_every_job_is_the_same_threads() {
    let mut pool = ThreadPool::new(4).unwrap();
    let all = Barrier::new(4);
    for _ in 0..100 {
        // No thread ends its task before all threads have begun one.
        pool.run(4, &|thread, task| {
            all.wait();
            assert_eq!(thread, task);
        });
    }
}

#[test]
fn a_panicking_task_reaches_the_caller_and_the_pool_survives() {
    let mut pool = ThreadPool::new(2).unwrap();
    for _ in 0..50 {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, &|_, i| assert!(i != 5, "task five"));
        }));
        assert!(result.is_err());
        let done = AtomicU64::new(0);
        pool.run(8, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 8);
    }
}
