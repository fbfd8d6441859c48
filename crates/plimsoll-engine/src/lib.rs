//! The engine: requests, scheduler, cache, sampling.
//!
//! One thread owns device and model; all other threads hold an [`EngineHandle`]. A request is one owned value:
//! dropping it releases all that it holds. **Architecture invariant:** this crate knows nothing of HTTP.

#![forbid(unsafe_code)]

mod api;
pub mod cache;
pub mod loading;
pub mod media;
mod memory;
pub mod metrics;
pub mod plan;
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
mod worker;

pub use api::cancel::Cancel;
pub use api::error::Refusal;
pub use api::handle::{EngineHandle, SavePrefixError, SavedPrefix, SubmitKind};
pub use api::limits::Limits;
pub use api::options::{DeviceChoice, DiskCache, HttpAlternative, Options, PackedCache};
pub use api::outbox::{Reader, Watch};
pub use api::output::{Cause, Delta, FinishReason, TokenLogprobs, TokenOut};
pub use api::pooling::{Embed, Pooling};
pub use api::progress::{Phase, Snapshot};
pub use api::request::Request;
pub use cache::Pin;
pub use cache::stats::CacheReport;
pub use loading::sentence::Sentence;
pub use loading::{CheckpointDefaults, LoadedModel, LoadingError, with_weights};
pub use media::{
    AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, TRANSCRIBES_ONLY, Transcript, VideoSpec,
};
pub use memory::host::EngineHost;
pub use memory::ledger_report::LedgerReport;
pub use plan::error::Advice;
pub use plan::{Blueprint, EnginePlan, GpuLine, GpuPlan, Line, OwnMemory, PlanError, Shortfall, check_options};
pub use plimsoll_formats::Whisper;
pub use plimsoll_models::{FrameTimes, Grid, PlaceRule};
pub use plimsoll_tier::SaveError;
pub use startup::shadow::{DryRun, dry_run};
pub use startup::{Host, NoRoom, StartError, gpus, settle_device, start, start_unless};

// The modules by the paths that other crates use.
pub use api::backlog;
pub use api::cancel;
pub use api::constraint;
pub use api::handle;
pub use api::options;
pub use api::outbox;
pub use api::pooling;
pub use api::progress;
pub use api::request;
pub use cache::stats as cache_stats;
pub use loading::sentence;
pub use memory::governor;
pub use memory::host as engine_host;
pub use memory::ledger_report as report;
pub use plan as planner;
pub use plan::what_if as whatif;
pub use runner::cpu;
pub use schedule::scheduler;
