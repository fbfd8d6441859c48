//! The outcomes of all visits, counted by client profile.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use serde::Serialize;

use super::outcome::Outcome;
use super::profile::ClientProfile;

/// At most this many findings are kept as text.
const FINDINGS: usize = 50;

/// Counts of one client profile.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    /// Visits with the right answer.
    pub good: u64,
    /// Good answers that were compared with an earlier answer and matched it.
    pub same: u64,
    /// Visits refused for now (429 or 503 that says when to retry).
    pub refused: u64,
    /// Visits that failed because the soak itself kept the client from the server.
    pub hindered: u64,
    /// Visits with a wrong answer or an error.
    pub bad: u64,
    /// Answers that differ from the recorded ones.
    pub changed: u64,
}

/// Everything counted so far.
#[derive(Debug, Default, Serialize)]
pub struct Counted {
    /// Counts by client profile.
    pub by_profile: BTreeMap<ClientProfile, Counts>,
    /// The first findings as text.
    pub findings: Vec<String>,
}

impl Counted {
    /// Whether a client with a valid request got a good answer.
    pub fn answered(&self) -> bool {
        use ClientProfile::{Chat, Fixed, Heavy, Image, Marathon, Shared, Stream, Structured, Tools, Whole};
        let sensible = [Whole, Stream, Chat, Shared, Fixed, Image, Tools, Structured, Marathon, Heavy];
        sensible.iter().any(|profile| self.by_profile.get(profile).is_some_and(|counts| counts.good > 0))
    }

    /// Sums one count over all client profiles.
    pub fn sum(&self, of: fn(&Counts) -> u64) -> u64 {
        self.by_profile.values().map(of).sum()
    }
}

/// Counts that all clients add to.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Counted>);

impl Tally {
    fn counted(&self) -> MutexGuard<'_, Counted> {
        // Counts are complete after every addition, even if a thread panicked.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts one visit.
    pub fn add(&self, profile: ClientProfile, outcome: Outcome) {
        let mut counted = self.counted();
        let counts = counted.by_profile.entry(profile).or_default();
        let words = match outcome {
            Outcome::Good => {
                counts.good += 1;
                return;
            }
            Outcome::Same => {
                counts.good += 1;
                counts.same += 1;
                return;
            }
            Outcome::Refused => {
                counts.refused += 1;
                return;
            }
            Outcome::Hindered => {
                counts.hindered += 1;
                return;
            }
            Outcome::Bad(words) => {
                counts.bad += 1;
                words
            }
            Outcome::Changed(words) => {
                counts.changed += 1;
                words
            }
        };
        if counted.findings.len() < FINDINGS {
            counted.findings.push(format!("{profile:?}: {words}"));
        }
    }

    /// Whether a client with a valid request got a good answer so far.
    pub fn answered(&self) -> bool {
        self.counted().answered()
    }

    /// Returns everything counted and resets the counts.
    pub fn take(&self) -> Counted {
        std::mem::take(&mut self.counted())
    }
}
