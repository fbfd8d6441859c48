//! The tables of one generation together: pages, prefix tree, state slots, and what the end of one means for the others.
//!
//! For models with recurrent state a page of the tree is worth nothing without a state at or below it, so every leaf of the tree
//! has a checkpoint: a checkpoint that goes takes the pages with it that no other one needs, and a page takes its checkpoint.

use super::key::PageKey;
use super::pages::{PAGE_TOKENS, PageId, PagePool};
use super::radix::{Match, PrefixIndex};
use super::states::{Purpose, SlotId, StatePool};

/// The page pool, the index over it and the state slots beside it.
#[derive(Debug)]
pub struct KvCache {
    /// Every page of the generation.
    pub pool: PagePool,
    /// Which prefixes they hold; none when prefix caching is off.
    pub index: Option<PrefixIndex>,
    /// Recurrent state; none for models without.
    pub states: Option<StatePool>,
    /// How often what was computed by then came to be doubted.
    doubts: u32,
}

/// What was lent and has no holder left that could give it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Pages.
    pub pages: usize,
    /// State slots.
    pub slots: usize,
}

impl KvCache {
    /// These tables, together.
    pub fn new(pool: PagePool, index: Option<PrefixIndex>, states: Option<StatePool>) -> Self {
        Self { pool, index, states, doubts: 0 }
    }

