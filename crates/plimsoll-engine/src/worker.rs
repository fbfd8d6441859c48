//! The engine thread: one loop that admits, schedules, runs, samples and delivers.
//!
//! It owns everything. A request that fails takes only itself along: a step that fails is run again sequence by
//! sequence, and those that fail alone are ended with an error; the others get the very bits they would have got.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use plimsoll_device::DeviceError;
use plimsoll_memory::faults::{self, Site};
use plimsoll_memory::{Component, Region, heap};

use crate::cache::PAGE_TOKENS;
use crate::delivery::{Delivery, SharedTokenizer};
use crate::governor::{Governor, Rung};
use crate::handle::{Arrival, Shared};
use crate::lease::{PageLease, SharedCache};
use crate::outbox::TokenLogprobs;
use crate::room::Failure;
use crate::runner::Runner;
use crate::sampling::{Sampler, top_logprobs};
use crate::scheduler::{Scheduler, Seq, Share, StepLimits};
use crate::step::StepBuffers;
use crate::trim::{Due, Trim};

/// How long an idle engine waits for an arrival before it looks around.
const IDLE_WAIT: Duration = Duration::from_millis(200);

/// Everything the engine thread owns.
pub(crate) struct Worker<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
    pub epoch: Instant,
    runner: R,
    cache: SharedCache,
    scheduler: Scheduler<Delivery>,
    buffers: StepBuffers,
    shares: Vec<Share>,
    sampler: Sampler,
    /// A copy of the row being sampled, kept while its log-probabilities are still to be reported.
    raw: Vec<f32>,
    tokenizer: SharedTokenizer,
    /// The model's own end-of-sequence tokens.
    eos: Vec<u32>,
    arrived: u64,
    governor: Governor,
    /// Readings of the machine that were acted upon.
    readings: u64,
    /// Canaries the heap had given up when this was last looked at.
    canaries: u64,
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
}

/// What a worker is built from.
pub(crate) struct Parts<R> {
    pub shared: Arc<Shared>,
    pub arrivals: Receiver<Arrival>,
    pub epoch: Instant,
    pub runner: R,
    pub cache: SharedCache,
    pub limits: StepLimits,
    pub sampler: Sampler,
    pub tokenizer: SharedTokenizer,
    pub eos: Vec<u32>,
    pub elastic: bool,
}

/// Says that the engine thread has ended, however it ends.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.stopped.store(true, Release);
    }
}

