//! The engine thread: one loop that admits, schedules, runs, samples and delivers.
//!
//! It owns everything. A request that fails takes only itself along: after a step that fails its sequences run one by one
//! until each has passed that place, and those that fail alone are ended with an error; the others get the very bits they
//! would have got.

mod deliver;
mod encode;
mod layers;
mod pool;
mod speculate;
mod upkeep;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use plimsoll_device::{DeviceError, MediaRows, StepInput};
use plimsoll_memory::broken;
use plimsoll_memory::faults::{self, Site};
use plimsoll_memory::heap::GivenUp;

use crate::arrival::Arrival;
use crate::cache::PAGE_TOKENS;
use crate::degradation::DegradationLevel;
use crate::governor::Governor;
use crate::lease::SharedCache;
use crate::metrics::Metrics;
use crate::pooling::Pooling;
use crate::prefill_budget::PrefillMeter;
use crate::request_state::{RequestState, SharedTokenizer};
use crate::runner::Runner;
use crate::sampling::Sampler;
use crate::scheduler::{NewSeq, Pooled, Scheduler, Seq, Share, StepLimits};
use crate::shared::Shared;
use crate::speculation::{Done, Next, Pace, Speculation};
use crate::step::{DraftRows, StepBuffers, reuse};
use crate::trim::Trim;
pub(crate) use encode::Encoding;
use layers::Layers;
use speculate::{Lane, Tally};

/// How long an idle engine waits for an arrival before it looks around.
const IDLE_WAIT: Duration = Duration::from_millis(200);

/// How long the engine waits at a time for a grammar's next tokens when no sequence can go on without them.
const HELD_WAIT: Duration = Duration::from_millis(5);

/// Everything the engine thread owns.
pub(crate) struct Worker<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
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
    /// How many rows of each share count, drafts that missed left out.
    counted: Vec<usize>,
    /// Drafts are taken as they are.
    optimistic: bool,
    /// Drafts a sequence may have at once.
    drafts_max: usize,
    pace: Pace,
    prefill_budget: PrefillMeter,
    speculation: Tally,
    /// Sequences that decode in the current step.
    decodes: usize,
    /// The next pass of the draft head, and the sequences that get guesses from it.
    passes: Vec<DraftRows>,
    lanes: Vec<Lane>,
    sampler: Sampler,
    /// A copy of the row being sampled, kept while its log-probabilities are still to be reported.
    raw: Vec<f32>,
    tokenizer: SharedTokenizer,
    /// The model's own end-of-sequence tokens.
    eos: Vec<u32>,
    arrived: u64,
    governor: Governor,
    /// The last level has given the emergency reserve up, and memory is not back yet.
    given_up: Option<GivenUp>,
    /// Readings of the machine that were acted upon.
    readings: u64,
    /// Pages on their way back to the system, reused.
    evicted: Vec<u32>,
    /// Pages are resident only while they are used.
    elastic: bool,
    trim: Trim,
    /// Shares delivered since start: how far the engine has got.
    delivered: u64,
    /// What that and the requests ended came to when it was last looked at, and when they had last changed.
    progress: (u64, Instant),
    /// How far it had got when it last started over.
    recovered_at: Option<u64>,
    /// The last step had a row that is no number.
    mistrusts: bool,
}

/// What a worker is built from.
pub(crate) struct Parts<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
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
}

