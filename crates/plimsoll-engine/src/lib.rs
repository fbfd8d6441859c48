//! The engine: requests, scheduler, cache, sampling.
//!
//! One thread owns device and model; all other threads hold an [`EngineHandle`]. A request is one owned value:
//! dropping it releases all that it holds. **Architecture invariant:** this crate does not depend on HTTP.

#![forbid(unsafe_code)]

mod api;
pub mod cache;
pub mod handle;
pub mod loading;
pub mod media;
mod memory;
pub mod metrics;
pub mod plan;
pub mod request;
pub mod runner;
pub mod sampling;
mod schedule;
mod shared;
pub mod simulate;
mod speculation;
pub mod startup;
mod status;
pub mod testing;
pub mod trace;
mod watch;
mod worker;

pub use api::cancel::Cancel;
pub use api::error::Refusal;
pub use api::limits::Limits;
pub use api::options::{DeviceChoice, DiskCache, HttpAlternative, Options, PackedCache};
pub use api::output::{Cause, Delta, FinishReason, TokenLogprobs, TokenOut};
pub use api::plan_error::Advice;
pub use api::pooling::{Embed, Pooling};
pub use api::progress::{RequestPhase, Snapshot};
pub use cache::Pin;
pub use cache::stats::CacheReport;
pub use handle::{EngineHandle, SavePrefixError, SavedPrefix, SubmitKind};
pub use loading::rank::{Rank, ranks};
pub use loading::sentence::Sentence;
pub use loading::{CheckpointDefaults, LoadedModel, LoadingError, with_weights};
pub use media::{
    AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, TRANSCRIBES_ONLY, Transcript, VideoSpec,
};
pub use plan::{Blueprint, EnginePlan, GpuLimit, GpuPlan, MemoryLimit, OwnMemory, PlanError, Shortfall, check_options};
pub use plimsoll_formats::Whisper;
pub use plimsoll_models::{EncoderKind, FrameTimes, Grid, PlaceRule, Stretch};
pub use plimsoll_tier::SaveError;
pub use request::Request;
pub use request::outbox::{Reader, Watch};
pub use startup::shadow::{DryRun, dry_run};
pub use startup::{Host, NoRoom, StartError, choose_device, gpus, start, start_unless};
pub use watch::host::EngineHost;
pub use watch::ledger_report::LedgerReport;

// The modules by the paths that other crates use.
pub use api::backlog;
pub use api::cancel;
pub use api::constraint;
pub use api::options;
pub use api::pooling;
pub use api::progress;
pub use cache::stats as cache_stats;
pub use loading::sentence;
pub use memory::governor;
pub use plan as planner;
pub use plan::what_if as whatif;
pub use request::outbox;
pub use runner::cpu;
pub use schedule::scheduler;
pub use watch::host as engine_host;
pub use watch::ledger_report as report;
