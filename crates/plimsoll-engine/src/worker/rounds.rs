//! The loop of the engine thread: it waits for arrivals, and does one round after another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use plimsoll_memory::broken;

use super::{Worker, panic_message};
use crate::runner::Runner;
use crate::shared::Shared;

/// How long an idle engine waits for an arrival before it looks around.
const IDLE_WAIT: Duration = Duration::from_millis(200);

/// Says that the engine thread has ended, however it ends.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.stopped.store(true, Release);
        self.0.cached.wake();
    }
}

impl<R: Runner> Worker<R> {
    /// Runs until every handle is gone or a stop is asked for.
    pub fn run(mut self) {
        let _stopped = Stopped(Arc::clone(&self.shared));
        loop {
            let open = self.wait();
            self.round();
            if self.shared.stop.load(Acquire) {
                while let Ok(arrival) = self.arrivals.try_recv() {
                    self.accept(arrival);
                }
                self.end_all("the server is shutting down");
                self.refresh_status();
                break;
            }
            if !open && self.scheduler.is_empty() {
                break;
            }
        }
    }

    /// One round without waiting: arrivals, a step, the governor, memory that is free. A panic costs the requests in flight.
    pub fn round(&mut self) {
        let clear = self.shared.cached.asked();
        let round = catch_unwind(AssertUnwindSafe(|| {
            if clear.is_some() && !broken("V-G") {
                self.cache.borrow_mut().clear();
                self.forget_outputs();
                self.give_pages_back();
            }
            while let Ok(arrival) = self.arrivals.try_recv() {
                self.accept(arrival);
            }
            self.turn();
            self.govern();
            self.trim();
        }));
        if let Err(panic) = round {
            self.shared.metrics.panics.inc();
            let panic = panic_message(panic);
            tracing::error!(panic, "the engine panicked outside any request");
            self.start_over();
        } else if !self.gets_anywhere() {
            tracing::error!("the engine goes round without getting anywhere");
            self.start_over();
        }
        self.refresh_status();
        clear.into_iter().for_each(|asked| self.shared.cached.done(asked));
    }

    /// Waits for an arrival when there is nothing else to do. False once no handle is left.
    fn wait(&mut self) -> bool {
        if !self.scheduler.is_empty() {
            return true;
        }
        match self.arrivals.recv_timeout(if broken("V-65") { Duration::ZERO } else { IDLE_WAIT }) {
            Ok(arrival) => self.accept(arrival),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }
}
