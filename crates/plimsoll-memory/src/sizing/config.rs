//! The input of sizing: the user's flags and the model's unit sizes.
//!
//! No default depends on the machine, and no environment variable changes anything: the self-test cannot be skipped.

use super::{EMERGENCY_RESERVE_BYTES, Fraction, PROBE_FLOOR_TOKENS, SizingError, max_decode_batch, probe_tokens};

/// How the capacity is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Mode {
    /// The server probes, measures, builds and runs the self-test.
    Auto,
    /// The planner has computed the size. The pools are built once at that size and tested once; this is probe and self-test in one. Where
    /// the measurement contradicts the plan, sizing continues as in [`Mode::Auto`].
    Planned {
        /// KV tokens.
        tokens: u64,
        /// Recurrent state slots.
        state_slots: u64,
    },
    /// The user has set the size (`--max-total-token-num`): the pools are built once at exactly this size and tested once.
    Pinned {
        /// KV tokens, used as given.
        tokens: u64,
    },
    /// As pinned, but also reports the choice of [`Mode::Auto`]. Changes nothing else.
    Shadow {
        /// KV tokens that the server runs with.
        running_tokens: u64,
    },
}

/// Recurrent state of a hybrid model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StatePool {
    /// Bytes of one slot over all layers on this rank.
    pub slot_bytes: u64,
    /// Slots of one request: one, and one for every draft token.
    pub slots_per_request: u64,
    /// KV tokens of a typical request, which balances both pools.
    pub tokens_per_request: u64,
    /// The least requests that must fit.
    pub min_requests: u64,
    /// The user's share of the budget for state.
    pub ratio: Option<Fraction>,
}

/// The configuration of sizing. Ranks of one server must be given equal values, unit sizes aside.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ProfileConfig {
    /// How the capacity is decided.
    pub mode: Mode,
    /// `--batch-max-tokens`: tokens of the largest prefill step.
    pub batch_max_tokens: u64,
    /// `--graph-max-batch-size`: rows of the largest captured decode step.
    pub graph_max_batch_size: u64,
    /// `--running-max-req-size`: request slots.
    pub running_max_req_size: u64,
    /// Whether decode steps may have more rows than `graph_max_batch_size`, outside of captured plans.
    pub eager_decode: bool,
    /// `--visual-infer-batch-size`; only named in advice.
    pub visual_infer_batch_size: u64,
    /// `--max-req-total-len`: tokens of the longest request.
    pub max_seq_len: u64,
    /// Whether the longest request is shortened to what fits instead of failing ("personal" mode).
    pub clamp_context: bool,
    /// KV bytes per token over all layers on this rank, with scales, the draft model's included.
    pub cell_bytes: u64,
    /// Tokens per KV page; capacities are whole pages unless pinned.
    pub page_tokens: u64,
    /// The least tokens of a probe; smaller than [`PROBE_FLOOR_TOKENS`] only for tiny devices.
    pub probe_floor_tokens: u64,
    /// Bytes of the emergency reserve, allocated after the pools; not used when pinned.
    pub emergency_reserve_bytes: u64,
    /// `--mem-fraction`: the share of the remaining budget that pools may take.
    pub fraction: Fraction,
    /// Recurrent state, for hybrid models.
    pub state: Option<StatePool>,
}

impl ProfileConfig {
    /// Returns a configuration with the usual floor, emergency reserve, fraction and page size. The other fields can be set afterwards.
    #[must_use]
    pub fn new(cell_bytes: u64, max_seq_len: u64) -> Self {
        Self {
            mode: Mode::Auto,
            batch_max_tokens: 8192,
            graph_max_batch_size: 64,
            running_max_req_size: 256,
            eager_decode: false,
            visual_infer_batch_size: 1,
            max_seq_len,
            clamp_context: false,
            cell_bytes,
            page_tokens: 16,
            probe_floor_tokens: PROBE_FLOOR_TOKENS,
            emergency_reserve_bytes: EMERGENCY_RESERVE_BYTES,
            fraction: Fraction::DEFAULT,
            state: None,
        }
    }

    /// Rows of the largest decode step that the scheduler can form. The self-test must cover it.
    #[must_use]
    pub fn max_decode_batch(&self) -> u64 {
        max_decode_batch(self.graph_max_batch_size, self.running_max_req_size, self.eager_decode)
    }

    /// KV tokens of the probe, in whole pages.
    #[must_use]
    pub fn probe_tokens(&self) -> u64 {
        let tokens = probe_tokens(self.batch_max_tokens, self.max_decode_batch(), self.probe_floor_tokens);
        tokens.checked_next_multiple_of(self.page_tokens.max(1)).unwrap_or(tokens)
    }

    /// `tokens` rounded down to whole pages.
    pub(super) fn whole_pages(&self, tokens: u64) -> u64 {
        tokens - tokens % self.page_tokens
    }

    /// KV bytes of `tokens`, saturating: a saturated size fits nowhere.
    pub(super) fn kv_bytes(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.cell_bytes)
    }

    /// State bytes of `slots`, saturating.
    pub(super) fn state_bytes(&self, slots: u64) -> u64 {
        self.state.map_or(0, |pool| slots.saturating_mul(pool.slot_bytes))
    }

    /// Refuses sizes of zero, with which sizing cannot compute.
    pub(super) fn validate(&self) -> Result<(), SizingError> {
        let state = self.state.as_ref();
        let zero = [
            (self.batch_max_tokens, "--batch-max-tokens"),
            (self.graph_max_batch_size, "--graph-max-batch-size"),
            (self.running_max_req_size, "--running-max-req-size"),
            (self.max_seq_len, "--max-req-total-len"),
            (self.cell_bytes, "the KV size of a token"),
            (self.page_tokens, "the tokens of a KV page"),
            (state.map_or(1, |s| s.slot_bytes), "the size of a recurrent state slot"),
            (state.map_or(1, |s| s.slots_per_request), "the state slots of a request"),
        ];
        match zero.iter().find(|(value, _)| *value == 0) {
            Some((_, what)) => Err(SizingError::Zero { what }),
            None => Ok(()),
        }
    }
}
