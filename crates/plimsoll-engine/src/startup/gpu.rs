//! The GPU's part of a start: finding it, opening it, loading weights onto it.

#[cfg(feature = "gpu")]
use plimsoll_memory::Bytes;
#[cfg(feature = "gpu")]
use plimsoll_memory::host::MemoryBudget;

use crate::api::options::{DeviceChoice, Options};
use crate::plan::GpuLimit;
#[cfg(feature = "gpu")]
use crate::plan::OwnMemory;

/// Returns the GPU that the operator chose, as planning sees it. `None`: the host's cores carry out the steps.
pub(super) fn limit(options: &Options) -> Option<Result<GpuLimit, String>> {
    match options.device {
        DeviceChoice::Cpu | DeviceChoice::Auto => None,
        DeviceChoice::Gpu(index) => Some(found(index, options)),
    }
}

/// Lists every GPU and software GPU as text; `None` in a program without GPU support.
#[cfg(not(feature = "gpu"))]
pub fn gpus() -> Option<Vec<String>> {
    None
}

/// Lists every GPU and software GPU as text.
#[cfg(feature = "gpu")]
pub fn gpus() -> Option<Vec<String>> {
    let words = |(i, adapter): (usize, plimsoll_gpu::Adapter)| {
        let memory = match (adapter.is_software(), adapter.shares_memory(), adapter.memory()) {
            (true, ..) => "software, which --device auto leaves aside".into(),
            (_, true, _) => match adapter.working_set() {
                Some(bytes) => format!("shares the machine's memory, {} of it at most", Bytes(bytes)),
                None => "shares the machine's memory".into(),
            },
            (.., Some(memory)) => format!("{} of {} free", Bytes(memory.free()), Bytes(memory.total)),
            (.., None) => "memory of its own, of which it says nothing".into(),
        };
        format!("gpu:{i} {} ({memory})", adapter.name())
    };
    Some(plimsoll_gpu::Adapter::all().into_iter().enumerate().map(words).collect())
}

#[cfg(not(feature = "gpu"))]
fn found(_index: Option<usize>, _options: &Options) -> Result<GpuLimit, String> {
    Err("this program was built without GPUs: build it with --features gpu".into())
}

#[cfg(feature = "gpu")]
pub(super) use open::{adapter, load, room};

#[cfg(feature = "gpu")]
fn found(index: Option<usize>, options: &Options) -> Result<GpuLimit, String> {
    let adapter = open::find(index, options.allow_software_gpu).map_err(|error| error.to_string())?;
    let (name, software) = (adapter.name().to_owned(), adapter.is_software());
    let own = match (adapter.shares_memory(), options.gpu_memory_budget) {
        (true, None) => None,
        // In tests a software GPU can take the place of a GPU with memory of its own.
        (true, Some(budget)) if software => {
            Some(OwnMemory { bytes: budget.bytes(u64::MAX), source: "--gpu-memory-budget".into() })
        }
        (true, Some(_)) => {
            return Err(format!("{name} shares the machine's memory: use --memory-budget, not --gpu-memory-budget"));
        }
        (false, budget) => Some(own_memory(&name, adapter.memory(), budget)?),
    };
    let working_set = adapter.working_set();
    Ok(GpuLimit { name, buffer: adapter.limits().buffer, software, own, working_set })
}

/// Returns the part of a GPU's own memory that this process may use.
#[cfg(feature = "gpu")]
fn own_memory(
    name: &str,
    memory: Option<plimsoll_gpu::OwnMemory>,
    budget: Option<MemoryBudget>,
) -> Result<OwnMemory, String> {
    let chosen = |bytes| OwnMemory { bytes, source: format!("--gpu-memory-budget, on {name}") };
    let Some(memory) = memory else {
        return Err(format!("{name} has memory of its own and does not say how much: use --device cpu"));
    };
    let budget = budget.map(|budget| budget.bytes(memory.free()));
    let (total, bytes) = (Bytes(memory.total), memory.free());
    let source = match memory.budget {
        Some([may, used]) => {
            let others = Bytes(memory.total.saturating_sub(may) + used);
            format!("{total} of {name}, less {others} in use or kept by its driver")
        }
        None => format!("all of {name}, whose driver does not say what others use: see --gpu-memory-budget"),
    };
    Ok(match budget {
        Some(budget) if budget <= bytes => chosen(budget),
        Some(budget) => {
            OwnMemory { bytes, source: format!("{source}; --gpu-memory-budget is more: {}", Bytes(budget)) }
        }
        None => OwnMemory { bytes, source },
    })
}

