//! A scripted engine: the usual handle, and a thread that answers from a script instead of a model.
//!
//! For tests of what sits above the engine (HTTP, streaming, aborts, drain, overload), which must not need weights. It
//! receives arrivals through the same channel, sees aborts the same way and keeps the same gauges. It does not
//! schedule: every request advances at its own script's pace.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plimsoll_memory::{Ledger, Plan};
use plimsoll_text::Tokenizer;

use crate::api::limits::Limits;
use crate::api::output::{Cause, FinishReason, TokenLogprobs, TokenOut};
use crate::api::progress::RequestPhase;
use crate::cache::{KvCache, KvEventLog, PAGE_TOKENS, PagePool, PrefixIndex, StatePool, WindowPool};
use crate::handle::EngineHandle;
use crate::media::MediaSpec;
use crate::request::Request;
use crate::request::state::{Arrival, RequestState};
use crate::runner::Runner;
use crate::sampling::Sampler;
use crate::schedule::prefill_budget::PrefillMeter;
use crate::schedule::scheduler::{NewSeq, StepLimits};
use crate::shared::Shared;
use crate::worker::{Encoding, Parts, Worker};

pub use crate::speculation::pace::Speculation;

/// One action of the scripted engine for a request.
#[derive(Clone, Debug)]
pub enum Step {
    /// Does nothing for this long.
    Wait(Duration),
    /// Produces a token with its text (empty: the text is held back).
    Token(u32, String),
    /// Reports this many prompt tokens as found in the cache.
    Cached(u32),
    /// Reports checked drafts, and how many of them were right.
    Drafts(u32, u32),
    /// Ends the request well, with the stop string that ended it, if any.
    Finish(FinishReason, Option<String>),
    /// Ends a pooled request with these numbers.
    Pooled(Vec<f32>),
    /// Ends the request with an error.
    Fail(String),
    /// Ends the request because memory ran short.
    RunShort,
    /// Ends the whole engine: every request's outbox is dropped as it is.
    StopEngine,
}

/// The actions of the engine for one request. After the last action without an end, the request hangs until it is aborted.
pub type Script = Box<dyn Iterator<Item = Step> + Send>;

/// The state of the scripted engine that a test can read, and the switch that freezes it.
#[derive(Debug, Default)]
pub struct Observed {
    /// Every request that arrived, in order.
    pub requests: Mutex<Vec<Request>>,
    /// Requests with structured output.
    pub constrained: AtomicU64,
    /// Requests that are being answered.
    pub active: AtomicU64,
    /// Requests with a reader that was dropped before the end.
    pub aborted: AtomicU64,
    /// Requests that ended by their script.
    pub ended: AtomicU64,
    /// While set, the engine takes no step and reports no progress.
    pub frozen: AtomicBool,
}

/// A running scripted engine.
pub struct Scripted {
    /// The handle.
    pub handle: EngineHandle,
    /// The state of the engine thread.
    pub observed: Arc<Observed>,
}

/// Small limits for tests: a context of 512 tokens, 8 running requests, 8 waiting.
pub fn limits() -> Limits {
    Limits {
        max_req_total_len: 512,
        max_total_token_num: 8 * 512,
        running_max_req_size: 8,
        max_waiting: 8,
        batch_max_tokens: 128,
        vocab_size: 258,
        max_logprobs: 20,
        max_stop_strings: 16,
        max_stop_bytes: 256,
        host_bytes: 16 << 20,
        encoder: false,
        embedding_size: 8,
        labels: 0,
        dense: false,
        token_types: 0,
    }
}

/// Starts a scripted engine. `script` is called once for every request; the thread ends with the last handle.
pub fn scripted(limits: Limits, script: impl FnMut(&Request) -> Script + Send + 'static) -> Scripted {
    scripted_with_media(limits, None, script)
}

