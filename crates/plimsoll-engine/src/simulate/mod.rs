//! Simulation: a trace through the scheduler, page pool, prefix tree and state slots of a plan, without a model. A step takes the time of
//! its work at given rates, so the same trace gives the same schedule on every machine.
//!
//! A second scheduler must not be in here. The simulation uses the engine's own parts, with a number for a clock.

use std::cell::RefCell;
use std::rc::Rc;

use plimsoll_device::{KvGroup, PAGE_TOKENS};
use serde::Serialize;
use thiserror::Error;

use crate::api::limits::Limits;
use crate::cache::lease::SharedCache;
use crate::cache::{KvCache, PagePool, PrefixIndex, StatePool, WindowPool};
use crate::plan::EnginePlan;
use crate::request::Request;
use crate::sampling::SamplingParams;
use crate::schedule::scheduler::{NewSeq, Scheduler, Seq, StepEntry, StepLimits};
use crate::trace::{Line, Trace};

/// The rates of the simulated machine, per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Bytes read from memory.
    pub bytes: f64,
    /// Multiplications and additions (floating-point operations).
    pub flops: f64,
}

/// The reason why a trace cannot be simulated.
#[derive(Debug, Error)]
pub enum SimulationError {
    /// The model is an encoder, which takes whole inputs.
    #[error("an encoder keeps nothing from step to step: there is nothing to simulate")]
    Encoder,
    /// The tables of the pools cannot be allocated.
    #[error("{0}")]
    Tables(String),
}

/// Percentiles of times in seconds, by nearest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The maximum.
    pub max: f64,
}

impl Times {
    /// Returns the percentiles of a list in any order; zeros for an empty list.
    pub fn of(mut times: Vec<f64>) -> Self {
        let mut rank = |percent| percentile(&mut times, percent);
        Self { p50: rank(50), p99: rank(99), max: rank(100) }
    }
}

/// Returns the value that `percent` of all values do not exceed (nearest rank); 0 for an empty list. Sorts the values.
pub fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100).max(1);
    values.get(rank - 1).copied().unwrap_or(0.0)
}

/// The results of a simulation. Each completion is a sequence.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Simulated {
    /// Sequences in the trace.
    pub sequences: u64,
    /// Sequences that were served to their end.
    pub finished: u64,
    /// Sequences of clients that left.
    pub left: u64,
    /// Sequences that are too large for this plan: 400.
    pub refused_invalid: u64,
    /// Sequences that found no place at their arrival: 429.
    pub refused_full: u64,
    /// Number of preemptions: sequences sent back to the queue.
    pub preempted: u64,
    /// Number of steps.
    pub steps: u64,
    /// From the first arrival to the last end, in seconds of the simulated machine.
    pub seconds: f64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were found in the prefix tree.
    pub cached_tokens: u64,
    /// Rows computed, rows computed again after preemptions included.
    pub computed_rows: u64,
    /// Number of generated tokens.
    pub output_tokens: u64,
    /// Pages in the pool.
    pub pages: u64,
    /// The most pages that sequences held at once, without pages cached for prefixes alone.
    pub pages_peak: u64,
    /// The most waiting sequences.
    pub waiting_peak: u64,
    /// The most running sequences.
    pub running_peak: u64,
    /// The most bytes that requests had reserved on the host.
    pub host_bytes_peak: u64,
    /// Times from arrival to the first token, over sequences with a token.
    pub first_token: Times,
    /// Times between two tokens of one sequence.
    pub between_tokens: Times,
    /// Pages and slots that were not given back: always 0, or a leak has been found.
    pub lost: u64,
    /// A hash of the whole schedule: every entry of every step.
    pub digest: String,
}

/// A sequence's data in the simulation.
#[derive(Clone, Copy, Debug)]
struct Job {
    arrived: f64,
    /// The time at which a sequence without a token ends, because its client left before the first; infinite otherwise.
    leaves_at: f64,
    outputs: u64,
    leaves: bool,
    first: bool,
    last_token: f64,
    host_bytes: u64,
    counted: bool,
}

struct Simulation<'a> {
    scheduler: Scheduler<Job>,
    cache: SharedCache,
    limits: &'a Limits,
    plan: &'a EnginePlan,
    rates: Rates,
    now: f64,
    order: u64,
    host_bytes: u64,
    out: Simulated,
    firsts: Vec<f64>,
    between: Vec<f64>,
    digest: u64,
}

