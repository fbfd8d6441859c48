//! Capacity pinned by the user: built once, tested once, trimmed once. No probe, no teardown, no second build.
//!
//! Shadow mode is the same start-up with one more line in the log (`shadow`).

use super::diagnose::{Stage, diagnose};
use super::generations::Generations;
use super::outcome::Outcome;
use super::run::{Fault, Run};
use super::{Event, PoolPhase, ProfileConfig, SizingError, check_sizes};

/// Starts at exactly `tokens`.
pub(super) fn start<D: Generations>(
    mut run: Run<'_, D>,
    tokens: u64,
    shadow: bool,
) -> Result<Outcome<D::G>, SizingError> {
    let cfg = run.cfg;
    let state_slots = cfg.state.map_or(0, |pool| cfg.running_max_req_size.saturating_mul(pool.slots_per_request));
    let max_seq_len = {
        let checked = check_pinned(cfg, tokens, state_slots, run.device.device().available);
        run.agree(checked)?
    };
    let shape = run.shape(tokens, state_slots, PoolPhase::Production);
    let (generation, result) = run.try_generation(shape, 0);
    let (generation, measured) = match (generation, result) {
        (Some(generation), Ok(measured)) => (generation, measured),
        (_, Err(Fault::Fatal(error))) => return Err(error),
        (_, result) => {
            let failure = result.err().and_then(Fault::into_memory);
            let ledger = run.device.components();
            let found = diagnose(Stage::Pinned, 1, tokens, failure, &ledger, cfg);
            return Err(SizingError::OutOfMemory(Box::new(found)));
        }
    };
    run.device.trim();
    let peak_reserved = measured.peak_reserved;
    run.device.event(&Event::SelfTestPassed { attempt: 1, shape, peak_reserved });
    run.note_context(max_seq_len);
    let shadow = shadow.then(|| {
        let input = run.input(shape, peak_reserved);
        run.shadow_report(&input, tokens)
    });
    let outcome = run.outcome(generation, shape, max_seq_len, measured);
    Ok(Outcome { shadow, ..outcome })
}

/// Checks by arithmetic, before anything is built, that the pools fit. Returns the longest request.
fn check_pinned(cfg: &ProfileConfig, tokens: u64, slots: u64, available: u64) -> Result<u64, SizingError> {
    if tokens == 0 {
        return Err(SizingError::Zero { what: "--max-total-token-num" });
    }
    let state = cfg.state_bytes(slots);
    let need = cfg.kv_bytes(tokens).saturating_add(state);
    if need > available {
        let fits = cfg.whole_pages(available.saturating_sub(state) / cfg.cell_bytes);
        return Err(SizingError::PinnedTooLarge { tokens, need, available, fits });
    }
    check_sizes(PoolPhase::Production, tokens, cfg)
}
