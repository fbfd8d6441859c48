//! The shortfall of a plan that does not fit.

use plimsoll_device::PAGE_TOKENS;
use plimsoll_memory::host::Remedy;
use plimsoll_memory::{Plan, PlanLine};

use super::{Blueprint, Draft};
use crate::api::plan_error::{PlanError, Shortfall};
use crate::cache::Pools;

impl Blueprint {
    /// Returns the shortfall for one request.
    pub(super) fn shortfall(&self, draft: &Draft<'_>, pools: Pools) -> PlanError {
        let Draft { options, limit, .. } = draft;
        let plan = self.tree(draft, pools);
        // Pools without a configured size get only a fraction of the room, so the room must be larger than the pools.
        let needed = match options.max_total_token_num {
            Some(_) => draft.taken(&plan),
            None => self.sizes(draft).0.total_for((pools.pages * PAGE_TOKENS) as u64, 1, options.mem_fraction),
        };
        let own = draft.own();
        let here = |of: &&PlanLine| own.is_none() || of.component.on_device();
        let largest = plan.lines.iter().filter(here).max_by_key(|l| l.bytes).map_or("none", |l| l.component.name());
        PlanError::DoesNotFit(Box::new(Shortfall {
            needed,
            limit: draft.budget(),
            limit_source: own.map_or_else(|| limit.source.clone(), |own| own.source.clone()),
            peers: if own.is_some() { 0 } else { limit.peers },
            remedy: if own.is_some() { Remedy::Gpu } else { limit.remedy },
            tokens: if draft.step.encoder_batch { draft.context } else { pools.pages * PAGE_TOKENS },
            advice: Vec::new(),
            needed_with_two: 0,
            largest,
            plan,
        }))
    }

    /// Returns the tree with these pools, which fit into the memory that they lie in.
    ///
    /// # Errors
    /// The shortfall of the machine's memory, beside a GPU with memory of its own.
    pub(super) fn tree_under_both(&self, draft: &Draft<'_>, pools: Pools) -> Result<Plan, PlanError> {
        let limit = draft.limit;
        let plan = self.tree(draft, pools);
        if plan.device.is_none() || plan.total() <= limit.bytes {
            return Ok(plan);
        }
        let here = |of: &&PlanLine| !of.component.on_device();
        let largest = plan.lines.iter().filter(here).max_by_key(|l| l.bytes).map_or("none", |l| l.component.name());
        Err(PlanError::DoesNotFit(Box::new(Shortfall {
            needed: plan.total(),
            limit: limit.bytes,
            limit_source: limit.source.clone(),
            peers: limit.peers,
            remedy: limit.remedy,
            tokens: pools.pages * PAGE_TOKENS,
            advice: Vec::new(),
            needed_with_two: 0,
            largest,
            plan,
        })))
    }
}
