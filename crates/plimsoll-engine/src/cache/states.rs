//! The pool of recurrent state slots: the holders of each slot, and the slots that are kept as checkpoints of a
//! prefix.
//!
//! A slot is the state of one sequence at one position. It is *free*, *held* (by running sequences), *kept* (for a
//! page of the prefix tree: the state after that page's last token), or both of the latter: a kept slot that a
//! sequence starts from is pinned until it has been read. Only a slot's single holder writes it, and never once it is
//! kept. A checkpoint thus never changes while sequences share it. When slots run out, kept slots without a holder
//! are evicted, the coldest first.
//!
//! Not here: bytes of state, tokens, what a page's parent is.

use thiserror::Error;

use super::pages::PageId;

/// No slot, no page, end of a list.
const NIL: u32 = u32::MAX;

/// The number of one state slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

impl SlotId {
    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why a checkpoint was made, which decides how long it is worth keeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The end of a prompt, from which the conversation's next turn will start.
    EndOfInput,
    /// The point where prompts diverge, from which others with the same beginning will start.
    Boundary,
}

/// Why a pool could not be built, or what [`StatePool::check`] found wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StateError {
    /// The host has no memory left for the tables.
    #[error("no host memory for the tables of {slots} state slots ({bytes} bytes)")]
    OutOfMemory {
        /// The requested number of slots.
        slots: usize,
        /// Bytes the tables would have taken.
        bytes: usize,
    },
    /// Lists, counters and tables disagree.
    #[error("the pool of state slots is broken: {0}")]
    Broken(&'static str),
    /// Holders released slots they did not hold, or kept slots they shared.
    #[error("{0} operations on state slots were refused")]
    Faults(u64),
}

/// The table row of one slot.
#[derive(Debug, Clone, Copy)]
struct Slot {
    holders: u32,
    /// The page it is kept for.
    page: u32,
    purpose: Purpose,
    /// Neighbours on the cold list; `next` also links the free stack.
    prev: u32,
    next: u32,
}

/// Counters of a pool since it was built, and the slots it keeps now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateStats {
    /// Slots kept as checkpoints now.
    pub kept: usize,
    /// Checkpoints made.
    pub made: u64,
    /// Checkpoints evicted because slots or pages ran out.
    pub evicted: u64,
    /// Checkpoints dropped because their conversation had continued.
    pub superseded: u64,
    /// Checkpoints that were requested and not made, because every slot was held.
    pub missed: u64,
}

/// A fixed number of state slots. No operation allocates after [`StatePool::new`].
#[derive(Debug)]
pub struct StatePool {
    slots: Box<[Slot]>,
    /// The slot kept for each page.
    of_page: Box<[u32]>,
    free_head: u32,
    free_len: usize,
    cold_head: u32,
    cold_tail: u32,
    cold_len: usize,
    stats: StateStats,
    faults: u64,
}

impl StatePool {
    /// Builds a pool of `slots` free slots beside a pool of `pages` pages.
    ///
    /// # Errors
    /// [`StateError::OutOfMemory`] if the tables cannot be allocated.
    pub fn new(slots: usize, pages: usize) -> Result<Self, StateError> {
        let full = |_| StateError::OutOfMemory { slots, bytes: Self::bytes_for(slots, pages) };
        let (mut table, mut of_page) = (Vec::new(), Vec::new());
        table.try_reserve_exact(slots).map_err(full)?;
        of_page.try_reserve_exact(pages).map_err(full)?;
        table.resize(slots, Slot { holders: 0, page: NIL, purpose: Purpose::Boundary, prev: NIL, next: NIL });
        of_page.resize(pages, NIL);
        let mut pool = Self {
            free_head: NIL,
            free_len: 0,
            slots: table.into_boxed_slice(),
            of_page: of_page.into_boxed_slice(),
            cold_head: NIL,
            cold_tail: NIL,
            cold_len: 0,
            stats: StateStats::default(),
            faults: 0,
        };
        pool.start_over();
        Ok(pool)
    }

