//! The seam between sizing and the engine: building, testing and dropping everything that depends on capacity.
//!
//! A generation owns all of it (KV, request table, attention workspaces, captured plans, emergency reserve), so that nothing can
//! point into a generation that is gone. The engine implements [`Generations`]; tests implement it with a fake device.

use super::{Event, PoolPhase};
use crate::host::ExactBytes;
use std::error::Error;

/// What a generation is built from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    /// KV tokens.
    pub tokens: u64,
    /// Recurrent state slots; zero for models without.
    pub state_slots: u64,
    /// Counts generations from 1; indices handed out by one are invalid in the next.
    pub generation: u32,
    /// What it is for.
    pub phase: PoolPhase,
}

/// The device as seen right now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct DeviceNow {
    /// Its capacity, or the effective limit of the host.
    pub total: u64,
    /// What this process holds.
    pub own_reserved: u64,
    /// What could still be taken.
    pub available: u64,
}

/// What the self-test measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Measured {
    /// The most bytes this process held during it, pool slack included.
    pub peak_reserved: u64,
}

/// A refused allocation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[error("'{component}' asked for {}, {} more than was free", ExactBytes(*requested), ExactBytes(*shortfall))]
pub struct OutOfMemory {
    /// The component that asked.
    pub component: String,
    /// For how many bytes.
    pub requested: u64,
    /// How many of them were not there.
    pub shortfall: u64,
}

/// Why building or testing failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Memory ran out: a smaller capacity may help.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// Anything else: a bug or a broken file, which no capacity cures. Reported as it is and never retried.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

/// What teardown released, as the allocator saw it, after unused pool segments were handed back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Released {
    /// Bytes held before.
    pub before: u64,
    /// Bytes held after.
    pub after: u64,
}

/// One line of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Component {
    /// Its name.
    pub name: String,
    /// Bytes it holds, or held at its peak.
    pub bytes: u64,
    /// What its size depends on.
    pub scales_with: ScalesWith,
}

/// What makes a component larger or smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ScalesWith {
    /// Nothing the user can set.
    Fixed,
    /// `--batch-max-tokens`.
    PrefillTokens,
    /// `--graph-max-batch-size`.
    DecodeBatch,
    /// `--visual-infer-batch-size`.
    VisualBatch,
    /// `--max-total-token-num`.
    Capacity,
}

/// How many items of a pool are free, out of how many.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PoolCount {
    /// Its name.
    pub name: String,
    /// Free items.
    pub free: u64,
    /// All items.
    pub total: u64,
}

/// An engine that can build itself at a given capacity, test it, and take itself down again.
///
/// With several ranks every rank runs [`super::auto_profile`] with its own implementation, and `reduce_min` and
/// `reduce_max` connect them; they are called in the same order on every rank, whatever happened on it. A self-test that
/// uses collectives of its own must not leave them half-way when it fails.
pub trait Generations {
    /// Everything with a size that depends on capacity, owned by one value.
    type G;

    /// The device right now.
    fn device(&mut self) -> DeviceNow;

    /// Builds a generation.
    ///
    /// # Errors
    /// [`Failure`]; whatever was built before the failure has been released again.
    fn build(&mut self, shape: Shape) -> Result<Self::G, Failure>;

    /// Sets start reserve aside in a freshly built generation.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it does not fit.
    fn place_reserve(&mut self, generation: &mut Self::G, bytes: u64) -> Result<(), OutOfMemory>;

    /// Runs the largest schedulable steps, of the draft model and the encoders too, and reports the peak.
    ///
    /// # Errors
    /// [`Failure`]; in every case all pools are full again afterwards.
    fn self_test(&mut self, generation: &mut Self::G) -> Result<Measured, Failure>;

    /// The pools of a generation, which must be full whenever nothing runs.
    fn pools(&self, generation: &Self::G) -> Vec<PoolCount>;

    /// The ledger, for diagnosis.
    fn components(&self) -> Vec<Component>;

    /// Drops a generation and hands unused pool segments back.
    fn teardown(&mut self, generation: Self::G) -> Released;

    /// What still belongs to some generation according to the ledger, while none should be alive.
    fn survivors(&self) -> Vec<Component>;

    /// Hands unused pool segments back without dropping anything.
    fn trim(&mut self);

    /// The least value over all ranks.
    fn reduce_min(&mut self, value: u64) -> u64 {
        value
    }

    /// The greatest value over all ranks.
    fn reduce_max(&mut self, value: u64) -> u64 {
        value
    }

    /// Told about progress, one log line each.
    fn event(&mut self, event: &Event<'_>) {
        let _ = event;
    }
}