/// Runs a trace through a plan. Speculation is left out.
///
/// # Errors
/// [`SimulationError`] for encoders, and when the tables of the pools cannot be allocated.
pub fn simulate(plan: &EnginePlan, trace: &Trace, rates: Rates) -> Result<Simulated, SimulationError> {
    let mut simulation = Simulation::new(plan, rates)?;
    let mut arrivals = trace.lines.iter().peekable();
    loop {
        if simulation.scheduler.is_empty() {
            match arrivals.peek() {
                Some(line) => simulation.now = simulation.now.max(seconds(line.at_ms)),
                None => break,
            }
        }
        while let Some(line) = arrivals.next_if(|line| seconds(line.at_ms) <= simulation.now) {
            simulation.arrive(trace, line);
        }
        simulation.step();
    }
    Ok(simulation.end())
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

impl<'a> Simulation<'a> {
    fn new(plan: &'a EnginePlan, rates: Rates) -> Result<Self, SimulationError> {
        if plan.step.encoder_batch {
            return Err(SimulationError::Encoder);
        }
        let tables = |error: &dyn std::fmt::Display| SimulationError::Tables(error.to_string());
        let index = match plan.tables.prefix_cache {
            true => Some(PrefixIndex::new(plan.pages).map_err(|error| tables(&error))?),
            false => None,
        };
        let windows = match plan.kv.window() {
            Some(window) => Some(WindowPool::new(plan.slots, plan.pages, window).map_err(|error| tables(&error))?),
            None => None,
        };
        let states = match plan.slots {
            0 => None,
            _ if windows.is_some() => None,
            slots => Some(StatePool::new(slots, plan.pages).map_err(|error| tables(&error))?),
        };
        let pool = PagePool::new(plan.pages).map_err(|error| tables(&error))?;
        let cache = Rc::new(RefCell::new(KvCache::new(pool, index, states).with_windows(windows)));
        // The number of layers between two steps depends on a clock, so layered chunks are off.
        let limits = StepLimits {
            drafts: 0,
            draft_head: false,
            draft_model: false,
            media: false,
            image_rows: 0,
            layered: false,
            ..plan.step
        };
        Ok(Self {
            scheduler: Scheduler::new(limits, Rc::clone(&cache), plan.limits.max_waiting as usize),
            cache,
            limits: &plan.limits,
            plan,
            rates,
            now: 0.0,
            order: 0,
            host_bytes: 0,
            out: Simulated { pages: plan.pages as u64, ..Simulated::default() },
            firsts: Vec::new(),
            between: Vec::new(),
            digest: 0xcbf2_9ce4_8422_2325,
        })
    }

    /// Lets every completion of a request arrive. It is refused as the engine would refuse it.
    fn arrive(&mut self, trace: &Trace, line: &Line) {
        for prompt in &line.prompts {
            let left = self.limits.max_req_total_len.saturating_sub(prompt.tokens);
            // At least the recorded output: a trace can lack the limit that the request had.
            let said = u32::try_from(line.output_each()).unwrap_or(u32::MAX);
            let max_tokens = line.max_tokens.unwrap_or(left).max(said);
            self.out.sequences += u64::from(line.n);
            if prompt.tokens == 0 || left == 0 || max_tokens > left {
                self.out.refused_invalid += u64::from(line.n);
                continue;
            }
            let ids = trace.ids(prompt, self.limits.vocab_size);
            for _ in 0..line.n {
                self.enter(priced(ids.clone(), max_tokens, line), line);
            }
        }
    }

    fn enter(&mut self, request: Request, line: &Line) {
        let bytes = request.host_bytes();
        let places = u64::from(self.limits.running_max_req_size) + u64::from(self.limits.max_waiting);
        let inside = (self.scheduler.running().len() + self.scheduler.waiting().len()) as u64;
        if bytes > self.limits.host_bytes {
            self.out.refused_invalid += 1;
        } else if inside >= places || self.host_bytes + bytes > self.limits.host_bytes {
            self.out.refused_full += 1;
        } else {
            self.admit(request, bytes, line);
        }
    }

    fn admit(&mut self, request: Request, host_bytes: u64, line: &Line) {
        let (tokens, arrived) = (request.prompt, seconds(line.at_ms));
        self.out.prompt_tokens += tokens.len() as u64;
        self.host_bytes += host_bytes;
        let outputs = line.output_each();
        let leaves = line.left();
        let leaves_at = if leaves && outputs == 0 { arrived + seconds(line.ms) } else { f64::INFINITY };
        let (last_token, first, counted) = (arrived, false, false);
        let payload = Job { arrived, leaves_at, outputs, leaves, first, last_token, host_bytes, counted };
        let new_seq = NewSeq { salt: line.salt, ..NewSeq::new(tokens, request.max_tokens as usize, payload) };
        let new_seq = new_seq.reporting(line.prompt_logprobs.is_some());
        self.scheduler.push(Seq::new(&self.cache, self.order, self.plan.step.slots, new_seq));
        self.order += 1;
        self.out.host_bytes_peak = self.out.host_bytes_peak.max(self.host_bytes);
    }

    /// Runs one step: sequences of clients that left are dropped, entries are computed, tokens are generated, and finished sequences are
    /// removed.
    fn step(&mut self) {
        let (now, mut freed, mut left) = (self.now, 0, 0);
        self.scheduler.remove(
            |seq| seq.payload.leaves_at <= now,
            |gone| {
                freed += gone.payload.host_bytes;
                left += 1;
            },
        );
        self.host_bytes -= freed;
        self.out.left += left;
        self.out.waiting_peak = self.out.waiting_peak.max(self.scheduler.waiting().len() as u64);
        if self.scheduler.is_empty() {
            return;
        }
        let (entries, events) = self.scheduler.schedule();
        let entries = entries.to_vec();
        self.out.preempted += events.preempted;
        self.out.steps += 1;
        self.out.running_peak = self.out.running_peak.max(self.scheduler.running().len() as u64);
        let held = self.cache.borrow().pool.used() - self.cache.borrow().pool.idle();
        self.out.pages_peak = self.out.pages_peak.max(held as u64);
        self.now += self.takes(&entries);
        entries.iter().for_each(|entry| self.compute(*entry));
        self.retire();
    }

    /// Returns the seconds of a step: the longer of reading (weights, keys and values, state) and computing.
    fn takes(&self, entries: &[StepEntry]) -> f64 {
        let one = &self.plan.work[1];
        let rows: usize = entries.iter().map(|entry| entry.rows).sum();
        let seen = |most: usize| entries.iter().map(|entry| (entry.start + entry.rows).min(most)).sum::<usize>() as f64;
        let bytes = |group| self.plan.kv.page_bytes(group) as f64 / PAGE_TOKENS as f64;
        let kv = seen(usize::MAX) * bytes(KvGroup::Whole)
            + seen(self.plan.kv.window().unwrap_or(0)) * bytes(KvGroup::Window);
        let state = entries.len() as f64 * one.state_bytes as f64;
        let read = (one.weight_bytes as f64 + kv + state) / self.rates.bytes;
        read.max(rows as f64 * one.flops as f64 / self.rates.flops)
    }

    fn compute(&mut self, entry: StepEntry) {
        self.out.computed_rows += entry.rows as u64;
        self.scheduler.commit(entry, entry.rows);
        let seq = &mut self.scheduler.running_mut()[entry.seq];
        for number in [seq.order, entry.start as u64, entry.rows as u64] {
            self.digest = (self.digest ^ number).wrapping_mul(0x0100_0000_01b3);
        }
        let payload = &mut seq.payload;
        if !std::mem::replace(&mut payload.counted, true) {
            self.out.cached_tokens += entry.start as u64;
        }
        seq.logits_from = seq.logits_from.max(seq.computed.min(seq.prompt_len));
        let generated = (seq.tokens.len() - seq.prompt_len) as u64;
        if seq.computed == seq.tokens.len() && generated < payload.outputs {
            if std::mem::replace(&mut payload.first, true) {
                self.between.push(self.now - payload.last_token);
            } else {
                self.firsts.push(self.now - payload.arrived);
            }
            payload.last_token = self.now;
            self.out.output_tokens += 1;
            // Each sequence gets different tokens: outputs of different sequences share no pages.
            let token = (seq.order.wrapping_mul(0x9e37_79b9) ^ generated) as u32 % self.limits.vocab_size;
            seq.tokens.push(token);
            seq.logits_from = seq.tokens.len() - 1;
        }
        self.scheduler.publish(entry.seq);
    }

    /// Removes sequences with all their output. A sequence is dropped when its client leaves, and not finished.
    fn retire(&mut self) {
        for index in (0..self.scheduler.running().len()).rev() {
            let seq = &self.scheduler.running()[index];
            let said = (seq.tokens.len() - seq.prompt_len) as u64;
            let computed = seq.computed >= seq.prompt_len;
            if said < seq.payload.outputs || !computed || (seq.payload.leaves && seq.payload.outputs == 0) {
                continue;
            }
            self.host_bytes -= seq.payload.host_bytes;
            let (order, leaves) = (seq.order, seq.payload.leaves);
            if leaves {
                self.scheduler.remove(|seq| seq.order == order, drop);
                self.out.left += 1;
            } else {
                drop(self.scheduler.finish(index));
                self.out.finished += 1;
            }
        }
    }

    fn end(mut self) -> Simulated {
        self.out.seconds = self.now;
        let missing = self.cache.borrow().missing_at_rest();
        self.out.lost = missing.map_or(0, |missing| (missing.pages + missing.slots) as u64);
        self.out.first_token = Times::of(std::mem::take(&mut self.firsts));
        self.out.between_tokens = Times::of(std::mem::take(&mut self.between));
        self.out.digest = format!("{:016x}", self.digest);
        self.out
    }
}

/// Returns the request as the engine would see it, to compute its bytes.
fn priced(prompt: Vec<u32>, max_tokens: u32, line: &Line) -> Request {
    let sampling = SamplingParams {
        temperature: line.temperature,
        top_p: line.top_p,
        top_k: line.top_k,
        ..SamplingParams::default()
    };
    Request {
        received: None,
        prompt,
        sampling,
        max_tokens,
        min_tokens: 0,
        stop: Vec::new(),
        keep_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: line.logprobs,
        prompt_logprobs: line.prompt_logprobs,
        skip_special_tokens: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        speculate: false,
        cache_salt: line.salt,
        embed: None,
        media: Vec::new(),
        pins: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut values, 50), 100.0);
        assert_eq!(percentile(&mut values, 99), 198.0);
        assert_eq!(percentile(&mut [3.0], 99), 3.0);
        assert_eq!(percentile(&mut [], 50), 0.0);
    }
}
