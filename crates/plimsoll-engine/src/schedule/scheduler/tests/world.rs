//! A scheduler over a cache without a model, random arrivals and endings, and the checks after every step.

mod check;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::*;
use crate::cache::{KvCache, PageId, PagePool, PrefixIndex, StatePool, WindowPool};

/// One event between steps.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    /// A request: prompt length, output length, the family of its prompt, its cache salt, and whether the logits of all
    /// positions are wanted. Prompts of a family share a prefix.
    Arrives { prompt: usize, output: usize, family: u32, salt: u64, reports: bool },
    /// The client of the n-th live sequence disconnects.
    Leaves(usize),
    /// The n-th running sequence ends early.
    Ends(usize),
    /// Steps are taken.
    Steps(usize),
    /// The next step fails.
    Fails,
}

pub(super) fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1usize..90, 0usize..60, 0u32..3, 0u64..2, prop::bool::weighted(0.4))
            .prop_map(|(prompt, output, family, salt, reports)| Happening::Arrives { prompt, output, family, salt, reports }),
        1 => (0usize..64).prop_map(Happening::Leaves),
        1 => (0usize..64).prop_map(Happening::Ends),
        4 => (1usize..12).prop_map(Happening::Steps),
        1 => Just(Happening::Fails),
    ]
}

/// Sizes of a scheduler and its pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) limits: StepLimits,
    pub(super) pages: usize,
    pub(super) slots: usize,
    pub(super) prefix_cache: bool,
    pub(super) prefill_budget: PrefillBudget,
}

impl Sizes {
    pub(super) fn plain(limits: StepLimits, pages: usize, prefix_cache: bool) -> Self {
        let prefill_budget = PrefillBudget { prompts: limits.rows, long: limits.rows };
        Self { limits, pages, slots: 0, prefix_cache, prefill_budget }
    }
}

pub(super) fn sizes() -> impl Strategy<Value = Sizes> {
    // With over 64 rows more than rows with logits, answers that are computed again have their own bound.
    let more_rows = prop_oneof![3 => 0usize..40, 1 => 65usize..150];
    let prefill_budget = (1usize..80, 1usize..80).prop_map(|(prompts, long)| PrefillBudget { prompts, long });
    let step = (1usize..9, 0usize..8, more_rows, prefill_budget);
    (
        step,
        1usize..14,
        prop::bool::weighted(0.8),
        prop::bool::ANY,
        0usize..4,
        prop::bool::ANY,
        0usize..12,
        prop::bool::ANY,
        prop::bool::ANY,
        prop::option::weighted(0.6, 1usize..60),
    )
        .prop_map(
            |(
                (running, more_logits, more_rows, prefill_budget),
                pages,
                prefix_cache,
                stateful,
                drafts,
                optimistic,
                more_slots,
                split_numerics,
                layers,
                window,
            )| {
                let logit_rows = running + more_logits;
                let rows = logit_rows + more_rows;
                let slots = if !stateful {
                    0
                } else if optimistic {
                    1
                } else {
                    1 + drafts
                };
                let window = window.filter(|_| !stateful).unwrap_or(0);
                let limits = StepLimits {
                    rows,
                    logit_rows,
                    running,
                    slots,
                    window,
                    drafts,
                    draft_head: false,
                    draft_model: false,
                    encoder_batch: false,
                    layered: layers,
                    media: false,
                    image_rows: 0,
                    bf16: if split_numerics { Bf16Rows::Prompts } else { Bf16Rows::None },
                    candidates: false,
                };
                // Down to the slots, or the window pages, of a single sequence.
                let one = if window > 0 { WindowPool::per_sequence(window, rows).min(pages) } else { slots };
                let slots = if one > 0 { one + more_slots } else { 0 };
                Sizes { limits, pages, slots, prefix_cache, prefill_budget }
            },
        )
}

