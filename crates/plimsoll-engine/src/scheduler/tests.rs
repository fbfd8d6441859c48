//! Properties of the scheduler under random arrivals, aborts and endings, in pools down to one request's size: it always
//! makes progress (I5), never exceeds a step's bounds, never lets two sequences write one page or one state slot, never lets a
//! checkpoint be written, and gives every page and slot back (I4). Half of the worlds have recurrent state and drafts that are
//! accepted at random.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::cache::{KvCache, PagePool, PrefixIndex, StatePool};
use crate::media::SeqMedia;

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
    /// The next step fails.
    Fails,
}

fn happening() -> impl Strategy<Value = Happening> {
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
struct Sizes {
    limits: StepLimits,
    pages: usize,
    slots: usize,
    prefix_cache: bool,
    /// Rows of long prompts beside those who decode.
    long_rows: usize,
}

impl Sizes {
    fn plain(limits: StepLimits, pages: usize, prefix_cache: bool) -> Self {
        Self { limits, pages, slots: 0, prefix_cache, long_rows: limits.rows }
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    // Beyond 64 rows more than there are logits, answers that are computed again have a bound of their own.
    let more_rows = prop_oneof![3 => 0usize..40, 1 => 65usize..150];
    let step = (1usize..9, 0usize..8, more_rows, 1usize..80);
    (
        step,
        1usize..14,
        prop::bool::weighted(0.8),
        prop::bool::ANY,
        0usize..4,
        prop::bool::ANY,
        0usize..12,
        prop::bool::ANY,
    )
        .prop_map(
            |(
                (running, more_logits, more_rows, long_rows),
                pages,
                prefix_cache,
                stateful,
                drafts,
                optimistic,
                more_slots,
                apart,
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
                let limits = StepLimits {
                    rows,
                    logit_rows,
                    running,
                    slots,
                    drafts,
                    whole: false,
                    media: false,
                    compute: if apart { ComputeDtype::Auto } else { ComputeDtype::F32 },
                };
                // Down to the slots of a single sequence.
                Sizes { limits, pages, slots: if stateful { slots + more_slots } else { 0 }, prefix_cache, long_rows }
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
    /// For each state slot the history it stands after: a hash of the tokens. Garbage after a failed step.
    states: Vec<u64>,
    /// For each page and position in it, whether it was computed as a prompt's.
    made: HashMap<u32, [bool; PAGE_TOKENS]>,
    fails: bool,
    dice: u64,
}

/// The state after `token` from the state before it.
fn after(state: u64, token: u32) -> u64 {
    (state ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

impl World {
    fn new(sizes: Sizes) -> Self {
        let index = sizes.prefix_cache.then(|| PrefixIndex::new(sizes.pages).unwrap());
        let states = (sizes.slots > 0).then(|| StatePool::new(sizes.slots, sizes.pages).unwrap());
        let pool = PagePool::new(sizes.pages).unwrap();
        let cache = Rc::new(RefCell::new(KvCache { pool, index, states }));
        let mut scheduler = Scheduler::new(sizes.limits, Rc::clone(&cache), 64);
        scheduler.long_prompts_take(sizes.long_rows);
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
            fails: false,
            dice: 7,
        }
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % sides
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
            Happening::Fails => self.fails = true,
        }
    }

    fn arrive(&mut self, prompt: usize, output: usize, family: u32, salt: u64, reports: bool) {
        let pool = self.cache.borrow().pool.total() * PAGE_TOKENS;
        let prompt_len = prompt.min(pool);
        // Without output a request only asks for its prompt's log-probabilities.
        let total_max = (prompt_len + output.max(usize::from(!reports))).min(pool).max(prompt_len);
        let order = self.arrived;
        // The first half of the prompt is the family's, of every second one all of it.
        let own = |i: usize| i >= prompt_len / 2 && order % 2 == 1;
        let token = |i: usize| if own(i) { 10 + (order as u32 % 4) } else { family };
        let tokens: Vec<u32> = (0..prompt_len).map(token).collect();
        let logits_from = if reports { 0 } else { prompt_len - 1 };
        let (slots, pages, page_ids) = (self.limits.slots, Vec::new(), Vec::new());
        let new = Newcomer {
            order,
            salt,
            tokens,
            total_max,
            logits_from,
            pooled: None,
            slots,
            pages,
            page_ids,
            media: SeqMedia::default(),
            work: (),
        };
        self.scheduler.push(Seq::new(&self.cache, new));
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
        if self.limits.apart() {
            self.check_apart(&shares);
        }
        self.compute(&shares);
        if std::mem::take(&mut self.fails) && !shares.is_empty() {
            if self.scheduler.step_failed() {
                self.preempted += shares.len() as u64;
            } else {
                drop(self.scheduler.running.remove(shares[0].seq));
            }
            return self.check_tables();
        }
        for share in &shares {
            let drafted = self.scheduler.running()[share.seq].drafts.clone();
            // With one slot there is no way back: drafts are taken as they are.
            let optimistic = self.limits.slots == 1;
            let hits = (0..share.drafts).take_while(|_| optimistic || self.roll(3) > 0).count();
            let known = share.rows - share.drafts;
            self.scheduler.commit(*share, known + hits);
            let (roll, drafts_max) = (self.roll(97) as u32, self.limits.drafts);
            let seq = &mut self.scheduler.running_mut()[share.seq];
            seq.drafts.clear();
            seq.tokens.extend_from_slice(&drafted[..hits]);
            seq.logits_from = seq.logits_from.max(seq.computed.min(seq.prompt_len));
            if seq.computed == seq.tokens.len() && seq.tokens.len() < seq.total_max {
                // What one sequence generates may be another's prompt.
                seq.tokens.push(seq.tokens[seq.prompt_len - 1]);
                seq.logits_from = seq.tokens.len() - 1;
                let room = seq.room_for_drafts(drafts_max);
                seq.drafts.extend((0..room as u32).map(|i| 400 + roll + i));
            }
            self.scheduler.publish(share.seq);
        }
        for i in (0..self.scheduler.running().len()).rev() {
            let seq = &self.scheduler.running()[i];
            if seq.computed == seq.total_max || (seq.tokens.len() == seq.total_max && seq.total_max > seq.prompt_len) {
                drop(self.scheduler.finish(i));
            }
        }
        self.check_tables();
    }

    /// A position is computed in one arithmetic, whoever computes it and whoever finds it; and rows of prompts stand last.
    fn check_apart(&mut self, shares: &[Share]) {
        let running = self.scheduler.running();
        let of_prompt = |share: &Share| running[share.seq].in_prompt(share.start);
        assert!(shares.is_sorted_by_key(of_prompt), "prompts come last");
        let answers: usize = shares.iter().filter(|share| !of_prompt(share)).map(|share| share.rows).sum();
        assert!(answers <= self.limits.answer_rows(), "{answers} rows of answers in a step");
        for share in shares {
            let seq = &running[share.seq];
            for position in share.start..share.start + share.rows {
                assert_eq!(seq.in_prompt(position), of_prompt(share), "a share is all of a prompt or not at all");
                let page = seq.pages.ids()[position / PAGE_TOKENS];
                self.made.entry(page).or_default()[position % PAGE_TOKENS] = seq.in_prompt(position);
            }
        }
        for seq in running {
            for position in 0..seq.computed {
                let made = self.made[&seq.pages.ids()[position / PAGE_TOKENS]][position % PAGE_TOKENS];
                assert_eq!(made, seq.in_prompt(position), "position {position} of a prompt of {}", seq.prompt_len);
            }
        }
    }

    /// What a model with state would do: every row's state from the one before it, into the slots that are named.
    fn compute(&mut self, shares: &[Share]) {
        if self.limits.slots == 0 {
            return;
        }
        let mut written = Vec::new();
        for share in shares {
            let seq = &self.scheduler.running()[share.seq];
            let mut out = Vec::new();
            seq.states.outputs(share.start, share.rows, share.keeps_each(self.limits.slots), &mut out);
            assert_eq!(out.len(), share.rows);
            let source = seq.states.source();
            assert_eq!(source.is_some(), share.start > 0, "state is there wherever something was computed");
            let mut state = source.map_or(0, |slot| self.states[slot as usize]);
            let history = seq.tokens[..share.start].iter().fold(0, |state, token| after(state, *token));
            assert_eq!(state, history, "it starts from the state of its own history");
            let rows = seq.tokens[share.start..].iter().chain(&seq.drafts).take(share.rows);
            for (row, token) in rows.enumerate() {
                state = after(state, *token);
                if out[row] == plimsoll_device::NO_STATE {
                    assert!(row + 1 < share.rows, "the last row's state is kept");
                    continue;
                }
                let slot = out[row];
                assert!(!written.contains(&slot), "a slot is written once");
                let in_place = source == Some(slot) && row + 1 == share.rows;
                assert!(source != Some(slot) || in_place, "the slot that is read is not written before it was");
                let cache = self.cache.borrow();
                let writable = cache.states.as_ref().unwrap().writable(crate::cache::SlotId(slot));
                assert!(writable, "who writes a slot is its one holder, and it is no checkpoint");
                written.push(slot);
                self.states[slot as usize] = if self.fails { u64::MAX } else { state };
            }
        }
        for share in shares {
            let source = self.scheduler.running()[share.seq].states.source();
            let others = shares.iter().filter(|other| other.seq != share.seq);
            let mut theirs = Vec::new();
            for other in others {
                let seq = &self.scheduler.running()[other.seq];
                seq.states.outputs(other.start, other.rows, other.keeps_each(self.limits.slots), &mut theirs);
            }
            assert!(source.is_none_or(|slot| !theirs.contains(&slot)), "nobody writes what another reads");
        }
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
            assert!(share.rows > 0 && share.start == seq.computed && end <= seq.tokens.len() + share.drafts);
            assert!(
                share.drafts == 0 || end == seq.tokens.len() + seq.drafts.len(),
                "drafts are checked from the first on"
            );
            assert!(end < seq.total_max || share.drafts == 0, "nothing is drafted beyond the end");
            assert!(seq.pages.capacity() >= end && seq.pages.ids().len() <= seq.total_max.div_ceil(PAGE_TOKENS));
            assert!(share.logit_rows <= share.rows && (share.logit_rows > share.drafts || end < seq.tokens.len()));
            let written = &seq.pages.ids()[share.start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)];
            let others = running.iter().filter(|other| other.order != seq.order);
            let mut read = others.flat_map(|other| other.pages.ids());
            assert!(!read.any(|page| written.contains(page)), "a page that is written belongs to one sequence");
        }
        let quarantine = running.iter().any(|seq| seq.suspect_until.is_some());
        if let Some(oldest) = oldest.filter(|_| !quarantine) {
            assert!(served.contains(&oldest), "I5: the oldest running sequence goes on");
        }
        for order in decoding.iter().filter(|order| running.iter().any(|seq| seq.order == **order)) {
            assert!(quarantine || served.contains(order), "a running sequence decodes in every step");
        }
        assert!(self.scheduler.waiting().all(|seq| seq.pages.ids().is_empty() && seq.computed == 0));
        assert!(self.scheduler.waiting().is_sorted_by_key(|seq| seq.order), "the queue keeps the order of arrival");
    }

    fn check_tables(&self) {
        let cache = self.cache.borrow();
        cache.check();
        assert_eq!(cache.pool.faults(), 0);
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
        let kept = cache.states.as_ref().map_or(0, |states| states.stats().kept);
        if let Some(states) = &cache.states {
            assert_eq!(states.available(), states.total(), "I4: sequences hold no slots");
            assert_eq!(states.free() + kept, states.total());
        }
        cache.clear();
        assert_eq!(cache.pool.used(), 0, "I4");
        assert!(cache.states.as_ref().is_none_or(|states| states.free() == states.total()), "I4");
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
        let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, ..StepLimits::default() };
        let mut world = World::new(Sizes::plain(limits, 8, true));
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

/// Answers that begin again come back by bounded steps (`World` checks each), and all do.
#[test]
fn long_answers_are_computed_again_bit_by_bit() {
    let limits =
        StepLimits { rows: 200, logit_rows: 4, running: 4, compute: ComputeDtype::Auto, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 200, false));
    for _ in 0..3 {
        world.arrive(9, 150, 0, 0, false);
    }
    (0..120).for_each(|_| world.step());
    let left =
        |world: &World| world.scheduler.running().iter().map(|seq| seq.tokens.len() - seq.computed).sum::<usize>();
    assert!(left(&world) <= 3, "three streams decode");
    (0..3).rev().for_each(|i| world.scheduler.preempt(i));
    let mut most = 0;
    for _ in 0..8 {
        world.step();
        most = most.max(world.scheduler.running().len());
    }
    assert!(most == 3 && left(&world) <= 3, "{most} run, {} tokens are left", left(&world));
    world.finish_all();
    world.assert_all_back();
}

/// Memory at rest does not grow with the number of those who waited one after the other, though somebody always waited.
#[test]
fn who_waits_alone_waits_where_the_one_before_did() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 1, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 8, true));
    let mut places = std::collections::BTreeSet::new();
    world.arrive(9, 2, 0, 0, false);
    world.step();
    for _ in 0..200 {
        world.arrive(9, 2, 0, 0, false);
        while world.scheduler.waiting.len() > 1 {
            world.step();
        }
        places.insert(std::ptr::from_ref(&world.scheduler.waiting[0]));
    }
    assert_eq!(places.len(), 1);
    world.finish_all();
}

