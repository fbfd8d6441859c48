//! The engine thread: one loop that admits, schedules, runs, samples and delivers.
//!
//! The engine thread owns the model, the cache and the scheduler. A failing request ends alone. After a failed step its
//! sequences run one by one past that position. A sequence that fails alone ends with an error. The others get the same
//! bits as without the failure (I7).

mod arrivals;
mod disk;
mod encode;
mod engine_loop;
mod layers;
mod parts;
mod pooling;
mod sample_rows;
mod speculate;
mod step;
mod upkeep;

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use crate::cache::PAGE_TOKENS;
use crate::cache::lease::SharedCache;
use crate::request::state::{Arrival, RequestState, SharedTokenizer};
use crate::runner::Runner;
use crate::runner::step_buffers::StepBuffers;
use crate::sampling::Sampler;
use crate::schedule::prefill_budget::PrefillMeter;
use crate::schedule::scheduler::{Scheduler, StepLimits};
use crate::shared::Shared;
use crate::speculation::pace::Speculation;
pub(crate) use disk::{Disk, DiskParts};
pub(crate) use encode::Encoding;
use layers::Layers;
use parts::{CurrentStep, Drafts, MemoryRelief, Recovery, TokenOutput};

/// The state of the engine thread.
pub(crate) struct Worker<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
    pub epoch: Instant,
    /// Requests that arrived since start.
    arrived: u64,
    limits: StepLimits,
    scheduler: Scheduler<RequestState>,
    prefill_meter: PrefillMeter,
    cache: SharedCache,
    runner: R,
    step: CurrentStep,
    /// A long prompt's chunk between two layers.
    layers: Layers,
    output: TokenOutput,
    drafts: Drafts,
    /// For a model that takes media.
    encoding: Option<Encoding>,
    /// The prefix cache on disk.
    disk: Option<Disk>,
    relief: MemoryRelief,
    recovery: Recovery,
}

/// The parts that a worker is built from.
pub(crate) struct Parts<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
    pub epoch: Instant,
    pub runner: R,
    pub cache: SharedCache,
    pub limits: StepLimits,
    pub speculation: Speculation,
    pub prefill_meter: PrefillMeter,
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
            prefill_meter,
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
            step: CurrentStep {
                media_rows: buffers.room_for_media(),
                buffers,
                entries: Vec::with_capacity(limits.running),
                accepted: Vec::with_capacity(limits.running),
                decodes: 0,
            },
            layers,
            output: TokenOutput { sampler, raw: Vec::with_capacity(shared.limits.vocab_size as usize), tokenizer, eos },
            drafts: Drafts::new(speculation, &limits),
            encoding,
            prefill_meter,
            limits,
            arrivals,
            epoch,
            runner,
            cache,
            shared,
            arrived: 0,
            disk: disk.map(Disk::new),
            relief: MemoryRelief::new(elastic, pages, windows),
            recovery: Recovery::default(),
        };
        if let Some(disk) = &worker.disk {
            let _ = worker.shared.facts.saved.set(disk.saved_prefixes());
        }
        // The self-test has touched all pages.
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
