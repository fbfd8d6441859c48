//! The pool of KV pages: the holders of each page, and the cached pages that no sequence uses.
//!
//! Every table is allocated when the pool is built. A page is in exactly one of three states: *free* (on the free
//! stack), *held* (one or more holders), or *idle* (the prefix index is its only holder; on the idle queue, coldest
//! first). Free stack and idle queue are linked through the same two fields, so a state change costs a few writes.
//!
//! Not here: tokens, prefixes, bytes of KV, requests.

use thiserror::Error;

/// Tokens in one page of KV.
pub const PAGE_TOKENS: usize = 16;

/// End of a list, and the link of a page that is on none.
const NIL: u32 = u32::MAX;
/// Set in `Slot::refs` while the prefix index is one of the holders.
const CACHED: u32 = 1 << 31;
/// The largest number of holders that fits beside the flag.
const REFS_MAX: u32 = CACHED - 1;

/// The number of one KV page, an index into the pool it came from (0 ≤ id < [`PagePool::total`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// The page number as an index into tables that have one row a page.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why a pool could not be built, or what [`PagePool::check`] found wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PoolError {
    /// More pages than a page number can name.
    #[error("a page pool of {total} pages was asked for, the limit is {limit}")]
    TooManyPages {
        /// The requested number of pages.
        total: usize,
        /// The largest number of pages a pool can have.
        limit: usize,
    },
    /// The host has no memory left for the tables.
    #[error("no host memory for the page tables of {total} pages ({bytes} bytes)")]
    OutOfMemory {
        /// The requested number of pages.
        total: usize,
        /// The bytes the tables would have taken.
        bytes: usize,
    },
    /// A list does not have as many pages as its counter says.
    #[error("the {list} list has {walked} pages, its counter says {counted}, the tables say {flagged}")]
    ListBroken {
        /// Which list: `free` or `idle`.
        list: &'static str,
        /// Pages met on a walk through the links.
        walked: usize,
        /// Pages according to the counter.
        counted: usize,
        /// Pages that belong on the list according to their holders and flag.
        flagged: usize,
    },
    /// Holders released pages they did not hold, or named pages of another pool.
    #[error("{faults} page operations were refused: double release or foreign page")]
    Faults {
        /// How many operations were refused since the pool was built.
        faults: u64,
    },
}

/// The table row of one page.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Number of holders, with [`CACHED`] on top.
    refs: u32,
    /// Previous page on the idle queue; unused on the free stack.
    prev: u32,
    /// Next page on the idle queue or the free stack.
    next: u32,
    /// Whether the draft head has entries of all positions of the page.
    drafted: bool,
}

/// A fixed number of KV pages with a holder count each.
///
/// No operation allocates after [`PagePool::new`]. Misuse (releasing what is not held, a number of another pool) fails
/// a debug assertion, is refused, and is counted in [`PagePool::faults`]; it never corrupts the pool.
#[derive(Debug)]
pub struct PagePool {
    slots: Box<[Slot]>,
    free_head: u32,
    free_len: usize,
    /// The most pages in use at once.
    peak: usize,
    idle_head: u32,
    idle_tail: u32,
    idle_len: usize,
    faults: u64,
}

impl PagePool {
    /// The largest number of pages one pool can have.
    pub const PAGES_MAX: usize = 1 << 30;

    /// Builds a pool of `total` pages, all of them free; page 0 is handed out first.
    ///
    /// # Errors
    /// [`PoolError::TooManyPages`] above [`Self::PAGES_MAX`], [`PoolError::OutOfMemory`] if the tables cannot be allocated.
    pub fn new(total: usize) -> Result<Self, PoolError> {
        if total > Self::PAGES_MAX {
            return Err(PoolError::TooManyPages { total, limit: Self::PAGES_MAX });
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(total).map_err(|_| PoolError::OutOfMemory { total, bytes: Self::bytes_for(total) })?;
        slots.resize(total, Slot { refs: 0, prev: NIL, next: NIL, drafted: false });
        let mut pool = Self {
            slots: slots.into_boxed_slice(),
            free_head: NIL,
            free_len: 0,
            peak: 0,
            idle_head: NIL,
            idle_tail: NIL,
            idle_len: 0,
            faults: 0,
        };
        pool.start_over();
        Ok(pool)
    }

    /// Makes every page free, whatever the tables said; [`Self::alloc`] hands out page 0 first. No page may have a
    /// holder.
    pub(crate) fn start_over(&mut self) {
        let total = self.slots.len();
        for (page, slot) in self.slots.iter_mut().enumerate() {
            let next = if page + 1 == total { NIL } else { page as u32 + 1 };
            *slot = Slot { refs: 0, prev: NIL, next, drafted: false };
        }
        (self.free_head, self.free_len) = (if total == 0 { NIL } else { 0 }, total);
        (self.idle_head, self.idle_tail, self.idle_len, self.faults) = (NIL, NIL, 0, 0);
    }

    /// Calls `each` with every page without a holder, in ascending order.
    pub(crate) fn each_free(&self, mut each: impl FnMut(u32)) {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.refs == 0).for_each(|(page, _)| each(page));
    }

