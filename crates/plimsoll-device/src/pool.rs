//! The thread pool: one per device, one job at a time, tasks claimed by a counter.
//!
//! Workers spin briefly for the next job, then park, so that an idle server costs nothing and a busy neighbour on one core does not
//! stop the other threads: whoever is awake claims the tasks that are left. Which thread runs a task never changes its result.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// How often a worker looks for the next job before it parks: about 20 µs, longer than the gap between two operations of
/// a step and far shorter than a scheduler's time slice.
const SPINS: usize = 4000;

/// A task: called with the thread's number and the task's.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

type Job = *const Task<'static>;

/// The job being run, as the workers see it.
struct Current {
    job: Option<Job>,
    generation: usize,
    parked: usize,
    stop: bool,
}

struct Shared {
    current: Mutex<Current>,
    wake: Condvar,
    /// Bumped for each job, so that spinning workers notice without the lock.
    generation: AtomicUsize,
    /// Next task to claim.
    next: AtomicUsize,
    tasks: AtomicUsize,
    /// Workers that may still be inside the current job.
    inside: AtomicUsize,
    panicked: AtomicBool,
}

// SAFETY: the raw job pointer is only dereferenced between `run`'s publication and its return, while the closure it
// points to is borrowed by `run`; the closure is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A fixed set of threads that run the tasks of one job after another.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool in which `threads` threads work, the caller of [`ThreadPool::run`] included.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            current: Mutex::new(Current { job: None, generation: 0, parked: 0, stop: false }),
            wake: Condvar::new(),
            generation: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let spawn = |index: usize| {
            let shared = Arc::clone(&shared);
            let name = format!("plimsoll-cpu-{index}");
            std::thread::Builder::new().name(name).spawn(move || work(&shared, index))
        };
        let workers = (1..threads.max(1)).map(spawn).collect::<Result<_, _>>()?;
        Ok(Self { shared, workers })
    }

    /// Threads that work, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(thread, 0)` … `task(thread, tasks - 1)`, in any order, on any thread, and returns when all are done.
    /// No two tasks run at once with the same thread number, so it can name that thread's scratch.
    /// `&mut self`: one job at a time.
    ///
    /// # Panics
    /// When a task panics, after all threads have left the job; the pool stays usable.
    pub fn run(&mut self, tasks: usize, task: &Task<'_>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|index| task(0, index));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; `run` does not return before every worker has left the job.
        let job: Job = unsafe { std::mem::transmute::<&Task<'_>, Job>(task) };
        let parked = {
            let mut current = lock(&shared.current);
            shared.next.store(0, Ordering::Relaxed);
            shared.tasks.store(tasks, Ordering::Relaxed);
            current.job = Some(job);
            current.generation += 1;
            shared.generation.store(current.generation, Ordering::Release);
            current.parked
        };
        if parked > 0 {
            shared.wake.notify_all();
        }
        // A panic in the caller's share must not leave the workers with a dangling job.
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| claim(shared, 0, task)));
        lock(&shared.current).job = None;
        let mut spins = 0;
        while shared.inside.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Err(panic) = own {
            shared.panicked.store(false, Ordering::Relaxed);
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel panicked on a pool thread");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        lock(&self.shared.current).stop = true;
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker only panics outside of jobs if the pool itself is broken; there is nothing left to save then.
            let _ = worker.join();
        }
    }
}

fn lock(current: &Mutex<Current>) -> std::sync::MutexGuard<'_, Current> {
    current.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Takes tasks until none is left.
fn claim(shared: &Shared, thread: usize, task: &Task<'_>) {
    let tasks = shared.tasks.load(Ordering::Relaxed);
    loop {
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        if index >= tasks {
            return;
        }
        task(thread, index);
    }
}

/// A worker's life: wait for a job, take part in it, again.
fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        for _ in 0..SPINS {
            if shared.generation.load(Ordering::Acquire) != seen {
                break;
            }
            std::hint::spin_loop();
        }
        let job = {
            let mut current = lock(&shared.current);
            while current.generation == seen && !current.stop {
                current.parked += 1;
                current = shared.wake.wait(current).unwrap_or_else(|poisoned| poisoned.into_inner());
                current.parked -= 1;
            }
            if current.stop {
                return;
            }
            seen = current.generation;
            if current.job.is_some() {
                // Counted under the lock: `run` clears the job under the same lock before it waits for zero.
                shared.inside.fetch_add(1, Ordering::AcqRel);
            }
            current.job
        };
        if let Some(job) = job {
            // SAFETY: `inside` was raised while the job was published, so `run` is still waiting for this thread.
            let task = unsafe { &*job };
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| claim(shared, thread, task))).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
            shared.inside.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

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
                std::thread::sleep(std::time::Duration::from_millis(2)); // long enough to park
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 20_000 * 6);
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
}
