//! The engine: requests, scheduler, cache, sampling.
//!
//! One thread owns device and model; all other threads hold an [`EngineHandle`]. A request is one owned value:
//! dropping it releases all that it holds. **Architecture invariant:** this crate knows nothing of HTTP.

#![forbid(unsafe_code)]

mod accounts;
mod advice;
pub mod backlog;
mod byte_reservation;
pub mod cache;
pub mod cache_stats;
pub mod cancel;
pub mod constraint;
pub mod cpu;
mod degradation;
mod emergency_reserve;
mod encoder_batch;
pub mod engine_host;
mod generation;
pub mod governor;
pub mod handle;
mod lease;
pub mod loading;
pub mod media;
mod memory_lease;
pub mod metrics;
pub mod options;
pub mod outbox;
pub mod planner;
pub mod pooling;
mod prefill_budget;
mod process;
pub mod progress;
mod prompt_lookup;
pub mod report;
pub mod request;
mod request_state;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod sentence;
mod shadow;
pub mod simulate;
mod sizing;
mod speculation;
pub mod startup;
mod step;
mod stress;
pub mod testing;
pub mod trace;
mod trim;
mod watch;
mod watchdog;
pub mod whatif;
mod worker;

pub use advice::Advice;
pub use cache_stats::CacheReport;
pub use cancel::Cancel;
pub use engine_host::{EngineHost, NoRoom};
pub use handle::EngineHandle;
pub use loading::{CheckpointDefaults, LoadedModel, LoadingError, with_weights};
pub use media::{AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, VideoSpec};
pub use options::{HttpAlternative, Options};
pub use outbox::{Cause, Delta, FinishReason, Reader, TokenLogprobs, TokenOut};
pub use planner::{Blueprint, EnginePlan, Line, PlanError, Shortfall, check_options};
pub use plimsoll_models::{Grid, PlaceRule};
pub use pooling::{Embed, Pooling};
pub use progress::{Phase, Snapshot, Watch};
pub use report::LedgerReport;
pub use request::{Limits, Refusal, Request};
pub use sentence::Sentence;
pub use shadow::{DryRun, dry_run};
pub use startup::{Host, StartError, start, start_unless};
