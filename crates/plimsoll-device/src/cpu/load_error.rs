//! Errors of loading weights.

use plimsoll_formats::FormatError;
use plimsoll_kernels::PackError;
use plimsoll_memory::OutOfMemory;
use thiserror::Error;

/// Why weights could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The weight region could not be mapped.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A file was changed after it was opened.
    #[error(transparent)]
    Changed(FormatError),
    /// A tensor's bytes could not be decoded.
    #[error("loading '{tensor}': {source}")]
    Format {
        /// The tensor.
        tensor: String,
        /// The decoder's error.
        source: FormatError,
    },
    /// The files of tables that stay in the model's files could not be opened.
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