/// Says that the engine thread has ended, however it ends.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.stopped.store(true, Release);
        self.0.cached.wake();
    }
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
        } = parts;
        let pages = cache.borrow().pool.total();
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
            lanes: Vec::with_capacity(limits.running),
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
            elastic,
            trim: Trim::new(),
            delivered: 0,
            progress: (0, Instant::now()),
            recovered_at: None,
            mistrusts: false,
        };
        // The proof has touched them all.
        worker.give_pages_back();
        // Gauges are right from the first look, before the first step.
        worker.refresh_status();
        worker
    }

    /// Runs until every handle is gone or a stop is asked for.
    pub fn run(mut self) {
        let _stopped = Stopped(Arc::clone(&self.shared));
        loop {
            let open = self.wait();
            self.round();
            if self.shared.stop.load(Acquire) {
                while let Ok(arrival) = self.arrivals.try_recv() {
                    self.accept(arrival);
                }
                self.end_all("the server is shutting down");
                self.refresh_status();
                break;
            }
            if !open && self.scheduler.is_empty() {
                break;
            }
        }
    }

    /// One round without waiting: arrivals, a step, the governor, memory that is free. A panic costs the requests in flight.
    pub fn round(&mut self) {
        let clear = self.shared.cached.asked();
        let round = catch_unwind(AssertUnwindSafe(|| {
            if clear.is_some() && !broken("V-G") {
                self.cache.borrow_mut().clear();
                self.forget_outputs();
                self.give_pages_back();
            }
            while let Ok(arrival) = self.arrivals.try_recv() {
                self.accept(arrival);
            }
            self.turn();
            self.govern();
            self.trim();
        }));
        if let Err(panic) = round {
            self.shared.metrics.panics.inc();
            let panic = panic_message(panic);
            tracing::error!(panic, "the engine panicked outside any request");
            self.start_over();
        } else if !self.gets_anywhere() {
            tracing::error!("the engine goes round without getting anywhere");
            self.start_over();
        }
        self.refresh_status();
        clear.into_iter().for_each(|asked| self.shared.cached.done(asked));
    }

    /// Waits for an arrival when there is nothing else to do. False once no handle is left.
    fn wait(&mut self) -> bool {
        if !self.scheduler.is_empty() {
            return true;
        }
        match self.arrivals.recv_timeout(if broken("V-65") { Duration::ZERO } else { IDLE_WAIT }) {
            Ok(arrival) => self.accept(arrival),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    /// Queues an arrival. A panic ends it alone: its outbox says so when it is dropped.
    fn accept(&mut self, arrival: Arrival) {
        if catch_unwind(AssertUnwindSafe(|| self.queue(arrival))).is_err() {
            tracing::error!("a request panicked on its way in");
            self.shared.metrics.panics.inc();
            self.shared.metrics.failed.inc();
        }
    }

    fn queue(&mut self, arrival: Arrival) {
        faults::site(Site::Accept);
        let Arrival { mut request, outbox, timestamps, place, mut room } = arrival;
        let tokens = std::mem::take(&mut request.prompt);
        let total_max = tokens.len() + request.max_tokens as usize;
        if let Some(first) = self.scheduler.running().first().filter(|_| broken("V-J")) {
            request.sampling.clone_from(&first.work.request.sampling);
        }
        // An unchecked draft could break the form; a checked one is compared with a token that keeps it.
        let drafts = self.drafts_max > 0 && !(self.optimistic && room.constraint.is_some());
        let new_seq = NewSeq {
            order: self.arrived,
            salt: if broken("V-66") { request.sampling.temperature.to_bits().into() } else { request.cache_salt },
            total_max,
            logits_from: if request.prompt_logprobs.is_some() { 0 } else { tokens.len() - 1 },
            pooled: request.embed.map(|embed| Pooled {
                logits: embed.pooling == Pooling::Score,
                every_row: embed.pooling.needs_every_row(),
                second_at: embed.second_at.map_or(usize::MAX, |at| at as usize),
            }),
            slots: self.limits.slots,
            media: std::mem::take(&mut room.media),
            pages: std::mem::take(&mut room.pages),
            page_ids: std::mem::take(&mut room.page_ids),
            tokens,
            work: RequestState::new(request, outbox, place, timestamps, room, drafts),
        };
        self.scheduler.push(Seq::new(&self.cache, new_seq));
        self.arrived += 1;
    }

    /// One step: drop abandoned sequences, schedule, run, deliver; then compute layers of a long prompt.
    fn turn(&mut self) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |seq| seq.work.abandoned(),
            |_gone| {
                metrics.aborted.inc();
            },
        );
        self.drop_layers();
        if self.scheduler.is_empty() || faults::asked(Site::NoStep) {
            return;
        }
        self.encode();
        self.hold();
        let began = Instant::now();
        faults::site(Site::Scheduler);
        let next = self.schedule();
        if !self.shares.is_empty() {
            self.step(next, began);
        } else if self.scheduler.layered().is_none() {
            // All sequences wait for the encoder or for a grammar's next tokens.
            if let Some(seq) = self.scheduler.running_mut().iter_mut().find(|seq| seq.held) {
                seq.work.mask_ready(HELD_WAIT);
            }
            return self.retire();
        }
        self.advance_layers(next);
        self.retire();
        self.shared.metrics.step_seconds.observe(began.elapsed().as_secs_f64());
        self.shared.status.steps.fetch_add(1, Release);
    }

    /// Keeps a sequence out of steps while its grammar would make a step wait, also a sequence that is about to start.
    /// Other sequences go on. Each sequence is asked twice: a later one may begin slow work that an earlier one must
    /// then wait for.
    fn hold(&mut self) {
        for _ in 0..2 {
            for seq in self.scheduler.soon_mut() {
                seq.held = !seq.work.mask_ready(Duration::ZERO);
            }
        }
    }

    /// Runs the shares that were scheduled, and delivers what comes of them.
    fn step(&mut self, next: Next, began: Instant) {
        for share in &self.shares {
            enters(&mut self.scheduler.running_mut()[share.seq], share.start, began, &self.shared);
        }
        match self.forward() {
            Ok(()) => {
                let drafting = self.settle(next);
                self.observe_pace(began, drafting);
            }
            Err(error) => self.quarantine(error),
        }
    }

    /// Fills the next step. Says what is to be done about drafts in it.
    fn schedule(&mut self) -> Next {
        self.decodes = self.scheduler.running().iter().filter(|seq| seq.decoding() && !seq.held).count();
        let rests = self.drafts_max == 0 || self.governor.level() >= DegradationLevel::SpeculationOff;
        let next = if rests { Next::PLAIN } else { self.pace.next(self.decodes) };
        if !next.check || !next.draft {
            self.scheduler.running_mut().iter_mut().for_each(|seq| seq.drafts.clear());
        }
        self.scheduler.prompts_take(self.prefill_budget.rows(self.decodes));
        let (shares, events) = self.scheduler.schedule();
        self.shares.clear();
        self.shares.extend_from_slice(shares);
        self.shared.metrics.preemptions.inc_by(events.preempted);
        next
    }

    /// Runs the shares as one step.
    fn forward(&mut self) -> Result<(), String> {
        let mut media = std::mem::take(&mut self.media_rows);
        let step = self.buffers.fill(&self.shares, self.scheduler.running(), &mut media);
        let step = StepInput { media: &media, ..step };
        let ran = run_guarded(&self.shared.metrics, || self.runner.forward(&step));
        self.media_rows = reuse(media);
        ran
    }

    /// After shares were computed: tokens, drafts, and prompts for others to share. Says when drafting began.
    fn settle(&mut self, next: Next) -> Instant {
        self.deliver();
        for share in &self.shares {
            self.scheduler.running_mut()[share.seq].work.tell();
        }
        let drafting = Instant::now();
        match self.limits.draft_head {
            true => self.draft(next),
            false if self.drafts_max > 0 => self.look_up(next),
            false => {}
        }
        for share in &self.shares {
            if !self.scheduler.running()[share.seq].work.failed() {
                self.scheduler.publish(share.seq);
            }
        }
        drafting
    }

    fn observe_pace(&mut self, began: Instant, drafting: Instant) {
        let now = Instant::now();
        let shares = self.shares.iter().zip(&self.counted);
        let decoding = shares.filter(|(share, _)| share.rows == 1 + share.drafts);
        let (decodes, tokens) = decoding.fold((0, 0), |(n, tokens), (_, counted)| (n + 1, tokens + counted));
        let rows: usize = self.shares.iter().map(|share| share.rows).sum();
        let drafts: usize = self.shares.iter().map(|share| share.drafts).sum();
        let (prompt_rows, seconds) = (rows - decodes - drafts, (now - began).as_secs_f64());
        self.prefill_budget.observe(decodes, prompt_rows, seconds);
        if self.drafts_max > 0 {
            let draft_seconds = (now - drafting).as_secs_f64();
            self.pace.observe(&Done { decodes, prompt_rows, drafts, tokens, seconds, draft_seconds });
        }
    }

    /// After a failed step: a sequence that was alone in it fails. Otherwise each of the step's sequences will run
    /// alone.
    fn quarantine(&mut self, error: String) {
        self.shared.metrics.failed_steps.inc();
        if self.scheduler.step_failed() {
            tracing::error!(error, shares = self.shares.len(), "a step failed; running its sequences one by one");
            return;
        }
        for share in &self.shares {
            self.scheduler.running_mut()[share.seq].work.fail(error.clone());
        }
    }

    /// Takes finished sequences out. What a failed one computed in its last step is not left for others to find; where that was no number
    /// nothing is, nor what others hold now, since what it was computed from may have been found already.
    fn retire(&mut self) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |seq| seq.work.failed(),
            |_gone| {
                metrics.failed.inc();
            },
        );
        for index in (0..self.scheduler.running().len()).rev() {
            if self.scheduler.running()[index].work.finished() {
                self.scheduler.finish(index);
                self.shared.metrics.finished.inc();
            }
        }
        if std::mem::take(&mut self.mistrusts) {
            tracing::error!("the model computed what is no number: every cached prefix is forgotten");
            self.cache.borrow_mut().doubt();
            self.forget_outputs();
        }
    }

    /// Drops encoder outputs that no request holds; they are encoded again when needed.
    fn forget_outputs(&self) {
        self.encoding.iter().for_each(|encoding| encoding.spec.outputs.clear());
    }

    fn end_all(&mut self, message: &str) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |_| true,
            |mut seq| {
                seq.work.fail(message);
                metrics.failed.inc();
            },
        );
    }
}

/// Notes the first step of a sequence, which begins where the cache's part of its prompt ends.
fn enters(seq: &mut Seq<RequestState>, start: usize, began: Instant, shared: &Shared) {
    let first = seq.work.scheduled(began, start, &shared.metrics);
    if first && seq.reuses() && shared.status.prefix_cache.load(Acquire) {
        shared.cached.looked_up(start, seq.prompt_len);
    }
}

/// What a runner is asked for. A panic in a kernel is an error like any other.
fn run_guarded<T>(metrics: &Metrics, run: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            metrics.panics.inc();
            Err(panic_message(panic))
        }
    }
}

/// The words of a panic.
fn panic_message(panic: Box<dyn std::any::Any + Send>) -> String {
    let words = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}
