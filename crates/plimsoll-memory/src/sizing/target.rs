//! The arithmetic of sizing: the tokens of the probe, and the tokens that the measurement leaves room for.
//!
//! It uses integers only and rounds down, so that every rank computes the same number and none exceeds the memory limit. It makes no
//! attempt and checks no limit: see `attempts` and `checks`.

use super::Fraction;

/// The least tokens of a probe, unless the configuration for a tiny device asks for fewer.
pub const PROBE_FLOOR_TOKENS: u64 = 8192;
/// Default bytes of the emergency reserve, which is set aside after the pools are built.
pub const EMERGENCY_RESERVE_BYTES: u64 = 256 << 20;

/// KV tokens for the probe: one full prefill step, and one new slot for every row of a full decode step.
///
/// The longest context does not enter: growing the probe to satisfy a check on contexts starves everything else
/// while the measurement is taken.
#[must_use]
pub fn probe_tokens(batch_max_tokens: u64, max_decode_batch: u64, floor: u64) -> u64 {
    batch_max_tokens.saturating_add(max_decode_batch).max(floor)
}

/// The measurement, and the configured sizes. All sizes are bytes on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SizingInput {
    /// The capacity of the device, or the effective limit of the host.
    pub total: u64,
    /// The most bytes that this process held while the probe was tested, pool slack included.
    pub peak_reserved: u64,
    /// KV tokens that were built for the probe.
    pub probe_tokens: u64,
    /// KV bytes per token over all layers on this rank, scales included; must not be zero.
    pub cell_bytes: u64,
    /// Bytes of recurrent state that were built for the probe; they are sized together with KV, so they leave the
    /// fixed part. Zero for models without recurrent state.
    pub probe_state_bytes: u64,
    /// Bytes that this process holds now.
    pub own_reserved_now: u64,
    /// Bytes that this process could still take now.
    pub available_now: u64,
    /// Bytes of the emergency reserve to leave room for.
    pub emergency_reserve: u64,
    /// The share of the budget that is used.
    pub fraction: Fraction,
}

/// A number that had to be corrected before it could be used.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, thiserror::Error)]
pub enum SizingWarning {
    /// The peak is smaller than the probe's own pools: it was not measured with this probe.
    #[error(
        "the measured peak of {peak_reserved} bytes is less than the {probe_bytes} bytes of the probe's own pools; \
         everything else is taken as 0 bytes, which is too little"
    )]
    NonKvClamped {
        /// The measured peak.
        peak_reserved: u64,
        /// The probe's KV and state bytes.
        probe_bytes: u64,
    },
    /// Bytes available and bytes of this process exceed the total: peers would be negative.
    #[error(
        "{available} bytes available and {own} bytes of our own are more than the total of {total} bytes; peers are \
         taken as 0 bytes"
    )]
    PeersClamped {
        /// The capacity.
        total: u64,
        /// Bytes that this process holds.
        own: u64,
        /// Bytes available.
        available: u64,
    },
    /// The decode step of the self-test is smaller than the largest one, because the probe has too few state slots.
    #[error(
        "{slots} recurrent state slots support at most {batch} concurrent requests in the probe, fewer than the \
         largest decode batch of {wanted}"
    )]
    ProbeSlots {
        /// Slots in the probe.
        slots: u64,
        /// Concurrent requests that these slots support.
        batch: u64,
        /// Requests wanted.
        wanted: u64,
    },
    /// Production is smaller than the probe was: a full prefill step beside a full decode step may not fit.
    #[error("room for {tokens} KV tokens only, fewer than the {probe} of the probe: steps will be smaller than asked")]
    BelowProbe {
        /// Tokens of production.
        tokens: u64,
        /// Tokens of the probe.
        probe: u64,
    },
    /// The context was shortened to what fits, as the user allowed.
    #[error("the maximum sequence length is reduced from {from} to {to} tokens, which is what fits")]
    ContextClamped {
        /// The maximum sequence length that was asked for.
        from: u64,
        /// The maximum sequence length that is used.
        to: u64,
    },
}

/// The result of sizing, with every term that led to it. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Target {
    /// Tokens that fit if KV takes the whole budget; not rounded to pages.
    pub tokens: u64,
    /// Everything of this process that does not grow with capacity.
    pub non_kv: u64,
    /// Bytes that other processes use.
    pub peers: u64,
    /// Bytes of the emergency reserve.
    pub emergency_reserve: u64,
    /// Bytes left for pools before the fraction is applied.
    pub room: u64,
    /// Bytes that the pools may take: `room × fraction`. The margin is applied here only.
    pub budget: u64,
    /// Bytes by which fixed parts, peers and emergency reserve exceed the capacity; zero unless nothing fits.
    pub deficit: u64,
    /// Numbers that had to be corrected.
    pub warnings: Vec<SizingWarning>,
}

/// Computes the token capacity from a measurement.
///
/// A `cell_bytes` of zero yields zero tokens; configurations with it are refused before this is reached.
#[must_use]
pub fn target_tokens(input: &SizingInput) -> Target {
    let mut warnings = Vec::new();
    let probe_kv = u128::from(input.probe_tokens) * u128::from(input.cell_bytes);
    let probe_bytes = probe_kv + u128::from(input.probe_state_bytes);
    let non_kv = match u128::from(input.peak_reserved).checked_sub(probe_bytes) {
        Some(non_kv) => non_kv as u64,
        None => {
            let probe_bytes = u64::try_from(probe_bytes).unwrap_or(u64::MAX);
            warnings.push(SizingWarning::NonKvClamped { peak_reserved: input.peak_reserved, probe_bytes });
            0
        }
    };
    let ours = u128::from(input.own_reserved_now) + u128::from(input.available_now);
    let peers = match u128::from(input.total).checked_sub(ours) {
        Some(peers) => peers as u64,
        None => {
            warnings.push(SizingWarning::PeersClamped {
                total: input.total,
                own: input.own_reserved_now,
                available: input.available_now,
            });
            0
        }
    };
    let taken = u128::from(non_kv) + u128::from(input.emergency_reserve) + u128::from(peers);
    let room = u128::from(input.total).saturating_sub(taken) as u64;
    let deficit = u64::try_from(taken.saturating_sub(u128::from(input.total))).unwrap_or(u64::MAX);
    let budget = input.fraction.of(room);
    Target {
        tokens: budget.checked_div(input.cell_bytes).unwrap_or(0),
        non_kv,
        peers,
        emergency_reserve: input.emergency_reserve,
        room,
        budget,
        deficit,
        warnings,
    }
}
