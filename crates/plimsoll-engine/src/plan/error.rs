//! Why no plan can be made, and what would help.

use std::fmt;

use plimsoll_device::{DeclareError, DeviceError};
use plimsoll_media::MediaError;
use plimsoll_memory::host::Remedy;
use plimsoll_memory::{Bytes, Plan};
use thiserror::Error;

use super::constants::SPACE_STEP_BYTES;

/// Why no plan can be made.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The checkpoint does not fit its own configuration, or the architecture is unknown.
    #[error(transparent)]
    Declare(#[from] DeclareError),
    /// The planner's own run failed: a bug, reported as itself.
    #[error("planning a step: {0}")]
    Step(#[from] DeviceError),
    /// How the checkpoint's media are prepared cannot be used.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// An option is out of range.
    #[error("{flag} {problem}")]
    Option {
        /// The flag's name.
        flag: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// The machine has no room for even one request.
    #[error("{0}")]
    DoesNotFit(Box<Shortfall>),
}

/// Why it does not fit, in numbers.
#[derive(Debug, Error)]
#[error(
    "it does not fit: {} are needed for one request of {tokens} tokens, the line is at {} ({limit_source}): {} ({} bytes) short.\n{plan}\n\
     largest component: {largest}. Try {}{}",
    Bytes(*needed), Bytes(*limit), Bytes(needed.saturating_sub(*limit)), needed.saturating_sub(*limit),
    advice.iter().map(|advice| format!("{advice}, ")).collect::<String>(), self.raised()
)]
pub struct Shortfall {
    /// Bytes needed.
    pub needed: u64,
    /// Bytes there are.
    pub limit: u64,
    /// Where the limit comes from.
    pub limit_source: String,
    /// What others use of the limit.
    pub peers: u64,
    /// How the limit is raised.
    pub remedy: Remedy,
    /// Tokens of the smallest useful pool.
    pub tokens: usize,
    /// Flags that would make it less, the best first.
    pub advice: Vec<Advice>,
    /// The component that takes most.
    pub largest: &'static str,
    /// The plan with that pool.
    pub plan: Plan,
}

impl Shortfall {
    /// What to do so that the limit is one that it fits under. What an rlimit counts beside the plan differs a little from one start to
    /// the next.
    pub fn raised(&self) -> String {
        let bytes = self.needed + self.peers;
        self.remedy.words(match self.remedy {
            Remedy::AddressSpace | Remedy::Data => bytes + SPACE_STEP_BYTES,
            _ => bytes,
        })
    }
}

/// What one flag would save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The flag.
    pub flag: &'static str,
    /// The value to give it.
    pub value: String,
    /// Bytes that the plan would be smaller by.
    pub saves: u64,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({} less)", self.flag, self.value, Bytes(self.saves))
    }
}
