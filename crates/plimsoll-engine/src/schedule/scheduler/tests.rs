//! Properties of the scheduler under random arrivals, aborts and endings, in pools down to one request's size: it always
//! makes progress (I5), never exceeds a step's bounds, never lets two sequences write one page or one state slot, never lets a
//! checkpoint be written, and gives every page and slot back (I4). Half of the worlds have recurrent state and drafts that are
//! accepted at random.

mod state;
mod world;

use plimsoll_device::Bf16Rows;
use proptest::prelude::*;

use super::*;
use world::{Sizes, World, happening, sizes};

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_requests_finish_and_all_pages_return(
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

/// The oldest is served however many newer ones arrive (I5), also when all of them share its prefix.
#[test]
fn a_stream_of_new_requests_starves_no_request() {
    for shares_prefix in [true, false] {
        let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, ..StepLimits::default() };
        let mut world = World::new(Sizes::plain(limits, 8, true));
        let mut waited_max = 0;
        for round in 0..600 {
            world.arrive(40 + round % 23, 1 + round % 40, if shares_prefix { 0 } else { round as u32 }, 0, false);
            (0..12).for_each(|_| world.step());
            let oldest = world.scheduler.running().iter().chain(world.scheduler.waiting()).map(|seq| seq.order).min();
            waited_max = waited_max.max(world.arrived - oldest.unwrap_or(world.arrived));
            // The backlog is bounded: the newest client disconnects when it is long.
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

/// A short prompt does not wait until long ones are done, running or waiting, and leaves them half of every step.
#[test]
fn short_prompts_do_not_wait_for_long_ones() {
    let limits = StepLimits { rows: 8, logit_rows: 16, running: 16, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 400, false));
    for long in 0..4 {
        world.arrive(400, 1, long, 0, false);
    }
    (0..3).for_each(|_| world.step());
    for short in 0..5 {
        world.arrive(6, 20, 10 + short, 0, false);
    }
    let done =
        |world: &World| world.scheduler.running().iter().filter(|seq| seq.total_max < 400 && seq.decoding()).count();
    let long =
        |world: &World| world.scheduler.running().iter().map(|seq| if seq.sched.long { seq.computed } else { 0 }).sum();
    let (mut steps, before): (usize, usize) = (0, long(&world));
    while done(&world) < 5 {
        world.step();
        steps += 1;
        assert!(steps < 20, "{} of five short prompts are done", done(&world));
    }
    let computed = long(&world) - before;
    assert!(computed >= 2 * steps, "{computed} tokens of long prompts in {steps} steps");
    world.finish_all();
    world.assert_all_back();
}

/// Answers that are computed again use bounded steps (`World` checks each), and all finish.
#[test]
fn long_answers_are_computed_again_bit_by_bit() {
    let limits = StepLimits { rows: 200, logit_rows: 4, running: 4, bf16: Bf16Rows::Prompts, ..StepLimits::default() };
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

/// A prompt that is computed again, in chunks that extend into its output, is found by other sequences as before.
#[test]
fn a_prompt_that_is_computed_again_is_published_again() {
    let limits = StepLimits { rows: 200, logit_rows: 4, running: 4, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 64, true));
    world.arrive(100, 60, 0, 0, false);
    (0..20).for_each(|_| world.step());
    world.scheduler.preempt(0);
    world.cache.borrow_mut().clear();
    let found = |world: &World| world.cache.borrow().peek(world.scheduler.running()[0].key());
    world.step();
    assert_eq!(found(&world), 96, "six whole pages of prompt");
    world.finish_all();
    world.assert_all_back();
}

/// A running sequence's pages are shared: admission charges a sequence with the same prefix for its own pages only.
#[test]
fn shared_prefix_needs_pages_for_the_rest_only() {
    let limits = StepLimits { rows: 600, logit_rows: 8, running: 8, ..StepLimits::default() };
    // Forty pages of prefix, and six pages of its own for each of four sequences; two such prefixes would not fit.
    let mut world = World::new(Sizes::plain(limits, 70, true));
    let prompt = |own: u32| [vec![1; 40 * PAGE_TOKENS], vec![10 + own; PAGE_TOKENS]].concat();
    (0..4).for_each(|own| world.push(prompt(own), 4 * PAGE_TOKENS));
    let mut most = 0;
    for _ in 0..20 {
        world.step();
        most = most.max(world.scheduler.running().len());
    }
    assert_eq!((most, world.preempted), (4, 0));
    world.finish_all();
    world.assert_all_back();
}

/// The queue neither grows nor moves with the number of sequences that pass through it, even while it is never empty.
#[test]
fn single_waiting_request_keeps_its_place() {
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

/// A preempted sequence that finds all but its newest token in the index is decoding when it is admitted: it still gets its row at once.
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

/// An older sequence that takes the pages of a newer one also takes its place in the step.
#[test]
fn preempted_sequence_leaves_the_step() {
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
    let (entries, events) = world.scheduler.schedule();
    assert_eq!(entries, [StepEntry { seq: 0, start: 0, rows: 7, logit_rows: 0, drafts: 0 }]);
    assert_eq!(events.preempted, 1);
    assert_eq!(world.scheduler.waiting().map(|seq| seq.order).collect::<Vec<_>>(), [1]);
}

/// A prompt of many steps goes between the steps of decoding sequences. It delays neither these nor a short prompt
/// behind it. When long prompts outnumber decoding sequences, they join the steps instead.
#[test]
fn a_long_prompt_goes_between_the_steps_of_others() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 8, layered: true, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 32, false));
    world.scheduler.set_prefill_budget(PrefillBudget { prompts: 8, long: 2 });
    let rows = |world: &mut World| {
        let mut rows: Vec<usize> = world.scheduler.schedule().0.iter().map(|entry| entry.rows).collect();
        rows.sort_unstable();
        let layered = world.scheduler.layered().map_or(0, |(_, entry)| entry.rows);
        (rows, layered)
    };
    world.arrive(40, 8, 0, 0, false);
    assert_eq!(rows(&mut world), (vec![8], 0), "nobody decodes");
    for _ in 0..5 {
        world.step();
    }
    assert!(world.scheduler.running()[0].decoding());
    world.arrive(40, 8, 1, 1, false);
    assert_eq!(rows(&mut world), (vec![1], 2), "one against one");
    world.arrive(4, 8, 2, 2, false);
    assert_eq!(rows(&mut world), (vec![1, 4], 2), "a short one behind it goes into the step");
    world.step();
    world.arrive(40, 8, 3, 3, false);
    world.arrive(3, 8, 4, 4, false);
    // Two decode. The waiting long prompt would have no row, so a shorter one overtakes it.
    assert_eq!(rows(&mut world), (vec![1, 1, 3], 2));
    assert_eq!(world.scheduler.waiting().map(|seq| seq.order).collect::<Vec<_>>(), [3]);
    let (number, _) = world.scheduler.layered().unwrap();
    while world.scheduler.layered().is_some_and(|(now, _)| now == number) {
        world.step();
    }
    let computed = world.scheduler.running().iter().find(|seq| seq.order == 1).map(|seq| seq.computed);
    assert!(world.layers_done > 0 && computed == Some(2 * world.layers_done), "{computed:?}");
    for _ in 0..4 {
        world.arrive(40, 8, 5, 5, false);
    }
    let (step, _) = rows(&mut world);
    assert!(step.last().is_some_and(|rows| *rows > 2), "more long prompts than sequences that decode: {step:?}");
    world.finish_all();
    world.assert_all_back();
}