/// A scheduler in a world without a model.
pub(super) struct World {
    pub(super) scheduler: Scheduler<()>,
    pub(super) cache: SharedCache,
    pub(super) limits: StepLimits,
    pub(super) arrived: u64,
    /// Tokens of all sequences that ever arrived, outputs included.
    pub(super) work: usize,
    pub(super) preempted: u64,
    /// For each state slot a hash of the tokens that it is the state after. Arbitrary after a failed step.
    pub(super) states: Vec<u64>,
    /// For each page and position in it, whether it was computed as a prompt's position.
    made: HashMap<PageId, [bool; PAGE_TOKENS]>,
    /// For each page, and for each window page, a hash of the tokens up to each position.
    kept: [HashMap<PageId, [u64; PAGE_TOKENS]>; 2],
    fails: bool,
    /// The layered chunk: its number, the steps until it is done, and its entry when it was begun.
    layers: Option<(u64, u64, StepEntry)>,
    /// Steps that waited for such a chunk, and chunks that were done.
    layers_waited: usize,
    pub(super) layers_done: usize,
    dice: u64,
}

/// The state after `token` from the state before it.
pub(super) fn after(state: u64, token: u32) -> u64 {
    (state ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

impl World {
    pub(super) fn new(sizes: Sizes) -> Self {
        let index = sizes.prefix_cache.then(|| PrefixIndex::new(sizes.pages).unwrap());
        let window = sizes.limits.window;
        let states = (sizes.limits.slots > 0).then(|| StatePool::new(sizes.slots, sizes.pages).unwrap());
        let windows = (window > 0).then(|| WindowPool::new(sizes.slots, sizes.pages, window).unwrap());
        let pool = PagePool::new(sizes.pages).unwrap();
        let cache = Rc::new(RefCell::new(KvCache::new(pool, index, states).with_windows(windows)));
        let mut scheduler = Scheduler::new(sizes.limits, Rc::clone(&cache), 64);
        scheduler.set_prefill_budget(sizes.prefill_budget);
        let states = vec![u64::MAX; sizes.slots];
        Self {
            scheduler,
            cache,
            limits: sizes.limits,
            arrived: 0,
            work: 0,
            preempted: 0,
            states,
            made: HashMap::new(),
            kept: Default::default(),
            fails: false,
            layers: None,
            layers_waited: 0,
            layers_done: 0,
            dice: 7,
        }
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % sides
    }

    pub(super) fn happen(&mut self, happening: &Happening) {
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
            Happening::Fails => self.fails = true,
        }
    }

    pub(super) fn arrive(&mut self, prompt: usize, output: usize, family: u32, salt: u64, reports: bool) {
        let pool = self.cache.borrow().pool.total() * PAGE_TOKENS;
        let prompt_len = prompt.min(pool);
        // A request without output needs its prompt's log-probabilities only.
        let total_max = (prompt_len + output.max(usize::from(!reports))).min(pool).max(prompt_len);
        let order = self.arrived;
        // The first half of the prompt is the family's, of every second one all of it.
        let own = |i: usize| i >= prompt_len / 2 && order % 2 == 1;
        let token = |i: usize| if own(i) { 10 + (order as u32 % 4) } else { family };
        let tokens: Vec<u32> = (0..prompt_len).map(token).collect();
        let new = NewSeq { salt, ..NewSeq::new(tokens, total_max - prompt_len, ()) }.reporting(reports);
        self.scheduler.push(Seq::new(&self.cache, order, self.limits.slots, new));
        self.arrived += 1;
        self.work += total_max;
    }

    /// A request of these tokens arrives.
    pub(super) fn push(&mut self, tokens: Vec<u32>, output: usize) {
        self.work += tokens.len() + output;
        let new = NewSeq::new(tokens, output, ());
        self.scheduler.push(Seq::new(&self.cache, self.arrived, self.limits.slots, new));
        self.arrived += 1;
    }

    /// Schedules a step, checks it, and updates sequences and cache as the engine would.
    pub(super) fn step(&mut self) {
        let oldest = self.scheduler.running().first().map(|seq| seq.order);
        let decoding: Vec<u64> = self.scheduler.running().iter().filter(|s| s.decoding()).map(|s| s.order).collect();
        let (entries, events) = self.scheduler.schedule();
        let entries = entries.to_vec();
        self.preempted += events.preempted;
        self.check(&entries, oldest, &decoding);
        if self.limits.split_numerics() {
            self.check_split_numerics(&entries);
        }
        self.compute(&entries);
        if std::mem::take(&mut self.fails) && !entries.is_empty() {
            if self.scheduler.step_failed() {
                self.preempted += entries.len() as u64;
            } else {
                drop(self.scheduler.running.remove(entries[0].seq));
            }
            return self.check_tables();
        }
        self.settle(&entries);
        self.advance_layers();
        for i in (0..self.scheduler.running().len()).rev() {
            let seq = &self.scheduler.running()[i];
            if seq.computed == seq.total_max || (seq.tokens.len() == seq.total_max && seq.total_max > seq.prompt_len) {
                drop(self.scheduler.finish(i));
            }
        }
        self.check_tables();
    }

    /// Completes a layered chunk some steps after it was begun. Until then it stays the same, and keeps its pages.
    fn advance_layers(&mut self) {
        let Some((number, entry)) = self.scheduler.layered() else { return self.layers = None };
        let begins = self.layers.is_none_or(|(begun, ..)| begun != number);
        let (_, left, begun) = if begins { (number, self.roll(4), entry) } else { self.layers.unwrap() };
        assert_eq!(StepEntry { seq: entry.seq, ..begun }, entry, "it is what it was");
        let seq = &self.scheduler.running()[entry.seq];
        let end = entry.start + entry.rows;
        assert!(!seq.decoding() && seq.sched.long && entry.rows <= self.scheduler.prefill_budget.long);
        assert!(entry.start == seq.computed && end <= seq.tokens.len() && seq.pages.capacity() >= end);
        assert!(entry.logit_rows <= self.limits.logit_rows);
        let written = &seq.pages.pages()[entry.start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)];
        let others = self.scheduler.running().iter().filter(|other| other.order != seq.order);
        let mut read = others.flat_map(|other| other.pages.pages());
        assert!(!read.any(|page| written.contains(page)), "a page that a chunk writes belongs to one sequence");
        if left > 0 {
            self.layers_waited += 1;
            self.layers = Some((number, left - 1, entry));
            return;
        }
        self.layers_done += 1;
        self.layers = None;
        if self.limits.split_numerics() {
            self.check_split_numerics(&[entry]);
        }
        self.compute(&[entry]);
        self.settle(&[entry]);
    }

    /// Commits computed entries.
    fn settle(&mut self, entries: &[StepEntry]) {
        for entry in entries {
            let drafted = self.scheduler.running()[entry.seq].drafts.clone();
            // With one slot a state cannot be restored: drafts are accepted without a check.
            let optimistic = self.limits.slots == 1;
            let hits = (0..entry.drafts).take_while(|_| optimistic || self.roll(3) > 0).count();
            let known = entry.rows - entry.drafts;
            self.scheduler.commit(*entry, known + hits);
            let (roll, drafts_max) = (self.roll(97) as u32, self.limits.drafts);
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            seq.drafts.clear();
            seq.tokens.extend_from_slice(&drafted[..hits]);
            seq.logits_from = seq.logits_from.max(seq.computed.min(seq.prompt_len));
            if seq.computed == seq.tokens.len() && seq.tokens.len() < seq.total_max {
                // Outputs repeat prompt tokens, so that one sequence's output may be another's prompt.
                seq.tokens.push(seq.tokens[seq.prompt_len - 1]);
                seq.logits_from = seq.tokens.len() - 1;
                let room = seq.room_for_drafts(drafts_max);
                seq.drafts.extend((0..room as u32).map(|i| 400 + roll + i));
            }
            self.scheduler.publish(entry.seq);
        }
    }
}