/// As [`scripted`], for a model that takes media.
pub fn scripted_with_media(
    limits: Limits,
    media: Option<MediaSpec>,
    script: impl FnMut(&Request) -> Script + Send + 'static,
) -> Scripted {
    let places = limits.running_max_req_size + limits.max_waiting;
    let (arrivals, inbox) = sync_channel(places as usize);
    let plan = Plan { limit: 1 << 30, limit_source: "a test".into(), device: None, lines: Vec::new() };
    let shared = Arc::new(Shared::new(limits, plan, Arc::new(Ledger::new())));
    media.into_iter().for_each(|media| drop(shared.facts.media.set(media)));
    let observed = Arc::new(Observed::default());
    let epoch = Instant::now();
    let engine = Engine {
        shared: Arc::clone(&shared),
        observed: Arc::clone(&observed),
        epoch,
        active: Vec::new(),
        script: Box::new(script),
    };
    std::thread::spawn(move || engine.run(&inbox));
    Scripted { handle: EngineHandle { shared, engine_host: None, arrivals, epoch }, observed }
}

/// The parts that [`over_runner`] builds an engine from.
pub struct Bench<R> {
    /// Runs the steps.
    pub runner: R,
    /// The bounds of requests; `max_total_token_num` is the size of the page pool.
    pub limits: Limits,
    /// The bounds of a step.
    pub step: StepLimits,
    /// Whether equal prefixes share their pages.
    pub prefix_cache: bool,
    /// Slots of recurrent state; window pages of a model with sliding windows.
    pub state_slots: usize,
    /// Settings of speculative decoding.
    pub speculation: Speculation,
    /// Tokenizer for the output.
    pub tokenizer: Arc<Tokenizer>,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// Free pages go back to the system.
    pub elastic: bool,
    /// The media that the runner's encoder takes, if it has one.
    pub media: Option<MediaSpec>,
}

impl<R: Runner> Bench<R> {
    /// Splits it into the handle and a function that builds the worker on its own thread.
    fn split(self) -> (EngineHandle, impl FnOnce() -> Worker<R>) {
        let Self { runner, limits, step, prefix_cache, state_slots, speculation, tokenizer, eos, elastic, media } =
            self;
        let places = limits.running_max_req_size + limits.max_waiting;
        let (arrivals, inbox) = sync_channel(places as usize);
        let plan = Plan { limit: 1 << 30, limit_source: "a test".into(), device: None, lines: Vec::new() };
        let shared = Arc::new(Shared::new(limits, plan, Arc::new(Ledger::new())));
        media.into_iter().for_each(|media| drop(shared.facts.media.set(media)));
        let epoch = Instant::now();
        let handle = EngineHandle { shared: Arc::clone(&shared), engine_host: None, arrivals, epoch };
        let build = move || {
            let pages = limits.max_total_token_num as usize / PAGE_TOKENS;
            let pool = PagePool::new(pages).expect("a pool");
            let log = || KvEventLog::new(pages).expect("an event log");
            let index = prefix_cache.then(|| PrefixIndex::new(pages).expect("an index").with_event_log(log()));
            let log = index.as_ref().and_then(PrefixIndex::kv_event_log);
            log.into_iter().for_each(|log| drop(shared.facts.kv_event_log.set(Arc::clone(log))));
            let states = (step.slots > 0).then(|| StatePool::new(state_slots, pages).expect("state slots"));
            let windows = || WindowPool::new(state_slots, pages, step.window).expect("window pages");
            let windows = (step.window > 0).then(windows);
            let cache = Rc::new(RefCell::new(KvCache::new(pool, index, states).with_windows(windows)));
            let sampler = Sampler::new(limits.vocab_size as usize).expect("a sampler");
            let encoding = shared.facts.media.get().map(|media| Encoding::new(media).expect("room for patches"));
            let (arrivals, limits) = (inbox, step);
            Worker::new(Parts {
                shared,
                arrivals,
                epoch,
                runner,
                cache,
                limits,
                speculation,
                // A layer of a long prompt behind every step, whatever the clock says.
                prefill_meter: PrefillMeter::new(0),
                sampler,
                encoding,
                tokenizer,
                eos,
                elastic,
                disk: None,
            })
        };
        (handle, build)
    }
}

/// The engine without its thread: a test runs its iterations one by one, so that everything happens in one order.
pub struct ByHand<R>(Worker<R>);

impl<R: Runner> ByHand<R> {
    /// Takes what has arrived and does one step.
    pub fn run_iteration(&mut self) {
        self.0.run_iteration();
    }
}

