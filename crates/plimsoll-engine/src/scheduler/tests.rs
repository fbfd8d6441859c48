//! Properties of the scheduler under random arrivals, aborts and endings, in pools down to one request's size: it always
//! makes progress (I5), never exceeds a step's bounds, never lets two sequences write one page, and gives every page back (I4).

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::cache::{PagePool, PrefixIndex};
use crate::lease::KvCache;

/// One thing that happens between steps.
#[derive(Clone, Debug)]
enum Happening {
    /// A request: prompt length, output length, whose prefix it shares, whether every position's logits are wanted.
    Arrives { prompt: usize, output: usize, family: u32, salt: u64, reports: bool },
    /// The client of the n-th live sequence goes.
    Leaves(usize),
    /// The n-th running sequence ends early.
    Ends(usize),
    /// Steps are taken.
    Steps(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1usize..90, 0usize..60, 0u32..3, 0u64..2, prop::bool::weighted(0.4))
            .prop_map(|(prompt, output, family, salt, reports)| Happening::Arrives { prompt, output, family, salt, reports }),
        1 => (0usize..64).prop_map(Happening::Leaves),
        1 => (0usize..64).prop_map(Happening::Ends),
        4 => (1usize..12).prop_map(Happening::Steps),
    ]
}

/// Sizes of a scheduler and its pool.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    limits: StepLimits,
    pages: usize,
    prefix_cache: bool,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (1usize..9, 0usize..8, 0usize..40, 1usize..80, 1usize..14, prop::bool::weighted(0.8)).prop_map(
        |(running, more_logits, more_rows, beside, pages, prefix_cache)| {
            let logit_rows = running + more_logits;
            let rows = logit_rows + more_rows;
            let prefill_rows_beside_decode = beside.min(rows);
            Sizes { limits: StepLimits { rows, logit_rows, running, prefill_rows_beside_decode }, pages, prefix_cache }
        },
    )
}

/// A scheduler in a world without a model.
struct World {
    scheduler: Scheduler<()>,
    cache: SharedCache,
    limits: StepLimits,
    arrived: u64,
    /// Tokens of all sequences that ever arrived, outputs included.
    work: usize,
    preempted: u64,
}

impl World {
    fn new(sizes: Sizes) -> Self {
        let index = sizes.prefix_cache.then(|| PrefixIndex::new(sizes.pages).unwrap());
        let cache = Rc::new(RefCell::new(KvCache { pool: PagePool::new(sizes.pages).unwrap(), index }));
        let scheduler = Scheduler::new(sizes.limits, Rc::clone(&cache), 64);
        Self { scheduler, cache, limits: sizes.limits, arrived: 0, work: 0, preempted: 0 }
    }

    fn happen(&mut self, happening: &Happening) {
        match *happening {
            Happening::Arrives { prompt, output, family, salt, reports } => {
                self.arrive(prompt, output, family, salt, reports)
            }
            Happening::Leaves(n) => {
                let live: Vec<u64> =
                    self.scheduler.running().iter().chain(self.scheduler.waiting()).map(|s| s.order).collect();
                if !live.is_empty() {
                    let gone = live[n % live.len()];
                    let mut taken = 0;
                    self.scheduler.remove(|seq| seq.order == gone, |_| taken += 1);
                    assert_eq!(taken, 1);
                }
            }
            Happening::Ends(n) => {
                let running = self.scheduler.running().len();
                if running > 0 {
                    drop(self.scheduler.finish(n % running));
                }
            }
            Happening::Steps(n) => (0..n).for_each(|_| self.step()),
        }
    }

    fn arrive(&mut self, prompt: usize, output: usize, family: u32, salt: u64, reports: bool) {
        let pool = self.cache.borrow().pool.total() * PAGE_TOKENS;
        let prompt_len = prompt.min(pool);
        // Without output a request only asks for its prompt's log-probabilities.
        let total_max = (prompt_len + output.max(usize::from(!reports))).min(pool).max(prompt_len);
        let order = self.arrived;
        // The first half of the prompt is the family's.
        let token = |i: usize| if i < prompt_len / 2 { family } else { 10 + (order as u32 % 4) };
        let tokens: Vec<u32> = (0..prompt_len).map(token).collect();
        let pages = PageLease::new(&self.cache, Vec::new(), Vec::new());
        let logits_from = if reports { 0 } else { prompt_len - 1 };
        self.scheduler.push(Seq {
            order,
            salt,
            tokens,
            prompt_len,
            total_max,
            computed: 0,
            pages,
            logits_from,
            work: (),
        });
        self.arrived += 1;
        self.work += total_max;
    }

