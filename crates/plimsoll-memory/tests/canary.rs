//! The canary in the heap's keeping: the first allocation that the system refuses costs it, once, and the refusal can be handled.

use std::sync::Arc;

use plimsoll_memory::{Component, Ledger, Region, heap};

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

/// One test: the canary is the process's.
#[test]
fn a_refused_allocation_costs_the_canary_and_is_an_error_not_an_abort() {
    let ledger = Arc::new(Ledger::new());
    ledger.plan(Component::Canary, 1 << 20);
    let canary = Region::map(&ledger, Component::Canary, 1 << 20, true).unwrap();
    assert!(heap::arm(canary).is_none() && heap::armed());
    let refused = || Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err();
    assert!(refused(), "half of the address space is not to be had");
    assert!(!heap::armed());
    assert_eq!((heap::canaries_released(), ledger.row(Component::Canary).committed), (1, 0));
    assert!(refused(), "a second refusal finds none and costs nothing");
    assert_eq!(heap::canaries_released(), 1);
    // Growing what is there is refused in the same way, and leaves it as it was.
    assert!(heap::arm(Region::restore_canary(&ledger).unwrap()).is_none());
    let mut list = vec![7u8; 100];
    assert!(list.try_reserve_exact(isize::MAX as usize - 200).is_err());
    assert_eq!((list, heap::canaries_released(), heap::armed()), (vec![7; 100], 2, false));
    assert!(heap::disarm().is_none());
}
