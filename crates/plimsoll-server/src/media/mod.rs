//! Pictures, lists of frames and sounds in requests, from what a body says of them to pixels and spectrograms that the engine takes.
//!
//! The rooms: `parse` reads what a body names, `fetch` gets the bytes, `measure` reads headers and says what each will take,
//! `prompt` puts placeholders into prompts, `decode_memory` has requests wait for what `decode` makes pixels in. Files from strangers are held under the byte budget of
//! bodies until they are decoded; decoding and pixels under the engine's [`Staging`](plimsoll_media::Staging). Refused is refused
//! before anything is decoded. What must not be in here: patches, encoders, anything that waits for the engine thread.

mod decode;
mod decode_memory;
mod fetch;
mod fetch_queue;
mod measure;
mod parse;
pub(crate) mod prompt;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::MediaSpec;
use plimsoll_hub::{FetchRules, Fetcher};
use plimsoll_media::audio::AudioLimits;
use plimsoll_media::image::ImageLimits;
use plimsoll_media::{MediaError, Modality};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Semaphore;

pub(crate) use decode::prepare;
use decode_memory::DecodeBudget;
pub(crate) use fetch::fetch;
use fetch_queue::FetchQueue;
pub(crate) use measure::Measured;
pub(crate) use parse::{MediaParser, Medium};

use crate::error::{ApiError, ApiResult, ServeError};
use crate::model_state::ModelState;

/// Pictures and videos that are decoded at once, and as many sounds: a picture never waits for minutes of sound.
pub(crate) const DECODERS: usize = 2;

/// From where media may be fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MediaFetch {
    /// From nowhere: they come in the body, or from a directory of the server's.
    Off,
    /// From public addresses.
    #[default]
    Public,
    /// From private networks and from this machine, too.
    Any,
}

impl std::str::FromStr for MediaFetch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "public" => Ok(Self::Public),
            "any" => Ok(Self::Any),
            other => Err(format!("`{other}` is none of off, public and any")),
        }
    }
}

impl std::fmt::Display for MediaFetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Public => "public",
            Self::Any => "any",
        })
    }
}

/// What the HTTP side takes of media, where the served model takes any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// From where they may be fetched.
    pub fetch: MediaFetch,
    /// Hosts that may be asked; empty for all.
    pub allowed_domains: Vec<String>,
    /// A file must have come within this time.
    pub fetch_timeout: Duration,
    /// Directories from which `file://` may read.
    pub roots: Vec<PathBuf>,
    /// What a picture may be at most, before it is resized.
    pub image: ImageLimits,
    /// What the file of a sound may have in bytes at most. How long it may be, the engine says.
    pub audio_bytes: u64,
    /// A request waits this long for room to decode its media in, and as long for a decoder.
    pub room_timeout: Duration,
    /// Certificates that replace the built-in roots.
    pub root_certificates: Option<PathBuf>,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            fetch: MediaFetch::default(),
            allowed_domains: Vec::new(),
            fetch_timeout: Duration::from_secs(10),
            roots: Vec::new(),
            image: ImageLimits::default(),
            audio_bytes: AudioLimits::default().file_bytes,
            room_timeout: Duration::from_secs(10),
            root_certificates: None,
        }
    }
}

impl MediaConfig {
    /// Bytes of a file of this kind, at most, and the flag that says so.
    fn file_limit(&self, kind: Modality) -> (u64, &'static str) {
        match kind {
            Modality::Image | Modality::Video => (self.image.file_bytes, "--max-image-bytes"),
            Modality::Audio => (self.audio_bytes, "--max-audio-bytes"),
        }
    }
}

/// What all requests with media share.
pub(crate) struct MediaPipeline {
    /// None where nothing may be fetched, or the model takes no media.
    fetcher: Option<std::sync::Arc<Fetcher>>,
    pub fetch_queue: FetchQueue,
    decoders: Arc<Semaphore>,
    /// For sounds.
    listeners: Arc<Semaphore>,
    /// None where the model takes no media.
    rooms: Option<DecodeBudget>,
    pub counts: Counts,
}

/// What has happened to media since start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Items that went to the engine.
    pub prepared: Counter,
    /// Files that were fetched.
    pub fetched: Counter,
    /// Bytes of them.
    pub fetched_bytes: Counter,
    /// Items that were refused for what they are.
    pub refused: Counter,
}

impl MediaPipeline {
    pub fn new(config: &MediaConfig, spec: Option<&MediaSpec>) -> Result<Self, ServeError> {
        let rules = FetchRules {
            private: config.fetch == MediaFetch::Any,
            hosts: config.allowed_domains.clone(),
            timeout: config.fetch_timeout,
        };
        let fetches = spec.is_some() && config.fetch != MediaFetch::Off;
        let fetcher = fetches.then(|| Fetcher::new(&rules, config.root_certificates.as_deref())).transpose();
        let fetcher = fetcher.map_err(|error| ServeError::Config(error.to_string()))?;
        let taken = || ServeError::Config("this engine's media are another server's already".into());
        let rooms = spec.map(|spec| DecodeBudget::of(&spec.staging).ok_or_else(taken)).transpose()?;
        Ok(Self {
            fetcher: fetcher.map(Into::into),
            fetch_queue: FetchQueue::default(),
            decoders: Arc::new(Semaphore::new(DECODERS)),
            listeners: Arc::new(Semaphore::new(DECODERS)),
            rooms,
            counts: Counts::default(),
        })
    }
}

/// Reads the headers of a request's media, and refuses media over a limit. All their bytes must be in memory. Runs on a
/// text worker.
pub(crate) fn measure_all(state: &ModelState, spec: &MediaSpec, media: Vec<Medium>) -> ApiResult<Vec<Measured>> {
    let mut measured = Vec::with_capacity(media.len());
    for medium in media {
        let param = medium.param.clone();
        let one = measure::measure(spec, &state.server.config.media, medium);
        measured.push(one.map_err(|error| {
            state.media_pipeline.counts.refused.inc();
            refused(&param, &error)
        })?);
    }
    let rows = measured.iter().map(|medium| medium.shape.tokens as usize);
    let param = measured.first().map_or("messages", |first| &first.param);
    spec.outputs.check(rows).map_err(|error| refused(param, &error))?;
    Ok(measured)
}

/// What a client is told of a medium at `param`.
fn refused(param: &str, error: &MediaError) -> ApiError {
    match error {
        MediaError::StagingBusy { .. } | MediaError::OutputsBusy { .. } => ApiError::unavailable(error.to_string(), 1),
        error if error.is_the_clients() => ApiError::invalid(param, format!("{param}: {error}")),
        error => ApiError::internal(error.to_string()),
    }
}
