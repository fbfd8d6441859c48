//! The pages and state slots of one sequence. However the sequence ends, they return to the pools.
//!
//! Pool, prefix index and state slots are on the engine thread, behind one shared cell. A lease can therefore return everything in
//! `Drop`.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use arrayvec::ArrayVec;
use plimsoll_device::NO_STATE;
use plimsoll_memory::faults::{self, Site};

use crate::api::options::Options;
use crate::cache::{KvCache, Match, PAGE_TOKENS, PageId, PageKey, Purpose, SlotId};

/// The most checkpoints of one sequence: the end of its input, the end of its cached prefix, the end of a follower's cached prefix,
/// and the ends of pinned prefixes.
pub const CHECKPOINTS_WANTED_MAX: usize = 3 + super::Pin::MOST;

/// The most slots that a sequence owns: one, and one for each draft.
const RING_MAX: usize = 1 + Options::DRAFTS_MAX;

/// The cache as sequences and scheduler share it.
pub type SharedCache = Rc<RefCell<KvCache>>;

/// The pages of one sequence, in order of position.
#[derive(Debug)]
pub struct PageLease {
    cache: SharedCache,
    pages: Vec<PageId>,
    /// For models with sliding windows a window page for each page. Entries that its next row does not see are page 0, and not held.
    windows: Vec<PageId>,
    /// Number of first pages without held window pages.
    slid: usize,
    /// [`KvCache::invalidations`] when the lease took its first page.
    invalidations: u32,
}

impl PageLease {
    /// No pages yet. `pages` and `windows` have the capacity for the longest sequence, so that growing never allocates.
    pub fn new(cache: &SharedCache, pages: Vec<PageId>, windows: Vec<PageId>) -> Self {
        debug_assert!(pages.is_empty() && windows.is_empty());
        Self { cache: Rc::clone(cache), pages, windows, slid: 0, invalidations: 0 }
    }

    /// Positions that the pages hold.
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// The pages.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// The window page of each page, for models with sliding windows; page 0 where none is held.
    pub fn windows(&self) -> &[PageId] {
        &self.windows
    }

    /// Window pages that the lease holds.
    pub fn windows_held(&self) -> usize {
        self.windows.len() - self.slid.min(self.windows.len())
    }

    /// Whether the model has sliding windows.
    pub fn windowed(&self) -> bool {
        self.cache.borrow().windows.is_some()
    }

    /// Takes the cached pages of `key`'s longest usable prefix, and the state after it.
    pub fn take_prefix(&mut self, key: PageKey<'_>, state: &mut StateLease) -> Match {
        debug_assert!(self.pages.is_empty(), "a prefix comes first");
        self.begin();
        let (found, slot) = self.cache.borrow_mut().lookup(key, &mut self.pages, &mut self.windows);
        let tail = self.cache.borrow().windows.as_ref().map_or(0, |windows| windows.tail());
        self.slid = self.windows.len().saturating_sub(tail);
        state.source = slot.map_or(Source::Zeros, Source::Shared);
        found
    }

    /// Records the number of invalidations at its first page.
    fn begin(&mut self) {
        self.invalidations = self.cache.borrow().invalidations();
    }

    /// Whether a step has computed a non-finite value since this lease took its first page. Such a lease is never
    /// published to the prefix index.
    pub(crate) fn invalidated(&self) -> bool {
        self.invalidations != self.cache.borrow().invalidations()
    }

    /// Grows to hold `positions`. False when the pool has no page left; pages taken so far stay.
    pub fn grow(&mut self, positions: usize) -> bool {
        if self.pages.is_empty() {
            self.begin();
        }
        while self.capacity() < positions {
            let cache = &mut *self.cache.borrow_mut();
            let Some(page) = cache.take() else { return false };
            if cache.windows.is_some() {
                let Some(window) = cache.take_window() else {
                    cache.pool.release(page);
                    return false;
                };
                self.windows.push(window);
            }
            self.pages.push(page);
        }
        true
    }

    /// Releases the window pages that no row from `position` on sees. The tree keeps the cached ones. They are the first to be evicted,
    /// except for window pages that a sequence reads if it starts from one of the positions `kept`. Returns the first page with a window
    /// page; none for a model without sliding windows.
    pub fn slide(&mut self, position: usize, kept: &[usize]) -> Option<usize> {
        let cache = &mut *self.cache.borrow_mut();
        let windows = cache.windows.as_mut()?;
        let first = windows.first_page(position).min(self.windows.len());
        for page in self.slid..first {
            let cold = !windows.is_read_from(page, kept);
            windows.release(self.windows[page], cold);
            self.windows[page] = PageId(0);
        }
        self.slid = self.slid.max(first);
        Some(self.slid)
    }

