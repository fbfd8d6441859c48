//! The counts of an engine since its start. The counts of an engine that has ended stay in the sum of its engine host,
//! so a count never falls.

use std::sync::atomic::Ordering::Acquire;

use serde::Serialize;

use crate::api::degradation::DegradationLevel;
use crate::shared::Shared;

/// All counts of one engine, or their sum over several.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub requests: Requests,
    pub tokens: Tokens,
    pub steps: u64,
    pub allocations: DeviceAllocations,
    /// How often each degradation level was entered.
    pub entered: [u64; DegradationLevel::ALL.len()],
    pub reserve_releases: u64,
}

/// Device allocations before and after ready; those after ready were refused.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct DeviceAllocations {
    /// Made before ready.
    pub before_ready: u64,
    /// Attempted after ready.
    pub after_ready: u64,
}

/// Requests since start.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Requests {
    /// Requests that finished.
    pub finished: u64,
    /// Requests that the client left or cancelled.
    pub aborted: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests refused with a 4xx.
    pub refused_invalid: u64,
    /// Requests refused with a 429.
    pub refused_full: u64,
    /// Requests refused with a 503 because memory was short.
    pub refused_memory: u64,
    /// Preemptions; a preempted request is computed again.
    pub preemptions: u64,
}

/// Tokens since start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens {
    /// Tokens of prompts.
    pub prompt: u64,
    /// Tokens of prompts that were found in the prefix cache.
    pub cached: u64,
    /// Generated tokens.
    pub generated: u64,
}

impl Counts {
    pub fn of(shared: &Shared) -> Self {
        let metrics = &shared.metrics;
        let (before_ready, after_ready) = shared.ledger.allocations();
        Self {
            requests: Requests::of(shared),
            tokens: Tokens {
                prompt: metrics.prompt_tokens.get(),
                cached: metrics.cached_tokens.get(),
                generated: metrics.generated_tokens.get(),
            },
            steps: shared.status.steps.load(Acquire),
            allocations: DeviceAllocations { before_ready, after_ready },
            entered: std::array::from_fn(|level| metrics.levels[level].get()),
            reserve_releases: metrics.reserve_releases.get(),
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.requests.add(&other.requests);
        self.tokens.add(&other.tokens);
        self.steps += other.steps;
        self.allocations.before_ready += other.allocations.before_ready;
        self.allocations.after_ready += other.allocations.after_ready;
        self.entered.iter_mut().zip(other.entered).for_each(|(mine, times)| *mine += times);
        self.reserve_releases += other.reserve_releases;
    }
}

impl Requests {
    fn add(&mut self, other: &Self) {
        self.finished += other.finished;
        self.aborted += other.aborted;
        self.failed += other.failed;
        self.refused_invalid += other.refused_invalid;
        self.refused_full += other.refused_full;
        self.refused_memory += other.refused_memory;
        self.preemptions += other.preemptions;
    }

    fn of(shared: &Shared) -> Self {
        let metrics = &shared.metrics;
        Self {
            finished: metrics.finished.get(),
            aborted: metrics.aborted.get(),
            failed: metrics.failed.get(),
            refused_invalid: metrics.refused_invalid.get(),
            refused_full: metrics.refused_full.get(),
            refused_memory: metrics.refused_memory.get(),
            preemptions: metrics.preemptions.get(),
        }
    }
}

impl Tokens {
    fn add(&mut self, other: &Self) {
        self.prompt += other.prompt;
        self.cached += other.cached;
        self.generated += other.generated;
    }
}
