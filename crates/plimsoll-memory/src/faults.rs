//! Injected faults for tests: allocations that are refused, and places that panic.
//!
//! Without the feature `fault-injection`, which only tests switch on, every query in here returns "no" at compile time. A release cannot be
//! made to fail. No environment variable is read. Three kinds of calls are counted: heap calls through
//! [`CountingHeap`](crate::heap::CountingHeap), on one thread or in the whole process; mappings of regions, of one component or of all;
//! passages of a [`Site`].

use crate::Component;

/// A place that a test can make panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Site {
    /// Text to ids.
    Tokenizer = 1,
    /// Messages to prompt.
    Template,
    /// Accepting a request in the engine.
    Accept,
    /// Filling a step.
    Scheduler,
    /// Skipping a step, so that the engine loop makes no progress.
    NoStep,
    /// Choosing a token.
    Sampler,
    /// Ids to text.
    Detokenizer,
    /// Building a response.
    Shape,
    /// Keeping a page that should be given back.
    LosePage,
    /// Keeping a state slot that should be given back.
    LoseSlot,
    /// Encoding images or other media.
    Encoder,
    /// The loss of a GPU at the next step.
    LoseDevice,
}

#[cfg(not(any(test, feature = "fault-injection")))]
mod never {
    use super::{Component, Site};

    /// Panics where a test has asked for it; without the feature, never.
    #[inline(always)]
    pub fn site(_: Site) {}

    /// Whether a test has armed this site; without the feature, no.
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

    /// Whether a test has asked to refuse this component's next mapping, or buffer on a GPU; without the feature, no.
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

    /// The counts of an armed counter.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Tally {
        /// Calls that matched the filter.
        pub seen: u64,
        /// Calls that were made to fail; 0 if the counter never reached the call to fail.
        pub hit: u64,
    }

    /// Counts calls and fails some of them. It uses atomics only, because the allocator calls it.
    struct Counter {
        /// Number of the first call that fails; 0 for none.
        nth: AtomicU64,
        /// Number of calls in a row that fail.
        run: AtomicU64,
        /// The calls that count; 0 while disarmed, otherwise a value that the counter's user defines.
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

    /// As the number of a call: every call fails.
    pub const EVERY: u64 = u64::MAX;

    static PROCESS: Counter = Counter::new();
    static REGIONS: Counter = Counter::new();
    static SITES: Counter = Counter::new();

    /// In the filter of [`REGIONS`]: every component counts.
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

    /// Refuses the `nth` heap call that this thread makes inside [`under`]. With 0 no call is refused, and all are counted.
    pub fn arm_thread(nth: u64) {
        THREAD.set(Thread { under: false, nth, tally: Tally::default() });
    }

    /// Runs a part of the program under test: its heap calls count. The test's own calls, outside, do not.
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

    /// Refuses the `nth` heap call of the whole process (0: none) while an emergency reserve is armed. Other calls do not count: the test
    /// harness's threads make some, and so can threads of an engine that has ended. They cannot handle a refusal that no reserve pays for.
    pub fn arm_process(nth: u64) {
        PROCESS.arm(1, nth);
    }

    /// The same for `run` calls in a row, the `nth` being the first.
    pub fn arm_process_run(nth: u64, run: u64) {
        PROCESS.arm_run(1, nth, run);
    }

    /// Ends [`arm_process`] and [`arm_process_run`].
    pub fn disarm_process() -> Tally {
        PROCESS.disarm()
    }

    /// Refuses the `nth` mapping of a region of `component`, or of any component (0: none).
    pub fn arm_regions(component: Option<Component>, nth: u64) {
        REGIONS.arm(component.map_or(ALL, |component| 1 + component as u64), nth);
    }

    /// Ends [`arm_regions`].
    pub fn disarm_regions() -> Tally {
        REGIONS.disarm()
    }

    /// Makes the `nth` passage of `site` panic (0: none).
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

    /// Whether a test has armed this site.
    pub fn asked(site: Site) -> bool {
        SITES.filter.load(Relaxed) == site as u64 && SITES.fails()
    }

    static REGION_BYTES: AtomicU64 = AtomicU64::new(0);

    /// Bytes of all regions that are mapped now, in any ledger.
    pub fn region_bytes() -> u64 {
        REGION_BYTES.load(Relaxed)
    }

    pub(crate) fn region(mapped: u64, unmapped: u64) {
        REGION_BYTES.fetch_add(mapped.wrapping_sub(unmapped), Relaxed);
    }

    /// Whether a heap call is refused. `armed` returns whether the heap has an emergency reserve.
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

    /// Whether a test has asked to refuse this component's next mapping, or buffer on a GPU.
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