/// A sequence that loses its place loses its chunk. The sequence that takes the place begins another chunk.
#[test]
fn a_chunk_between_layers_ends_with_its_sequence() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 4, layered: true, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 32, false));
    world.arrive(4, 40, 0, 0, false);
    world.step();
    world.arrive(40, 8, 1, 1, false);
    world.scheduler.schedule();
    let (first, entry) = world.scheduler.layered().unwrap();
    world.scheduler.preempt(entry.seq);
    assert_eq!(world.scheduler.layered(), None);
    world.scheduler.schedule();
    let (second, again) = world.scheduler.layered().unwrap();
    assert!(second != first && again == entry, "the same rows, in other pages");
    world.scheduler.remove(|seq| seq.order == 1, drop);
    assert_eq!(world.scheduler.layered(), None);
    world.finish_all();
    world.assert_all_back();
}

/// A sequence with the beginning of a long prompt waits for that common part, chunk by chunk, and for no more.
#[test]
fn equal_prefix_starts_from_cached_chunks() {
    for slots in [0, 24] {
        let limits = StepLimits { rows: 32, logit_rows: 8, running: 8, layered: true, ..StepLimits::default() };
        let limits = StepLimits { slots: slots.min(1), ..limits };
        let mut world = World::new(Sizes { slots, ..Sizes::plain(limits, 256, true) });
        world.scheduler.set_prefill_budget(PrefillBudget { prompts: 32, long: 32 });
        let begins = |shared: u32, len: u32, own: u32| (0..shared).chain((0..len - shared).map(|i| own + i)).collect();
        (0..4).for_each(|i| world.push(begins(0, 8, 9000 + 10 * i), 400));
        world.step();
        world.push(begins(300, 300, 0), 4);
        world.step();
        world.push(begins(20, 30, 1000), 4);
        world.push(begins(200, 230, 2000), 4);
        let mut starts = std::collections::BTreeMap::new();
        for _ in 0..200 {
            world.step();
            for seq in world.scheduler.running() {
                starts.entry(seq.order).or_insert((seq.sched.published, world.layers_done));
            }
        }
        assert!(world.layers_done > 10, "the long prompts go layer by layer");
        let [(short, chunks), (long, _)] = [5, 6].map(|order| starts[&order]);
        // The first chunk was under way when the short prompt arrived, so it has no checkpoint inside.
        let common = if slots == 0 { 16 } else { 0 };
        assert!(short == common && (192..=224).contains(&long), "{slots} slots: from {short} and {long}");
        assert!(chunks <= 2, "it waited for {chunks} chunks");
        world.finish_all();
        world.assert_all_back();
    }
}

/// A burst of short prompts does not delay decoding sequences by a step full of prompts. A long prompt does not delay
/// the short ones.
#[test]
fn short_prompts_leave_others_their_share_of_a_step() {
    let limits = StepLimits { rows: 8, logit_rows: 4, running: 6, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 32, false));
    world.scheduler.set_prefill_budget(PrefillBudget { prompts: 3, long: 2 });
    world.arrive(6, 16, 0, 0, false);
    world.arrive(7, 16, 1, 1, false);
    let rows = |world: &mut World| -> Vec<usize> {
        let rows = world.scheduler.schedule().0.iter().map(|entry| entry.rows).collect();
        world.step();
        rows
    };
    assert_eq!(rows(&mut world), [6, 2], "nobody decodes");
    assert_eq!(rows(&mut world), [1, 3], "of five");
    world.arrive(2, 16, 2, 2, false);
    assert_eq!(rows(&mut world), [1, 2, 1], "of two, and of two");
    assert_eq!(rows(&mut world), [1, 1, 1]);
    world.finish_all();
    world.assert_all_back();
}
