//! The errors between characters and token ids, in one enum.
//!
//! Every message names the limit or the offending value. People read it in a 4xx answer, or in the log of a server that refused to start.
//! This module does not depend on HTTP.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The error from the operating system.
        source: std::io::Error,
    },
    /// A file is larger than this crate's limit for it.
    #[error("{path} has {bytes} bytes, the limit is {limit}")]
    FileTooLarge {
        /// The file.
        path: String,
        /// Its size in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A tokenizer description is malformed or contradicts itself.
    #[error("bad tokenizer: {0}")]
    BadTokenizer(String),
    /// A tokenizer is well-formed but uses something that is not implemented.
    #[error("unsupported tokenizer: {0}")]
    Unsupported(String),
    /// A GGUF file names a pre-tokenizer that is not in the table.
    #[error("unknown pre-tokenizer {name:?}; known are: {known}")]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
        /// Every known name, separated by commas.
        known: String,
    },
    /// A text is longer than the tokenizer accepts.
    #[error("text of {bytes} bytes exceeds the tokenizer's limit of {limit}")]
    TextTooLong {
        /// Length of the text in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The tokenizer failed on this text.
    #[error("the tokenizer failed: {0}")]
    Encode(String),
    /// A list of stop strings is not acceptable.
    #[error("bad stop strings: {0}")]
    BadStop(String),
    /// A chat template does not compile or is too long.
    #[error("bad chat template: {0}")]
    BadTemplate(String),
    /// A chat template failed on these messages, or refused them with `raise_exception`.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template engine panicked: a bug in the server, not in the request.
    #[error("the chat template's engine failed: {0}")]
    Panicked(String),
    /// A memory allocation failed.
    #[error("no memory for {0}")]
    OutOfMemory(&'static str),
    /// Rendering a chat template went over one of its limits.
    #[error("the chat template exceeded its limit of {limit} {what}")]
    TemplateLimit {
        /// The unit of the limit: steps, or bytes that are written.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

/// Runs `work`, turning a panic inside it into an error made from the panic's message.
///
/// The tokenizer and template libraries get input from clients. A panic there may fail one request, but never ends the process. `work`
/// borrows nothing mutably that outlives the call, so unwinding leaves no broken state.
pub(crate) fn shielded<T>(
    error: fn(String) -> TextError,
    work: impl FnOnce() -> Result<T, TextError>,
) -> Result<T, TextError> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(panic) => {
            let message = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "panic without a message".to_owned());
            Err(error(format!("panic: {message}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        let result: Result<(), _> = shielded(TextError::Encode, || panic!("byte {} is odd", 7));
        let message = result.unwrap_err().to_string();
        assert!(message.contains("byte 7 is odd"), "{message}");
    }
}
