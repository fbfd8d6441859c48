//! The machine's part of a start: memory limit, threads, instruction set.

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_device::Isa;
use plimsoll_memory::host::{HostError, HostLimits, HostNow, Remedy, Root};
use plimsoll_memory::{Bytes, Ledger};

use crate::api::options::Options;
use crate::api::plan_error::PlanError;
use crate::api::plan_error::SPACE_STEP_BYTES;
use crate::api::start_error::{NoRoom, StartError};
use crate::memory::lease::MemoryLease;
use crate::plan::limit::MemoryLimit;
use crate::startup::gpu;
use crate::watch::host::EngineHost;

const SPACE_KEPT_BYTES: u64 = 1 << 20;

/// Returns the most threads of a process with an engine of `threads` compute threads, beside its first thread. The compute threads run all
/// the time. Beside them run either the threads that touch memory during the build, or the engine's thread, the watching thread and
/// `others`.
fn threads_beside(threads: usize, others: usize) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (threads - 1 + (2 + others).max(cores - 1)) as u64
}

/// The machine's resources for this process.
pub struct Host {
    /// The memory limit.
    pub limit: MemoryLimit,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// The root of the machine's files, to read limits and usage again.
    pub root: Root,
    /// Every limit that was found.
    pub limits: HostLimits,
    /// The directory of leases; `None`: the directory that all of this user's processes share.
    pub lease_dir: Option<PathBuf>,
    /// The engine host, where several engines share one limit; `None` for an engine alone.
    pub engine_host: Option<Arc<EngineHost>>,
}

impl Host {
    /// Reads the machine's limits and decides memory limit, threads and instruction set.
    pub fn read(options: &Options) -> Result<Self, HostError> {
        Self::read_from(Root::system(), options)
    }

    /// The same for a machine with its files under `root`.
    pub fn read_from(root: Root, options: &Options) -> Result<Self, HostError> {
        let limits = HostLimits::read(&root, options.memory_budget)?;
        let cores = usize::try_from(limits.cpus.usable).unwrap_or(1).max(1);
        let (threads, isa) = (options.threads.unwrap_or(cores).max(1), options.isa());
        let limits = limits.with_threads(threads_beside(threads, options.other_threads));
        let now = HostNow::read(&root, &limits);
        let binding = limits.binding();
        let others = now.used_by_others;
        let (peers, whose) = match binding.remedy {
            Remedy::AddressSpace | Remedy::Data => {
                let mapped = others.saturating_add(SPACE_KEPT_BYTES).div_ceil(SPACE_STEP_BYTES);
                (mapped.saturating_mul(SPACE_STEP_BYTES), "for stacks and what else is mapped beside the plan")
            }
            _ => (others, "that others use"),
        };
        let source = format!("{} ({}), less {} {whose}", binding.name, Bytes(binding.bytes), Bytes(peers));
        let limit = MemoryLimit {
            bytes: limits.effective.saturating_sub(peers),
            source,
            chosen: options.memory_budget.is_some(),
            peers,
            remedy: binding.remedy,
            gpu: gpu::limit(options),
        };
        Ok(Self { limit, threads, isa, root, limits, lease_dir: None, engine_host: None })
    }

    /// Refuses an instruction set that this machine lacks. Such an instruction set can be planned for, but not run.
    ///
    /// # Errors
    /// [`PlanError::Option`] with the best instruction set of this processor.
    pub fn runs_kernels(&self) -> Result<(), PlanError> {
        if self.isa.available() {
            return Ok(());
        }
        let problem = format!("is {}; the best that this processor runs is {}", self.isa, Isa::detect());
        Err(PlanError::Option { flag: "--isa", problem })
    }

    /// Bytes that the engine of `ledger` may hold in total at this moment: free bytes, and bytes of this process that belong to no other
    /// engine of its host.
    pub(super) fn room(&self, ledger: &Arc<Ledger>) -> u64 {
        let others = self.engine_host.as_ref().map_or(0, |engine_host| engine_host.committed_beside(ledger));
        ledger.look();
        let now = HostNow::read(&self.root, &self.limits);
        // Where address space is limited, mapped memory counts as held.
        let untouched = match self.limits.binding().remedy {
            Remedy::AddressSpace | Remedy::Data => ledger.mapped_total().saturating_sub(ledger.committed_total()),
            _ => 0,
        };
        now.available.saturating_add(untouched).saturating_add(now.own.leak_gauge().saturating_sub(others))
    }
}

impl EngineHost {
    /// Plans the engine host under the machine's limit, leases the plan, and arms the heap's emergency reserve.
    ///
    /// # Errors
    /// [`StartError::NoRoom`] when the limit is below the host's own plan; otherwise as for a start.
    pub fn open(http_bytes: u64, host: &Host) -> Result<Arc<Self>, StartError> {
        let plan = Self::planned(http_bytes, &host.limit);
        if plan.shortfall() > 0 {
            let (needed, left) = (plan.total(), plan.limit);
            return Err(NoRoom { what: "what all models share", needed, left, limit: plan.limit }.into());
        }
        let memory_lease = MemoryLease::take(plan.total(), 0, host.lease_dir.clone(), &host.root, &host.limits)?;
        Self::build(plan, memory_lease)
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_memory::{Component, heap};

    use super::*;

    #[test]
    fn hosted_engines_stay_under_the_limit_and_return_their_memory() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { memory_budget: Some("64MiB".parse().unwrap()), ..Options::default() };
        let host = Host { lease_dir: Some(dir.path().join("leases")), ..Host::read(&options).unwrap() };
        let engine_host = EngineHost::open(8 << 20, &host).unwrap();
        let shared = engine_host.plan().total();
        assert_eq!((engine_host.planned_total(), engine_host.room()), (shared, (64 << 20) - shared));
        let ledger = |bytes| {
            let ledger = Arc::new(Ledger::new());
            ledger.plan(Component::Weights, bytes);
            ledger
        };
        let first = engine_host.admit(&ledger(engine_host.room() - 10)).unwrap();
        assert_eq!(engine_host.room(), 10);
        let refused = engine_host.admit(&ledger(11)).err().unwrap();
        assert_eq!((refused.needed, refused.left, refused.limit), (11, 10, 64 << 20));
        assert!(refused.to_string().contains("64.0 MiB"), "{refused}");
        let second = engine_host.admit(&ledger(10)).unwrap();
        assert_eq!(engine_host.room(), 0);
        // The report counts hosted engines that are loading or shutting down.
        let report = engine_host.report(&[]);
        assert_eq!(report.planned_bytes, 64 << 20);
        let weights = report.components.iter().find(|row| row.component == Component::Weights.name()).unwrap();
        assert_eq!(weights.planned_bytes, (64 << 20) - shared);
        drop(first);
        drop(second);
        assert_eq!(engine_host.planned_total(), shared);
        assert!(heap::armed());
        drop(engine_host);
        assert!(!heap::armed(), "the emergency reserve goes with the engine host");
        let tight = Host { lease_dir: Some(dir.path().join("leases")), ..Host::read(&options).unwrap() };
        assert!(matches!(EngineHost::open(1 << 30, &tight), Err(StartError::NoRoom(_))));
    }
}