    fn release_windows(&mut self) {
        if let Some(windows) = &mut self.cache.borrow_mut().windows {
            self.windows.drain(..).skip(self.slid).rev().for_each(|window| windows.release(window, false));
        }
        self.slid = 0;
    }

    /// Records that the draft head has entries of the positions `drafted`; the entries from `new` on are the latest.
    pub fn set_drafted(&self, drafted: &Range<usize>, new: usize) {
        let whole = new.max(drafted.start.next_multiple_of(PAGE_TOKENS)) / PAGE_TOKENS..drafted.end / PAGE_TOKENS;
        let pool = &mut self.cache.borrow_mut().pool;
        self.pages[whole.start.min(whole.end)..whole.end].iter().for_each(|page| pool.set_drafted(*page));
    }

    /// Whether no other sequence reads these positions.
    pub fn held_once(&self, positions: Range<usize>) -> bool {
        let pool = &self.cache.borrow().pool;
        self.pages[positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS)]
            .iter()
            .all(|page| pool.held_once(*page))
    }

    /// The position from which on the draft head has entries of all of the first `positions`.
    pub fn drafted_from(&self, positions: usize) -> usize {
        let pool = &self.cache.borrow().pool;
        let pages = &self.pages[..positions.div_ceil(PAGE_TOKENS)];
        pages.iter().rposition(|page| !pool.drafted(*page)).map_or(0, |gap| ((gap + 1) * PAGE_TOKENS).min(positions))
    }

    /// Publishes the whole pages of `key`, which these pages hold, unless they are invalid. Sequences may start from the positions `kept`:
    /// the disk tier is to save the window pages that they read.
    pub fn publish(&mut self, key: PageKey<'_>, kept: &[usize]) {
        if self.invalidated() {
            return;
        }
        let cache = &mut *self.cache.borrow_mut();
        if cache.windows.is_some() {
            cache.publish_windows(key, &mut self.pages, &mut self.windows, self.slid, kept);
        } else if let Some(index) = &mut cache.index {
            index.insert(key, &self.pages, &mut cache.pool);
        }
    }

    /// Publishes, for a model with recurrent state, each checkpoint that the last step wrote. Returns whether there was one.
    pub fn publish_checkpoints(&mut self, key: PageKey<'_>, state: &mut StateLease, end_of_input: usize) -> bool {
        let any = !state.written.is_empty() && !self.invalidated();
        for (position, slot) in state.written.drain(..) {
            let purpose = if position == end_of_input { Purpose::EndOfInput } else { Purpose::Boundary };
            let cache = &mut *self.cache.borrow_mut();
            if any {
                cache.publish_state(key.first(position), &mut self.pages, slot, purpose);
            }
            cache.states.as_mut().expect("it gave the slot").release(slot);
        }
        any
    }

    /// Ends the lease and hands its pages to the index, unless they are invalid.
    pub fn donate(&mut self, key: PageKey<'_>) {
        if self.invalidated() {
            return self.clear();
        }
        if self.windowed() {
            self.publish(key, &[key.tokens.len()]);
            self.release_windows();
        }
        let cache = &mut *self.cache.borrow_mut();
        if let Some(index) = &mut cache.index {
            index.donate(key, &self.pages, &mut cache.pool);
            self.pages.clear();
        }
    }

    /// Drops every page without releasing it: the pool starts over.
    pub fn forget(&mut self) {
        self.pages.clear();
        self.windows.clear();
        self.slid = 0;
    }

    /// Releases every page.
    pub fn clear(&mut self) {
        if !self.pages.is_empty() && faults::asked(Site::LosePage) {
            self.pages.pop();
        }
        self.release_windows();
        self.cache.borrow_mut().pool.release_all(&self.pages);
        self.pages.clear();
    }
}

impl Drop for PageLease {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The place of a sequence's recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// None: the sequence starts from zeros.
    Zeros,
    /// In this slot of its own ring.
    Ring(usize),
    /// A checkpoint that it shares and does not write; held until another step has moved the state on.
    Shared(SlotId),
}

/// The state slots of one sequence. A sequence that verifies drafts owns a ring of one slot more than it has drafts. A step writes the
/// state after each row into the next slot. Accepting rows moves the ring's position on by as many slots. No state is copied.
#[derive(Debug)]
pub struct StateLease {
    cache: SharedCache,
    ring: ArrayVec<SlotId, RING_MAX>,
    /// Slots of the full ring; 0 for a model without state.
    width: usize,
    source: Source,
    /// Slots that the next step writes as checkpoints, with their positions, ascending.
    planned: ArrayVec<(usize, SlotId), CHECKPOINTS_WANTED_MAX>,
    /// Checkpoints that the last step has written and that are not published yet.
    written: ArrayVec<(usize, SlotId), CHECKPOINTS_WANTED_MAX>,
}

