//! Why weights could not be loaded.

use plimsoll_formats::FormatError;
use plimsoll_kernels::PackError;
use plimsoll_memory::OutOfMemory;
use thiserror::Error;

/// Why weights could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The weight region could not be had.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A file is not any more what was opened.
    #[error(transparent)]
    Changed(FormatError),
    /// A tensor's bytes could not be decoded.
    #[error("loading '{tensor}': {source}")]
    Format {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        source: FormatError,
    },
    /// The files of tables that stay there could not be opened.
    #[error("tables in files: {0}")]
    Table(FormatError),
    /// A tensor's rows do not fit the declared packing: a bug.
    #[error("packing '{tensor}': {source}")]
    Pack {
        /// The tensor.
        tensor: String,
        /// The kernels' reason.
        source: PackError,
    },
    /// The caller has cancelled loading.
    #[error("loading was stopped")]
    Stopped,
}
