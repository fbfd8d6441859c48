//! Backends: build runners, each a device with the memory of one pool build. The weights stay loaded while pools are
//! rebuilt.

use std::sync::Arc;

use plimsoll_device::{CpuDevice, CpuMemory, CpuWeights, Isa, ModelShape, ThreadPool};
use plimsoll_memory::sizing::{self, Failure};
use plimsoll_memory::{Ledger, OutOfMemory};
use plimsoll_models::Model;

use crate::cache::Pools;
use crate::runner::Runner;
use crate::runner::cpu::CpuRunner;

/// Sizes of a device's part of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Pages, and state slots or window pages.
    pub pools: Pools,
    /// Bytes of step workspace.
    pub workspace: usize,
    /// Memory is committed at once.
    pub touch: bool,
}

/// Weights on a device, and the resources that runners on it are built from.
pub(crate) trait Backend {
    /// A model on the device.
    type Runner: Runner + Send + 'static;

    /// Builds a runner with a pool of this extent. At most one exists at a time.
    fn build(&mut self, ledger: &Arc<Ledger>, shape: &ModelShape, extent: Extent) -> Result<Self::Runner, Failure>;

    /// Bytes that the engine may hold in the own memory of a GPU, as its driver reports.
    fn room(&self, _ledger: &Ledger) -> u64 {
        u64::MAX
    }

    /// The most bytes of workspace that a runner's steps have taken.
    fn workspace_peak(runner: &mut Self::Runner) -> usize;

    /// Takes a runner apart: its pool is freed, its weights are kept for the next runner.
    fn take_apart(&mut self, runner: Self::Runner);
}

/// A refused region, as the sizing search reports it.
pub(crate) fn refused(error: &OutOfMemory) -> sizing::OutOfMemory {
    let (OutOfMemory::Refused { component, bytes, .. } | OutOfMemory::Sealed { component, bytes }) = error;
    // The system does not say how much was missing; one byte leaves the next attempt open.
    sizing::OutOfMemory { component: (*component).into(), requested: *bytes, shortfall: 1 }
}

/// The host's cores.
pub(crate) struct CpuBackend {
    model: Arc<dyn Model>,
    isa: Isa,
    threads: usize,
    /// Weights and threads; none while a runner holds them.
    parts: Option<(CpuWeights, ThreadPool)>,
}

impl CpuBackend {
    /// Takes loaded weights, and the threads that compute.
    pub fn new(model: Arc<dyn Model>, isa: Isa, weights: CpuWeights, pool: ThreadPool) -> Self {
        Self { model, isa, threads: pool.threads(), parts: Some((weights, pool)) }
    }
}

impl Backend for CpuBackend {
    type Runner = CpuRunner;

    fn build(&mut self, ledger: &Arc<Ledger>, shape: &ModelShape, extent: Extent) -> Result<CpuRunner, Failure> {
        let Extent { pools: Pools { pages, slots }, workspace, touch } = extent;
        let memory = CpuMemory::map(ledger, shape, pages, slots, workspace, self.threads, touch);
        let memory = memory.map_err(|error| refused(&error))?;
        let Some((weights, pool)) = self.parts.take() else {
            return Err(Failure::Other("internal error: a pool was built while another exists".into()));
        };
        Ok(CpuRunner::new(Arc::clone(&self.model), CpuDevice::new(weights, pool, self.isa, memory)))
    }

    fn workspace_peak(runner: &mut CpuRunner) -> usize {
        runner.device().memory().workspace_peak()
    }

    fn take_apart(&mut self, runner: CpuRunner) {
        let (weights, pool, _memory) = runner.into_device().into_parts();
        self.parts = Some((weights, pool));
    }
}
