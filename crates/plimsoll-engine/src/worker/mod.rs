//! The engine thread: one loop that admits, schedules, runs, samples and delivers.
//!
//! The engine thread owns the model, the cache and the scheduler. A failing request ends alone. After a failed step its
//! sequences run one by one past that position. A sequence that fails alone ends with an error. The others get the same
//! bits as without the failure (I7).

mod arrivals;
mod disk;
mod encode;
mod engine_loop;
mod iteration;
mod layers;
mod pool;
pub(crate) mod request_state;
mod sample_rows;
mod speculate;
mod upkeep;
pub(crate) mod watchdog;

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use plimsoll_device::MediaRows;
use plimsoll_memory::heap::GivenUp;

use crate::cache::PAGE_TOKENS;
use crate::cache::lease::SharedCache;
use crate::memory::governor::Governor;
use crate::memory::trim::Trim;
use crate::runner::Runner;
use crate::runner::step::{DraftRows, StepBuffers};
use crate::sampling::Sampler;
use crate::schedule::prefill_budget::PrefillMeter;
use crate::schedule::scheduler::{Scheduler, Share, StepLimits};
use crate::shared::Shared;
use crate::speculation::pace::{Pace, Speculation};
use crate::worker::request_state::Message;
use crate::worker::request_state::{RequestState, SharedTokenizer};
pub(crate) use disk::{Disk, DiskParts};
pub(crate) use encode::Encoding;
use layers::Layers;
use speculate::{DraftedSeq, Tally};

/// The state of the engine thread.
pub(crate) struct Worker<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Message>,
    pub epoch: Instant,
    runner: R,
    cache: SharedCache,
    scheduler: Scheduler<RequestState>,
    limits: StepLimits,
    buffers: StepBuffers,
    /// A long prompt's chunk between two layers.
    layers: Layers,
    /// Pieces of encoder outputs in a step; empty between steps.
    media_rows: Vec<MediaRows<'static>>,
    /// For a model that takes media.
    encoding: Option<Encoding>,
    shares: Vec<Share>,
    /// Rows of each share that count: all but drafts that were rejected.
    counted: Vec<usize>,
    /// Drafts are accepted without verification.
    optimistic: bool,
    /// Drafts a sequence may have at once.
    drafts_max: usize,
    pace: Pace,
    prefill_budget: PrefillMeter,
    speculation: Tally,
    /// Sequences that decode in the current step.
    decodes: usize,
    /// The next pass of the draft head, and the sequences that get drafts from it.
    passes: Vec<DraftRows>,
    drafting: Vec<DraftedSeq>,
    sampler: Sampler,
    /// A copy of the row being sampled, kept while its log-probabilities are still to be reported.
    raw: Vec<f32>,
    tokenizer: SharedTokenizer,
    /// The model's own end-of-sequence tokens.
    eos: Vec<u32>,
    arrived: u64,
    governor: Governor,
    /// The emergency reserve, if it was given up and not taken back yet.
    given_up: Option<GivenUp>,
    /// The last memory reading that was handled.
    readings: u64,
    /// Pages on their way back to the system, reused.
    evicted: Vec<u32>,
    evicted_windows: Vec<u32>,
    /// Pages are resident only while they are used.
    elastic: bool,
    trim: Trim,
    /// Shares delivered since start, a measure of progress.
    delivered: u64,
    /// Delivered shares, ended requests and encoded items at the last check, and when the sum last changed.
    progress: (u64, Instant),
    /// `delivered` and ended requests at the last recovery.
    recovered_at: Option<u64>,
    /// A device was lost and could not be opened again.
    device_gone: bool,
    /// The last step had non-finite logits: the prefix cache must be cleared.
    non_finite: bool,
    /// The prefix cache on disk.
    disk: Option<Disk>,
}

/// What a worker is built from.
pub(crate) struct Parts<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Message>,
    pub epoch: Instant,
    pub runner: R,
    pub cache: SharedCache,
    pub limits: StepLimits,
    pub speculation: Speculation,
    pub prefill_budget: PrefillMeter,
    pub sampler: Sampler,
    /// For a model that takes media.
    pub encoding: Option<Encoding>,
    pub tokenizer: SharedTokenizer,
    pub eos: Vec<u32>,
    pub elastic: bool,
    /// The prefix cache on disk, if there is one.
    pub disk: Option<DiskParts>,
}

impl<R: Runner> Worker<R> {
    /// Reserves every buffer a step will use.
    pub fn new(parts: Parts<R>) -> Self {
        let Parts {
            shared,
            arrivals,
            epoch,
            runner,
            cache,
            limits,
            speculation,
            prefill_budget,
            sampler,
            encoding,
            tokenizer,
            eos,
            elastic,
            disk,
        } = parts;
        let pages = cache.borrow().pool.total();
        let windows = cache.borrow().windows.as_ref().map_or(0, |windows| windows.pool().total());
        let page_ids = limits.running * (shared.limits.max_req_total_len as usize).div_ceil(PAGE_TOKENS);
        // Shared pages are named once per sequence; without sharing the pool bounds the sum.
        let named_max = match &cache.borrow().index {
            Some(_) => page_ids,
            // Pages of the step's own: each sequence may have one that is not full.
            None if limits.encoder_batch => page_ids.min(limits.running + limits.rows / PAGE_TOKENS),
            None => page_ids.min(pages),
        };
        let buffers = StepBuffers::new(&limits, named_max);
        let layers = Layers::new(&limits, (shared.limits.max_req_total_len as usize).div_ceil(PAGE_TOKENS));
        let mut worker = Self {
            scheduler: Scheduler::new(limits, cache.clone(), shared.limits.max_waiting as usize),
            media_rows: buffers.room_for_media(),
            buffers,
            layers,
            encoding,
            shares: Vec::with_capacity(limits.running),
            counted: Vec::with_capacity(limits.running),
            optimistic: speculation.optimistic,
            drafts_max: limits.drafts,
            pace: Pace::new(speculation.adaptive, speculation.cost),
            prefill_budget,
            speculation: Tally::default(),
            decodes: 0,
            passes: Vec::with_capacity(limits.running),
            drafting: Vec::with_capacity(limits.running),
            limits,
            arrivals,
            epoch,
            runner,
            cache,
            sampler,
            raw: Vec::with_capacity(shared.limits.vocab_size as usize),
            shared,
            tokenizer,
            eos,
            arrived: 0,
            governor: Governor::default(),
            given_up: None,
            readings: 0,
            evicted: Vec::with_capacity(pages),
            evicted_windows: Vec::with_capacity(windows),
            elastic,
            trim: Trim::new(),
            delivered: 0,
            progress: (0, Instant::now()),
            recovered_at: None,
            device_gone: false,
            non_finite: false,
            disk: disk.map(Disk::new),
        };
        if let Some(disk) = &worker.disk {
            let _ = worker.shared.saved.set(disk.saved_prefixes());
        }
        // The proof has touched them all.
        worker.give_pages_back();
        // Gauges are right from the first look, before the first step.
        worker.refresh_status();
        worker
    }
}

/// The message of a panic.
fn panic_message(panic: Box<dyn std::any::Any + Send>) -> String {
    let words = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}
