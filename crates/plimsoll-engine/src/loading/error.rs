//! Errors of opening a model, and the reader of the small files beside a checkpoint.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use plimsoll_formats::FormatError;
use plimsoll_text::TextError;
use serde_json::Value;
use thiserror::Error;

/// The most bytes of a small file beside a checkpoint.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The reason why a model cannot be opened.
#[derive(Debug, Error)]
pub enum LoadingError {
    /// The path is no checkpoint, or the checkpoint is broken.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Tokenizer or chat template are broken.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The tokenizer is not there.
    #[error("no tokenizer: {0}")]
    NoTokenizer(String),
    /// The files of sentence-transformers are broken, or ask for something else than pooling and normalization.
    #[error("sentence-transformers' {0}")]
    Sentence(String),
    /// The pooling of a GGUF file is not supported.
    #[error("the GGUF file's {0} (--pooling mean, last or cls overrides it)")]
    Pooling(String),
    /// The sampling that the checkpoint recommends is broken.
    #[error("{0} (--generation-config off serves without it)")]
    Generation(String),
    /// The tokens of the draft model differ.
    #[error(
        "--draft-model: token {id} is {draft:?} there and {own:?} in the model: use a draft model of the same vocabulary"
    )]
    DraftTokens {
        /// The first token that differs.
        id: u32,
        /// The draft model's spelling.
        draft: String,
        /// The model's spelling.
        own: String,
    },
    /// The checkpoint holds a configuration only.
    #[error("'{0}' has a configuration but no weights: it can be planned, not served")]
    NoWeights(String),
}

/// Reads a small JSON file; the error is a message.
pub(crate) fn small_json(file: &Path) -> Result<Value, String> {
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|opened| opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("is longer than {FILE_BYTES_MAX} bytes"));
    }
    serde_json::from_slice(&bytes).map_err(|error| error.to_string())
}
