//! The one error type of this crate: the file, the fault and the offending value.
//!
//! This module has only the errors and helpers that build them.

use std::path::{Path, PathBuf};

/// Why a checkpoint, or one row of it, could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The operating system refused to open, stat, read or map a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory concerned.
        path: PathBuf,
        /// The error from the operating system.
        source: std::io::Error,
    },
    /// The file changed after it was opened.
    #[error("{} changed while it was read: {reason}; put a new file beside it and rename it (mv)", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The change that was found.
        reason: String,
    },
    /// The path is neither a GGUF file, nor a Hugging Face directory, nor a `config.json`.
    #[error("{}: not a checkpoint: {reason}", path.display())]
    NotACheckpoint {
        /// The path that was given.
        path: PathBuf,
        /// The content that was expected there.
        reason: String,
    },
    /// A GGUF file breaks the format or one of this reader's limits.
    #[error("GGUF: {0}")]
    Gguf(String),
    /// The file with a GGUF model's vision encoder is broken, or does not fit the model.
    #[error("{}: {reason} (--no-mmproj serves text alone)", path.display())]
    Mmproj {
        /// The file.
        path: PathBuf,
        /// The value that was found, and the expected one.
        reason: String,
    },
    /// The draft model does not go with the model.
    #[error("--draft-model: {0}")]
    Draft(String),
    /// A safetensors file or its index breaks the format or one of this reader's limits.
    #[error("safetensors: {0}")]
    Safetensors(String),
    /// The model configuration lacks a key, or holds a value of the wrong type or outside the sane range.
    #[error("model configuration: {0}")]
    Config(String),
    /// The file is well formed but uses something that this engine does not implement.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// Two tensors of the checkpoint map to the same canonical name.
    #[error("two tensors are named {0}")]
    DuplicateTensor(String),
    /// The checkpoint has no tensor of this name.
    #[error("no tensor named {0:?} in this checkpoint")]
    NoSuchTensor(String),
    /// The row index is not below the number of rows of the tensor.
    #[error("tensor {name:?} has {rows} rows, row {row} was asked for")]
    NoSuchRow {
        /// Canonical name of the tensor.
        name: String,
        /// Number of rows that the tensor has.
        rows: usize,
        /// The row that was asked for.
        row: usize,
    },
}

impl FormatError {
    /// A row of small floats with a NaN in it.
    pub(crate) fn holds_nan(tensor: &str, row: usize) -> FormatError {
        FormatError::Safetensors(format!("tensor {}: row {row} holds NaN; fetch the file again", quote(tensor)))
    }

    /// An adapter: weights that only change another model's. Without the adapter, that model would give different answers than intended.
    pub(crate) fn adapter(found: &str) -> FormatError {
        let next = "merge it into its model (PEFT's merge_and_unload) and serve the result";
        FormatError::Unsupported(format!("{found}: an adapter (LoRA), not a model; {next}"))
    }

    /// Attaches `path` to an I/O error, for use in `map_err`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> FormatError {
        let path = path.to_path_buf();
        move |source| FormatError::Io { path, source }
    }
}

/// Shortens text from a file for use in an error message, so that a hostile name cannot flood the log.
pub(crate) fn quote(text: &str) -> String {
    const LIMIT_CHARS: usize = 96;
    if text.chars().count() <= LIMIT_CHARS {
        return format!("{text:?}");
    }
    let head: String = text.chars().take(LIMIT_CHARS).collect();
    format!("{head:?}... ({} bytes)", text.len())
}
