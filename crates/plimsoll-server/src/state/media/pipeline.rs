//! State shared by all requests with media: the fetcher, the queues for fetching and decoding, and the counters.

use std::sync::Arc;

use plimsoll_engine::MediaSpec;
use plimsoll_hub::{FetchRules, Fetcher};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Semaphore;

use super::config::{DECODERS, MediaConfig, MediaFetch};
use super::decode_memory::DecodeBudget;
use super::fetch_queue::FetchQueue;
use crate::http::error::ServeError;

/// State shared by all requests with media.
pub(crate) struct MediaPipeline {
    /// None with `--media-fetch off`.
    pub(crate) fetcher: Option<Arc<Fetcher>>,
    pub fetch_queue: FetchQueue,
    pub(crate) decoders: Arc<Semaphore>,
    /// Permits for decoding audio clips.
    pub(crate) listeners: Arc<Semaphore>,
    /// None where the model takes no media.
    pub(crate) decode_budget: Option<DecodeBudget>,
    pub counts: Counts,
}

/// Counters of media since start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Items that went to the engine.
    pub prepared: Counter,
    /// Files that were fetched.
    pub fetched: Counter,
    /// Bytes of the fetched files.
    pub fetched_bytes: Counter,
    /// Files that ffmpeg has read before they were measured.
    pub ffmpeg_runs: Counter,
    /// Windows of audio clips that are transcribed window by window.
    pub windows: Counter,
    /// Items that were refused because of their content or size.
    pub refused: Counter,
}

impl MediaPipeline {
    pub fn new(config: &MediaConfig, spec: Option<&MediaSpec>) -> Result<Self, ServeError> {
        let rules = FetchRules {
            private: config.fetch == MediaFetch::Any,
            hosts: config.allowed_domains.clone(),
            timeout: config.fetch_timeout,
        };
        let fetches = config.fetch != MediaFetch::Off;
        let fetcher = fetches.then(|| Fetcher::new(&rules, config.root_certificates.as_deref())).transpose();
        let fetcher = fetcher.map_err(|error| ServeError::Config(error.to_string()))?;
        let taken = || ServeError::Config("this engine's media are another server's already".into());
        let decode_budget = spec.map(|spec| DecodeBudget::of(&spec.staging).ok_or_else(taken)).transpose()?;
        Ok(Self {
            fetcher: fetcher.map(Into::into),
            fetch_queue: FetchQueue::default(),
            decoders: Arc::new(Semaphore::new(DECODERS)),
            listeners: Arc::new(Semaphore::new(DECODERS)),
            decode_budget,
            counts: Counts::default(),
        })
    }
}