    /// Bytes of host memory the tables of a pool of `total` pages take.
    #[must_use]
    pub const fn bytes_for(total: usize) -> usize {
        total * size_of::<Slot>()
    }

    /// Bytes of host memory this pool's tables take; constant over its life.
    #[must_use]
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.slots.len())
    }

    /// All pages of the pool.
    #[must_use]
    pub fn total(&self) -> usize {
        self.slots.len()
    }

    /// Pages without a holder.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free_len
    }

    /// Pages with at least one holder; this includes the idle ones.
    #[must_use]
    pub fn used(&self) -> usize {
        self.slots.len() - self.free_len
    }

    /// The most pages that were in use at once since the pool was built.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Pages that only the prefix index holds, so that evicting them makes them free.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.idle_len
    }

    /// Pages a new sequence could get: the free ones and, after eviction, the idle ones.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free_len + self.idle_len
    }

    /// Number of holders of `page`, the prefix index included; 0 for a free page and for one of another pool.
    #[must_use]
    pub fn holders(&self, page: PageId) -> u32 {
        self.slots.get(page.index()).map_or(0, |slot| slot.refs & REFS_MAX)
    }

    /// Operations refused since the pool was built; anything but 0 is a bug in a caller.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.faults
    }

    /// Takes a free page; the caller is its only holder. `None` when no page is free.
    pub fn alloc(&mut self) -> Option<PageId> {
        let page = self.free_head;
        let slot = self.slots.get_mut(page as usize)?;
        debug_assert_eq!(slot.refs, 0, "page {page} is on the free stack and held");
        self.free_head = slot.next;
        *slot = Slot { refs: 1, prev: NIL, next: NIL, drafted: false };
        self.free_len -= 1;
        self.peak = self.peak.max(self.used());
        Some(PageId(page))
    }

    /// Whether no second sequence holds the page.
    #[must_use]
    pub fn held_once(&self, page: PageId) -> bool {
        self.slots.get(page.index()).is_some_and(|slot| slot.refs == 1)
    }

    /// Records that the draft head has entries of all the page's positions.
    pub fn set_drafted(&mut self, page: PageId) {
        if let Some(slot) = self.slots.get_mut(page.index()) {
            slot.drafted = true;
        }
    }

    /// Whether the draft head has entries of all the page's positions.
    #[must_use]
    pub fn drafted(&self, page: PageId) -> bool {
        self.slots.get(page.index()).is_some_and(|slot| slot.drafted)
    }

    /// Marks the draft head's entries of all pages as missing.
    pub(crate) fn forget_drafted(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.drafted = false);
    }

    /// Adds a holder to a page that has at least one.
    pub fn retain(&mut self, page: PageId) {
        let Some(refs) = self.refs_of(page) else {
            return self.fault("retain of a foreign page", page);
        };
        let holders = refs & REFS_MAX;
        if holders == 0 || holders == REFS_MAX {
            return self.fault("retain of a free page, or of one with too many holders", page);
        }
        if refs == CACHED | 1 {
            self.idle_unlink(page.0);
        }
        self.slots[page.index()].refs = refs + 1;
    }

    /// Releases one holder's claim; returns whether the page became free.
    ///
    /// A sequence releases its pages deepest first ([`Self::release_all`] does), so that a prefix is always colder
    /// than what continues it and eviction meets leaves first.
    pub fn release(&mut self, page: PageId) -> bool {
        let Some(refs) = self.refs_of(page) else {
            self.fault("release of a foreign page", page);
            return false;
        };
        // The last claim on a cached page is the index's own, and only `uncache` gives that back.
        if refs & REFS_MAX == 0 || refs == CACHED | 1 {
            self.fault("released by a sequence that does not hold it", page);
            return false;
        }
        self.slots[page.index()].refs = refs - 1;
        match refs - 1 {
            0 => self.free_push(page.0),
            idle if idle == CACHED | 1 => self.idle_push(page.0),
            _ => {}
        }
        refs == 1
    }

    /// Gives back one claim on each of `pages`, the last page first, and returns how many became free.
    pub fn release_all(&mut self, pages: &[PageId]) -> usize {
        pages.iter().rev().filter(|&&page| self.release(page)).count()
    }

    /// Walks every list and compares it with the counters and the holder counts.
    ///
    /// # Errors
    /// [`PoolError::ListBroken`] if a list disagrees with its counter, [`PoolError::Faults`] if an operation was refused.
    pub fn check(&self) -> Result<(), PoolError> {
        let flagged = |want: u32| self.slots.iter().filter(|slot| slot.refs == want).count();
        let lists = [("free", self.free_head, self.free_len, 0), ("idle", self.idle_head, self.idle_len, CACHED | 1)];
        for (list, head, counted, refs) in lists {
            let (walked, flagged) = (self.walk(head, refs), flagged(refs));
            if walked != counted || flagged != counted {
                return Err(PoolError::ListBroken { list, walked, counted, flagged });
            }
        }
        if self.faults > 0 { Err(PoolError::Faults { faults: self.faults }) } else { Ok(()) }
    }

    /// Adds the prefix index as a holder of `page`; false if the page has no holder or is cached already.
    pub(super) fn cache(&mut self, page: PageId) -> bool {
        let holders = self.refs_of(page).unwrap_or(0);
        if holders == 0 || holders >= REFS_MAX {
            self.fault("caching of a page that is free, foreign or cached", page);
            return false;
        }
        self.slots[page.index()].refs = (holders + 1) | CACHED;
        true
    }

    /// Releases the prefix index's claim on `page`; returns whether the page became free.
    pub(super) fn uncache(&mut self, page: PageId) -> bool {
        let refs = self.refs_of(page).unwrap_or(0);
        if refs & CACHED == 0 {
            self.fault("uncaching of a page that is not cached", page);
            return false;
        }
        if refs == CACHED | 1 {
            self.idle_unlink(page.0);
        }
        let holders = (refs & REFS_MAX) - 1;
        self.slots[page.index()].refs = holders;
        if holders == 0 {
            self.free_push(page.0);
        }
        holders == 0
    }

    /// Whether the prefix index is one of the holders of `page`.
    pub(super) fn is_cached(&self, page: PageId) -> bool {
        self.refs_of(page).is_some_and(|refs| refs & CACHED != 0)
    }

    /// The idle page that has been idle longest.
    pub(super) fn coldest(&self) -> Option<PageId> {
        (self.idle_head != NIL).then_some(PageId(self.idle_head))
    }

    /// The page that has been idle longest among those that `fits` accepts. The pages before it become the warmest; the order stays
    /// if none fits.
    pub(super) fn coldest_of(&mut self, fits: impl Fn(PageId) -> bool) -> Option<PageId> {
        for _ in 0..self.idle_len {
            let page = self.coldest()?;
            if fits(page) {
                return Some(page);
            }
            self.warm(page);
        }
        None
    }

    /// Makes an idle page the warmest one.
    pub(super) fn warm(&mut self, page: PageId) {
        if self.refs_of(page) == Some(CACHED | 1) {
            self.idle_unlink(page.0);
            self.idle_push(page.0);
        }
    }

    /// Makes an idle page the coldest one.
    pub(super) fn chill(&mut self, page: PageId) {
        if self.refs_of(page) != Some(CACHED | 1) {
            return;
        }
        self.idle_unlink(page.0);
        let head = self.idle_head;
        self.slots[page.index()].next = head;
        match self.slots.get_mut(head as usize) {
            Some(first) => first.prev = page.0,
            None => self.idle_tail = page.0,
        }
        self.idle_head = page.0;
        self.idle_len += 1;
    }

    fn refs_of(&self, page: PageId) -> Option<u32> {
        self.slots.get(page.index()).map(|slot| slot.refs)
    }

    fn fault(&mut self, what: &str, page: PageId) {
        self.faults += 1;
        debug_assert!(false, "{what}: page {} of {}", page.0, self.slots.len());
    }

    fn free_push(&mut self, page: u32) {
        self.slots[page as usize] = Slot { refs: 0, prev: NIL, next: self.free_head, drafted: false };
        self.free_head = page;
        self.free_len += 1;
    }

    fn idle_push(&mut self, page: u32) {
        let tail = self.idle_tail;
        let slot = &mut self.slots[page as usize];
        (slot.prev, slot.next) = (tail, NIL);
        match self.slots.get_mut(tail as usize) {
            Some(last) => last.next = page,
            None => self.idle_head = page,
        }
        self.idle_tail = page;
        self.idle_len += 1;
    }

    fn idle_unlink(&mut self, page: u32) {
        let Slot { prev, next, .. } = self.slots[page as usize];
        match self.slots.get_mut(prev as usize) {
            Some(before) => before.next = next,
            None => self.idle_head = next,
        }
        match self.slots.get_mut(next as usize) {
            Some(after) => after.prev = prev,
            None => self.idle_tail = prev,
        }
        let slot = &mut self.slots[page as usize];
        (slot.prev, slot.next) = (NIL, NIL);
        self.idle_len -= 1;
    }

    /// Pages met from `head` on that have exactly `refs`, stopping after one page more than there are.
    ///
    /// A page has one successor, so a walk that ends cannot have met a page twice.
    fn walk(&self, head: u32, refs: u32) -> usize {
        let (mut at, mut met) = (head, 0);
        while let Some(slot) = self.slots.get(at as usize) {
            if slot.refs != refs || met > self.slots.len() {
                return usize::MAX;
            }
            (at, met) = (slot.next, met + 1);
        }
        met
    }
}