/// A preempted sequence that finds all but its newest token in the index comes back decoding: it still gets its row at once.
#[test]
fn a_sequence_that_comes_back_decoding_is_not_left_out() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 8, true));
    world.arrive(32, 8, 0, 0, false);
    (0..4).for_each(|_| world.step());
    let seq = &world.scheduler.running()[0];
    assert_eq!((seq.computed, seq.tokens.len()), (32, 33), "both pages of the prompt are in the index");
    let mut seq = world.scheduler.running.pop().unwrap();
    seq.leave();
    world.scheduler.push(seq);
    world.step();
    assert_eq!(world.scheduler.running()[0].computed, 33);
}

/// An older sequence that takes the pages of a newer one takes its place in the step, too.
#[test]
fn who_is_preempted_after_it_was_scheduled_is_not_in_the_step() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 2, false));
    world.arrive(16, 16, 1, 0, false);
    world.arrive(15, 16, 2, 0, false);
    let mut newer = world.scheduler.waiting.pop().unwrap();
    let older = world.scheduler.waiting.pop().unwrap();
    // The newer one decodes at position 16 and holds the whole pool; the older one has computed nothing.
    newer.tokens.extend([20, 20]);
    newer.computed = 16;
    assert!(newer.pages.grow(17));
    world.scheduler.running.extend([older, newer]);
    let (shares, events) = world.scheduler.schedule();
    assert_eq!(shares, [Share { seq: 0, start: 0, rows: 7, logit_rows: 0, drafts: 0 }]);
    assert_eq!(events.preempted, 1);
    assert_eq!(world.scheduler.waiting().map(|seq| seq.order).collect::<Vec<_>>(), [1]);
}

