//! Keeps answers that were given under load. At the end, when no other client runs, the same questions are asked again.
//!
//! A sample of bounded size in which every answer has the same chance (reservoir sampling). Random choices (temperature, seeds) are in
//! the request bodies, so the same answer must come again.

use std::sync::{Mutex, MutexGuard};

use super::ask::{Reading, ask};
use super::endpoint::Endpoint;
use super::golden_answers::same;
use super::outcome::Outcome;
use super::question::Question;
use crate::prompts::Random;

/// Answers in the sample. A body with an image has up to 110 KB.
const KEPT: u64 = 128;

/// The sample.
pub struct Keep(Mutex<State>);

struct State {
    random: Random,
    offered: u64,
    kept: Vec<(Question, String)>,
}

impl Default for Keep {
    fn default() -> Self {
        Self(Mutex::new(State { random: Random::new(7), offered: 0, kept: Vec::new() }))
    }
}

impl Keep {
    fn state(&self) -> MutexGuard<'_, State> {
        // The sample is complete after every offer, even if a thread panicked.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds an answer to the sample, or drops it.
    pub fn offer(&self, question: Question, said: String) {
        let mut state = self.state();
        state.offered += 1;
        if state.offered <= KEPT {
            state.kept.push((question, said));
            return;
        }
        let offered = state.offered;
        let at = state.random.below(offered);
        if at < KEPT {
            state.kept[at as usize] = (question, said);
        }
    }

    /// Asks all sampled questions again, one after the other. Returns their number and a description of each difference.
    pub async fn compare_all(&self, endpoint: &Endpoint) -> (usize, Vec<String>) {
        let kept = std::mem::take(&mut self.state().kept);
        let mut findings = Vec::new();
        for (index, (question, before)) in kept.iter().enumerate() {
            let reading = Reading { stream: false, patience: endpoint.patience, slowly: None };
            let outcome = match ask(&endpoint.target, question, reading).await {
                Ok(Ok(said)) => same(question.path, before, &said),
                Ok(Err(outcome)) => outcome,
                Err(error) => Outcome::Bad(format!("{error:#}")),
            };
            if outcome != Outcome::Same {
                findings.push(format!("{index}: {outcome:?}"));
            }
        }
        (kept.len(), findings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_bounded_sample_of_everything_is_kept() {
        let keep = Keep::default();
        for i in 0..10_000 {
            keep.offer(Question { path: "/", body: Value::Null }, i.to_string());
        }
        let state = keep.state();
        assert_eq!(state.kept.len() as u64, KEPT);
        let late = state.kept.iter().filter(|(_, said)| said.parse::<u64>().unwrap() >= 5000).count();
        assert!((40..90).contains(&late), "{late} of {KEPT} come from the second half");
    }
}
