//! Why a plan does not fit, and what would help.

use plimsoll_device::PAGE_TOKENS;
use plimsoll_memory::host::Remedy;
use plimsoll_memory::{Bytes, Plan};
use thiserror::Error;

use super::{Blueprint, Draft, PlanError};
use crate::advice::Advice;
use crate::startup::SPACE_STEP_BYTES;
use crate::stress::Pools;

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

impl Blueprint {
    /// What is short for one request.
    pub(super) fn shortfall(&self, draft: &Draft<'_>, pools: Pools) -> PlanError {
        let Draft { options, line, .. } = draft;
        let plan = self.tree(draft, pools);
        // Pools without a configured size get only a fraction of the room, so the room must be larger than the pools.
        let needed = match options.max_total_token_num {
            Some(_) => plan.total(),
            None => self.sizes(draft).0.total_for((pools.pages * PAGE_TOKENS) as u64, 1, options.mem_fraction),
        };
        let largest = plan.lines.iter().max_by_key(|l| l.bytes).map_or("none", |l| l.component.name());
        PlanError::DoesNotFit(Box::new(Shortfall {
            needed,
            limit: line.bytes,
            limit_source: line.source.clone(),
            peers: line.peers,
            remedy: line.remedy,
            tokens: if draft.step.encoder_batch { draft.context } else { pools.pages * PAGE_TOKENS },
            advice: Vec::new(),
            largest,
            plan,
        }))
    }
}
