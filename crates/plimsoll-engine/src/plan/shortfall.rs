//! What is short when a plan does not fit.

use plimsoll_device::PAGE_TOKENS;

use super::error::{PlanError, Shortfall};
use super::sizes::Pools;
use super::{Blueprint, Draft};

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