/// An engine over a test's own runner that advances one iteration at a time.
///
/// # Panics
/// As [`over_runner`].
pub fn by_hand<R: Runner>(bench: Bench<R>) -> (EngineHandle, ByHand<R>) {
    let (handle, build) = bench.split();
    (handle, ByHand(build()))
}

/// Starts the real engine thread (scheduler, cache, sampler, delivery) over a test's own runner.
///
/// # Panics
/// When the tables of pool, index and sampler cannot be built from the limits: a mistake in the test.
pub fn over_runner<R: Runner + Send + 'static>(bench: Bench<R>) -> EngineHandle {
    let (handle, build) = bench.split();
    std::thread::spawn(move || build().run());
    handle
}

/// Lower-case letters that depend on the prompt alone, one per token, up to `max_tokens`.
pub fn letters(request: &Request) -> Script {
    let seed: u32 = request.prompt.iter().fold(7, |h, id| h.wrapping_mul(31).wrapping_add(*id));
    let token = move |i: u32| {
        let id = 97 + (seed.wrapping_add(i.wrapping_mul(i))) % 26;
        Step::Token(id, char::from_u32(id).unwrap_or('a').to_string())
    };
    let end = std::iter::once(Step::Finish(FinishReason::Length, None));
    Box::new((0..request.max_tokens).map(token).chain(end))
}

struct Active {
    arrival: NewSeq<RequestState>,
    script: Script,
    due: Instant,
    text_bytes: u32,
    text_chars: u32,
}

struct Engine {
    shared: Arc<Shared>,
    observed: Arc<Observed>,
    epoch: Instant,
    active: Vec<Active>,
    script: Box<dyn FnMut(&Request) -> Script + Send>,
}

enum Outcome {
    Goes,
    Ends,
    Stops,
}

impl Engine {
    fn run(mut self, inbox: &Receiver<Arrival>) {
        while self.receive(inbox) {
            if self.observed.frozen.load(Ordering::Acquire) {
                continue;
            }
            if self.shared.shutdown.stop.load(Ordering::Acquire) || !self.step() {
                break;
            }
        }
        self.shared.shutdown.stopped.store(true, Ordering::Release);
    }