/// Those who decode are not held up by a prompt of many steps, nor is a short one behind it; but the few do not hold up the many.
#[test]
fn a_long_prompt_leaves_others_their_share_of_a_step() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 6, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 32, false));
    world.scheduler.long_prompts_take(2);
    let rows =
        |world: &mut World| -> Vec<usize> { world.scheduler.schedule().0.iter().map(|share| share.rows).collect() };
    world.arrive(40, 8, 0, 0, false);
    assert_eq!(rows(&mut world), [8], "nobody decodes");
    for _ in 0..5 {
        world.step();
    }
    assert!(world.scheduler.running()[0].decoding());
    world.arrive(40, 8, 1, 1, false);
    assert_eq!(rows(&mut world), [1, 2], "one against one");
    world.step();
    world.arrive(4, 8, 2, 2, false);
    assert_eq!(rows(&mut world), [1, 2, 4], "a short one behind it has all that is left");
    world.step();
    world.arrive(40, 8, 3, 3, false);
    world.arrive(3, 8, 4, 4, false);
    // Two decode; the long one that waits would have no row, and is passed by.
    assert_eq!(rows(&mut world), [1, 1, 2, 3]);
    assert_eq!(world.scheduler.waiting().map(|seq| seq.order).collect::<Vec<_>>(), [3]);
    for _ in 0..3 {
        world.arrive(40, 8, 5, 5, false);
    }
    world.scheduler.long_prompts_take(1);
    world.scheduler.ease(8, 6);
    world.step();
    assert!(world.scheduler.running().len() == 4, "three decode, and the places of the others count");
    world.finish_all();
    world.assert_all_back();
}

