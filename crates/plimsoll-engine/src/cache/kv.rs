//! The tables of one generation together: pages, prefix tree, state slots, and what the end of one means for the others.
//!
//! For models with recurrent state a page of the tree is worth nothing without a state at or below it, so every leaf of the tree
//! has a checkpoint: a checkpoint that goes takes the pages with it that no other one needs, and a page takes its checkpoint.
//!
//! For models with sliding windows a page of the tree may have a window page, and takes it with it. Pages without one stay: a sequence
//! that computes them again gives them theirs.

use super::key::PageKey;
use super::pages::{PAGE_TOKENS, PageId, PagePool};
use super::radix::{Match, PrefixIndex};
use super::states::{Purpose, SlotId, StatePool};
use super::unsaved::{Link, Part, Pending};
use super::windows::WindowPool;

/// The page pool, the index over it and the state slots beside it.
#[derive(Debug)]
pub struct KvCache {
    /// Every page of the generation.
    pub pool: PagePool,
    /// Which prefixes they hold; none when prefix caching is off.
    pub index: Option<PrefixIndex>,
    /// Recurrent state; none for models without.
    pub states: Option<StatePool>,
    /// Pages of sliding-window layers; none for models without, and for those with recurrent state.
    pub windows: Option<WindowPool>,
    /// Window pages and states that a tier below memory is to keep, by their pages of the tree; none without such a tier.
    unsaved: Option<Pending>,
    /// How often the cache was invalidated.
    invalidations: u32,
}

