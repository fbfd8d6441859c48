//! Plan once, build once, test once: a start at the size that the planner worked out.
//!
//! Auto mode measures with a probe what does not grow with capacity, sizes, and builds and tests again. That measurement
//! is `peak − tokens · cell`, whatever the generation's size: so the generation that will serve can be its own probe. Built at the
//! planned size and tested once, it is kept if the same arithmetic, fed with its own peak, leaves room for at least
//! the tokens it has. If memory ran out, or the measurement says that the plan was too large, the plan was wrong on this
//! machine: the generation is torn down and auto mode takes over from the beginning. What is kept has passed every check
//! that auto mode makes; what the probe alone could find, it still finds.

use super::generations::Generations;
use super::outcome::Outcome;
use super::run::{Fault, Run};
use super::{Event, PoolPhase, SizingError, check_sizes, target_tokens};

/// Starts at `tokens` and `state_slots`, or as auto mode does where they do not hold.
pub(super) fn start<D: Generations>(
    mut run: Run<'_, D>,
    tokens: u64,
    state_slots: u64,
) -> Result<Outcome<D::G>, SizingError> {
    let cfg = run.cfg;
    let Some(max_seq_len) = worth_building(&mut run, tokens, state_slots) else { return run.auto() };
    let shape = run.shape(tokens, state_slots, PoolPhase::Production);
    run.device.event(&Event::Attempt { attempt: 1, shape });
    let (generation, measured) = match run.try_generation(shape, cfg.emergency_reserve_bytes) {
        (Some(generation), Ok(measured)) => (generation, measured),
        (_, Err(Fault::Fatal(error))) => return Err(error),
        (generation, result) => {
            let failure = result.err().and_then(Fault::into_memory);
            run.device.event(&Event::OutOfMemory { attempt: 1, failure: failure.as_ref() });
            run.teardown(generation, shape)?;
            return run.auto();
        }
    };
    let peak_reserved = measured.peak_reserved;
    // The start reserve stands already; the arithmetic sets it aside on its own.
    let target = target_tokens(&run.input(shape, peak_reserved.saturating_sub(cfg.emergency_reserve_bytes)));
    let fits = run.agreed_size(&target).ok().filter(|(fit, slots)| *fit >= tokens && *slots >= state_slots);
    if fits.is_none() {
        run.device.event(&Event::PlanMissed { shape, fits: target.tokens });
        run.teardown(Some(generation), shape)?;
        return run.auto();
    }
    run.warn_all(&target.warnings);
    run.device.event(&Event::SelfTestPassed { attempt: 1, shape, peak_reserved });
    run.note_context(max_seq_len);
    let mut outcome = run.outcome(generation, shape, max_seq_len, measured);
    outcome.emergency_reserve_bytes = cfg.emergency_reserve_bytes;
    outcome.target = Some(target);
    Ok(outcome)
}

/// Whether arithmetic alone has nothing against the plan, on any rank; then the longest request it serves.
fn worth_building<D: Generations>(run: &mut Run<'_, D>, tokens: u64, state_slots: u64) -> Option<u64> {
    let cfg = run.cfg;
    let need =
        cfg.kv_bytes(tokens).saturating_add(cfg.state_bytes(state_slots)).saturating_add(cfg.emergency_reserve_bytes);
    let room = tokens > 0 && need <= run.device.device().available;
    let max_seq_len = check_sizes(PoolPhase::Production, tokens, cfg).ok().filter(|_| room);
    let refused = run.device.reduce_max(u64::from(max_seq_len.is_none())) > 0;
    max_seq_len.filter(|_| !refused)
}
