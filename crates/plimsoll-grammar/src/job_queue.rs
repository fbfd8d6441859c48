//! A thread that computes masks, and its queue.
//!
//! The queue needs no limit in jobs or bytes. Dropping a [`QueuedJob`] removes its job, so the queue holds at most one
//! job per live output. The engine limits the number of outputs. Each output reserves the bytes of its job
//! (`Guide::bytes_max`).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A job of the mask threads.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// A queue with its thread. The thread ends when the queue is dropped.
pub(crate) struct JobQueue<T>(Arc<SharedQueue<T>>);

/// A submitted job. Dropping this removes the job from the queue, unless it has started.
pub(crate) struct QueuedJob<T> {
    queue: Arc<SharedQueue<T>>,
    id: u64,
}

struct SharedQueue<T> {
    state: Mutex<QueueState<T>>,
    changed: Condvar,
}

struct QueueState<T> {
    jobs: VecDeque<(u64, T)>,
    last_id: u64,
    closed: bool,
}

impl<T> SharedQueue<T> {
    fn state(&self) -> MutexGuard<'_, QueueState<T>> {
        // A panic under this lock leaves no partial update.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job. `None` when the queue is closed and empty.
    fn next(&self) -> Option<T> {
        let idle = |state: &mut QueueState<T>| state.jobs.is_empty() && !state.closed;
        let state = self.changed.wait_while(self.state(), idle);
        state.unwrap_or_else(PoisonError::into_inner).jobs.pop_front().map(|(_, job)| job)
    }

    fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        // Dropped without the lock: a job's destructor may use the queue.
        let left = std::mem::take(&mut state.jobs);
        drop(state);
        drop(left);
        self.changed.notify_all();
    }
}

/// Closes the queue when its thread ends, by a panic too.
struct CloseOnDrop<T>(Arc<SharedQueue<T>>);

impl<T> Drop for CloseOnDrop<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T: Send + 'static> JobQueue<T> {
    /// Starts a thread with this name, which calls `run` for each job.
    ///
    /// # Errors
    ///
    /// The system has no thread.
    pub fn start(name: &str, run: fn(T)) -> std::io::Result<Arc<Self>> {
        let state = QueueState { jobs: VecDeque::new(), last_id: 0, closed: false };
        let queue = Arc::new(SharedQueue { state: Mutex::new(state), changed: Condvar::new() });
        let close_on_drop = CloseOnDrop(Arc::clone(&queue));
        let work = move || {
            while let Some(job) = close_on_drop.0.next() {
                run(job);
            }
        };
        std::thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(Arc::new(Self(queue)))
    }

    /// Appends a job. Drops it at once if the thread has ended.
    pub fn push(&self, job: T) -> QueuedJob<T> {
        let mut state = self.0.state();
        state.last_id += 1;
        let id = state.last_id;
        let refused = if state.closed {
            Some(job)
        } else {
            state.jobs.push_back((id, job));
            None
        };
        drop(state);
        drop(refused);
        self.0.changed.notify_one();
        QueuedJob { queue: Arc::clone(&self.0), id }
    }
}

impl<T> Drop for JobQueue<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T> Drop for QueuedJob<T> {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        // Jobs are sorted by id.
        let found = state.jobs.binary_search_by_key(&self.id, |(id, _)| *id);
        let removed = found.ok().and_then(|at| state.jobs.remove(at));
        drop(state);
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A job that reports its start and waits for a signal.
    type Slow = (Sender<()>, Receiver<()>);

    fn slow((start, finish): Slow) {
        let _ = start.send(());
        let _ = finish.recv();
    }

    #[test]
    fn dropped_jobs_leave_the_queue() {
        let queue = JobQueue::start("slow", slow).unwrap();
        let job = || {
            let ((start, started), (finish, finished)) = (channel(), channel());
            (queue.push((start, finished)), started, finish)
        };
        let (_first, started, finish) = job();
        started.recv().unwrap();
        let kept: Vec<_> = (0..3).map(|_| job()).collect();
        // Jobs are dropped in any order while the thread is busy.
        let mut dropped: Vec<_> = (0..100).map(|_| job()).collect();
        while !dropped.is_empty() {
            drop(dropped.swap_remove(dropped.len() / 2));
            assert_eq!(queue.0.state().jobs.len(), kept.len() + dropped.len());
        }
        for _ in 0..1000 {
            drop(job());
        }
        assert!(queue.0.state().jobs.len() == kept.len() && queue.0.state().jobs.capacity() < 1000);
        finish.send(()).unwrap();
        for (queued, started, finish) in kept {
            started.recv().unwrap();
            finish.send(()).unwrap();
            drop(queued);
        }
    }

    #[test]
    fn thread_ends_with_its_queue_and_dead_queue_drops_jobs() {
        let queue = JobQueue::start("ends", drop::<Sender<()>>).unwrap();
        let shared = Arc::downgrade(&queue.0);
        drop(queue);
        while shared.strong_count() > 0 {
            std::thread::yield_now();
        }
        let queue = JobQueue::start("panics", |_: Sender<()>| panic!("injected")).unwrap();
        for _ in 0..2 {
            let (reply, answer) = channel();
            let _queued = queue.push(reply);
            assert!(answer.recv().is_err());
        }
    }
}
