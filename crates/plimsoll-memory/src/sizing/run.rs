//! One generation's life: it is built, given its emergency reserve, tested and dropped, with votes of all ranks.
//!
//! Every step that can fail on one rank ends with a vote here. `attempts` decides what to try next.

use super::generations::{Failure, Generations, Measured, OutOfMemory, Shape};
use super::outcome::Outcome;
use super::{Event, PoolPhase, ProfileConfig, SizingError, SizingInput, SizingWarning};

/// The reason why a generation does not serve, as seen from this rank.
pub(super) enum Fault {
    /// Memory ran out: here, or on another rank if `None`.
    Memory(Option<OutOfMemory>),
    /// An error that is not retried.
    Fatal(SizingError),
}

impl Fault {
    fn severity(&self) -> u64 {
        match self {
            Self::Memory(_) => 1,
            Self::Fatal(_) => 2,
        }
    }

    /// The refused allocation, if it happened on this rank.
    pub(super) fn into_memory(self) -> Option<OutOfMemory> {
        match self {
            Self::Memory(oom) => oom,
            Self::Fatal(_) => None,
        }
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::OutOfMemory(oom) => Self::Memory(Some(oom)),
            Failure::Other(error) => Self::Fatal(SizingError::Other(error)),
        }
    }
}

/// One start-up on one rank.
pub(super) struct Run<'a, D: Generations> {
    pub(super) cfg: &'a ProfileConfig,
    pub(super) device: &'a mut D,
    warnings: Vec<SizingWarning>,
    generations: u32,
}

impl<'a, D: Generations> Run<'a, D> {
    pub(super) fn new(cfg: &'a ProfileConfig, device: &'a mut D) -> Self {
        Self { cfg, device, warnings: Vec::new(), generations: 0 }
    }

    /// The outcome of a successful start, with the fields of a pinned one.
    pub(super) fn outcome(self, generation: D::G, shape: Shape, max_seq_len: u64, measured: Measured) -> Outcome<D::G> {
        Outcome {
            generation,
            shape,
            max_seq_len,
            emergency_reserve_bytes: 0,
            attempts: 1,
            probe_tokens: None,
            target: None,
            peak_reserved: measured.peak_reserved,
            warnings: self.warnings,
            shadow: None,
        }
    }

    /// The input of the arithmetic, with the device as it is now.
    pub(super) fn input(&mut self, shape: Shape, peak_reserved: u64) -> SizingInput {
        let now = self.device.device();
        SizingInput {
            total: now.total,
            peak_reserved,
            probe_tokens: shape.tokens,
            cell_bytes: self.cfg.cell_bytes,
            probe_state_bytes: self.cfg.state_bytes(shape.state_slots),
            own_reserved_now: now.own_reserved,
            available_now: now.available,
            emergency_reserve: self.cfg.emergency_reserve_bytes,
            fraction: self.cfg.fraction,
        }
    }

    pub(super) fn shape(&mut self, tokens: u64, state_slots: u64, phase: PoolPhase) -> Shape {
        self.generations += 1;
        Shape { tokens, state_slots, generation: self.generations, phase }
    }

    /// Builds a generation, sets its emergency reserve aside and tests it. Returns the generation even if the test failed, for teardown.
    pub(super) fn try_generation(
        &mut self,
        shape: Shape,
        emergency_reserve: u64,
    ) -> (Option<D::G>, Result<Measured, Fault>) {
        let (generation, fault) = match self.device.build(shape) {
            Ok(generation) => (Some(generation), None),
            Err(failure) => (None, Some(failure.into())),
        };
        match (generation, self.vote(fault)) {
            (Some(mut generation), None) => {
                let result = self.test(&mut generation, emergency_reserve);
                (Some(generation), result)
            }
            (generation, fault) => (generation, Err(fault.unwrap_or(Fault::Memory(None)))),
        }
    }

    fn test(&mut self, generation: &mut D::G, emergency_reserve: u64) -> Result<Measured, Fault> {
        if emergency_reserve > 0 {
            let placed = self.device.place_reserve(generation, emergency_reserve);
            let fault = placed.err().map(|oom| Fault::Memory(Some(oom)));
            self.vote(fault).map_or(Ok(()), Err)?;
        }
        let result = self.device.self_test(generation).map_err(Fault::from);
        // A leak after running out of memory is a bug of this program and is reported. Any other error is reported as it is.
        let result = match result {
            Err(Fault::Fatal(error)) => Err(Fault::Fatal(error)),
            result => self.pools_full(generation).map_err(Fault::Fatal).and(result),
        };
        match result {
            Ok(measured) => self.vote(None).map_or(Ok(measured), Err),
            Err(fault) => Err(self.vote(Some(fault)).unwrap_or(Fault::Memory(None))),
        }
    }

    fn pools_full(&self, generation: &D::G) -> Result<(), SizingError> {
        match self.device.pools(generation).into_iter().find(|pool| pool.free != pool.total) {
            Some(pool) => Err(SizingError::SelfTestLeak { pool: pool.name, free: pool.free, total: pool.total }),
            None => Ok(()),
        }
    }

    /// Drops a generation and checks that its memory was released. Without a generation, checks that the failed build left nothing.
    pub(super) fn teardown(&mut self, generation: Option<D::G>, shape: Shape) -> Result<(), SizingError> {
        let (released, expected) = match generation {
            None => (0, 0),
            Some(generation) => {
                let released = self.device.teardown(generation);
                let pools = self.cfg.kv_bytes(shape.tokens).saturating_add(self.cfg.state_bytes(shape.state_slots));
                (released.before.saturating_sub(released.after), pools)
            }
        };
        let left = self.device.survivors();
        let result = if released >= expected && left.is_empty() {
            Ok(())
        } else {
            let names: Vec<String> = left.iter().map(|c| format!("{} ({} bytes)", c.name, c.bytes)).collect();
            let survivors = if names.is_empty() { "nothing the ledger knows".to_owned() } else { names.join(", ") };
            Err(SizingError::LeakedGeneration { generation: shape.generation, released, expected, survivors })
        };
        self.agree(result)
    }

    /// Tells every rank whether this one failed. Returns this rank's own fault if it is as severe as the worst.
    fn vote(&mut self, mine: Option<Fault>) -> Option<Fault> {
        let own = mine.as_ref().map_or(0, Fault::severity);
        match self.device.reduce_max(own) {
            worst if worst <= own => mine,
            1 => Some(Fault::Memory(None)),
            _ => Some(Fault::Fatal(SizingError::AnotherRank)),
        }
    }

    /// A vote on a result whose failure is fatal on any rank.
    pub(super) fn agree<T>(&mut self, mine: Result<T, SizingError>) -> Result<T, SizingError> {
        let failed = self.device.reduce_max(u64::from(mine.is_err())) > 0;
        let value = mine?;
        if failed { Err(SizingError::AnotherRank) } else { Ok(value) }
    }

    pub(super) fn note_context(&mut self, max_seq_len: u64) {
        let from = self.cfg.max_seq_len;
        if max_seq_len < from {
            self.warn(SizingWarning::ContextClamped { from, to: max_seq_len });
        }
    }

    pub(super) fn note_below_probe(&mut self, tokens: u64, probe: u64) {
        if tokens < probe {
            self.warn(SizingWarning::BelowProbe { tokens, probe });
        }
    }

    pub(super) fn warn(&mut self, warning: SizingWarning) {
        self.device.event(&Event::Warning(&warning));
        self.warnings.push(warning);
    }

    pub(super) fn warn_all(&mut self, warnings: &[SizingWarning]) {
        for warning in warnings {
            self.warn(warning.clone());
        }
    }
}