/// Limits of a world with state.
fn stateful(drafts: usize) -> StepLimits {
    StepLimits {
        rows: 64,
        logit_rows: 32,
        running: 8,
        slots: 1 + drafts,
        drafts,
        whole: false,
        media: false,
        compute: ComputeDtype::F32,
    }
}

fn state_world(drafts: usize, pages: usize, slots: usize) -> World {
    World::new(Sizes { limits: stateful(drafts), pages, slots, prefix_cache: true, long_rows: 80 })
}

fn checkpoints(world: &World) -> usize {
    world.cache.borrow().states.as_ref().unwrap().stats().kept
}

/// Runs a prompt to its end; returns how many of its tokens were found, and all of them.
fn converse(world: &mut World, tokens: Vec<u32>, output: usize) -> (usize, Vec<u32>) {
    let (order, total_max) = (world.arrived, tokens.len() + output);
    let limits = world.limits;
    let new = Newcomer {
        order,
        salt: 0,
        logits_from: tokens.len() - 1,
        pooled: None,
        tokens,
        total_max,
        slots: limits.slots,
        pages: Vec::new(),
        page_ids: Vec::new(),
        media: SeqMedia::default(),
        work: (),
    };
    world.scheduler.push(Seq::new(&world.cache, new));
    world.arrived += 1;
    let (mut found, mut last) = (None, Vec::new());
    while !world.scheduler.is_empty() {
        world.step();
        if let Some(seq) = world.scheduler.running().first() {
            found.get_or_insert(seq.published);
            last.clone_from(&seq.tokens);
        }
    }
    (found.unwrap(), last)
}

