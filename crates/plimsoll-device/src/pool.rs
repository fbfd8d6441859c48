//! The thread pool: one per device, one job at a time.
//!
//! Every thread has a share of a job's tasks, always the same part of them. So a thread finds its results of one job in its own cache
//! in the next. A thread that is done with its share claims tasks of other shares. Workers spin briefly for the next job, then park: an
//! idle server costs nothing, and a busy neighbour on one core does not stop the other threads. The thread that runs a task never
//! changes the task's result.

#[cfg(test)]
use shuttle::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle, yield_now},
};
use std::cell::UnsafeCell;
#[cfg(not(test))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle, yield_now},
};

use crate::ahead::Ahead;

/// Checks for the next job before a worker parks: about 20 µs, more while it prefetches. That is longer than the gap between two
/// operations of a step and far shorter than a scheduler's time slice.
const SPINS: usize = if cfg!(test) { 2 } else { 4000 };

/// A task: called with the thread's number and the task's.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;
/// A function that returns the memory that a thread reads after a job.
type Next<'a> = dyn Fn(usize) -> Ahead + Sync + 'a;

/// A job: the function of its tasks, their number, and the memory that threads read after it, if that is predicted.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
    next: Option<*const Next<'static>>,
}

/// The current job and the number of workers in it, together on a cache line.
#[repr(align(64))]
struct Gate {
    /// Number of the job in units of [`JOB`], whether it is [`OPEN`], and how many workers are inside.
    word: AtomicUsize,
    /// Written by `run_then` alone, while the gate is shut and no worker is inside.
    job: UnsafeCell<Option<Job>>,
}

/// Workers may enter.
const OPEN: usize = 1 << 16;
/// From one job's number to the next.
const JOB: usize = 2 * OPEN;

/// Returns the job's number in the gate's word.
const fn number(word: usize) -> usize {
    word / JOB
}

/// Returns the number of workers inside, from the gate's word.
const fn inside(word: usize) -> usize {
    word % OPEN
}

/// Neighbouring tasks that belong to one thread first, on a cache line of their own.
#[repr(align(64))]
struct Share {
    /// Next task of the share to claim, counted from its first.
    next: AtomicUsize,
}

struct Shared {
    gate: Gate,
    /// One for each thread.
    shares: Box<[Share]>,
    /// Workers that wait for `wake`, or are about to.
    parked: AtomicUsize,
    /// Held between the check of the gate and the wait.
    lock: Mutex<()>,
    wake: Condvar,
    /// Whether the pool ends: there are no more jobs.
    stop: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `Gate::job` is written while no worker is inside the gate and read by the workers inside. What it points to
// is borrowed by `run_then`, which returns when the gate is shut and empty, and is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A fixed set of threads that run the tasks of one job after another.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The caller's prefetches.
    ahead: Ahead,
}