/// At most one page in so many is pinned.
const PINNED_PART: usize = 4;

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
        Self { pool, index, states, windows: None, unsaved: None, invalidations: 0 }
    }

    /// The same with window pages.
    #[must_use]
    pub fn with_windows(self, windows: Option<WindowPool>) -> Self {
        debug_assert!(windows.is_none() || self.states.is_none(), "a model has one or the other");
        Self { windows, ..self }
    }

    /// Lists from now on what a tier below memory is to keep, with links from `root` on. Nothing is cached yet.
    #[must_use]
    pub(crate) fn with_tier(mut self, root: Link) -> Self {
        let pages = self.pool.total();
        self.unsaved = (self.states.is_some() || self.windows.is_some()).then(|| Pending::new(pages));
        self.index = self.index.map(|index| index.with_chain(root));
        self
    }

    /// The next part of this kind that a tier below memory is to keep: its number in its pool, and its link.
    /// What has left the cache meanwhile is skipped, and counted in `lost`.
    pub(crate) fn next_unsaved(&mut self, part: Part, lost: &mut u64) -> Option<(u32, Link)> {
        let Self { index, states, windows, unsaved, .. } = self;
        let index = index.as_mut()?;
        loop {
            let list = match part {
                Part::Whole => &mut index.chain.as_mut()?.entered,
                Part::Window => windows.as_ref().and(unsaved.as_mut())?,
                Part::State => states.as_ref().and(unsaved.as_mut())?,
            };
            let page = list.first()?;
            let id = match part {
                Part::Whole => index.knows(page).then_some(page.0),
                Part::Window => windows.as_ref()?.of(page).map(|window| window.0),
                Part::State => states.as_ref()?.of(page).map(|slot| slot.0),
            };
            if let Some(id) = id {
                return Some((id, *index.chain.as_ref()?.link(page)));
            }
            self::pop(index, unsaved, part);
            *lost += 1;
        }
    }

    /// The part that [`Self::next_unsaved`] named is kept.
    pub(crate) fn saved(&mut self, part: Part) {
        self.index.iter_mut().for_each(|index| self::pop(index, &mut self.unsaved, part));
    }

    /// Parts that a tier below memory is to keep.
    pub(crate) fn unsaved(&self) -> usize {
        let pages = self.index.as_ref().and_then(|index| index.chain.as_ref()).map_or(0, |chain| chain.entered.len());
        pages + self.unsaved.as_ref().map_or(0, Pending::len)
    }

    /// State slots, or window pages: a model has one or the other.
    pub(crate) fn slots(&self) -> usize {
        let windows = self.windows.as_ref().map(|windows| windows.pool().total());
        windows.or(self.states.as_ref().map(StatePool::total)).unwrap_or(0)
    }

    /// One more page: a free one, or one the index gives up. None when every page is held by a sequence.
    pub(crate) fn take(&mut self) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.evict_coldest(true, |_| {});
        }
        self.pool.alloc()
    }

    /// One more state slot: a free one, or the coldest checkpoint's. None when every slot is held by a sequence.
    pub(crate) fn take_slot(&mut self) -> Option<SlotId> {
        let states = self.states.as_mut()?;
        if states.free() == 0 {
            let index = self.index.as_ref();
            let page = states.coldest(|page| index.is_some_and(|index| index.is_pinned(page)))?;
            states.count_evicted();
            self.drop_checkpoint(page);
        }
        self.states.as_mut()?.alloc()
    }

    /// One more window page: a free one, or one that the tree gives up. None when sequences hold every one.
    pub(crate) fn take_window(&mut self) -> Option<PageId> {
        let index = self.index.as_ref();
        self.windows.as_mut()?.take(|page| index.is_some_and(|index| index.is_pinned(page)))
    }

    /// It is this minute now, for what is pinned.
    pub(crate) fn advance(&mut self, minute: u32) {
        self.index.iter_mut().for_each(|index| index.advance(minute));
    }

    /// Pins what is known of `key` for so many minutes: others are given up before it. At most a quarter of all pages is pinned. Returns
    /// how many pages were not.
    pub(crate) fn pin(&mut self, key: PageKey<'_>, minutes: u32) -> usize {
        let most = self.pool.total() / PINNED_PART;
        self.index.as_mut().map_or(0, |index| index.pin(key, minutes, most))
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

    /// Forgets every prefix that no sequence holds. Their pages are free now; `pages` receives them, in ascending order, and `windows`
    /// all free window pages.
    pub fn evict_idle(&mut self, pages: &mut Vec<u32>, windows: &mut Vec<u32>) {
        pages.clear();
        windows.clear();
        // Every idle page is evicted, so pins change nothing.
        while self.evict_coldest(false, |page| pages.push(page.0)) {}
        pages.sort_unstable();
        if let Some(of) = &mut self.windows {
            while of.evict_coldest(|_| false).is_some() {}
            of.pool().each_free(|window| windows.push(window));
        }
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
        if let Some(windows) = &mut self.windows {
            windows.start_over();
        }
        self.unsaved.iter_mut().for_each(Pending::clear);
    }

    /// I4, when no sequence is left: every page is free or held by the index alone, every slot free or a checkpoint. What is neither
    /// was lost on the way; none when all is there.
    pub(crate) fn missing_at_rest(&self) -> Option<Missing> {
        let held = |pool: &PagePool| pool.total() - pool.available();
        let pages = held(&self.pool) + self.windows.as_ref().map_or(0, |windows| held(windows.pool()));
        let slots = self.states.as_ref().map_or(0, |states| states.total() - states.available());
        (pages + slots > 0).then_some(Missing { pages, slots })
    }

    /// Evicts the coldest idle leaf and what depends on it, pinned leaves last if `pins`. Returns whether there was one.
    fn evict_coldest(&mut self, pins: bool, mut freed: impl FnMut(PageId)) -> bool {
        let Some(index) = &mut self.index else { return false };
        let Some((page, parent)) = index.evict_one(&mut self.pool, pins) else { return false };
        freed(page);
        if let Some(windows) = &mut self.windows {
            windows.forget(page);
        }
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
    /// end where the model has one. Says how many tokens that is, and how many the tree knows beyond what has a state. `windows` has a
    /// window page for each page where the model has them: of the last pages, held too; of those before, which are not read, page 0.
    pub(crate) fn lookup(
        &mut self,
        key: PageKey<'_>,
        pages: &mut Vec<PageId>,
        windows: &mut Vec<PageId>,
    ) -> (Match, Option<SlotId>) {
        let Some(index) = &mut self.index else { return (Match::default(), None) };
        if let Some(of) = &mut self.windows {
            let found = index.lookup_usable(key, &mut self.pool, pages, of.startable());
            let (before, seen) = pages.split_at(pages.len() - of.tail().min(pages.len()));
            windows.clear();
            windows.resize(before.len(), PageId(0));
            windows.extend(seen.iter().filter_map(|page| of.of(*page)));
            windows[before.len()..].iter().for_each(|window| of.retain(*window));
            return (found, None);
        }
        let Some(states) = &mut self.states else { return (index.lookup(key, &mut self.pool, pages), None) };
        let usable = |page| states.of(page).is_some();
        let found = index.lookup_usable(key, &mut self.pool, pages, usable);
        let slot = pages.last().and_then(|page| states.of(*page));
        slot.into_iter().for_each(|slot| states.retain(slot));
        (found, slot)
    }

    /// How many pages of a prompt the tree knows, whether it can be started from them or not.
    pub(crate) fn known(&self, key: PageKey<'_>) -> usize {
        self.index.as_ref().map_or(0, |index| index.peek(key) / PAGE_TOKENS)
    }

    /// How many tokens [`Self::lookup`] would find.
    pub(crate) fn peek(&self, key: PageKey<'_>) -> usize {
        self.index.as_ref().map_or(0, |index| index.peek_usable(key, self.usable()))
    }

    /// Takes the pages of a prefix, in order, and says after which of them it can be started from.
    fn usable(&self) -> impl FnMut(PageId) -> bool {
        let mut startable = self.windows.as_ref().map(WindowPool::startable);
        move |page| match &mut startable {
            Some(startable) => startable(page),
            None => self.states.as_ref().is_none_or(|states| states.of(page).is_some()),
        }
    }

    /// The number of pages that [`Self::lookup`] would find and that sequences hold now. Taking these pages takes
    /// nothing from the pool.
    pub(crate) fn held(&self, key: PageKey<'_>) -> usize {
        let Some(index) = &self.index else { return 0 };
        let (mut held, mut usable, mut starts) = (0, 0, self.usable());
        let _tokens = index.peek_usable(key, |page| {
            // The tree is a holder itself.
            held += usize::from(self.pool.holders(page) > 1);
            let ends = starts(page);
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
            if key.salt == 0 {
                self.unsaved.iter_mut().for_each(|unsaved| unsaved.push(page));
            }
        }
        if purpose == Purpose::EndOfInput {
            self.supersede(page);
        }
    }

    /// Publishes the pages of `key` (whole pages) with their window pages, those before page `from` without. Pages that the tree knows
    /// under other numbers are exchanged for those: they hold the same. The caller stays a holder. A tier below memory is to keep the
    /// window pages that a sequence reads from one of the positions `kept` on.
    pub(crate) fn publish_windows(
        &mut self,
        key: PageKey<'_>,
        pages: &mut [PageId],
        windows: &mut [PageId],
        from: usize,
        kept: &[usize],
    ) {
        let (Some(index), Some(of)) = (&mut self.index, &mut self.windows) else { return };
        let known = index.adopt(key, pages, &mut self.pool);
        for at in from.min(known)..known {
            windows[at] = of.keep(pages[at], windows[at]);
            if key.salt == 0 && of.is_read_from(at, kept) && of.of(pages[at]).is_some() {
                self.unsaved.iter_mut().for_each(|unsaved| unsaved.push(pages[at]));
            }
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
                if turns > 2 && !index.is_pinned(page) && states.forget(page) {
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
        if let Some(windows) = &self.windows {
            windows.check().expect("window pages");
            let known = |page| self.index.as_ref().is_some_and(|index| index.knows(page));
            let lost =
                (0..self.pool.total() as u32).map(PageId).find(|page| windows.of(*page).is_some() && !known(*page));
            assert_eq!(lost, None, "a window page of a page that is not in the tree");
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
        if let Some(windows) = &mut self.windows {
            (0..self.pool.total() as u32).for_each(|page| windows.forget(PageId(page)));
        }
        self.unsaved.iter_mut().for_each(Pending::clear);
    }

    /// Forgets every prefix, and takes none from the sequences of now: they may have been computed from a wrong one.
    pub(crate) fn invalidate(&mut self) {
        self.clear();
        self.invalidations += 1;
    }

    /// How often it was invalidated. What was computed before the last time is not shared.
    pub(crate) fn invalidations(&self) -> u32 {
        self.invalidations
    }
}

/// Takes the first part out of its list.
fn pop(index: &mut PrefixIndex, unsaved: &mut Option<Pending>, part: Part) {
    match part {
        Part::Whole => index.chain.iter_mut().for_each(|chain| chain.entered.pop()),
        Part::Window | Part::State => unsaved.iter_mut().for_each(Pending::pop),
    }
}