#[cfg(feature = "gpu")]
mod open {
    use std::sync::Arc;

    use plimsoll_device::{ThreadPool, WeightTable};
    use plimsoll_formats::{Checkpoint, Sources};
    use plimsoll_gpu::{Adapter, AdapterChoice, Context, GpuError, GpuWeights, Sizes};
    use plimsoll_memory::Ledger;
    use plimsoll_memory::host::Room;
    use plimsoll_models::Model;

    use crate::api::cancel::Cancel;
    use crate::api::options::{DeviceChoice, Options};
    use crate::api::start_error::StartError;
    use crate::plan::GpuPlan;
    use crate::runner::gpu::{GpuBackend, Load};

    pub(super) fn find(index: Option<usize>, allow_software: bool) -> Result<Adapter, GpuError> {
        Adapter::find(AdapterChoice { index, allow_software })
    }

    /// Finds the GPU that the operator chose.
    pub fn adapter(options: &Options) -> Result<Adapter, GpuError> {
        match options.device {
            DeviceChoice::Gpu(index) => find(index, options.allow_software_gpu),
            DeviceChoice::Cpu | DeviceChoice::Auto => Err(GpuError::NoAdapter),
        }
    }

    /// Returns a function that reads the room in the GPU's own memory. `None` where it shares the machine's memory, or does not report its
    /// size.
    pub fn room(adapter: &Adapter) -> Option<impl FnOnce() -> Room> {
        let first = adapter.memory().filter(|_| !adapter.shares_memory())?;
        Some(move || {
            let memory = adapter.memory().unwrap_or(first);
            let used_by_others = memory.total.saturating_sub(memory.free());
            Room { domain: adapter.memory_domain(), shared: true, limit: memory.total, used_by_others }
        })
    }

    /// Opens the GPU and loads the weights onto it. The threads that pack the weights end afterwards.
    pub fn load(
        (model, weights, checkpoint): (Arc<dyn Model>, WeightTable, &Checkpoint),
        (plan, adapter): (GpuPlan, &Adapter),
        ledger: &Arc<Ledger>,
        (options, threads): (&Options, usize),
        progress: impl FnMut(u64),
        cancel: &Cancel,
    ) -> Result<GpuBackend, StartError> {
        let again = reloads((weights.clone(), checkpoint.sources()), ledger, options, threads);
        let mut context = Context::open(adapter)?;
        let mut pool = ThreadPool::new(threads).map_err(StartError::Thread)?;
        let stopped = || cancel.is_cancelled();
        let weights = GpuWeights::load_unless(&mut context, weights, checkpoint, ledger, &mut pool, progress, stopped)?;
        let GpuPlan { arena, upload, readback, calls, outputs, .. } = plan;
        let step = Sizes { pages: [0; 2], slots: 0, arena, upload, readback, calls, outputs };
        Ok(GpuBackend::new(model, step, (context, weights), again))
    }

    /// Returns a function that does the same after a loss of the device, from files that are opened again.
    fn reloads(
        (weights, sources): (WeightTable, Sources),
        ledger: &Arc<Ledger>,
        options: &Options,
        threads: usize,
    ) -> Load {
        let (options, ledger) = (options.clone(), Arc::clone(ledger));
        Arc::new(move || {
            let words = |error: &dyn std::fmt::Display| error.to_string();
            let checkpoint = sources.open().map_err(|error| words(&error))?;
            let adapter = adapter(&options).map_err(|error| words(&error))?;
            let mut context = Context::open(&adapter).map_err(|error| words(&error))?;
            let mut pool = ThreadPool::new(threads).map_err(|error| words(&error))?;
            let table = weights.clone();
            let loaded =
                GpuWeights::load_unless(&mut context, table, &checkpoint, &ledger, &mut pool, |_| {}, || false);
            let loaded = loaded.map_err(|error| words(&error))?;
            Ok((context, loaded))
        })
    }
}
