//! The durations in answers of Ollama's and llama.cpp's APIs.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use plimsoll_text::strftime;
use serde::Serialize;

use crate::conversation::active::Usage;

/// The times of one request's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    arrived: Instant,
    /// The time at which the model was loaded.
    began: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// Durations in nanoseconds, and tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Counts {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u64,
    prompt_eval_duration: u64,
    eval_count: u64,
    eval_duration: u64,
}

impl Clock {
    /// Starts the clock of a request, when its model is loaded.
    pub fn new(arrived: Instant) -> Self {
        Self { arrived, began: Instant::now(), first_token: None, last_token: None }
    }

    /// Notes that this many tokens have arrived.
    pub fn tokens(&mut self, count: usize) {
        if count > 0 {
            let now = Instant::now();
            self.first_token.get_or_insert(now);
            self.last_token = Some(now);
        }
    }

    /// Returns the nanoseconds since the request arrived.
    pub fn total(&self) -> u64 {
        nanoseconds(self.arrived, Instant::now())
    }

    /// Returns the nanoseconds from the request's arrival until the model was loaded.
    pub fn load(&self) -> u64 {
        nanoseconds(self.arrived, self.began)
    }

    /// Returns the seconds that the prompt took, and the output.
    pub fn seconds(&self) -> (f64, f64) {
        let first = self.first_token.unwrap_or_else(Instant::now);
        let last = self.last_token.unwrap_or(first);
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        (seconds(self.began, first), seconds(first, last))
    }

    /// Returns the counts for the last line of an answer of Ollama's.
    pub fn counts(&self, usage: Usage) -> Counts {
        let first = self.first_token.unwrap_or_else(Instant::now);
        Counts {
            total_duration: self.total(),
            load_duration: self.load(),
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: nanoseconds(self.began, first),
            eval_count: usage.completion_tokens,
            eval_duration: nanoseconds(first, self.last_token.unwrap_or(first)),
        }
    }
}

fn nanoseconds(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the time of day in UTC, in Ollama's form.
pub(crate) fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:06}Z", strftime("%Y-%m-%dT%H:%M:%S", now.as_secs()), now.subsec_micros())
}
