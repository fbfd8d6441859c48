//! Errors of an engine's start.

use plimsoll_device::DeviceError;
use plimsoll_media::MediaError;
use plimsoll_memory::host::HostError;
use plimsoll_memory::host::lease::{LeaseError, Refusal};
use plimsoll_memory::sizing::SizingError;
use plimsoll_memory::{Bytes, OutOfMemory};
use thiserror::Error;

use crate::api::plan_error::PlanError;
use crate::sampling::SamplerError;

/// Why an engine did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The engine cannot be planned, or does not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The machine's limits could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Other Plimsolls have leased too much of the machine.
    #[error("{}: {}; {}", taken_by(.0), .0, next_step(.0))]
    Refused(Box<Refusal>),
    /// Other processes under the same limit leave too little memory.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The leases of other processes could not be read.
    #[error("leases: {0}")]
    Lease(Box<LeaseError>),
    /// No pool could be built and tested.
    #[error(transparent)]
    Sizing(Box<SizingError>),
    /// The smallest pool does not fit any more, though it was planned. No option set its size.
    #[error(
        "the pool of {tokens} tokens that was planned needs {}, but only {} are left: others have taken memory since", Bytes(*need),
        Bytes(*available)
    )]
    Shrunk {
        /// Tokens of the pool.
        tokens: u64,
        /// Bytes it needs.
        need: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The weights could not be loaded.
    #[error(transparent)]
    Load(#[from] plimsoll_device::cpu::LoadError),
    /// The GPU cannot be used.
    #[cfg(feature = "gpu")]
    #[error(transparent)]
    Gpu(#[from] plimsoll_gpu::GpuError),
    /// Planned memory could not be allocated.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The sampler's scratch could not be allocated.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The system refused a thread.
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
    /// Planned memory for media could not be allocated.
    #[error(transparent)]
    MediaMemory(MediaError),
    /// The self-test of media failed.
    #[error("the memory self-test failed: {0}")]
    Media(MediaError),
    /// The self-test of steps failed.
    #[error("the memory self-test failed: {0}")]
    SelfTest(DeviceError),
    /// The directory of the prefix cache on disk cannot be used.
    #[error("--cache-dir: {0}")]
    Disk(#[from] plimsoll_tier::OpenError),
    /// The directory of packed weights cannot be used.
    #[error("--packed-cache: {0}")]
    PackedCache(String),
    /// The key of the prefix cache on disk cannot be used.
    #[error("--cache-key-file: {0}")]
    DiskKey(#[from] plimsoll_tier::KeyError),
    /// The program file could not be read; its hash identifies the build.
    #[error("--cache-dir: the program file cannot be read, so pages of other builds cannot be told from its own: {0}")]
    Build(std::io::Error),
    /// The caller cancelled the start ([`crate::Cancel`]).
    #[error("the start was cancelled")]
    Cancelled,
    /// The memory self-test took more than was planned: a bug in the planner.
    #[error("the memory self-test failed: {component} used {measured} bytes, {planned} were planned")]
    SelfTestExceeds {
        /// The component.
        component: &'static str,
        /// Bytes used.
        measured: u64,
        /// Bytes planned.
        planned: u64,
    },
}

/// The engine host itself does not fit under the memory limit, or an engine does not fit into the host.
#[derive(Clone, Debug, Error)]
#[error("{what} needs {} of which {} are left under the memory limit of {}", Bytes(*needed), Bytes(*left), Bytes(*limit))]
pub struct NoRoom {
    /// The part that does not fit.
    pub what: &'static str,
    /// Bytes it needs.
    pub needed: u64,
    /// Bytes that no plan has taken.
    pub left: u64,
    /// The memory limit.
    pub limit: u64,
}

/// Names the owner of the memory that could not be leased.
fn taken_by(refusal: &Refusal) -> &'static str {
    if refusal.holders > 0 { "another Plimsoll server has leased the memory" } else { "other processes use the memory" }
}

/// Returns the step that makes a refused lease possible.
fn next_step(refusal: &Refusal) -> String {
    let flag = if refusal.domain.starts_with("gpu ") { "--gpu-memory-budget" } else { "--memory-budget" };
    format!("free memory, or lower {flag} to at most {}", Bytes(refusal.free))
}
