//! What a machine gives an engine.

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_device::Isa;
use plimsoll_memory::host::{HostError, HostLimits, HostNow, Remedy, Root};
use plimsoll_memory::{Bytes, Ledger};

use crate::engine_host::EngineHost;
use crate::options::Options;
use crate::planner::{Line, PlanError};

/// What is mapped and not touched differs by some hundred KiB from one look to the next, and between `plan` and `serve`. Under an rlimit the
/// line is so much lower, at least, and a multiple of this below the limit: both find the same.
pub(crate) const SPACE_STEP_BYTES: u64 = 4 << 20;
const SPACE_KEPT_BYTES: u64 = 1 << 20;

/// Threads that a process with an engine of `threads` compute threads has beside its first: those, all of the time; and either what
/// touches memory while the engine is built, or the engine's own, its watch, and `others`.
fn threads_beside(threads: usize, others: usize) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (threads - 1 + (2 + others).max(cores - 1)) as u64
}

/// What the machine gives this process, and with how many threads.
pub struct Host {
    /// The line.
    pub line: Line,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// The machine, to look again.
    pub root: Root,
    /// Every limit that was found.
    pub limits: HostLimits,
    /// Where leases are left; absent: where all of this user's processes meet.
    pub lease_dir: Option<PathBuf>,
    /// Where the engine lives with others under one line; absent: alone.
    pub engine_host: Option<Arc<EngineHost>>,
}

impl Host {
    /// Reads the machine's limits and decides line, threads and instruction set.
    pub fn read(options: &Options) -> Result<Self, HostError> {
        Self::read_from(Root::system(), options)
    }

    /// The same for a machine that is found under `root`.
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
        let line = Line {
            bytes: limits.effective.saturating_sub(peers),
            source,
            chosen: options.memory_budget.is_some(),
            peers,
            remedy: binding.remedy,
        };
        Ok(Self { line, threads, isa, root, limits, lease_dir: None, engine_host: None })
    }

    /// Refuses an instruction set that only another machine has, for which this one may plan.
    ///
    /// # Errors
    /// [`PlanError::Option`] with the best one there is.
    pub fn runs_kernels(&self) -> Result<(), PlanError> {
        if self.isa.available() {
            return Ok(());
        }
        let problem = format!("is {}; the best that this processor runs is {}", self.isa, Isa::detect());
        Err(PlanError::Option { flag: "--isa", problem })
    }

    /// Bytes that the engine of `ledger` may hold in all at this moment: what this process holds, but for others in its engine host, and what
    /// is free.
    pub(super) fn room(&self, ledger: &Arc<Ledger>) -> u64 {
        let others = self.engine_host.as_ref().map_or(0, |engine_host| engine_host.committed_beside(ledger));
        ledger.look();
        let now = HostNow::read(&self.root, &self.limits);
        // Where address space is limited, what is mapped is held.
        let untouched = match self.limits.binding().remedy {
            Remedy::AddressSpace | Remedy::Data => ledger.mapped_total().saturating_sub(ledger.committed_total()),
            _ => 0,
        };
        now.available.saturating_add(untouched).saturating_add(now.own.leak_gauge().saturating_sub(others))
    }
}