    /// Schedules, checks, and does what the engine would do with the result.
    fn step(&mut self) {
        let oldest = self.scheduler.running().first().map(|seq| seq.order);
        let decoding: Vec<u64> = self.scheduler.running().iter().filter(|s| s.decoding()).map(|s| s.order).collect();
        let (shares, events) = self.scheduler.schedule();
        let shares = shares.to_vec();
        self.preempted += events.preempted;
        self.check(&shares, oldest, &decoding);
        for share in &shares {
            self.scheduler.commit(*share);
            let seq = &mut self.scheduler.running_mut()[share.seq];
            seq.logits_from = seq.logits_from.max(seq.computed.min(seq.prompt_len));
            if seq.computed == seq.tokens.len() && seq.tokens.len() < seq.total_max {
                seq.tokens.push(20 + (seq.order as u32 + seq.tokens.len() as u32) % 3);
                seq.logits_from = seq.tokens.len() - 1;
            }
        }
        for i in (0..self.scheduler.running().len()).rev() {
            let seq = &self.scheduler.running()[i];
            if seq.computed == seq.total_max || (seq.tokens.len() == seq.total_max && seq.total_max > seq.prompt_len) {
                drop(self.scheduler.finish(i));
            }
        }
        self.check_tables();
    }

    fn check(&self, shares: &[Share], oldest: Option<u64>, decoding: &[u64]) {
        let running = self.scheduler.running();
        assert!(running.len() <= self.limits.running);
        assert!(running.is_sorted_by_key(|seq| seq.order), "oldest first");
        assert_eq!(shares.is_empty(), self.scheduler.is_empty(), "I5: a step with work to do does some");
        assert!(shares.iter().map(|s| s.rows).sum::<usize>() <= self.limits.rows);
        assert!(shares.iter().map(|s| s.logit_rows).sum::<usize>() <= self.limits.logit_rows);
        let mut served: Vec<u64> = Vec::new();
        for share in shares {
            let seq = &running[share.seq];
            let end = share.start + share.rows;
            assert!(!served.contains(&seq.order), "one share a sequence");
            served.push(seq.order);
            assert!(share.rows > 0 && share.start == seq.computed && end <= seq.tokens.len());
            assert!(seq.pages.capacity() >= end && seq.pages.ids().len() <= seq.total_max.div_ceil(PAGE_TOKENS));
            assert!(share.logit_rows <= share.rows && (share.logit_rows > 0 || end < seq.tokens.len()));
            let written = &seq.pages.ids()[share.start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)];
            let others = running.iter().filter(|other| other.order != seq.order);
            let mut read = others.flat_map(|other| other.pages.ids());
            assert!(!read.any(|page| written.contains(page)), "a page that is written belongs to one sequence");
        }
        if let Some(oldest) = oldest {
            assert!(served.contains(&oldest), "I5: the oldest running sequence goes on");
        }
        for order in decoding.iter().filter(|order| running.iter().any(|seq| seq.order == **order)) {
            assert!(served.contains(order), "a running sequence decodes in every step");
        }
        assert!(self.scheduler.waiting().all(|seq| seq.pages.ids().is_empty() && seq.computed == 0));
        assert!(self.scheduler.waiting().is_sorted_by_key(|seq| seq.order), "the queue keeps the order of arrival");
    }

    fn check_tables(&self) {
        let cache = self.cache.borrow();
        cache.pool.check().unwrap();
        assert_eq!(cache.pool.faults(), 0);
        if let Some(index) = &cache.index {
            index.check(&cache.pool).unwrap();
        }
    }

    /// No more arrivals: everybody finishes in at most one step per token of work, recomputation included.
    fn finish_all(&mut self) {
        // After a preemption at most everything that the victim had is computed again, a step a row at worst.
        let longest = self.cache.borrow().pool.total() * PAGE_TOKENS;
        let mut steps = 0;
        while !self.scheduler.is_empty() {
            self.step();
            steps += 1;
            let bound = self.work + self.preempted as usize * longest;
            assert!(steps <= bound, "I5: {steps} steps for {bound} tokens");
        }
    }

    fn assert_all_back(&self) {
        let cache = &mut *self.cache.borrow_mut();
        assert_eq!(cache.pool.used(), cache.pool.idle(), "I4: only the index holds pages");
        if let Some(index) = &mut cache.index {
            index.clear(&mut cache.pool);
        }
        assert_eq!(cache.pool.used(), 0, "I4");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everybody_finishes_and_every_page_comes_back(
        sizes in sizes(),
        happenings in prop::collection::vec(happening(), 1..60),
    ) {
        let mut world = World::new(sizes);
        for happening in &happenings {
            world.happen(happening);
        }
        world.finish_all();
        world.assert_all_back();
    }

    #[test]
    fn an_abandoned_scheduler_gives_everything_back(
        sizes in sizes(),
        happenings in prop::collection::vec(happening(), 1..30),
    ) {
        let mut world = World::new(sizes);
        for happening in &happenings {
            world.happen(happening);
        }
        world.scheduler.remove(|_| true, drop);
        prop_assert!(world.scheduler.is_empty());
        world.assert_all_back();
    }
}

