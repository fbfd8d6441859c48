//! Faults on purpose: allocations that are refused and places that panic, for tests.
//!
//! Without the feature `fault-injection`, which only tests switch on, every question in here is answered "no" at compile time:
//! a release cannot be told to fail. Nothing reads an environment variable. What is counted: heap calls through
//! [`CountingHeap`](crate::heap::CountingHeap), on one thread or in the whole process; mappings of regions, of one
//! component or of all; passages of a [`Site`].

use crate::Component;

/// A place that a test can make panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Site {
    /// Text to ids.
    Tokenizer = 1,
    /// Messages to prompt.
    Template,
    /// A request's way into the engine.
    Accept,
    /// Filling a step.
    Scheduler,
    /// A step that is not taken, so that the engine goes round without getting anywhere.
    NoStep,
    /// Choosing a token.
    Sampler,
    /// Ids to text.
    Detokenizer,
    /// Shaping an answer.
    Shape,
    /// A page that is not given back.
    LosePage,
    /// A state slot that is not given back.
    LoseSlot,
    /// Images on their way through the encoder.
    Encoder,
    /// The loss of a GPU at the next step.
    LoseDevice,
}

#[cfg(not(any(test, feature = "fault-injection")))]
mod never {
    use super::{Component, Site};

    /// Panics where a test has asked for it; here: never.
    #[inline(always)]
    pub fn site(_: Site) {}

    /// Whether a test has asked for something here; no.
    #[inline(always)]
    pub fn asked(_: Site) -> bool {
        false
    }

    #[inline(always)]
    pub(crate) fn region(_: u64, _: u64) {}

    #[inline(always)]
    pub(crate) fn refuses_heap(_: fn() -> bool) -> bool {
        false
    }

    /// Whether a test has asked for the refusal of this component's next mapping, or buffer on a GPU; no.
    #[inline(always)]
    pub fn refuses_region(_: Component) -> bool {
        false
    }
}

#[cfg(not(any(test, feature = "fault-injection")))]
pub use never::{asked, refuses_region, site};
#[cfg(not(any(test, feature = "fault-injection")))]
pub(crate) use never::{refuses_heap, region};

#[cfg(any(test, feature = "fault-injection"))]
mod armed {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::{Component, Site};

