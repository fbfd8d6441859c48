//! Recurrent state, its checkpoints, and drafts.

use super::*;

/// Limits of a world with state.
fn stateful(drafts: usize) -> StepLimits {
    StepLimits {
        rows: 64,
        logit_rows: 32,
        running: 8,
        slots: 1 + drafts,
        window: 0,
        drafts,
        draft_head: false,
        draft_model: false,
        encoder_batch: false,
        layered: false,
        media: false,
        image_rows: 0,
        bf16: Bf16Rows::None,
        candidates: false,
    }
}

fn state_world(drafts: usize, pages: usize, slots: usize) -> World {
    World::new(Sizes { slots, ..Sizes::plain(stateful(drafts), pages, true) })
}

fn checkpoints(world: &World) -> usize {
    world.cache.borrow().states.as_ref().unwrap().stats().kept
}

/// Runs a prompt to its end; returns how many of its tokens were cached, and all its tokens.
fn converse(world: &mut World, tokens: Vec<u32>, output: usize) -> (usize, Vec<u32>) {
    world.push(tokens, output);
    let (mut found, mut last) = (None, Vec::new());
    while !world.scheduler.is_empty() {
        world.step();
        if let Some(seq) = world.scheduler.running().first() {
            found.get_or_insert(seq.sched.published);
            last.clone_from(&seq.tokens);
        }
    }
    (found.unwrap(), last)
}

/// Every turn of a conversation starts from the checkpoint of the last turn's input. A long conversation keeps no more checkpoints than a
/// short one.
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
        world.push(prefix.iter().copied().chain((0..30).map(|j| 500 + i * 50 + j)).collect(), 4);
    }
    world.step();
    assert_eq!(world.scheduler.running().len(), 1, "the others wait");
    let mut starts = std::collections::BTreeMap::new();
    while !world.scheduler.is_empty() {
        world.step();
        for seq in world.scheduler.running() {
            starts.entry(seq.order).or_insert(seq.sched.published);
        }
    }
    let hits = (1..8).filter(|order| starts[order] == 96).count();
    assert_eq!(hits, 7, "{starts:?}");
    world.assert_all_back();
}

/// Sequences with two prefixes arrive in turn. In a step, sequences with the same prefix are neighbours, so that
/// attention reads it once for them.
#[test]
fn equal_prefixes_are_scheduled_together() {
    let limits = StepLimits { rows: 600, logit_rows: 8, running: 8, bf16: Bf16Rows::Prompts, ..StepLimits::default() };
    let mut world = World::new(Sizes::plain(limits, 400, true));
    for i in 0..6 {
        world.arrive(1100, 20, i % 2, 0, false);
    }
    while world.scheduler.running().iter().filter(|seq| seq.decoding()).count() < 6 {
        world.step();
    }
    let (entries, _) = world.scheduler.schedule();
    let begin: Vec<u32> = entries.to_vec().iter().map(|entry| world.scheduler.running()[entry.seq].tokens[0]).collect();
    assert_eq!(begin.len(), 6);
    assert_eq!(begin.chunk_by(|a, b| a == b).count(), 2, "{begin:?}");
}

/// When running sequences hold every slot, prompts continue without checkpoints. When sequences need slots, the coldest checkpoints are
/// evicted, with the pages that no other checkpoint needs.
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

/// Drafts of decoding sequences leave a row with logits to the oldest sequence, while its prompt is still computed.
#[test]
fn drafts_leave_prompts_their_rows() {
    let limits = StepLimits {
        rows: 6,
        logit_rows: 4,
        running: 4,
        slots: 0,
        window: 0,
        drafts: 3,
        draft_head: false,
        draft_model: false,
        encoder_batch: false,
        layered: false,
        media: false,
        image_rows: 0,
        bf16: Bf16Rows::None,
        candidates: false,
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
fn cached_pages_record_what_the_draft_head_has_seen() {
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

#[test]
fn a_draft_model_goes_back_over_what_it_missed_where_no_other_sequence_can_read() {
    let limits = StepLimits { rows: 80, logit_rows: 4, running: 4, ..StepLimits::default() };
    for prefix_cache in [false, true] {
        let mut world = World::new(Sizes::plain(limits, 8, prefix_cache));
        world.arrive(64, 8, 0, 0, false);
        world.step();
        let seq = world.scheduler.running.last_mut().unwrap();
        assert_eq!(seq.draft_from(40, 64), 40, "it has seen nothing");
        seq.draft_over(0, 24);
        // Pages of the prompt are in the prefix cache, where there is one.
        assert_eq!(seq.draft_from(40, 64), if prefix_cache { 40 } else { 24 });
        assert_eq!(seq.draft_from(40, 15), 40, "16 rows are too many");
        assert_eq!(seq.draft_from(24, 64), 24);
    }
}
