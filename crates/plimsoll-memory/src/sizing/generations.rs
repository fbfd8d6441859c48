//! The interface between sizing and the engine: building, testing and dropping everything that depends on capacity.
//!
//! A generation owns all of it: KV, request table, attention workspaces, captured plans, emergency reserve. No pointer can therefore lead
//! into a dropped generation. The engine implements [`Generations`]; tests implement it with a fake device.

use super::{Event, PoolPhase};
use crate::host::ExactBytes;
use std::error::Error;

/// The sizes that a generation is built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    /// KV tokens.
    pub tokens: u64,
    /// Recurrent state slots; zero for models without.
    pub state_slots: u64,
    /// Number of this generation, counted from 1; indices into one generation are invalid in the next.
    pub generation: u32,
    /// Whether it is a probe or serves requests.
    pub phase: PoolPhase,
}

/// The device as seen right now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct DeviceNow {
    /// Its capacity, or the effective limit of the host.
    pub total: u64,
    /// Bytes that this process holds.
    pub own_reserved: u64,
    /// Bytes that this process could still take.
    pub available: u64,
}

/// The measurement of a self-test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Measured {
    /// The most bytes that this process held during the self-test, pool slack included.
    pub peak_reserved: u64,
}

/// A refused allocation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[error("'{component}' asked for {}, {} more than was free", ExactBytes(*requested), ExactBytes(*shortfall))]
pub struct OutOfMemory {
    /// The component that asked for memory.
    pub component: String,
    /// Bytes that it asked for.
    pub requested: u64,
    /// Bytes of these that were not free.
    pub shortfall: u64,
}

/// Why building or testing failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Memory ran out: a smaller capacity may help.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// Any other error: a bug or a broken file. A smaller capacity does not help, so it is reported unchanged and never retried.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

/// The effect of a teardown, as the allocator reports it after unused pool segments were handed back.
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
    /// Bytes that it holds, or held at its peak.
    pub bytes: u64,
    /// The flag that its size depends on.
    pub scales_with: ScalesWith,
}

/// The flag that makes a component larger or smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ScalesWith {
    /// No flag.
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

/// The free items of a pool, and all its items.
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
/// With several ranks every rank runs [`super::auto_profile`] with its own implementation, and `reduce_min` and `reduce_max` connect them.
/// Every rank calls them in the same order, whatever fails on it. A self-test with other collectives must complete them even when it fails.
pub trait Generations {
    /// Everything with a size that depends on capacity, owned by one value.
    type G;

    /// Returns the state of the device right now.
    fn device(&mut self) -> DeviceNow;

    /// Builds a generation.
    ///
    /// # Errors
    /// [`Failure`]; memory taken before the failure has been released again.
    fn build(&mut self, shape: Shape) -> Result<Self::G, Failure>;

    /// Sets the emergency reserve aside in a freshly built generation.
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

    /// Components that belong to a generation according to the ledger, while none should be alive.
    fn survivors(&self) -> Vec<Component>;

    /// Hands unused pool segments back without dropping anything.
    fn trim(&mut self);

    /// The smallest `value` over all ranks.
    fn reduce_min(&mut self, value: u64) -> u64 {
        value
    }

    /// The largest `value` over all ranks.
    fn reduce_max(&mut self, value: u64) -> u64 {
        value
    }

    /// Reports progress, one log line for each event.
    fn event(&mut self, event: &Event<'_>) {
        let _ = event;
    }
}
