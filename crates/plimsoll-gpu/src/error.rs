//! What can go wrong with a GPU before it serves.

use plimsoll_device::cpu::LoadError;
use plimsoll_memory::Bytes;
use thiserror::Error;

use crate::segments::TooWide;

/// Why a GPU cannot be used.
#[derive(Debug, Error)]
pub enum GpuError {
    /// None was found.
    #[error("no GPU was found: install the Vulkan driver of the graphics card, or use --device cpu")]
    NoAdapter,
    /// Those that were found compute on the host's cores.
    #[error(
        "no GPU was found, only software that stands for one ({0}): use --device cpu, or allow it with --allow-software-gpu"
    )]
    OnlySoftware(String),
    /// There is none with this number.
    #[error("there is no GPU {index}: use one of {found}")]
    NoSuch {
        /// The number asked for.
        index: usize,
        /// Those that there are.
        found: String,
    },
    /// It lacks something that kernels need.
    #[error("{name} lacks {what}, which the kernels need: use --device cpu")]
    Lacks {
        /// The adapter.
        name: String,
        /// What it lacks.
        what: &'static str,
    },
    /// It would not be opened.
    #[error("{name} could not be opened: {reason}")]
    Open {
        /// The adapter.
        name: String,
        /// The driver's words.
        reason: String,
    },
    /// The driver refused memory.
    #[error("{component}: the GPU refused {}: {reason}", Bytes(*bytes))]
    Refused {
        /// What it was for.
        component: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// The driver's words.
        reason: String,
    },
    /// A kernel was not accepted: a bug here or in the driver.
    #[error("a kernel was not accepted: {0}")]
    Kernel(String),
    /// A matrix has wider panels than a buffer.
    #[error(transparent)]
    TooWide(#[from] TooWide),
    /// The weights could not be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The device does not work any more.
    #[error("the GPU failed: {0}")]
    Failed(String),
}
