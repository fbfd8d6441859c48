//! The one error type of this crate. Every message names the offending value, the limit and the flag that sets it.

/// Everything that can be wrong with a medium, its processor's configuration, or the running of an encoder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The item is larger than what was planned and stressed (I6).
    #[error("{what} has {asked} {unit}; the limit is {limit} ({flag})")]
    OverLimit {
        /// The item, as a noun with its article.
        what: &'static str,
        /// What it has.
        asked: u64,
        /// What is allowed.
        limit: u64,
        /// What is counted.
        unit: &'static str,
        /// The flag that sets the limit, or the configuration key it comes from.
        flag: &'static str,
    },
    /// The bytes are not what they claim to be.
    #[error("{what} cannot be read: {why}")]
    Malformed {
        /// The item, as a noun with its article.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The bytes are in a format that is not decoded here.
    #[error("{what} is in a format that is not supported; supported are {supported}")]
    Unsupported {
        /// The item, as a noun with its article.
        what: &'static str,
        /// The formats that work.
        supported: &'static str,
    },
    /// The processor's configuration lacks a value or has an impossible one.
    #[error("the processor's configuration is not usable: {key}: {why}")]
    BadConfig {
        /// The key.
        key: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// There is no room for encoder outputs now: what is held is in use. Worth another try later.
    #[error("the encoder outputs have {free} of {total} pages free and {asked} are needed; the rest is in use")]
    OutputsBusy {
        /// Pages asked for.
        asked: u64,
        /// Pages that are free or can be freed now.
        free: u64,
        /// Pages there are.
        total: u64,
    },
    /// The encoder failed on this item, run alone.
    #[error("the encoder failed on this item: {0}")]
    Encoder(String),
    /// The encoder does not survive its own worst case; start-up must not go on.
    #[error("the worst case of {batch} × {modality} does not run: {why}; reduce --visual-infer-batch-size")]
    WorstCaseFailed {
        /// Items in the stressed batch.
        batch: usize,
        /// Which worst case.
        modality: &'static str,
        /// The encoder's words.
        why: String,
    },
    /// The server is shutting down.
    #[error("the encoder is shutting down")]
    Closed,
}

impl MediaError {
    /// True where the request is at fault (a 4xx), false where the server is.
    pub fn is_the_clients(&self) -> bool {
        matches!(self, Self::OverLimit { .. } | Self::Malformed { .. } | Self::Unsupported { .. })
    }
}
