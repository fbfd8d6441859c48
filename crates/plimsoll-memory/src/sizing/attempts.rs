//! [`Mode::Auto`](super::Mode::Auto): probe, size, build, self-test; a smaller attempt follows as long as memory is the only problem.
//!
//! Every step that can fail on one rank ends with a vote before any rank decides. All ranks thus take the same branch, and no collective is
//! left waiting. A generation is dropped whole before the next is built, and each drop is checked.

use super::diagnose::{Stage, diagnose};
use super::generations::{Component, DeviceNow, Generations, OutOfMemory, Shape};
use super::outcome::Outcome;
use super::pools::own_size;
use super::run::{Fault, Run};
use super::{
    Event, PoolPhase, ProfileConfig, SizingError, SizingInput, SizingWarning, Target, check_sizes, target_tokens,
};

/// The most attempts at production size: the first, and three smaller ones.
pub const ATTEMPTS_MAX: u32 = 4;

/// The probe's shape and peak, and the capacity that follows from them.
struct Probe {
    shape: Shape,
    peak_reserved: u64,
    target: Target,
    tokens: u64,
    state_slots: u64,
}

impl<D: Generations> Run<'_, D> {
    pub(super) fn auto(mut self) -> Result<Outcome<D::G>, SizingError> {
        let cfg = self.cfg;
        let probe = self.probe()?;
        let (mut tokens, mut attempt) = (probe.tokens, 1);
        loop {
            let max_seq_len = check_sizes(PoolPhase::Production, tokens, self.cfg)?;
            let shape = self.shape(tokens, probe.state_slots, PoolPhase::Production);
            self.device.event(&Event::Attempt { attempt, shape });
            match self.try_generation(shape, self.cfg.emergency_reserve_bytes) {
                (Some(generation), Ok(measured)) => {
                    let peak_reserved = measured.peak_reserved;
                    self.device.event(&Event::SelfTestPassed { attempt, shape, peak_reserved });
                    self.note_context(max_seq_len);
                    self.note_below_probe(tokens, probe.shape.tokens);
                    let mut outcome = self.outcome(generation, shape, max_seq_len, measured);
                    outcome.emergency_reserve_bytes = cfg.emergency_reserve_bytes;
                    outcome.attempts = attempt;
                    outcome.probe_tokens = Some(probe.shape.tokens);
                    outcome.target = Some(probe.target);
                    return Ok(outcome);
                }
                (_, Err(Fault::Fatal(error))) => return Err(error),
                (generation, result) => {
                    let failure = result.err().and_then(Fault::into_memory);
                    let event = Event::OutOfMemory { attempt, failure: failure.as_ref() };
                    self.device.event(&event);
                    // Read while the generation is alive: afterwards the ledger no longer shows what filled the device.
                    let ledger = self.device.components();
                    self.teardown(generation, shape)?;
                    tokens = self.shrink(attempt, shape, failure, &ledger, &probe)?;
                    attempt += 1;
                }
            }
        }
    }

    /// Returns the shape of the probe. Refuses it if arithmetic alone shows that it does not fit.
    fn plan_probe(&mut self) -> Result<Shape, SizingError> {
        let cfg = self.cfg;
        let tokens = cfg.probe_tokens();
        let before = self.device.device();
        let state_slots = self.probe_slots(tokens, &before);
        let need = cfg.kv_bytes(tokens).saturating_add(cfg.state_bytes(state_slots));
        let available = before.available;
        let fits = if need > available {
            Err(SizingError::ProbeDoesNotFit { tokens, state_slots, need, available })
        } else {
            check_sizes(PoolPhase::Probe, tokens, cfg).map(drop)
        };
        self.agree(fits)?;
        let shape = self.shape(tokens, state_slots, PoolPhase::Probe);
        self.device.event(&Event::Probe { shape, bytes: need });
        Ok(shape)
    }

    /// Builds the probe, tests it, measures, and tears it down. Returns its shape and the input of the arithmetic.
    pub(super) fn measure(&mut self) -> Result<(Shape, SizingInput), SizingError> {
        let shape = self.plan_probe()?;
        let (generation, result) = self.try_generation(shape, 0);
        let measured = match result {
            Ok(measured) => measured,
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Memory(failure)) => {
                let ledger = self.device.components();
                let found = diagnose(Stage::Probe, 0, shape.tokens, failure, &ledger, self.cfg);
                return Err(SizingError::OutOfMemory(Box::new(found)));
            }
        };
        let peak_reserved = measured.peak_reserved;
        self.device.event(&Event::Measured { peak_reserved });
        // Measured before the probe's teardown, so that its bytes count as this process's own.
        let input = self.input(shape, peak_reserved);
        self.teardown(generation, shape)?;
        Ok((shape, input))
    }

    /// Measures with a probe, and computes the capacity that all ranks share.
    fn probe(&mut self) -> Result<Probe, SizingError> {
        let (shape, input) = self.measure()?;
        let peak_reserved = input.peak_reserved;
        let target = target_tokens(&input);
        self.warn_all(&target.warnings);
        let (tokens, state_slots) = self.agreed_size(&target)?;
        let (cell_bytes, fraction) = (self.cfg.cell_bytes, self.cfg.fraction);
        self.device.event(&Event::Sized { target: &target, cell_bytes, fraction, tokens, state_slots });
        Ok(Probe { shape, peak_reserved, target, tokens, state_slots })
    }

    /// State slots of the probe: a full decode batch, or fewer where that would exceed the share of free memory. Equal on all ranks, since
    /// they run the same steps.
    fn probe_slots(&mut self, tokens: u64, now: &DeviceNow) -> u64 {
        let Some(pool) = self.cfg.state else { return 0 };
        let wanted = self.cfg.max_decode_batch();
        let room = now.available.saturating_sub(self.cfg.kv_bytes(tokens));
        let share = pool.ratio.map_or(room / 2, |ratio| ratio.of(room));
        let fits = share / pool.slot_bytes / pool.slots_per_request;
        let batch = self.device.reduce_min(wanted.min(fits).max(1));
        let slots = batch.saturating_mul(pool.slots_per_request);
        if batch < wanted {
            self.warn(SizingWarning::ProbeSlots { slots, batch, wanted });
        }
        slots
    }

    /// Computes this rank's capacity, then the capacity of all ranks: the least tokens and the least state slots.
    pub(super) fn agreed_size(&mut self, target: &Target) -> Result<(u64, u64), SizingError> {
        let total = self.device.device().total;
        let mine = own_size(self.cfg, target, total);
        let (tokens, state_slots) = self.agree(mine)?;
        Ok((self.device.reduce_min(tokens), self.device.reduce_min(state_slots)))
    }

    /// Returns a capacity five per cent smaller, in whole pages, or less if other processes have grown since. The error is the reason to
    /// give up.
    fn shrink(
        &mut self,
        attempt: u32,
        failed: Shape,
        failure: Option<OutOfMemory>,
        ledger: &[Component],
        probe: &Probe,
    ) -> Result<u64, SizingError> {
        let cfg = self.cfg;
        let fresh = target_tokens(&self.input(probe.shape, probe.peak_reserved));
        let beside_state = fresh.budget.saturating_sub(cfg.state_bytes(probe.state_slots));
        let fresh = cfg.whole_pages(beside_state / cfg.cell_bytes);
        let smallest = (attempt..ATTEMPTS_MAX).fold(failed.tokens, |tokens, _| shrunk(cfg, tokens)).min(fresh);
        let freed_at_most = cfg.kv_bytes(failed.tokens - smallest.min(failed.tokens));
        let hopeless = failure.as_ref().is_some_and(|f| f.shortfall > freed_at_most);
        let next = self.device.reduce_min(shrunk(cfg, failed.tokens).min(fresh));
        let hopeless = self.device.reduce_max(u64::from(hopeless)) > 0 || next == 0;
        let stage = match () {
            () if attempt == ATTEMPTS_MAX => Stage::Exhausted,
            () if hopeless => Stage::BeyondKv,
            () => return Ok(next),
        };
        let found = diagnose(stage, attempt, failed.tokens, failure, ledger, cfg);
        Err(SizingError::OutOfMemory(Box::new(found)))
    }
}

/// Returns 95 % of `tokens` in whole pages. It is always fewer tokens, since 95 % of a page is not a page.
fn shrunk(cfg: &ProfileConfig, tokens: u64) -> u64 {
    cfg.whole_pages((u128::from(tokens) * 95 / 100) as u64)
}