    /// Makes every slot free, whatever the tables said. No slot may have a holder.
    pub(crate) fn start_over(&mut self) {
        let total = self.slots.len();
        for (slot, next) in self.slots.iter_mut().zip(1..) {
            let next = if next as usize == total { NIL } else { next };
            *slot = Slot { holders: 0, page: NIL, purpose: Purpose::Boundary, prev: NIL, next };
        }
        self.of_page.fill(NIL);
        (self.free_head, self.free_len) = (if total == 0 { NIL } else { 0 }, total);
        (self.cold_head, self.cold_tail, self.cold_len, self.faults) = (NIL, NIL, 0, 0);
        self.stats.kept = 0;
    }

    /// Bytes of host memory that the tables take.
    #[must_use]
    pub const fn bytes_for(slots: usize, pages: usize) -> usize {
        slots * size_of::<Slot>() + pages * size_of::<u32>()
    }

    /// All slots.
    #[must_use]
    pub fn total(&self) -> usize {
        self.slots.len()
    }

    /// Slots that are neither held nor kept.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free_len
    }

    /// Slots that a sequence could get: the free ones and the checkpoints without a holder.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free_len + self.cold_len
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> StateStats {
        self.stats
    }

    /// Takes a free slot; the caller is its only holder.
    pub fn alloc(&mut self) -> Option<SlotId> {
        let id = self.free_head;
        let slot = self.slots.get_mut(id as usize)?;
        self.free_head = slot.next;
        *slot = Slot { holders: 1, page: NIL, purpose: Purpose::Boundary, prev: NIL, next: NIL };
        self.free_len -= 1;
        Some(SlotId(id))
    }

    /// Adds a holder to a slot that is held or kept.
    pub fn retain(&mut self, id: SlotId) {
        let slot = self.slots[id.index()];
        if slot.holders == 0 && slot.page == NIL {
            return self.fault("a free slot was retained");
        }
        if slot.holders == 0 {
            self.cold_unlink(id);
        }
        self.slots[id.index()].holders += 1;
    }

    /// Removes one holder. A slot without a holder is free, or the warmest checkpoint.
    pub fn release(&mut self, id: SlotId) {
        let slot = &mut self.slots[id.index()];
        if slot.holders == 0 {
            return self.fault("a slot was released by a sequence that does not hold it");
        }
        slot.holders -= 1;
        match (slot.holders, slot.page) {
            (0, NIL) => self.free_push(id),
            (0, _) => self.cold_push(id),
            _ => {}
        }
    }

    /// Whether a step may write the slot: it has one holder, and nothing keeps it.
    #[must_use]
    pub fn writable(&self, id: SlotId) -> bool {
        let slot = &self.slots[id.index()];
        slot.holders == 1 && slot.page == NIL
    }

    /// The checkpoint of the prefix that ends with `page`.
    #[must_use]
    pub fn of(&self, page: PageId) -> Option<SlotId> {
        self.of_page.get(page.index()).filter(|slot| **slot != NIL).map(|slot| SlotId(*slot))
    }

    /// The purpose of the checkpoint of `page`; none if it has a holder or does not exist.
    #[must_use]
    pub(super) fn unpinned(&self, page: PageId) -> Option<Purpose> {
        let slot = self.slots[self.of(page)?.index()];
        (slot.holders == 0).then_some(slot.purpose)
    }

    /// Keeps a slot that the caller has written for the prefix that ends with `page`; the caller stays a holder.
    pub(super) fn keep(&mut self, page: PageId, id: SlotId, purpose: Purpose) {
        let slot = self.slots[id.index()];
        if slot.holders == 0 || slot.page != NIL || self.of(page).is_some() {
            return self.fault("a slot was kept that is free or kept already");
        }
        self.slots[id.index()].page = page.0;
        self.slots[id.index()].purpose = purpose;
        self.of_page[page.index()] = id.0;
        self.stats.kept += 1;
        self.stats.made += 1;
    }

    /// Drops the checkpoint of `page`; returns whether there was one. A sequence that reads the slot stays a holder.
    pub(super) fn forget(&mut self, page: PageId) -> bool {
        let Some(id) = self.of(page) else { return false };
        self.of_page[page.index()] = NIL;
        self.slots[id.index()].page = NIL;
        if self.slots[id.index()].holders == 0 {
            self.cold_unlink(id);
            self.free_push(id);
        }
        self.stats.kept -= 1;
        true
    }

    /// The page of the coldest checkpoint without a holder and not of a pinned page; of a pinned one if there is no other.
    pub(super) fn coldest(&self, pinned: impl Fn(PageId) -> bool) -> Option<PageId> {
        let page = |slot: &Slot| PageId(slot.page);
        let mut at = self.slots.get(self.cold_head as usize);
        while let Some(slot) = at.filter(|slot| pinned(page(slot))) {
            at = self.slots.get(slot.next as usize);
        }
        at.or(self.slots.get(self.cold_head as usize)).map(page)
    }

    pub(super) fn count_evicted(&mut self) {
        self.stats.evicted += 1;
    }

    pub(super) fn count_superseded(&mut self) {
        self.stats.superseded += 1;
    }

    pub(super) fn count_missed(&mut self) {
        self.stats.missed += 1;
    }

    /// Compares lists, counters and tables. Costs time in proportion to the pool.
    ///
    /// # Errors
    /// [`StateError::Broken`] says what is wrong, [`StateError::Faults`] that operations were refused.
    pub fn check(&self) -> Result<(), StateError> {
        let count = |of: fn(&Slot) -> bool| self.slots.iter().filter(|slot| of(slot)).count();
        let (free, cold) = (count(|s| s.holders == 0 && s.page == NIL), count(|s| s.holders == 0 && s.page != NIL));
        if free != self.free_len || self.walk(self.free_head) != free {
            return Err(StateError::Broken("the free slots"));
        }
        if cold != self.cold_len || self.walk(self.cold_head) != cold {
            return Err(StateError::Broken("the unused checkpoints"));
        }
        let kept = (0u32..).zip(&self.slots).filter(|(_, slot)| slot.page != NIL);
        let (mut found, mut named) = (0, true);
        for (id, slot) in kept {
            found += 1;
            named &= self.of_page[slot.page as usize] == id;
        }
        let pages = self.of_page.iter().filter(|slot| **slot != NIL).count();
        if !named || found != self.stats.kept || pages != found {
            return Err(StateError::Broken("checkpoints and their pages"));
        }
        if self.faults > 0 { Err(StateError::Faults(self.faults)) } else { Ok(()) }
    }

    fn walk(&self, mut at: u32) -> usize {
        let mut met = 0;
        while let Some(slot) = self.slots.get(at as usize) {
            met += 1;
            if met > self.slots.len() {
                break;
            }
            at = slot.next;
        }
        met
    }

    fn fault(&mut self, what: &str) {
        self.faults += 1;
        debug_assert!(false, "{what}");
    }

    fn free_push(&mut self, id: SlotId) {
        let slot = &mut self.slots[id.index()];
        (slot.prev, slot.next) = (NIL, self.free_head);
        self.free_head = id.0;
        self.free_len += 1;
    }

    fn cold_push(&mut self, id: SlotId) {
        let tail = self.cold_tail;
        let slot = &mut self.slots[id.index()];
        (slot.prev, slot.next) = (tail, NIL);
        match self.slots.get_mut(tail as usize) {
            Some(last) => last.next = id.0,
            None => self.cold_head = id.0,
        }
        self.cold_tail = id.0;
        self.cold_len += 1;
    }

    fn cold_unlink(&mut self, id: SlotId) {
        let Slot { prev, next, .. } = self.slots[id.index()];
        match self.slots.get_mut(prev as usize) {
            Some(before) => before.next = next,
            None => self.cold_head = next,
        }
        match self.slots.get_mut(next as usize) {
            Some(after) => after.prev = prev,
            None => self.cold_tail = prev,
        }
        (self.slots[id.index()].prev, self.slots[id.index()].next) = (NIL, NIL);
        self.cold_len -= 1;
    }
}