    /// Takes what has arrived, waiting a moment for it. False when every handle is gone.
    fn receive(&mut self, inbox: &Receiver<Arrival>) -> bool {
        let wait = if self.active.is_empty() { 20_000 } else { 200 };
        match inbox.recv_timeout(Duration::from_micros(wait)) {
            Ok(first) => {
                let others = std::iter::from_fn(|| inbox.try_recv().ok());
                std::iter::once(first).chain(others).flatten().for_each(|arrival| self.admit(arrival));
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    fn admit(&mut self, mut arrival: NewSeq<RequestState>) {
        // The request with its prompt and pins back; the detokenizer has its special ids.
        let request =
            Request { prompt: arrival.tokens.clone(), pins: arrival.pins.clone(), ..arrival.payload.request.clone() };
        let script = (self.script)(&request);
        let outbox = &mut arrival.payload.outbox;
        if let Some(n) = request.prompt_logprobs {
            let own = |(i, id): (usize, &u32)| report(*id, n, i == 0);
            let reports: Vec<_> = request.prompt.iter().enumerate().map(own).collect();
            outbox.push(|delta| delta.prompt_logprobs = reports);
        }
        outbox.progress().scheduled();
        outbox.progress().store(RequestPhase::Prefill, 0, [0; 3]);
        self.observed.constrained.fetch_add(arrival.payload.constraint.is_some().into(), Ordering::AcqRel);
        if let Ok(mut requests) = self.observed.requests.lock() {
            requests.push(request);
        }
        self.active.push(Active { arrival, script, due: Instant::now(), text_bytes: 0, text_chars: 0 });
    }

    /// One iteration over all requests. False when a script stopped the engine.
    fn step(&mut self) -> bool {
        let now = Instant::now();
        let mut stops = false;
        let observed = &self.observed;
        self.active.retain_mut(|active| {
            // Checked before the script runs: a reader that is dropped after this step's output did not abort.
            let gone = active.arrival.payload.outbox.reader_gone();
            let outcome = active.advance(now);
            active.arrival.payload.outbox.wake_reader();
            match outcome {
                _ if gone => {
                    observed.aborted.fetch_add(1, Ordering::AcqRel);
                    false
                }
                Outcome::Goes => true,
                Outcome::Ends => {
                    observed.ended.fetch_add(1, Ordering::AcqRel);
                    false
                }
                Outcome::Stops => {
                    stops = true;
                    true
                }
            }
        });
        let running = self.active.len() as u64;
        observed.active.store(running, Ordering::Release);
        self.shared.status.running.store(running, Ordering::Release);
        self.shared.clear_calls.asked().into_iter().for_each(|asked| self.shared.clear_calls.done(asked));
        self.shared.status.steps.fetch_add(1, Ordering::AcqRel);
        self.shared.status.iterations.fetch_add(1, Ordering::AcqRel);
        let progress = self.epoch.elapsed().as_millis() as u64;
        self.shared.status.progress_ms.store(progress, Ordering::Release);
        !stops
    }
}

impl Active {
    fn advance(&mut self, now: Instant) -> Outcome {
        if now < self.due {
            return Outcome::Goes;
        }
        let Some(step) = self.script.next() else {
            return Outcome::Goes;
        };
        let outbox = &mut self.arrival.payload.outbox;
        if let Step::Token(..) = step {
            outbox.progress().store(RequestPhase::Decode, 0, [0; 3]);
        }
        match step {
            Step::Wait(time) => self.due = now + time,
            Step::Cached(tokens) => outbox.push(|delta| delta.cached_tokens = tokens),
            Step::Drafts(drafted, accepted) => {
                outbox.push(|delta| (delta.drafted_tokens, delta.accepted_tokens) = (drafted, accepted));
            }
            Step::Token(id, text) => {
                let logprobs = self.arrival.payload.request.logprobs.map(|n| report(id, n, false));
                let token = TokenOut { id, text_offset: self.text_bytes, text_chars: self.text_chars, logprobs };
                self.text_bytes += text.len() as u32;
                self.text_chars += text.chars().count() as u32;
                outbox.push(|delta| {
                    delta.text.push_str(&text);
                    delta.tokens.push(token);
                });
            }
            Step::Finish(reason, stop) => {
                outbox.push(|delta| {
                    delta.finish = Some(reason);
                    delta.stop_reason = stop;
                });
                return Outcome::Ends;
            }
            Step::Pooled(values) => {
                outbox.push(|delta| {
                    delta.pooled = Some(values);
                    delta.finish = Some(FinishReason::Stop);
                });
                return Outcome::Ends;
            }
            Step::Fail(message) => {
                outbox.push(|delta| delta.error = Some(message));
                return Outcome::Ends;
            }
            Step::RunShort => {
                outbox.fail_without_alloc("memory ran short", Cause::Memory);
                return Outcome::Ends;
            }
            Step::StopEngine => return Outcome::Stops,
        }
        Outcome::Goes
    }
}

/// A constant report: -0.5 for the token itself, then one less for each alternative.
fn report(id: u32, n: u32, first_of_prompt: bool) -> TokenLogprobs {
    if first_of_prompt {
        return TokenLogprobs::default();
    }
    let top = (0..n).map(|i| ((id + i) % 256, -0.5 - i as f32)).collect();
    TokenLogprobs { own: Some(-0.5), top }
}

/// Gives the engine a constant reading of the machine.
pub fn take_reading(engine: &EngineHandle, reading: crate::memory::governor::MemoryReading) {
    engine.shared.monitor.gauge.set(reading);
}

/// Looks after the engine's progress as start-up's watching thread does, several times a stall limit, until the engine ends.
pub fn watch_progress(engine: &EngineHandle) {
    let (shared, epoch) = (Arc::downgrade(&engine.shared), engine.epoch);
    std::thread::spawn(move || {
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.shutdown.stopped.load(Ordering::Acquire)) {
            shared.monitor.watchdog.look(epoch.elapsed(), &shared.status, &shared.metrics);
            let pause = shared.monitor.watchdog.limit() / 8;
            drop(shared);
            std::thread::sleep(pause);
        }
    });
}
