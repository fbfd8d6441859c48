//! Errors of a GPU before it serves.

use plimsoll_device::cpu::LoadError;
use plimsoll_memory::Bytes;
use thiserror::Error;

use crate::segments::TooWide;

/// The reason why a GPU cannot be used.
#[derive(Debug, Error)]
pub enum GpuError {
    /// No GPU was found.
    #[error("no GPU was found: install the Vulkan driver of the graphics card, or use --device cpu")]
    NoAdapter,
    /// All adapters that were found compute on the host's cores.
    #[error(
        "no GPU was found, only software that stands for one ({0}): use --device cpu, or allow it with --allow-software-gpu"
    )]
    OnlySoftware(String),
    /// There is no adapter with this number.
    #[error("there is no GPU {index}: use one of {found}")]
    NoSuch {
        /// The configured number.
        index: usize,
        /// The numbers of the adapters that exist.
        found: String,
    },
    /// The adapter lacks a feature that kernels need.
    #[error("{name} lacks {what}, which the kernels need: use --device cpu")]
    Lacks {
        /// The adapter.
        name: String,
        /// The missing feature.
        what: &'static str,
    },
    /// The device could not be opened.
    #[error("{name} could not be opened: {reason}")]
    Open {
        /// The adapter.
        name: String,
        /// The driver's message.
        reason: String,
    },
    /// The driver refused memory.
    #[error("{component}: the GPU refused {}: {reason}", Bytes(*bytes))]
    Refused {
        /// The component that the memory was for.
        component: &'static str,
        /// Bytes requested.
        bytes: u64,
        /// The driver's message.
        reason: String,
    },
    /// The driver rejected a kernel: a bug here or in the driver.
    #[error("a kernel was not accepted: {0}")]
    Kernel(String),
    /// A matrix has wider panels than a buffer.
    #[error(transparent)]
    TooWide(#[from] TooWide),
    /// The weights could not be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The device has failed.
    #[error("the GPU failed: {0}")]
    Failed(String),
}