/// The oldest is served however many newer ones keep coming (I5), also when all of them want its prefix.
#[test]
fn a_stream_of_newcomers_starves_nobody() {
    for shares_prefix in [true, false] {
        let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, prefill_rows_beside_decode: 8 };
        let mut world = World::new(Sizes { limits, pages: 8, prefix_cache: true });
        let mut waited_max = 0;
        for round in 0..600 {
            world.arrive(40 + round % 23, 1 + round % 40, if shares_prefix { 0 } else { round as u32 }, 0, false);
            (0..12).for_each(|_| world.step());
            let oldest = world.scheduler.running().iter().chain(world.scheduler.waiting()).map(|seq| seq.order).min();
            waited_max = waited_max.max(world.arrived - oldest.unwrap_or(world.arrived));
            // The backlog is bounded: the client of the newest one gives up when it is long.
            if world.scheduler.waiting().len() > 20 {
                let newest = world.arrived - 1;
                world.scheduler.remove(|seq| seq.order == newest, drop);
            }
        }
        assert!(waited_max < 400, "the oldest of {waited_max} was never served");
        world.finish_all();
        world.assert_all_back();
    }
}

/// A preempted sequence that finds all but its newest token in the index comes back decoding: it still gets its row at once.
#[test]
fn a_sequence_that_comes_back_decoding_is_not_left_out() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, prefill_rows_beside_decode: 8 };
    let mut world = World::new(Sizes { limits, pages: 8, prefix_cache: true });
    world.arrive(32, 8, 0, 0, false);
    (0..4).for_each(|_| world.step());
    let seq = &world.scheduler.running()[0];
    assert_eq!((seq.computed, seq.tokens.len()), (32, 33), "both pages of the prompt are in the index");
    let mut seq = world.scheduler.running.pop().unwrap();
    seq.preempt();
    world.scheduler.push(seq);
    world.step();
    assert_eq!(world.scheduler.running()[0].computed, 33);
}

/// An older sequence that takes the pages of a newer one takes its place in the step, too.
#[test]
fn who_is_preempted_after_it_was_scheduled_is_not_in_the_step() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, prefill_rows_beside_decode: 4 };
    let mut world = World::new(Sizes { limits, pages: 2, prefix_cache: false });
    world.arrive(16, 16, 1, 0, false);
    world.arrive(15, 16, 2, 0, false);
    let mut newer = world.scheduler.waiting.pop_back().unwrap();
    let older = world.scheduler.waiting.pop_back().unwrap();
    // The newer one decodes at position 16 and holds the whole pool; the older one has computed nothing.
    newer.tokens.extend([20, 20]);
    newer.computed = 16;
    assert!(newer.pages.grow(17));
    world.scheduler.running.extend([older, newer]);
    let (shares, events) = world.scheduler.schedule();
    assert_eq!(shares, [Share { seq: 0, start: 0, rows: 4, logit_rows: 0 }]);
    assert_eq!(events.preempted, 1);
    assert_eq!(world.scheduler.waiting().map(|seq| seq.order).collect::<Vec<_>>(), [1]);
}