    /// What an armed counter has met.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Tally {
        /// Calls that counted.
        pub seen: u64,
        /// Calls that were made to fail: one, or none if it never came to the one that was meant.
        pub hit: u64,
    }

    /// Counts calls and fails one of them. Atomics only: the allocator asks it.
    struct Counter {
        /// Which call fails; 0 for none.
        nth: AtomicU64,
        /// How many calls fail from there on.
        run: AtomicU64,
        /// Which calls count; 0 while disarmed, otherwise up to the owner.
        filter: AtomicU64,
        seen: AtomicU64,
        hit: AtomicU64,
    }

    impl Counter {
        const fn new() -> Self {
            Self {
                nth: AtomicU64::new(0),
                run: AtomicU64::new(1),
                filter: AtomicU64::new(0),
                seen: AtomicU64::new(0),
                hit: AtomicU64::new(0),
            }
        }

        fn arm(&self, filter: u64, nth: u64) {
            self.arm_run(filter, nth, 1);
        }

        fn arm_run(&self, filter: u64, nth: u64, run: u64) {
            self.run.store(run, Relaxed);
            self.seen.store(0, Relaxed);
            self.hit.store(0, Relaxed);
            self.nth.store(nth, Relaxed);
            self.filter.store(filter, Relaxed);
        }

        fn disarm(&self) -> Tally {
            self.filter.store(0, Relaxed);
            Tally { seen: self.seen.load(Relaxed), hit: self.hit.load(Relaxed) }
        }

        fn fails(&self) -> bool {
            let nth = self.nth.load(Relaxed);
            let call = self.seen.fetch_add(1, Relaxed) + 1;
            let of_run = nth > 0 && call >= nth && call - nth < self.run.load(Relaxed);
            let fails = of_run || nth == EVERY;
            self.hit.fetch_add(u64::from(fails), Relaxed);
            fails
        }
    }

    /// As the number of a call: every one.
    pub const EVERY: u64 = u64::MAX;

    static PROCESS: Counter = Counter::new();
    static REGIONS: Counter = Counter::new();
    static SITES: Counter = Counter::new();

    /// In [`REGIONS`]' filter: every component counts.
    const ALL: u64 = u64::MAX;

    #[derive(Clone, Copy)]
    struct Thread {
        under: bool,
        nth: u64,
        tally: Tally,
    }

    thread_local! {
        static THREAD: Cell<Thread> =
            const { Cell::new(Thread { under: false, nth: 0, tally: Tally { seen: 0, hit: 0 } }) };
    }

    /// The `nth` heap call that this thread makes inside [`under`] is refused (0: none is, they are counted).
    pub fn arm_thread(nth: u64) {
        THREAD.set(Thread { under: false, nth, tally: Tally::default() });
    }

    /// Runs a part of the product: its heap calls count. The test's own calls, outside, do not.
    pub fn under<T>(work: impl FnOnce() -> T) -> T {
        struct Leave(bool);
        impl Drop for Leave {
            fn drop(&mut self) {
                THREAD.set(Thread { under: self.0, ..THREAD.get() });
            }
        }
        let before = THREAD.get();
        THREAD.set(Thread { under: true, ..before });
        let _leave = Leave(before.under);
        work()
    }

    /// Ends [`arm_thread`].
    pub fn disarm_thread() -> Tally {
        let Thread { tally, .. } = THREAD.replace(Thread { under: false, nth: 0, tally: Tally::default() });
        tally
    }

    /// The `nth` heap call of the whole process is refused (0: none is), of those made while a emergency reserve is armed: threads of the test
    /// harness make calls too, and one of an engine that has ended may, and cannot live with a refusal that nothing pays for.
    pub fn arm_process(nth: u64) {
        PROCESS.arm(1, nth);
    }

    /// The same for `run` calls in a row, from the `nth` on.
    pub fn arm_process_run(nth: u64, run: u64) {
        PROCESS.arm_run(1, nth, run);
    }

    /// Ends [`arm_process`] and [`arm_process_run`].
    pub fn disarm_process() -> Tally {
        PROCESS.disarm()
    }

    /// The `nth` mapping of a region of `component`, or of any, is refused (0: none is).
    pub fn arm_regions(component: Option<Component>, nth: u64) {
        REGIONS.arm(component.map_or(ALL, |component| 1 + component as u64), nth);
    }

    /// Ends [`arm_regions`].
    pub fn disarm_regions() -> Tally {
        REGIONS.disarm()
    }

    /// The `nth` passage of `site` panics (0: none does).
    pub fn arm_site(site: Site, nth: u64) {
        SITES.arm(site as u64, nth);
    }

    /// Ends [`arm_site`].
    pub fn disarm_site() -> Tally {
        SITES.disarm()
    }

    /// Panics where a test has asked for it.
    pub fn site(site: Site) {
        if asked(site) {
            panic!("injected panic in {site:?}");
        }
    }

    /// Whether a test has asked for something here.
    pub fn asked(site: Site) -> bool {
        SITES.filter.load(Relaxed) == site as u64 && SITES.fails()
    }

    static REGION_BYTES: AtomicU64 = AtomicU64::new(0);

    /// Bytes of all regions that are mapped now, whatever ledger they are in.
    pub fn region_bytes() -> u64 {
        REGION_BYTES.load(Relaxed)
    }

    pub(crate) fn region(mapped: u64, unmapped: u64) {
        REGION_BYTES.fetch_add(mapped.wrapping_sub(unmapped), Relaxed);
    }

    /// `armed`: whether an emergency reserve is in the heap's keeping.
    pub(crate) fn refuses_heap(armed: fn() -> bool) -> bool {
        let Thread { under, nth, tally } = THREAD.get();
        if under {
            let fails = tally.seen + 1 == nth;
            let tally = Tally { seen: tally.seen + 1, hit: tally.hit + u64::from(fails) };
            THREAD.set(Thread { under, nth, tally });
            if fails {
                return true;
            }
        }
        PROCESS.filter.load(Relaxed) != 0 && armed() && PROCESS.fails()
    }

    /// Whether a test has asked for the refusal of this component's next mapping, or buffer on a GPU.
    pub fn refuses_region(component: Component) -> bool {
        let filter = REGIONS.filter.load(Relaxed);
        (filter == ALL || filter == 1 + component as u64) && REGIONS.fails()
    }
}

#[cfg(any(test, feature = "fault-injection"))]
pub use armed::{
    EVERY, Tally, arm_process, arm_process_run, arm_regions, arm_site, arm_thread, asked, disarm_process,
    disarm_regions, disarm_site, disarm_thread, refuses_region, region_bytes, site, under,
};
#[cfg(any(test, feature = "fault-injection"))]
pub(crate) use armed::{refuses_heap, region};
