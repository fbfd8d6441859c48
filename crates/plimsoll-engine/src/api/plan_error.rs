//! Reasons why no plan can be made, and flags that would help.

use std::fmt;

use plimsoll_device::{DeclareError, DeviceError};
use plimsoll_media::MediaError;
use plimsoll_memory::host::Remedy;
use plimsoll_memory::{Bytes, Component, Plan};
use thiserror::Error;

/// The granularity of the memory limit under an rlimit. Mapped but untouched memory differs by some hundred KiB between two readings, and
/// between `plan` and `serve`. The limit is therefore reduced by a multiple of this, rounded up: both find the same limit.
pub(crate) const SPACE_STEP_BYTES: u64 = 4 << 20;

/// Why no plan can be made.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The checkpoint does not fit its own configuration, or the architecture is unknown.
    #[error(transparent)]
    Declare(#[from] DeclareError),
    /// The planner's own run failed: a bug, reported as itself.
    #[error("planning a step: {0}")]
    Step(#[from] DeviceError),
    /// The checkpoint's rules for preparing media cannot be used.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// An option is out of range.
    #[error("{flag} {problem}")]
    Option {
        /// The flag's name.
        flag: &'static str,
        /// The problem and the allowed values.
        problem: String,
    },
    /// The machine has no room for even one request.
    #[error("{0}")]
    DoesNotFit(Box<Shortfall>),
}

/// The numbers of a plan that does not fit.
///
/// The message has three lines: bytes needed, bytes available, and the best remedies. [`Shortfall::details`] has the rest.
#[derive(Debug, Error)]
#[error(
    "it does not fit: {} are needed for one request of {tokens} tokens (largest component: {largest}, {})\n\
     there are {} ({limit_source}): {} ({} bytes) short\n\
     Try {}",
    Bytes(*needed), Bytes(self.largest_bytes()), Bytes(*limit), Bytes(self.missing()), self.missing(), self.tries()
)]
pub struct Shortfall {
    /// Bytes needed.
    pub needed: u64,
    /// Bytes available.
    pub limit: u64,
    /// Where the limit comes from.
    pub limit_source: String,
    /// Bytes of the limit that other processes use.
    pub peers: u64,
    /// How the limit is raised.
    pub remedy: Remedy,
    /// Tokens of the smallest useful pool.
    pub tokens: usize,
    /// Flags that would reduce the bytes needed, the best first.
    pub advice: Vec<Advice>,
    /// Bytes needed with the first two flags.
    pub needed_with_two: u64,
    /// The component that takes most.
    pub largest: &'static str,
    /// The plan with the smallest useful pool.
    pub plan: Plan,
}

impl Shortfall {
    /// Bytes that are short.
    pub fn missing(&self) -> u64 {
        self.needed.saturating_sub(self.limit)
    }

    fn bytes_of(&self, name: &str) -> u64 {
        self.plan.lines.iter().find(|line| line.component.name() == name).map_or(0, |line| line.bytes)
    }

    fn largest_bytes(&self) -> u64 {
        self.bytes_of(self.largest)
    }

    /// The two flags that save most, a smaller model if they are not enough, and how the limit is raised.
    fn tries(&self) -> String {
        let mut tries: Vec<String> = match &self.advice[..] {
            [] => Vec::new(),
            [one] => vec![one.to_string()],
            [one, two, ..] => vec![format!("{one} and {two}")],
        };
        match tries.last_mut() {
            Some(flags) if self.needed_with_two <= self.limit => flags.push_str(", with which it fits"),
            _ => {
                let rest = self.needed_with_two.saturating_sub(self.bytes_of(Component::Weights.name()));
                let weights = self.limit.saturating_sub(rest);
                if weights > 0 {
                    tries
                        .push(format!("a model with {} of weights at most (`plimsoll models --fits`)", Bytes(weights)));
                }
            }
        }
        tries.push(self.raised());
        tries.join(", or ")
    }

    /// Lists every component, and every flag that reduces the bytes needed.
    pub fn details(&self) -> String {
        let flags: Vec<_> = self.advice.iter().map(ToString::to_string).collect();
        format!(
            "{}\n  flags that make it less: {}",
            self.plan,
            if flags.is_empty() { "none".into() } else { flags.join(", ") }
        )
    }

    /// Describes how to raise the limit until the plan fits. Under an rlimit the result is one step higher, because memory beside the plan
    /// differs a little between starts.
    pub fn raised(&self) -> String {
        let bytes = self.needed + self.peers;
        self.remedy.words(match self.remedy {
            Remedy::AddressSpace | Remedy::Data => bytes + SPACE_STEP_BYTES,
            _ => bytes,
        })
    }
}

/// A flag that would reduce the bytes needed.
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
