//! Properties of the scheduler for encoder models: a step has only whole sequences and never too many rows, the oldest runs first, and no
//! page is taken. They also hold when steps fail, clients disconnect, and the governor reduces the limits.

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::cache::{KvCache, PagePool};

fn new_seq(len: usize, logits: bool) -> NewSeq<()> {
    let pooled = Some(Pooled { logits, every_row: true, second_at: usize::MAX });
    NewSeq { pooled, ..NewSeq::new(vec![7; len], 0, ()) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whole_sequences_in_order_within_the_step(
        (rows, running) in (1usize..100, 1usize..9),
        lengths in prop::collection::vec((1usize..100, any::<bool>(), 0u8..6), 1..60),
        reduced in (1usize..20, 1usize..9),
    ) {
        let limits = StepLimits {
            rows, logit_rows: running.min(rows), running, encoder_batch: true, ..StepLimits::default()
        };
        let pool = PagePool::new(0).unwrap();
        let cache = Rc::new(RefCell::new(KvCache::new(pool, None, None)));
        let mut scheduler: Scheduler<()> = Scheduler::new(limits, Rc::clone(&cache), 100);
        scheduler.reduce_limits(reduced.0, reduced.1);
        let mut arrivals = lengths.iter().enumerate();
        let (mut done, mut gone) = (0, 0);
        for round in 0.. {
            prop_assert!(round < 500, "it never ends");
            // A few arrive before every step.
            for (order, (len, logits, _)) in arrivals.by_ref().take(round % 7) {
                scheduler.push(Seq::new(&cache, order as u64, 0, new_seq((*len).min(rows), *logits)));
            }
            let oldest = scheduler.running().iter().chain(scheduler.waiting()).map(|seq| seq.order).min();
            let entries = scheduler.schedule().0.to_vec();
            prop_assert_eq!(entries.is_empty(), oldest.is_none(), "whoever waits is served");
            prop_assert!(entries.iter().map(|entry| entry.rows).sum::<usize>() <= rows);
            prop_assert!(entries.len() <= running);
            for entry in &entries {
                let seq = &scheduler.running()[entry.seq];
                prop_assert_eq!((entry.start, entry.rows, entry.drafts), (0, seq.tokens.len(), 0));
                prop_assert_eq!(entry.logit_rows, usize::from(seq.pooled.unwrap().logits));
            }
            if let Some(first) = entries.first() {
                let suspect = scheduler.running().iter().any(|seq| seq.sched.suspect_until.is_some());
                prop_assert!(suspect || Some(scheduler.running()[first.seq].order) == oldest, "nobody overtakes the oldest");
            }
            let fate = lengths[round % lengths.len()].2;
            if fate == 0 && scheduler.step_failed() {
                continue;
            }
            entries.iter().for_each(|entry| scheduler.commit(*entry, entry.rows));
            for index in (0..scheduler.running().len()).rev() {
                if scheduler.running()[index].computed > 0 {
                    drop(scheduler.finish(index));
                    done += 1;
                }
            }
            if fate == 1 {
                let newest = scheduler.waiting().map(|seq| seq.order).max();
                scheduler.remove(|seq| Some(seq.order) == newest, |_| gone += 1);
            }
            if scheduler.is_empty() && done + gone == lengths.len() {
                break;
            }
        }
        prop_assert_eq!((cache.borrow().pool.total(), cache.borrow().pool.used()), (0, 0));
    }
}