    /// One more page: a free one, or one the index gives up. None when every page is held by a sequence.
    pub(crate) fn take(&mut self) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.evict_coldest(|_| {});
        }
        self.pool.alloc()
    }

    /// One more state slot: a free one, or the coldest checkpoint's. None when every slot is held by a sequence.
    pub(crate) fn take_slot(&mut self) -> Option<SlotId> {
        let states = self.states.as_mut()?;
        if states.free() == 0 {
            let page = states.coldest()?;
            states.count_evicted();
            self.drop_checkpoint(page);
        }
        self.states.as_mut()?.alloc()
    }

    /// Takes a slot for a checkpoint. If sequences hold every slot, it returns none and counts the miss; the prompt
    /// continues without a checkpoint. Without a prefix index it also returns none, since no lookup would find the
    /// checkpoint.
    pub(crate) fn take_checkpoint_slot(&mut self) -> Option<SlotId> {
        self.index.as_ref()?;
        let slot = self.take_slot();
        if let (None, Some(states)) = (slot, &mut self.states) {
            states.count_missed();
        }
        slot
    }

    /// Forgets every prefix that no sequence holds. Their pages are free now; `pages` receives them, in ascending order.
    pub fn evict_idle(&mut self, pages: &mut Vec<u32>) {
        pages.clear();
        while self.evict_coldest(|page| pages.push(page.0)) {}
        pages.sort_unstable();
    }

    /// Resets the cache after a panic, when the tables may be inconsistent and no sequence holds anything. Afterwards
    /// every page and slot is free and no prefix is cached.
    pub fn start_over(&mut self) {
        self.pool.start_over();
        if let Some(index) = &mut self.index {
            index.start_over();
        }
        if let Some(states) = &mut self.states {
            states.start_over();
        }
    }

    /// I4, when no sequence is left: every page is free or held by the index alone, every slot free or a checkpoint. What is neither
    /// was lost on the way; none when all is there.
    pub(crate) fn missing_at_rest(&self) -> Option<Missing> {
        let pages = self.pool.total() - self.pool.available();
        let slots = self.states.as_ref().map_or(0, |states| states.total() - states.available());
        (pages + slots > 0).then_some(Missing { pages, slots })
    }

    /// Evicts the coldest idle leaf, and what is worth nothing without it; says whether there was one.
    fn evict_coldest(&mut self, mut freed: impl FnMut(PageId)) -> bool {
        let Some(index) = &mut self.index else { return false };
        let Some((page, parent)) = index.evict_one(&mut self.pool) else { return false };
        freed(page);
        if let Some(states) = &mut self.states {
            if states.forget(page) {
                states.count_evicted();
            }
            self.prune(parent, freed);
        }
        true
    }

    fn drop_checkpoint(&mut self, page: PageId) {
        if let Some(states) = &mut self.states {
            states.forget(page);
            self.prune(Some(page), |_| {});
        }
    }

    /// Takes `page` and those before it out of the tree as long as they are leaves without a checkpoint.
    fn prune(&mut self, mut page: Option<PageId>, mut freed: impl FnMut(PageId)) {
        let (Some(index), Some(states)) = (&mut self.index, &self.states) else { return };
        while let Some(leaf) = page {
            if index.children(leaf) > 0 || states.of(leaf).is_some() {
                return;
            }
            let (parent, free) = index.remove_leaf(leaf, &mut self.pool);
            if free {
                freed(leaf);
            }
            page = parent;
        }
    }

    /// Makes the caller a holder of the pages of the longest prefix of `key` that can be started from, and of the state at its
    /// end where the model has one. Says how many tokens that is, and how many the tree knows beyond what has a state.
    pub(crate) fn lookup(&mut self, key: PageKey<'_>, pages: &mut Vec<PageId>) -> (Match, Option<SlotId>) {
        let Some(index) = &mut self.index else { return (Match::default(), None) };
        let Some(states) = &mut self.states else { return (index.lookup(key, &mut self.pool, pages), None) };
        let usable = |page| states.of(page).is_some();
        let found = index.lookup_usable(key, &mut self.pool, pages, usable);
        let slot = pages.last().and_then(|page| states.of(*page));
        slot.into_iter().for_each(|slot| states.retain(slot));
        (found, slot)
    }

    /// How many tokens [`Self::lookup`] would find.
    pub(crate) fn peek(&self, key: PageKey<'_>) -> usize {
        match (&self.index, &self.states) {
            (Some(index), None) => index.peek(key),
            (Some(index), Some(states)) => index.peek_usable(key, |page| states.of(page).is_some()),
            (None, _) => 0,
        }
    }

    /// The number of pages that [`Self::lookup`] would find and that sequences hold now. Taking these pages takes
    /// nothing from the pool.
    pub(crate) fn held(&self, key: PageKey<'_>) -> usize {
        let Some(index) = &self.index else { return 0 };
        let (mut held, mut usable) = (0, 0);
        let _tokens = index.peek_usable(key, |page| {
            // The tree is a holder itself.
            held += usize::from(self.pool.holders(page) > 1);
            let ends = self.states.as_ref().is_none_or(|states| states.of(page).is_some());
            usable = if ends { held } else { usable };
            ends
        });
        usable
    }

    /// Publishes the pages of `key` (whole pages) with the state after them. Pages that the tree knows under other numbers are
    /// exchanged for those: they hold the same. The caller stays a holder of pages and slot.
    pub(crate) fn publish_state(&mut self, key: PageKey<'_>, pages: &mut [PageId], slot: SlotId, purpose: Purpose) {
        let (Some(index), Some(states)) = (&mut self.index, &mut self.states) else { return };
        let depth = key.tokens.len() / PAGE_TOKENS;
        let adopted = index.adopt(key, pages, &mut self.pool);
        let last = pages[..adopted].last().copied();
        if adopted < depth {
            // Misuse, counted by the pool: what entered the tree without a state leaves it again.
            return self.prune(last, |_| {});
        }
        let Some(page) = last else { return };
        if states.of(page).is_none() {
            states.keep(page, slot, purpose);
        }
        if purpose == Purpose::EndOfInput {
            self.supersede(page);
        }
    }

    /// A conversation keeps the ends of its last two turns. Those before are given up, up to where another one branches off.
    fn supersede(&mut self, page: PageId) {
        let (Some(index), Some(states)) = (&self.index, &mut self.states) else { return };
        let mut turns = 1;
        let mut above = index.parent(page);
        while let Some(page) = above.filter(|page| index.children(*page) < 2) {
            if states.unpinned(page) == Some(Purpose::EndOfInput) {
                turns += 1;
                if turns > 2 && states.forget(page) {
                    states.count_superseded();
                }
            }
            above = index.parent(page);
        }
    }

    /// Compares all tables.
    ///
    /// # Panics
    /// When they disagree; for tests.
    pub fn check(&self) {
        self.pool.check().expect("pages");
        if let Some(index) = &self.index {
            index.check(&self.pool).expect("prefix tree");
        }
        if let Some(states) = &self.states {
            states.check().expect("state slots");
            let index = self.index.as_ref();
            for page in (0..self.pool.total() as u32).map(PageId) {
                let node = index.is_some_and(|index| index.knows(page));
                assert!(node || states.of(page).is_none(), "a checkpoint of a page that is not in the tree");
                let leaf = node && index.is_some_and(|index| index.children(page) == 0);
                assert!(!leaf || states.of(page).is_some(), "pages without a state are kept");
            }
        }
    }

    /// Forgets every prefix, checkpoints included.
    pub fn clear(&mut self) {
        if let Some(index) = &mut self.index {
            index.clear(&mut self.pool);
        }
        if let Some(states) = &mut self.states {
            for page in 0..self.pool.total() as u32 {
                states.forget(PageId(page));
            }
        }
    }

    /// Forgets every prefix, and lets none in that a sequence holds now: what it was computed from may have been found in them.
    pub(crate) fn doubt(&mut self) {
        self.clear();
        self.doubts += 1;
    }

    /// How often that was: what was computed before the last time is not for others.
    pub(crate) fn doubts(&self) -> u32 {
        self.doubts
    }
}
