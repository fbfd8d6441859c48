//! The arithmetic of pool sizes, over the planner's sizes.

use plimsoll_device::PAGE_TOKENS;
use plimsoll_memory::sizing::{self, ProfileConfig, SizingError, SizingInput, StatePool};

use crate::memory::footprint::Tables;
use crate::schedule::scheduler::StepLimits;

/// The planner's sizes that hold for pools of any size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes that do not depend on the pools' sizes, the step workspace included.
    pub fixed: u64,
    /// Bytes of the emergency reserve; 0 in a hosted engine.
    pub emergency_reserve: u64,
    /// KV bytes of one page.
    pub page_bytes: u64,
    /// The tables beside the pages.
    pub tables: Tables,
    /// Bytes of the table of slots, as a part of `fixed`: it does not grow with the pages.
    pub slot_tables: u64,
    /// Recurrent state, or window pages, for models that have them.
    pub state: Option<StatePool>,
    /// The most requests that `state` is planned for; more would be useless.
    pub requests_max: usize,
}

impl Sizes {
    /// Bytes of a token: keys and values, and its share of the tables.
    pub fn cell_bytes(&self) -> u64 {
        self.page_bytes.div_ceil(PAGE_TOKENS as u64) + self.tables.bytes_per_token()
    }

    /// Bytes of state or window pages of one request.
    pub fn request_state_bytes(&self) -> u64 {
        self.state.map_or(0, |state| state.slot_bytes.saturating_mul(state.slots_per_request))
    }

    /// Tokens, in whole pages, and state slots that fit under `total`: the arithmetic of a probe with exactly the
    /// planned peak.
    pub fn pools(&self, total: u64, config: &ProfileConfig) -> Result<(u64, u64), SizingError> {
        let (cell, page) = (self.cell_bytes(), PAGE_TOKENS as u64);
        let input = SizingInput {
            total,
            peak_reserved: self.fixed + page * cell,
            probe_tokens: page,
            cell_bytes: cell,
            probe_state_bytes: 0,
            own_reserved_now: 0,
            available_now: total,
            emergency_reserve: self.emergency_reserve,
            fraction: config.fraction,
        };
        sizing::own_size(config, &sizing::target_tokens(&input), total)
    }

    /// The least total under which `tokens` fit beside the state of `requests`: the inverse of [`Self::pools`].
    pub fn total_for(&self, tokens: u64, requests: usize, fraction: sizing::Fraction) -> u64 {
        let state = u128::from(self.request_state_bytes()) * requests as u128;
        let pools = u128::from(tokens) * u128::from(self.cell_bytes()) + state;
        let room = (pools * 1_000_000).div_ceil(u128::from(fraction.ppm()));
        u64::try_from(room).unwrap_or(u64::MAX).saturating_add(self.fixed).saturating_add(self.emergency_reserve)
    }

    /// Returns the input of `auto_profile`, for steps of `step` and requests of up to `context` tokens.
    pub fn config(&self, step: &StepLimits, context: u64, fraction: sizing::Fraction, clamp: bool) -> ProfileConfig {
        let mut config = ProfileConfig::new(self.cell_bytes(), context.max(1));
        // A step never has more rows than a request has tokens.
        config.batch_max_tokens = (step.rows as u64).min(config.max_seq_len);
        config.graph_max_batch_size = (step.logit_rows / (1 + step.drafts)).max(1) as u64;
        config.running_max_req_size = self.requests_max.max(1) as u64;
        config.page_tokens = PAGE_TOKENS as u64;
        config.emergency_reserve_bytes = self.emergency_reserve;
        config.fraction = fraction;
        config.clamp_context = clamp;
        config.state = self.state;
        config
    }
}
