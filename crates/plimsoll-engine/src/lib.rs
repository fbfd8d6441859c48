//! The engine: requests, scheduler, cache, sampling.
//!
//! One thread owns device and model; all other threads hold an [`EngineHandle`]. A request is one owned value:
//! dropping it releases all that it holds. **Architecture invariant:** this crate knows nothing of HTTP.

#![forbid(unsafe_code)]

mod accounts;
mod admission;
mod advice;
mod arrival;
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
mod error;
mod generation;
pub mod governor;
pub mod handle;
mod lease;
mod limits;
pub mod loading;
pub mod media;
mod memory_lease;
pub mod metrics;
pub mod options;
pub mod outbox;
mod output;
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
mod shared;
pub mod simulate;
mod sizing;
mod speculation;
pub mod startup;
mod status;
mod step;
mod stress;
pub mod testing;
pub mod trace;
mod trim;
mod watch;
mod watchdog;
pub mod whatif;
mod worker;

pub use cache_stats::CacheReport;
pub use cancel::Cancel;
pub use engine_host::EngineHost;
pub use error::Refusal;
pub use handle::EngineHandle;
pub use limits::Limits;
pub use loading::{CheckpointDefaults, LoadedModel, LoadingError, with_weights};
pub use media::{AudioSpec, ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, VideoSpec};
pub use options::{HttpAlternative, Options};
pub use outbox::{Reader, Watch};
pub use output::{Cause, Delta, FinishReason, TokenLogprobs, TokenOut};
pub use planner::error::Advice;
pub use planner::{Blueprint, EnginePlan, Line, PlanError, Shortfall, check_options};
pub use plimsoll_models::{Grid, PlaceRule};
pub use pooling::{Embed, Pooling};
pub use progress::{Phase, Snapshot};
pub use report::LedgerReport;
pub use request::Request;
pub use sentence::Sentence;
pub use shadow::{DryRun, dry_run};
pub use startup::{Host, NoRoom, StartError, start, start_unless};
