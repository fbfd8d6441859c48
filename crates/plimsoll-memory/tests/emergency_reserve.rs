//! The emergency reserve of the heap: an allocation that the system refuses costs one block of it, and the refusal can be handled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_memory::emergency_reserve::BLOCKS;
use plimsoll_memory::{Component, EmergencyReserve, Ledger, heap};

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

/// A watcher that is woken later than this counts as not woken.
const LATE: Duration = Duration::from_secs(20);

/// One test: the emergency reserve belongs to the process.
#[test]
fn every_refused_allocation_costs_a_slice_and_is_an_error_not_an_abort() {
    let ledger = Arc::new(Ledger::new());
    ledger.plan(Component::EmergencyReserve, 1 << 20);
    let emergency_reserve = EmergencyReserve::map(&ledger, 1 << 20).unwrap();
    assert!(heap::arm(emergency_reserve).is_none() && heap::armed());
    let state =
        || (heap::blocks_released(), heap::reserve_blocks_missing(), ledger.row(Component::EmergencyReserve).committed);
    let slice = (1 << 20) / BLOCKS as u64;
    for n in 1..=BLOCKS as u64 {
        let refused = Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err();
        assert!(refused, "half of the address space is not to be had");
        assert_eq!(state(), (n, n as usize, (1 << 20) - n * slice), "one refusal, one slice");
    }
    assert!(Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err(), "and more cost nothing");
    assert_eq!(state(), (BLOCKS as u64, BLOCKS, 0));
    // Blocks are restored one at a time, and only if the system has room for more than them.
    assert_eq!(heap::restore_reserve(2 * slice - 1), Ok(false));
    assert_eq!(heap::reserve_blocks_missing(), BLOCKS);
    for missing in (0..BLOCKS).rev() {
        assert_eq!(heap::restore_reserve(2 * slice), Ok(missing == 0));
        assert_eq!(heap::reserve_blocks_missing(), missing);
    }
    assert_eq!(ledger.row(Component::EmergencyReserve).committed, 1 << 20);
    // Growing a list is refused in the same way, and leaves the list as it was.
    let mut list = vec![7u8; 100];
    assert!(list.try_reserve_exact(isize::MAX as usize - 200).is_err());
    assert_eq!((list, heap::reserve_blocks_missing()), (vec![7; 100], 1));
    // If two callers have given up the reserve, it is restored only after both have ended.
    let first = heap::give_up_reserve();
    let second = heap::give_up_reserve();
    assert_eq!((heap::reserve_blocks_missing(), ledger.row(Component::EmergencyReserve).committed), (BLOCKS, 0));
    assert_eq!(heap::restore_reserve(u64::MAX), Ok(false));
    drop(first);
    assert_eq!((heap::restore_reserve(u64::MAX), heap::reserve_blocks_missing()), (Ok(false), BLOCKS));
    drop(second);
    while heap::restore_reserve(u64::MAX) == Ok(false) {}
    assert_eq!(heap::reserve_blocks_missing(), 0);
    every_watcher_that_lives_is_woken();
    drop(heap::give_up_reserve());
    assert!(heap::disarm().is_some());
    assert_eq!((heap::reserve_blocks_missing(), heap::armed(), heap::restore_reserve(u64::MAX)), (0, false, Ok(true)));
}

/// Asserts that a refusal wakes both watchers that live, after a third has ended.
fn every_watcher_that_lives_is_woken() {
    let (ready, wait) = std::sync::mpsc::channel();
    let watch = || {
        let ready = ready.clone();
        std::thread::spawn(move || {
            let _woken = heap::wake_me();
            let missing = heap::reserve_blocks_missing();
            ready.send(()).unwrap();
            let begun = Instant::now();
            while heap::reserve_blocks_missing() == missing && begun.elapsed() < LATE {
                std::thread::park_timeout(LATE);
            }
            begun.elapsed()
        })
    };
    let watchers = [watch(), watch()];
    watchers.iter().for_each(|_| wait.recv().unwrap());
    std::thread::spawn(|| drop(heap::wake_me())).join().unwrap();
    assert!(Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err());
    for watcher in watchers {
        let after = watcher.join().unwrap();
        assert!(after < LATE, "it was not woken: {after:?}");
    }
}