impl ThreadPool {
    /// A pool in which `threads` threads work, the caller of [`ThreadPool::run`] included.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = threads.clamp(1, OPEN - 1);
        let shared = Arc::new(Shared {
            gate: Gate { word: AtomicUsize::new(0), job: UnsafeCell::new(None) },
            shares: (0..threads).map(|_| Share { next: AtomicUsize::new(0) }).collect(),
            parked: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        // If the system refuses a thread, dropping the pool ends the threads before it.
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1), ahead: Ahead::default() };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let name = format!("plimsoll-cpu-{index}");
            pool.workers.push(Builder::new().name(name).spawn(move || work(&shared, index))?);
        }
        Ok(pool)
    }

    /// Threads that work, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(thread, 0)` … `task(thread, tasks - 1)`, in any order, on any thread, and returns when all are done. Tasks of the same
    /// part of a job, its first half say, run on the same thread in every job, unless another thread had to help.
    /// No two tasks run at once with the same thread number, so it can name that thread's scratch.
    /// `&mut self`: one job at a time.
    ///
    /// # Panics
    /// When a task panics, after all threads have left the job; the pool stays usable.
    pub fn run(&mut self, tasks: usize, task: &Task<'_>) {
        self.run_then(tasks, task, None);
    }

    /// Runs a job as [`ThreadPool::run`]. Threads that wait, for other threads or for a later job, meanwhile prefetch the memory of
    /// `next`. Without `next` they continue with the prefetches of an earlier job.
    pub(crate) fn run_then(&mut self, tasks: usize, task: &Task<'_>, next: Option<&Next<'_>>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|index| task(0, index));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only lifetimes are erased; `run_then` does not return before every worker has left the job.
        let job = unsafe {
            let next = next.map(|next| std::mem::transmute::<&Next<'_>, *const Next<'static>>(next));
            Job { task: std::mem::transmute::<&Task<'_>, *const Task<'static>>(task), tasks, next }
        };
        // SAFETY: the last call left the gate shut and empty.
        unsafe { *shared.gate.job.get() = Some(job) };
        for share in &shared.shares {
            // A share without tasks keeps its cache lines.
            if share.next.load(Ordering::Relaxed) > 0 {
                share.next.store(0, Ordering::Relaxed);
            }
        }
        shared.call(OPEN);
        // A panic in the caller's share must not leave the workers with a dangling job.
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_part(shared, 0, job, &mut self.ahead)));
        let mut word = shared.gate.word.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while inside(word) > 0 {
            spins += 1;
            if self.ahead.fetch() || spins < SPINS {
                spin_loop()
            } else {
                yield_now()
            }
            word = shared.gate.word.load(Ordering::Acquire);
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
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.call(0);
        for worker in self.workers.drain(..) {
            // A worker only panics outside of jobs if the pool itself is broken; then nothing can be saved.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Wakes all workers: there is a new job if `open` is [`OPEN`]. No worker is inside the gate.
    fn call(&self, open: usize) {
        let next = number(self.gate.word.load(Ordering::Relaxed)).wrapping_add(1);
        // Sequentially consistent with `wait`: either the worker that is about to park sees this job, or this thread sees the worker.
        self.gate.word.store(next.wrapping_mul(JOB) | open, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(self.locked());
            self.wake.notify_all();
        }
    }

    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns when the gate's number is no longer `seen`: there is a new job, or the pool ends.
    fn wait(&self, seen: usize, ahead: &mut Ahead) {
        for _ in 0..SPINS {
            if number(self.gate.word.load(Ordering::Acquire)) != seen {
                return;
            }
            ahead.fetch();
            spin_loop();
        }
        let mut locked = self.locked();
        self.parked.fetch_add(1, Ordering::SeqCst);
        while number(self.gate.word.load(Ordering::SeqCst)) == seen {
            locked = self.wake.wait(locked).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }

    /// Enters the gate if it is open. Returns the number found there, and whether the worker entered.
    fn enter(&self) -> (usize, bool) {
        let more = |word| (word & OPEN > 0).then_some(word + 1);
        match self.gate.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(word) => (number(word), true),
            Err(word) => (number(word), false),
        }
    }
}

/// Runs tasks until none is left: first the thread's own share, then tasks left in other shares.
fn claim(shared: &Shared, thread: usize, tasks: usize, task: &Task<'_>) {
    let threads = shared.shares.len();
    for owner in (thread..threads).chain(0..thread) {
        let [first, end] = [owner, owner + 1].map(|owner| owner * tasks / threads);
        if first == end {
            continue;
        }
        let next = &shared.shares[owner].next;
        // The load comes first: `fetch_add` takes the cache line from the owner even if no task is left.
        while first + next.load(Ordering::Relaxed) < end {
            let index = first + next.fetch_add(1, Ordering::Relaxed);
            if index < end {
                task(thread, index);
            }
        }
    }
}

/// Runs tasks until none is left, and then records the memory that this thread reads next. The job is open.
fn take_part(shared: &Shared, thread: usize, job: Job, ahead: &mut Ahead) {
    // SAFETY: `run_then` borrows both until every thread has left the job.
    let (task, next) = unsafe { (&*job.task, job.next.map(|next| &*next)) };
    claim(shared, thread, job.tasks, task);
    if let Some(next) = next {
        *ahead = next(thread);
    }
}

/// The loop of a worker: it waits for a job, takes part in it, and repeats.
fn work(shared: &Shared, thread: usize) {
    let (mut seen, mut ahead) = (0, Ahead::default());
    loop {
        shared.wait(seen, &mut ahead);
        let entered;
        (seen, entered) = shared.enter();
        if !entered {
            // It was set before the gate was shut for good, and not while it is open.
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            continue;
        }
        // SAFETY: `run_then` wrote this job before it opened the gate, and waits for this thread to leave before it returns.
        let job = unsafe { (*shared.gate.job.get()).expect("the gate is open") };
        let claimed =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_part(shared, thread, job, &mut ahead)));
        if claimed.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.gate.word.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    //! The interleavings (not the memory orderings), explored by shuttle: a lost wake-up, a task run twice or a job outliving its
    //! borrow would show as a deadlock or a wrong count. The same code on real threads is tested in `tests/device/pool.rs`.

    use super::*;

    /// Random schedules per case.
    const SCHEDULES: usize = 10_000;

    fn explore(threads: usize, jobs: &'static [usize]) {
        let body = move || {
            let mut pool = ThreadPool::new(threads).unwrap();
            for tasks in jobs {
                let counts: Vec<AtomicUsize> = (0..*tasks).map(|_| AtomicUsize::new(0)).collect();
                let next = |_: usize| {
                    let mut ahead = Ahead::default();
                    ahead.add(&[0; 256]);
                    ahead
                };
                let task = |thread: usize, task: usize| {
                    assert!(thread < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                };
                pool.run_then(*tasks, &task, Some(&next));
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
