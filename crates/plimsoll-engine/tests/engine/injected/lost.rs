//! Pages and state slots that are never released: they are found when nothing runs, logged, counted, and available again.

use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::testing::by_hand;
use plimsoll_memory::faults::{self, Site};

use super::hide_injected_panics;
use crate::common::recall::{Shape, recall_bench, says};
use crate::common::{drive, full_pools, greedy};
use crate::process::own_process;

/// Runs requests of which one loses pages or slots at `site`. These are available again a moment after the last request has ended.
fn loses(shape: Shape, site: Site, [pages, slots]: [u64; 2]) {
    hide_injected_panics();
    let (bench, _) = recall_bench(shape);
    let (engine, mut hand) = by_hand(bench);
    let prompt: Vec<u32> = (0..40).collect();
    faults::arm_site(site, 2);
    let readers: Vec<_> = (0..3).map(|_| engine.submit(greedy(&prompt, 8)).unwrap()).collect();
    for answer in drive(&mut hand, readers, |_| {}) {
        assert_eq!(answer.ids, says(&prompt, 8), "nobody notices");
    }
    assert_eq!(faults::disarm_site().hit, 1);
    let metrics = engine.metrics();
    let lost = || [metrics.lost_pages.get(), metrics.lost_slots.get()];
    let missing = || {
        let status = engine.status();
        let [used, cached] = [&status.pages_used, &status.pages_cached].map(|n| n.load(Acquire));
        let [taken, kept] = [&status.slots_used, &status.slots_kept].map(|n| n.load(Acquire));
        [used - cached, taken - kept]
    };
    hand.run_iteration();
    assert_eq!((missing(), lost()), ([pages, slots], [0, 0]), "it is really gone");
    let deadline = Instant::now() + Duration::from_secs(20);
    while lost() == [0, 0] {
        assert!(Instant::now() < deadline, "nobody finds it");
        std::thread::sleep(Duration::from_millis(50));
        hand.run_iteration();
    }
    assert_eq!((lost(), metrics.recoveries.get()), ([pages, slots], 1));
    full_pools(&engine);
    // Later requests are served as before, and no more pages or slots are lost.
    let again = vec![engine.submit(greedy(&prompt, 8)).unwrap()];
    assert_eq!(drive(&mut hand, again, |_| {})[0].ids, says(&prompt, 8));
    let later = Instant::now() + Duration::from_secs(4);
    while Instant::now() < later {
        hand.run_iteration();
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((lost(), metrics.recoveries.get()), ([pages, slots], 1));
}

#[test]
#[ignore = "soak"]
fn a_page_that_is_not_given_back_is_found_at_rest() {
    own_process!();
    loses(Shape { prefix_cache: false, ..Shape::default() }, Site::LosePage, [1, 0]);
}

#[test]
#[ignore = "soak"]
fn a_state_slot_that_is_not_given_back_is_found_at_rest() {
    own_process!();
    loses(Shape::hybrid(0, 256, 8), Site::LoseSlot, [0, 1]);
}
