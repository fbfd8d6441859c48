//! The models with a name in Plimsoll, the sources of their files, and the cache.
//!
//! One call does it all: [`resolve`] turns the user's text (`smollm2`, `hf:org/repo`, `./model.gguf`) into a path
//! on this machine and pulls the files first if they are not there yet.
//!
//! | modules | task |
//! | --- | --- |
//! | `model_ref` | parses the user's text |
//! | `catalogue`, `demo` | the table of known models, and the model inside the program itself |
//! | `pull` | decides which files to fetch, and from which source |
//! | `hub`, `http`, `wheels` | fetch |
//! | `fetch` | fetches files from addresses in requests |
//! | `model_dir`, `marker`, `disk` | keep cached files complete and verified |
//! | `cache`, `check` | list, remove and check models |
//! | `progress` | reports to the user |
//!
//! *Invariant*: this crate never looks into a model file. It compares sizes and SHA-256 sums, no more.
//!
//! *Invariant*: a path that [`resolve`] returns never names a half-written file. Bytes arrive in a private partial
//! file, are synced, verified, and only then renamed into place.

#![forbid(unsafe_code)]

mod cache;
mod catalogue;
mod check;
mod demo;
mod disk;
mod entry;
mod error;
mod fetch;
mod http;
mod hub;
mod known;
mod marker;
mod model_dir;
mod model_ref;
mod names;
mod progress;
mod pull;
mod settings;
mod size;
mod wanted;
mod wheels;

use std::path::PathBuf;

pub use cache::{Cache, CachedModel};
pub use catalogue::{CATALOGUE, DEFAULT_MODEL};
pub use check::{FileCheck, FileState};
pub use entry::{Beside, Entry, Source, WheelPart};
pub use error::HubError;
pub use fetch::{FETCH_BYTES, FETCH_PIECE_BYTES, FetchError, FetchRules, Fetcher, host_of};
pub use known::{KNOWN, Kind, Known, Weights};
pub use model_ref::ModelRef;
pub use progress::{Progress, Quiet, TerminalProgress};
pub use pull::pull;
pub use settings::Settings;

/// Turns the user's text into a path on this machine: of a `.gguf` file, or of a checkpoint directory.
///
/// A local path is only checked for existence. A catalogue name or `hf:` reference is looked up in `cache` without
/// touching the network, and pulled if it is missing or has changed since it was verified. Settings come from the
/// environment, see [`Settings::from_env`].
///
/// # Errors
///
/// Any [`HubError`]; its message is meant for the user and names the offending value.
pub fn resolve(spec: &str, cache: &Cache, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
    pull(&ModelRef::parse(spec)?, cache, &Settings::from_env(), progress)
}

/// Whether the hub answers, each step of the connection within `within`, and has the repository.
#[must_use]
pub fn has_repo(repo: &str, within: std::time::Duration) -> bool {
    let from_env = Settings::from_env();
    let settings = Settings { connect_timeout: within, read_timeout: within, retry_pause: within, ..from_env };
    http::Client::new(&settings).is_ok_and(|client| hub::list(&client, repo).is_ok())
}
