//! The one error type of this crate. Every message names the offending value, the limit and the flag that sets it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Any error of a medium, its processor's configuration, or the run of an encoder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The item is larger than the planned and tested size (I6).
    #[error("{what} has {asked} {unit}; the limit is {limit} ({flag})")]
    OverLimit {
        /// The item, as a noun with its article.
        what: &'static str,
        /// Its size.
        asked: u64,
        /// The limit.
        limit: u64,
        /// The unit of both.
        unit: &'static str,
        /// The flag that sets the limit, or its configuration key.
        flag: &'static str,
    },
    /// The bytes do not have the format that they declare.
    #[error("{what} cannot be read: {why}")]
    Malformed {
        /// The item, as a noun with its article.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// The file has no audio, which the request needs.
    #[error("the file has no audio track")]
    NoAudioTrack,
    /// The bytes are in a format that this server does not decode.
    #[error("{what} is in a format that is not supported; supported are {supported}")]
    Unsupported {
        /// The item, as a noun with its article.
        what: &'static str,
        /// The supported formats.
        supported: &'static str,
    },
    /// The processor's configuration lacks a value or has an impossible one.
    #[error("the processor's configuration is not usable: {key}: {why}")]
    BadConfig {
        /// The key.
        key: &'static str,
        /// The reason.
        why: String,
    },
    /// There is no room for encoder outputs now: all of it is in use. A later try may succeed.
    #[error("the encoder outputs have {free} of {total} pages free and {asked} are needed; the rest is in use")]
    OutputsBusy {
        /// Pages requested.
        asked: u64,
        /// Pages that are free or can be freed now.
        free: u64,
        /// All pages.
        total: u64,
    },
    /// There are no free host bytes to prepare a medium now. A later try may succeed.
    #[error("all but {} of {total} bytes for media on the host are in use and {asked} are needed; try again later", total - used)]
    StagingBusy {
        /// Bytes requested.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// All bytes (`--media-bytes`).
        total: u64,
    },
    /// Planned memory could not be allocated; start-up must end.
    #[error("the system refused {bytes} bytes for {what}; reduce {flag}")]
    OutOfMemory {
        /// The component that the memory was for.
        what: &'static str,
        /// Bytes of it.
        bytes: u64,
        /// The flag that reduces it.
        flag: &'static str,
    },
    /// The encoder failed on this item, run alone.
    #[error("the encoder failed on this item: {0}")]
    Encoder(String),
    /// The encoder fails on its own worst case; start-up must end.
    #[error("the worst case of {batch} × {modality} does not run: {why}; reduce --visual-infer-batch-size")]
    WorstCaseFailed {
        /// Items in the batch of the self-test.
        batch: usize,
        /// The kind of the worst case.
        modality: &'static str,
        /// The encoder's message.
        why: String,
    },
    /// An external decoder could not be started or limited; the item was not read.
    #[error("{program} cannot be run: {why}")]
    Decoder {
        /// The program.
        program: String,
        /// The system's message.
        why: String,
    },
    /// The request has ended.
    #[error("its request ended while it was prepared")]
    Abandoned,
    /// The server is shutting down.
    #[error("the encoder is shutting down")]
    Closed,
}

/// Runs foreign decoders: a panic in one becomes an error of the item, like any other (I7).
pub(crate) fn contained<T>(what: &'static str, work: impl FnOnce() -> Result<T, MediaError>) -> Result<T, MediaError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let why = format!("its decoder failed: {}", panic_words(&*panic));
        Err(MediaError::Malformed { what, why })
    })
}

/// Returns the message of a panic.
pub(crate) fn panic_words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".to_owned())
}

impl MediaError {
    /// Whether the request is at fault (a 4xx); false if the server is.
    pub fn is_the_clients(&self) -> bool {
        matches!(self, Self::OverLimit { .. } | Self::Malformed { .. } | Self::NoAudioTrack | Self::Unsupported { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::{MediaError, contained};

    #[test]
    fn a_panic_in_a_decoder_is_the_items_error() {
        let error = contained("an image", || -> Result<(), MediaError> { panic!("index 7 of {}", 3) }).unwrap_err();
        assert_eq!(error.to_string(), "an image cannot be read: its decoder failed: index 7 of 3");
        assert!(error.is_the_clients());
    }
}
