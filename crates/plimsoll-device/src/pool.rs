//! The thread pool: one per device, one job at a time, tasks claimed by a counter.
//!
//! Workers spin briefly for the next job, then park, so that an idle server costs nothing and a busy neighbour on one core does not
//! stop the other threads: whoever is awake claims the tasks that are left. Which thread runs a task never changes its result.

#[cfg(test)]
use shuttle::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle, yield_now},
};
#[cfg(not(test))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle, yield_now},
};

/// How often a worker looks for the next job before it parks: about 20 µs, longer than the gap between two operations of
/// a step and far shorter than a scheduler's time slice.
const SPINS: usize = if cfg!(test) { 2 } else { 4000 };

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
            Builder::new().name(name).spawn(move || work(&shared, index))
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
            if spins < SPINS { spin_loop() } else { yield_now() }
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

fn lock(current: &Mutex<Current>) -> MutexGuard<'_, Current> {
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
            spin_loop();
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
    //! The interleavings, explored by shuttle: a lost wake-up, a task run twice or a job outliving its borrow would show as a
    //! deadlock or a wrong count. The same code on real threads is tested in `tests/pool.rs`.

    use super::*;

    /// Random schedules per case.
    const SCHEDULES: usize = 2000;

    fn explore(threads: usize, jobs: &'static [usize]) {
        let body = move || {
            let mut pool = ThreadPool::new(threads).unwrap();
            for tasks in jobs {
                let counts: Vec<AtomicUsize> = (0..*tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(*tasks, &|thread, task| {
                    assert!(thread < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "each task runs once");
            }
        };
        shuttle::check_random(body, SCHEDULES);
    }

    #[test]
    fn two_threads_in_any_order() {
        explore(2, &[2, 3, 2]);
    }

    #[test]
    fn three_threads_in_any_order() {
        explore(3, &[3, 2, 4]);
    }

    #[test]
    fn a_pool_that_never_ran_ends() {
        explore(3, &[]);
    }
}
