//! The choice of auto mode, as a report.

use super::pools::own_size;
use super::{PoolPhase, ProfileConfig, SizingInput, Target, check_sizes, target_tokens};
use std::fmt;

/// The choice of auto mode, beside the running server's size.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ShadowReport {
    /// KV tokens of the running server.
    pub running_tokens: u64,
    /// KV tokens that auto mode would build; zero if it would refuse.
    pub chosen_tokens: u64,
    /// State slots that auto mode would build.
    pub chosen_state_slots: u64,
    /// The reason why auto mode would refuse.
    pub refusal: Option<String>,
    /// The arithmetic behind the choice.
    pub target: Target,
}

impl ShadowReport {
    /// Computes the report from a measurement alone, for a dry run: nothing is built and nothing is changed.
    #[must_use]
    pub fn new(cfg: &ProfileConfig, input: &SizingInput, running_tokens: u64) -> Self {
        let target = target_tokens(input);
        let size = cfg.validate().and_then(|()| own_size(cfg, &target, input.total));
        let size = size.and_then(|size| check_sizes(PoolPhase::Production, size.0, cfg).map(|_| size));
        let refusal = size.as_ref().err().map(ToString::to_string);
        let (chosen_tokens, chosen_state_slots) = size.unwrap_or((0, 0));
        Self { running_tokens, chosen_tokens, chosen_state_slots, refusal, target }
    }

    /// Tokens that auto mode would add (positive) or take away (negative).
    #[must_use]
    pub fn delta(&self) -> i128 {
        i128::from(self.chosen_tokens) - i128::from(self.running_tokens)
    }
}

impl fmt::Display for ShadowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(refusal) = &self.refusal {
            return write!(f, "running with {} tokens; auto would refuse: {refusal}", self.running_tokens);
        }
        let (by, word) = match self.delta() {
            more @ 0.. => (more, "more"),
            fewer => (-fewer, "fewer"),
        };
        write!(f, "running with {} tokens; auto would choose {}, {by} {word}", self.running_tokens, self.chosen_tokens)
    }
}