/// Every turn of a conversation starts from the last one's input, and a long one keeps no more checkpoints than a short one.
#[test]
fn a_conversation_of_200_turns_holds_a_constant_number_of_checkpoints() {
    let mut world = state_world(1, 600, 32);
    let mut history: Vec<u32> = (0..40).collect();
    let mut kept = Vec::new();
    let mut end_before = 0;
    for turn in 0..200u32 {
        let end = (history.len() - 1) / PAGE_TOKENS * PAGE_TOKENS;
        let (found, said) = converse(&mut world, history, 9);
        assert_eq!(found, end_before, "turn {turn} starts from the end of the last one's input");
        (history, end_before) = (said, end);
        history.extend((0..13).map(|i| 1000 + (turn * 13 + i) % 500));
        kept.push(checkpoints(&world));
    }
    assert_eq!(kept[..3], [1, 2, 2]);
    assert!(kept[2..].iter().all(|n| *n == 2), "{kept:?}");
    world.assert_all_back();
}

/// Eight cold requests with one prefix: the first computes it, the others wait for its state and start from there.
#[test]
fn cold_requests_with_one_prefix_wait_for_the_first_and_hit() {
    let mut world = state_world(0, 128, 24);
    let prefix: Vec<u32> = (0..100).collect();
    for i in 0..8u32 {
        let tokens: Vec<u32> = prefix.iter().copied().chain((0..30).map(|j| 500 + i * 50 + j)).collect();
        let new = Newcomer {
            order: u64::from(i),
            salt: 0,
            logits_from: tokens.len() - 1,
            pooled: None,
            total_max: tokens.len() + 4,
            tokens,
            slots: 1,
            pages: Vec::new(),
            page_ids: Vec::new(),
            media: SeqMedia::default(),
            work: (),
        };
        world.scheduler.push(Seq::new(&world.cache, new));
        world.arrived += 1;
    }
    world.step();
    assert_eq!(world.scheduler.running().len(), 1, "the others wait");
    let mut starts = std::collections::BTreeMap::new();
    while !world.scheduler.is_empty() {
        world.step();
        for seq in world.scheduler.running() {
            starts.entry(seq.order).or_insert(seq.published);
        }
    }
    let hits = (1..8).filter(|order| starts[order] == 96).count();
    assert_eq!(hits, 7, "{starts:?}");
    world.assert_all_back();
}

