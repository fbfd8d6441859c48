//! The loop of the engine thread: take arrivals, run one step, react to memory pressure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use super::{Worker, panic_message};
use crate::runner::Runner;
use crate::shared::Shared;

/// How long an idle engine waits for an arrival before its next iteration.
const IDLE_WAIT: Duration = Duration::from_millis(200);

/// How long an idle engine waits for an arrival while prefixes are still to be written to disk.
const SAVING_WAIT: Duration = Duration::from_millis(2);

/// Marks the engine as stopped on drop, also after a panic.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.shutdown.stopped.store(true, Release);
        self.0.clear_calls.wake();
    }
}

impl<R: Runner> Worker<R> {
    /// Runs until every handle is dropped or a stop is requested.
    pub fn run(mut self) {
        let _stopped = Stopped(Arc::clone(&self.shared));
        loop {
            let open = self.wait();
            self.run_iteration();
            if self.shared.shutdown.stop.load(Acquire) {
                self.enqueue_all();
                self.end_all("the server is shutting down");
                self.flush_disk();
                self.refresh_status();
                break;
            }
            if !open && self.scheduler.is_empty() {
                self.flush_disk();
                break;
            }
        }
    }

    /// One iteration without waiting: arrivals, a step, memory pressure, unused memory. After a panic the requests in
    /// flight start again.
    pub fn run_iteration(&mut self) {
        let clear = self.shared.clear_calls.asked();
        let ran = catch_unwind(AssertUnwindSafe(|| {
            if clear.is_some() {
                self.cache.borrow_mut().clear();
                self.clear_disk();
                self.forget_outputs();
                self.give_pages_back();
            }
            self.enqueue_all();
            self.cache.borrow_mut().advance((self.epoch.elapsed().as_secs() / 60) as u32);
            self.run_step();
            self.save_to_disk();
            self.govern();
            self.trim();
        }));
        if let Err(panic) = ran {
            self.shared.metrics.panics.inc();
            let panic = panic_message(panic);
            tracing::error!(panic, "the engine panicked outside any request");
            self.start_over();
        } else if !self.makes_progress() {
            let limit = self.shared.monitor.watchdog.limit().as_secs_f64();
            tracing::error!(
                limit,
                "no progress for the limit's seconds: all requests are requeued and the page tables rebuilt"
            );
            self.start_over();
        }
        self.recover_device();
        self.refresh_status();
        clear.into_iter().for_each(|asked| self.shared.clear_calls.done(asked));
    }

    fn enqueue_all(&mut self) {
        while let Ok(message) = self.arrivals.try_recv() {
            message.into_iter().for_each(|arrival| self.enqueue(arrival));
        }
    }

    /// Waits for an arrival if there is no other work. False if every handle is dropped.
    fn wait(&mut self) -> bool {
        if !self.scheduler.is_empty() {
            return true;
        }
        let wait = if self.saves_to_disk() { SAVING_WAIT } else { IDLE_WAIT };
        match self.arrivals.recv_timeout(wait) {
            Ok(message) => message.into_iter().for_each(|arrival| self.enqueue(arrival)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }
}
