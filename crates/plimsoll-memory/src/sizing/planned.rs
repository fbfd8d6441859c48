//! Plan once, build once, test once: a start at the size that the planner computed.
//!
//! Auto mode uses a probe to measure the bytes that do not grow with capacity; then it sizes, builds and tests again. That measurement is
//! `peak − tokens · cell`, for a generation of any size. So the generation that will serve can be its own probe. It is built at the planned
//! size and tested once. It is kept if the same arithmetic, with its own peak, leaves room for at least the tokens it has. If memory ran
//! out, or the measurement shows that the plan is too large, the plan is wrong for this machine. The generation is then torn down, and auto
//! mode starts from the beginning. A kept generation has passed every check that auto mode makes.

use super::generations::Generations;
use super::outcome::Outcome;
use super::run::{Fault, Run};
use super::{Event, PoolPhase, SizingError, check_sizes, target_tokens};

/// Starts at `tokens` and `state_slots`. Where the plan does not hold, starts as auto mode does.
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
    // The peak includes the emergency reserve, and the arithmetic subtracts it once more; so it is left out here.
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

/// Returns the longest request of the plan. `None` if arithmetic alone rules the plan out on any rank.
fn worth_building<D: Generations>(run: &mut Run<'_, D>, tokens: u64, state_slots: u64) -> Option<u64> {
    let cfg = run.cfg;
    let need =
        cfg.kv_bytes(tokens).saturating_add(cfg.state_bytes(state_slots)).saturating_add(cfg.emergency_reserve_bytes);
    let room = tokens > 0 && need <= run.device.device().available;
    let max_seq_len = check_sizes(PoolPhase::Production, tokens, cfg).ok().filter(|_| room);
    let refused = run.device.reduce_max(u64::from(max_seq_len.is_none())) > 0;
    max_seq_len.filter(|_| !refused)
}