impl<R: Runner> Worker<R> {
    /// Reserves every buffer a step will use.
    pub fn new(parts: Parts<R>) -> Self {
        let Parts { shared, arrivals, epoch, runner, cache, limits, sampler, tokenizer, eos, elastic } = parts;
        let pages = cache.borrow().pool.total();
        let page_ids = limits.running * (shared.limits.max_req_total_len as usize).div_ceil(PAGE_TOKENS);
        // Shared pages are named once per sequence; without sharing the pool bounds the sum.
        let named_max = match &cache.borrow().index {
            Some(_) => page_ids,
            None => page_ids.min(pages),
        };
        let mut worker = Self {
            scheduler: Scheduler::new(limits, cache.clone(), shared.limits.max_waiting as usize),
            buffers: StepBuffers::new(&limits, named_max),
            shares: Vec::with_capacity(limits.running),
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
            readings: 0,
            canaries: heap::canaries_released(),
            evicted: Vec::with_capacity(pages),
            elastic,
            trim: Trim::new(),
            delivered: 0,
            progress: (0, Instant::now()),
            recovered_at: None,
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
        let round = catch_unwind(AssertUnwindSafe(|| {
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
    }

    /// Forgets all state that may be half changed. Requests wait again and are computed anew, with the same bits; if that is of
    /// no use, they end.
    fn start_over(&mut self) {
        self.shared.metrics.recoveries.inc();
        self.scheduler.start_over();
        self.cache.borrow_mut().start_over();
        let done = self.delivered + self.ended();
        if self.recovered_at.replace(done) == Some(done) {
            self.end_all("the engine failed and recovered; the request was lost");
        }
        self.progress = (done, Instant::now());
    }

    /// I10: false when there is work and nothing has been delivered or ended for longer than the limit.
    fn gets_anywhere(&mut self) -> bool {
        let now = self.delivered + self.ended();
        if now != self.progress.0 || self.scheduler.is_empty() {
            self.progress = (now, Instant::now());
        }
        self.progress.1.elapsed() <= self.shared.watchdog.limit()
    }

    /// Requests that have ended, whatever the way.
    fn ended(&self) -> u64 {
        let metrics = &self.shared.metrics;
        metrics.finished.get() + metrics.failed.get() + metrics.aborted.get()
    }

    /// Gives back what is free: now and then, and everything when nothing has been left to do for a while.
    fn trim(&mut self) {
        let idle = self.scheduler.is_empty();
        match self.trim.due(Instant::now(), self.scheduler.running().len(), self.ended(), idle) {
            Due::Nothing => return,
            Due::Free => {}
            Due::All => {
                self.cache.borrow().assert_at_rest();
                if self.elastic {
                    self.cache.borrow_mut().evict_idle(&mut self.evicted);
                    self.shared.metrics.evicted_pages.inc_by(self.evicted.len() as u64);
                }
            }
        }
        self.shared.metrics.trims.inc();
        self.shared.trim.store(true, Release);
        self.give_pages_back();
    }

    /// In elastic mode: every free page's memory goes back to the system.
    fn give_pages_back(&mut self) {
        if self.elastic {
            self.evicted.clear();
            self.cache.borrow().pool.each_free(|page| self.evicted.push(page));
            self.runner.decommit(&self.evicted);
        }
    }

    /// Acts on a new reading of the machine, if there is one: gives way, or climbs back.
    fn govern(&mut self) {
        let Some(reading) = self.shared.gauge.newer(&mut self.readings) else { return };
        let rung = self.governor.observe(&reading);
        self.shared.gauge.stand(rung, &self.shared.metrics);
        if rung >= Rung::EvictPrefix {
            self.cache.borrow_mut().evict_idle(&mut self.evicted);
            self.shared.metrics.evicted_pages.inc_by(self.evicted.len() as u64);
            self.runner.decommit(&self.evicted);
        }
        let prefill_rows = if rung >= Rung::SmallChunks { PAGE_TOKENS } else { usize::MAX };
        let running = if rung >= Rung::Preempt { self.scheduler.running().len().saturating_sub(1) } else { usize::MAX };
        let preempted = self.scheduler.ease(prefill_rows, running);
        self.shared.metrics.preemptions.inc_by(preempted);
        if rung >= Rung::Fail {
            drop(heap::disarm());
            if let Some(mut seq) = self.scheduler.give_up_newest() {
                seq.work.fail("memory ran short on this machine; the newest request was given up");
                self.shared.metrics.failed.inc();
            }
        }
        self.keep_canary(rung);
    }

    /// Says that the canary was given up, and sets another aside once the machine is calm.
    fn keep_canary(&mut self, rung: Rung) {
        let released = heap::canaries_released();
        if released > self.canaries {
            tracing::error!("an allocation failed; the canary was given up for it");
            self.shared.metrics.canaries.inc_by(released - self.canaries);
            self.canaries = released;
        }
        let planned = self.shared.ledger.row(Component::Canary).planned;
        if rung == Rung::Calm && planned > 0 && !heap::armed() {
            match Region::restore_canary(&self.shared.ledger) {
                Ok(canary) => drop(heap::arm(canary)),
                Err(error) => tracing::debug!(%error, "no canary yet"),
            }
        }
    }

    /// Waits for an arrival when there is nothing else to do. False once no handle is left.
    fn wait(&mut self) -> bool {
        if !self.scheduler.is_empty() {
            return true;
        }
        match self.arrivals.recv_timeout(IDLE_WAIT) {
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
        let Arrival { mut request, outbox, arrived, place, mut room } = arrival;
        let tokens = std::mem::take(&mut request.prompt);
        let (prompt_len, total_max) = (tokens.len(), tokens.len() + request.max_tokens as usize);
        let (pages, page_ids) = (std::mem::take(&mut room.pages), std::mem::take(&mut room.page_ids));
        self.scheduler.push(Seq {
            order: self.arrived,
            salt: request.cache_salt,
            prompt_len,
            total_max,
            computed: 0,
            pages: PageLease::new(&self.cache, pages, page_ids),
            logits_from: if request.prompt_logprobs.is_some() { 0 } else { prompt_len - 1 },
            tokens,
            work: Delivery::new(request, outbox, place, arrived, room),
        });
        self.arrived += 1;
    }

    /// One step: drop what nobody waits for, schedule, run, deliver.
    fn turn(&mut self) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |seq| seq.work.abandoned(),
            |_gone| {
                metrics.aborted.inc();
            },
        );
        if self.scheduler.is_empty() {
            return;
        }
        let began = Instant::now();
        faults::site(Site::Scheduler);
        let (shares, events) = self.scheduler.schedule();
        self.shares.clear();
        self.shares.extend_from_slice(shares);
        self.shared.metrics.preemptions.inc_by(events.preempted);
        for share in &self.shares {
            let seq = &mut self.scheduler.running_mut()[share.seq];
            seq.work.scheduled(began, share.start, &self.shared.metrics);
        }
        match self.forward(0..self.shares.len()) {
            Ok(()) => self.deliver(0..self.shares.len()),
            Err(error) => self.isolate(&error),
        }
        self.retire();
        self.shared.metrics.step_seconds.observe(began.elapsed().as_secs_f64());
        self.shared.status.steps.fetch_add(1, Release);
    }

    /// Runs the given shares as one step. A panic in a kernel is an error like any other.
    fn forward(&mut self, which: std::ops::Range<usize>) -> Result<(), String> {
        let step = self.buffers.fill(&self.shares[which], self.scheduler.running());
        match catch_unwind(AssertUnwindSafe(|| self.runner.forward(&step))) {
            Ok(result) => result.map_err(|error: DeviceError| error.to_string()),
            Err(panic) => {
                self.shared.metrics.panics.inc();
                Err(panic_message(panic))
            }
        }
    }

    /// After a failed step: each sequence alone. Whoever fails alone is ended.
    fn isolate(&mut self, error: &str) {
        tracing::error!(error, shares = self.shares.len(), "a step failed; running its sequences one by one");
        self.shared.metrics.failed_steps.inc();
        for i in 0..self.shares.len() {
            match self.forward(i..i + 1) {
                Ok(()) => self.deliver(i..i + 1),
                Err(error) => self.scheduler.running_mut()[self.shares[i].seq].work.fail(error),
            }
        }
    }

    /// Turns the logits of the given shares, which were one step, into tokens.
    fn deliver(&mut self, which: std::ops::Range<usize>) {
        let mut logit_row = 0;
        for i in which {
            let share = self.shares[i];
            let computed = share.rows - share.logit_rows.min(share.rows);
            for j in 0..share.logit_rows {
                let position = share.start + computed + j;
                let outcome = catch_unwind(AssertUnwindSafe(|| self.deliver_row(share.seq, position, logit_row)));
                let work = &mut self.scheduler.running_mut()[share.seq].work;
                match outcome {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => work.fail(error),
                    Err(panic) => {
                        self.shared.metrics.panics.inc();
                        work.fail(panic_message(panic));
                    }
                }
                logit_row += 1;
            }
            let seq = &self.scheduler.running()[share.seq];
            let of_prompt = seq.prompt_len.saturating_sub(share.start).min(share.rows);
            self.shared.metrics.prompt_tokens.inc_by(of_prompt as u64);
            self.delivered += 1;
            if !seq.work.failed() {
                self.scheduler.commit(share);
            }
        }
    }

    /// The logits at `position`: a report for the next prompt token, or the next token itself.
    fn deliver_row(&mut self, index: usize, position: usize, logit_row: usize) -> Result<(), Failure> {
        let seq = &mut self.scheduler.running_mut()[index];
        if seq.work.finished() {
            return Ok(());
        }
        let logits = self.runner.logits(logit_row);
        if let (Some(n), true) = (seq.work.request.prompt_logprobs, position < seq.prompt_len) {
            if position == 0 {
                seq.work.prompt_logprobs(TokenLogprobs::default())?;
            }
            if position + 1 < seq.prompt_len {
                let report = logprobs(logits, seq.tokens[position + 1], n)?;
                seq.work.prompt_logprobs(report)?;
            }
            // Recomputing after a preemption must not report twice.
            seq.logits_from = position + 1;
        }
        if position + 1 < seq.tokens.len() {
            return Ok(());
        }
        if seq.work.request.max_tokens == 0 {
            seq.work.end_without_output();
            return Ok(());
        }
        let report = seq.work.request.logprobs;
        if report.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        if seq.work.generated < seq.work.request.min_tokens {
            let stops = self.eos.iter().chain(&seq.work.request.stop_token_ids);
            stops.for_each(|id| logits[*id as usize] = f32::NEG_INFINITY);
        }
        faults::site(Site::Sampler);
        let work = &mut seq.work;
        let allowed = work.constraint.as_mut().map(|constraint| constraint.allowed()).transpose()?.flatten();
        let position = seq.tokens.len() as u64;
        let sampled = self.sampler.sample(logits, &work.request.sampling, &work.counts, position, allowed);
        let token = sampled.map_err(|error| error.to_string())?.token;
        let report = report.map(|n| logprobs(&self.raw, token, n)).transpose()?;
        seq.tokens.push(token);
        // Recomputing after a preemption needs no logits of positions whose next token is known.
        seq.logits_from = seq.tokens.len() - 1;
        seq.work.token(token, report, &self.tokenizer, &self.eos, &self.shared.metrics)
    }

    /// Takes finished sequences out. What a failed one computed is not left for others to find.
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

    fn refresh_status(&self) {
        let status = &self.shared.status;
        let cache = self.cache.borrow();
        status.running.store(self.scheduler.running().len() as u64, Release);
        status.waiting.store(self.scheduler.waiting().len() as u64, Release);
        status.pages_used.store(cache.pool.used() as u64, Release);
        status.pages_total.store(cache.pool.total() as u64, Release);
        status.pages_cached.store(cache.pool.idle() as u64, Release);
        status.turns.fetch_add(1, Release);
        // A round without a step delivered is no progress.
        let progress = self.progress.1.duration_since(self.epoch);
        status.progress_ms.store(progress.as_millis() as u64, Release);
    }
}

fn logprobs(logits: &[f32], chosen: u32, n: u32) -> Result<TokenLogprobs, Failure> {
    let mut top = Vec::new();
    top.try_reserve_exact(n as usize)?;
    let own = top_logprobs(logits, chosen, n as usize, &mut top).map_err(|error| error.to_string())?;
    Ok(TokenLogprobs { own: Some(own.logprob), top })
}

/// The words of a panic.
fn panic_message(panic: Box<dyn std::any::Any + Send>) -> String {
    let words = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".into())
}