/// When every slot is taken by running sequences, prompts go on without checkpoints, and when sequences need slots the coldest
/// checkpoints go, and with them the pages that nothing else needs.
#[test]
fn checkpoints_give_way_to_sequences() {
    let mut world = state_world(0, 64, 4);
    for i in 0..4 {
        let (found, _) = converse(&mut world, (i * 100..i * 100 + 40).collect(), 2);
        assert_eq!(found, 0);
    }
    assert!(checkpoints(&world) >= 3);
    let before = world.cache.borrow().pool.used();
    for i in 0..4u64 {
        world.arrive(60, 20, 7 + i as u32, 5, false);
    }
    (0..3).for_each(|_| world.step());
    assert_eq!(world.scheduler.running().len(), 4);
    let stats = world.cache.borrow().states.as_ref().unwrap().stats();
    assert!(stats.kept == 0 && stats.evicted >= 3 && stats.missed > 0, "{stats:?}");
    assert!(before > 0 && world.cache.borrow().pool.idle() == 0, "their pages went, too");
    world.finish_all();
    world.assert_all_back();
}

/// Drafts of those who decode leave the oldest, whose prompt is still computed and wants logits, its row.
#[test]
fn drafts_leave_prompts_their_rows() {
    let limits = StepLimits {
        rows: 6,
        logit_rows: 4,
        running: 4,
        slots: 0,
        drafts: 3,
        whole: false,
        media: false,
        compute: ComputeDtype::F32,
    };
    let mut world = World::new(Sizes::plain(limits, 16, false));
    world.arrive(40, 1, 0, 0, true);
    world.arrive(1, 60, 1, 0, false);
    for _ in 0..40 {
        let before = world.scheduler.running().first().map(|seq| (seq.order, seq.computed));
        world.step();
        let after = world.scheduler.running().first().map(|seq| (seq.order, seq.computed));
        assert!(before.is_none() || before != after, "the oldest stands still: {before:?}");
    }
    world.finish_all();
}

#[test]
fn who_starts_from_cached_pages_knows_how_far_the_draft_head_has_seen_them() {
    let limits = StepLimits { rows: 80, logit_rows: 4, running: 4, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 8, true));
    world.arrive(64, 8, 0, 0, false);
    world.step();
    let passes = [(0, 24, 0..24, 64), (32, 32, 32..64, 32), (8, 24, 8..32, 0)];
    for (start, rows, drafted, seen_from) in passes {
        let mut seq = world.scheduler.running.pop().unwrap();
        seq.drafted = drafted.start..start;
        seq.draft_over(start, rows);
        assert_eq!(seq.drafted, drafted);
        seq.leave();
        assert!(seq.enter(true, 0));
        assert_eq!((seq.computed, seq.drafted.clone()), (64, seen_from..64), "after a pass over {drafted:?}");
        world.scheduler.running.push(seq);
    }
}
