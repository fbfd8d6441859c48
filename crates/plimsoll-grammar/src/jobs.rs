//! A thread that computes masks, and who waits for it.
//!
//! The queue has no limit of its own, in count or in bytes, and needs none: whoever asks holds a [`Ticket`], with which a job that has not
//! begun goes out of the queue. So it holds one job at most of each output that is alive, which are as many as the engine's places; and a job,
//! with the way its output has gone, is part of what each of them has reserved (`Guide::bytes_max`). What must not be in here: what
//! a job is.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A job as the threads of masks take it.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// Where jobs are handed in. The thread ends with the last who could.
pub(crate) struct Desk<T>(Arc<Queue<T>>);

/// A job that was handed in: it is withdrawn with this, unless it has begun.
pub(crate) struct Ticket<T> {
    queue: Arc<Queue<T>>,
    number: u64,
}

struct Queue<T> {
    waiting: Mutex<Waiting<T>>,
    changed: Condvar,
}

struct Waiting<T> {
    jobs: VecDeque<(u64, T)>,
    handed_in: u64,
    closed: bool,
}

impl<T> Queue<T> {
    fn waiting(&self) -> MutexGuard<'_, Waiting<T>> {
        // Nothing is left half done under this lock.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job, once there is one; none when nobody is left to hand one in.
    fn next(&self) -> Option<T> {
        let idle = |waiting: &mut Waiting<T>| waiting.jobs.is_empty() && !waiting.closed;
        let waiting = self.changed.wait_while(self.waiting(), idle);
        waiting.unwrap_or_else(PoisonError::into_inner).jobs.pop_front().map(|(_, job)| job)
    }

    fn close(&self) {
        let mut waiting = self.waiting();
        waiting.closed = true;
        // Without the lock: jobs may hold whatever they like.
        let left = std::mem::take(&mut waiting.jobs);
        drop(waiting);
        drop(left);
        self.changed.notify_all();
    }
}

/// Closes a queue, however its thread ends.
struct Closes<T>(Arc<Queue<T>>);

impl<T> Drop for Closes<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T: Send + 'static> Desk<T> {
    /// Starts a thread of this name, which does to each job what `run` says.
    ///
    /// # Errors
    ///
    /// When the system has no thread.
    pub fn open(name: &str, run: fn(T)) -> std::io::Result<Arc<Self>> {
        let waiting = Waiting { jobs: VecDeque::new(), handed_in: 0, closed: false };
        let queue = Arc::new(Queue { waiting: Mutex::new(waiting), changed: Condvar::new() });
        let closes = Closes(Arc::clone(&queue));
        let work = move || {
            while let Some(job) = closes.0.next() {
                run(job);
            }
        };
        std::thread::Builder::new().name(name.into()).spawn(work)?;
        Ok(Arc::new(Self(queue)))
    }

    /// Hands in a job, behind all others. It is dropped at once where the thread has ended.
    pub fn hand_in(&self, job: T) -> Ticket<T> {
        let mut waiting = self.0.waiting();
        waiting.handed_in += 1;
        let number = waiting.handed_in;
        let refused = if waiting.closed {
            Some(job)
        } else {
            waiting.jobs.push_back((number, job));
            None
        };
        drop(waiting);
        drop(refused);
        self.0.changed.notify_one();
        Ticket { queue: Arc::clone(&self.0), number }
    }
}

impl<T> Drop for Desk<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        let mut waiting = self.queue.waiting();
        // They stand in the order of their numbers.
        let found = waiting.jobs.binary_search_by_key(&self.number, |(number, _)| *number);
        let withdrawn = found.ok().and_then(|at| waiting.jobs.remove(at));
        drop(waiting);
        drop(withdrawn);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Says that it has begun, and waits for a word.
    type Slow = (Sender<()>, Receiver<()>);

    fn slow((begun, word): Slow) {
        let _ = begun.send(());
        let _ = word.recv();
    }

    #[test]
    fn queue_holds_awaited_jobs_only() {
        let desk = Desk::open("slow", slow).unwrap();
        let job = || {
            let ((begun, begins), (word, go)) = (channel(), channel());
            (desk.hand_in((begun, go)), begins, word)
        };
        let (_first, begins, word) = job();
        begins.recv().unwrap();
        let waits: Vec<_> = (0..3).map(|_| job()).collect();
        // One after the other goes away while the thread is busy, in any order.
        let mut gone: Vec<_> = (0..100).map(|_| job()).collect();
        while !gone.is_empty() {
            drop(gone.swap_remove(gone.len() / 2));
            assert_eq!(desk.0.waiting().jobs.len(), waits.len() + gone.len());
        }
        for _ in 0..1000 {
            drop(job());
        }
        assert!(desk.0.waiting().jobs.len() == waits.len() && desk.0.waiting().jobs.capacity() < 1000);
        word.send(()).unwrap();
        for (ticket, begins, word) in waits {
            begins.recv().unwrap();
            word.send(()).unwrap();
            drop(ticket);
        }
    }

    #[test]
    fn thread_ends_with_its_last_queue_and_a_queue_without_thread_answers_nothing() {
        let desk = Desk::open("ends", drop::<Sender<()>>).unwrap();
        let queue = Arc::downgrade(&desk.0);
        drop(desk);
        while queue.strong_count() > 0 {
            std::thread::yield_now();
        }
        let desk = Desk::open("panics", |_: Sender<()>| panic!("injected")).unwrap();
        for _ in 0..2 {
            let (reply, answer) = channel();
            let _ticket = desk.hand_in(reply);
            assert!(answer.recv().is_err());
        }
    }
}