impl StateLease {
    /// No slots yet; [`Self::acquire`] takes `width`.
    pub fn new(cache: &SharedCache, width: usize) -> Self {
        debug_assert!(width <= RING_MAX);
        Self {
            cache: Rc::clone(cache),
            ring: ArrayVec::new(),
            width,
            source: Source::Zeros,
            planned: ArrayVec::new(),
            written: ArrayVec::new(),
        }
    }

    /// Whether the model has recurrent state.
    pub fn needed(&self) -> bool {
        self.width > 0
    }

    /// Slots that it holds, shared slots included.
    pub fn held(&self) -> usize {
        let shared = matches!(self.source, Source::Shared(_));
        self.ring.len() + self.planned.len() + self.written.len() + usize::from(shared)
    }

    /// Takes the ring's slots; cold checkpoints are evicted. False when there are not enough: slots taken so far stay held until more are
    /// free.
    pub fn acquire(&mut self) -> bool {
        let cache = &mut *self.cache.borrow_mut();
        if cache.states.as_ref().is_some_and(|states| states.available() < self.width - self.ring.len()) {
            return false;
        }
        while self.ring.len() < self.width {
            let Some(slot) = cache.take_slot() else { return false };
            self.ring.push(slot);
        }
        true
    }

    /// The slot that the next step starts from.
    pub fn source(&self) -> Option<u32> {
        match self.source {
            Source::Zeros => None,
            Source::Ring(at) => Some(self.ring[at].0),
            Source::Shared(slot) => Some(slot.0),
        }
    }

    /// Plans a checkpoint of the state at `position` in the next step; false if every slot is held.
    pub fn plan_checkpoint(&mut self, position: usize) -> bool {
        let slot = self.cache.borrow_mut().take_checkpoint_slot();
        slot.into_iter().for_each(|slot| self.planned.push((position, slot)));
        slot.is_some()
    }

    /// Whether a checkpoint at `position` is planned.
    pub fn plans(&self, position: usize) -> bool {
        self.planned.iter().any(|(planned, _)| *planned == position)
    }

    /// The ring's place `rows` after the current one.
    fn ahead(&self, rows: usize) -> usize {
        let current = if let Source::Ring(at) = self.source { at } else { self.width - 1 };
        (current + rows) % self.width
    }

    /// The ring's place for a step that keeps only its last state: the place that the step reads, which is in the CPU caches.
    fn in_place(&self) -> usize {
        if let Source::Ring(at) = self.source { at } else { 0 }
    }

    /// Appends the slot that receives the state after each of the `rows` rows from `start` on. `each`: after every row, since any of them
    /// may be the last accepted one.
    pub fn outputs(&self, start: usize, rows: usize, each: bool, out: &mut Vec<u32>) {
        if self.width == 0 {
            return;
        }
        let first = out.len();
        for row in 1..=rows {
            let slot = match each {
                true => self.ring[self.ahead(row)].0,
                false => NO_STATE,
            };
            out.push(slot);
        }
        if !each {
            out[first + rows - 1] = self.ring[self.in_place()].0;
        }
        for (position, slot) in &self.planned {
            out[first + position - 1 - start] = slot.0;
        }
    }

    /// Advances by the first `rows` rows from `start`, for which [`Self::outputs`] has chosen slots.
    pub fn advance(&mut self, start: usize, rows: usize, each: bool) {
        if self.width == 0 {
            return;
        }
        let next = match self.planned.last() {
            Some((position, slot)) if *position == start + rows => {
                self.cache.borrow_mut().states.as_mut().expect("it gave the slot").retain(*slot);
                Source::Shared(*slot)
            }
            _ => Source::Ring(if each { self.ahead(rows) } else { self.in_place() }),
        };
        self.leave_source();
        self.source = next;
        debug_assert!(self.written.is_empty(), "published after every step");
        self.written = self.planned.take();
    }

    fn leave_source(&mut self) {
        if let (Source::Shared(slot), Some(states)) = (self.source, &mut self.cache.borrow_mut().states) {
            states.release(slot);
        }
        self.source = Source::Zeros;
    }

    /// Drops every slot without releasing it: the pool starts over.
    pub fn forget(&mut self) {
        self.source = Source::Zeros;
        self.ring.clear();
        self.planned.clear();
        self.written.clear();
    }

    /// Releases every slot: the sequence starts over.
    pub fn clear(&mut self) {
        self.leave_source();
        if !self.ring.is_empty() && faults::asked(Site::LoseSlot) {
            self.ring.pop();
        }
        let cache = &mut *self.cache.borrow_mut();
        let Some(states) = &mut cache.states else { return };
        let checkpoints = self.planned.drain(..).chain(self.written.drain(..)).map(|(_, slot)| slot);
        checkpoints.chain(self.ring.drain(..)).for_each(|slot| states.release(slot));
    }
}

impl Drop for StateLease {
    fn drop(&mut self) {
        self.clear();
    }
}
