//! The time of each phase of a start, in the log at debug.

use std::time::Instant;

/// A stopwatch for phases that follow each other.
pub(crate) struct Phases(Instant);

impl Phases {
    pub fn begin() -> Self {
        Self(Instant::now())
    }

    /// Logs the time since the previous call as the time of `phase`.
    pub fn ended(&mut self, phase: &'static str) {
        let now = Instant::now();
        let ms = now.duration_since(std::mem::replace(&mut self.0, now)).as_millis() as u64;
        tracing::debug!(phase, ms, "start");
    }
}
