//! The durations that answers of Ollama's and llama.cpp's APIs carry.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use plimsoll_text::strftime;
use serde::Serialize;

use crate::conversation::active::Usage;

/// When the steps of one request happened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    arrived: Instant,
    /// When the model was there.
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
    /// For a request to a model that is there now.
    pub fn new(arrived: Instant) -> Self {
        Self { arrived, began: Instant::now(), first_token: None, last_token: None }
    }

    /// Tokens have come.
    pub fn tokens(&mut self, count: usize) {
        if count > 0 {
            let now = Instant::now();
            self.first_token.get_or_insert(now);
            self.last_token = Some(now);
        }
    }

    /// Nanoseconds since the request arrived.
    pub fn total(&self) -> u64 {
        nanoseconds(self.arrived, Instant::now())
    }

    /// Nanoseconds until the model was there.
    pub fn load(&self) -> u64 {
        nanoseconds(self.arrived, self.began)
    }

    /// Seconds that the prompt took, and the output.
    pub fn seconds(&self) -> (f64, f64) {
        let first = self.first_token.unwrap_or_else(Instant::now);
        let last = self.last_token.unwrap_or(first);
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        (seconds(self.began, first), seconds(first, last))
    }

    /// What the last line of Ollama's says.
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

/// The time of day in UTC, as Ollama writes it.
pub(crate) fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:06}Z", strftime("%Y-%m-%dT%H:%M:%S", now.as_secs()), now.subsec_micros())
}
