//! The cache tables of one pool build: pages, prefix tree, state slots and window pages. Evicting from one table updates the others.
//!
//! For models with recurrent state a page of the tree is useful only with a state at or below it, so every leaf of the tree has a
//! checkpoint. Evicting a checkpoint also evicts the pages that no other checkpoint needs. Evicting a page also evicts its checkpoint.
//!
//! For models with sliding windows a page of the tree may have a window page, which is evicted with it. A page without a window page
//! stays: the next sequence that computes the page again provides one.

use super::key::PageKey;
use super::pages::{PAGE_TOKENS, PageId, PagePool};
use super::radix::{Match, PrefixIndex};
use super::states::{Purpose, SlotId, StatePool};
use super::unsaved::{Link, Part, Pending};
use super::windows::WindowPool;

/// The page pool, the index over it and the state slots beside it.
#[derive(Debug)]
pub struct KvCache {
    /// Every page of the pool build.
    pub pool: PagePool,
    /// The prefixes in these pages; none when prefix caching is off.
    pub index: Option<PrefixIndex>,
    /// Recurrent state; none for models without.
    pub states: Option<StatePool>,
    /// Pages of sliding-window layers; none for models without them, and for models with recurrent state.
    pub windows: Option<WindowPool>,
    /// Window pages and states that the disk tier has not saved yet, by their pages of the tree; none without such a tier.
    unsaved: Option<Pending>,
    /// How often the cache was invalidated.
    invalidations: u32,
}

/// At most one page in this many is pinned.
const PINNED_PART: usize = 4;

/// Pages and slots that are neither free nor cached, although no sequence is left to release them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Pages.
    pub pages: usize,
    /// State slots.
    pub slots: usize,
}

impl KvCache {
    /// Joins the tables.
    pub fn new(pool: PagePool, index: Option<PrefixIndex>, states: Option<StatePool>) -> Self {
        Self { pool, index, states, windows: None, unsaved: None, invalidations: 0 }
    }

    /// Adds the window pages.
    #[must_use]
    pub fn with_windows(self, windows: Option<WindowPool>) -> Self {
        debug_assert!(windows.is_none() || self.states.is_none(), "a model has one or the other");
        Self { windows, ..self }
    }

    /// Records from now on the parts that the disk tier is to save, with links from `root` on. Nothing is cached yet.
    #[must_use]
    pub(crate) fn with_tier(mut self, root: Link) -> Self {
        let pages = self.pool.total();
        self.unsaved = (self.states.is_some() || self.windows.is_some()).then(|| Pending::new(pages));
        self.index = self.index.map(|index| index.with_chain(root));
        self
    }

    /// Returns the next part of this kind that the disk tier is to save: its number in its pool, and its link.
    /// Parts that have left the cache meanwhile are skipped, and counted in `lost`.
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

    /// Removes the part that [`Self::next_unsaved`] returned: it is saved.
    pub(crate) fn saved(&mut self, part: Part) {
        self.index.iter_mut().for_each(|index| self::pop(index, &mut self.unsaved, part));
    }

    /// Parts that the disk tier has not saved yet.
    pub(crate) fn unsaved(&self) -> usize {
        let pages = self.index.as_ref().and_then(|index| index.chain.as_ref()).map_or(0, |chain| chain.entered.len());
        pages + self.unsaved.as_ref().map_or(0, Pending::len)
    }

    /// Total of state slots, or of window pages: a model has one or the other.
    pub(crate) fn slots(&self) -> usize {
        let windows = self.windows.as_ref().map(|windows| windows.pool().total());
        windows.or(self.states.as_ref().map(StatePool::total)).unwrap_or(0)
    }

    /// Takes a page: a free one, or one that the index evicts. None when sequences hold every page.
    pub(crate) fn take(&mut self) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.evict_coldest(true, |_| {});
        }
        self.pool.alloc()
    }

    /// Takes a state slot: a free one, or the coldest checkpoint's. None when sequences hold every slot.
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

    /// Takes a window page: a free one, or one that the tree evicts. None when sequences hold every one.
    pub(crate) fn take_window(&mut self) -> Option<PageId> {
        let index = self.index.as_ref();
        self.windows.as_mut()?.take(|page| index.is_some_and(|index| index.is_pinned(page)))
    }

    /// Sets the current minute, from which pins end.
    pub(crate) fn advance(&mut self, minute: u32) {
        self.index.iter_mut().for_each(|index| index.advance(minute));
    }

    /// Pins the cached pages of `key` for `minutes`: other pages are evicted before them. At most a quarter of all pages is pinned. Returns
    /// how many pages were not pinned for that reason.
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

    /// Evicts every prefix that no sequence holds. Their pages are free now; `pages` receives them, in ascending order, and `windows`
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

    /// I4: without a sequence every page is free or held by the index alone, and every slot is free or a checkpoint. Returns the number of
    /// pages and slots that are neither; none if there are none.
    pub(crate) fn missing_at_rest(&self) -> Option<Missing> {
        let held = |pool: &PagePool| pool.total() - pool.available();
        let pages = held(&self.pool) + self.windows.as_ref().map_or(0, |windows| held(windows.pool()));
        let slots = self.states.as_ref().map_or(0, |states| states.total() - states.available());
        (pages + slots > 0).then_some(Missing { pages, slots })
    }

    /// Evicts the coldest idle leaf and the entries that depend on it, pinned leaves last if `pins`. Returns whether there was one.
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

    /// Removes `page` and its ancestors from the tree, as long as they are leaves without a checkpoint.
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

    /// Makes the caller a holder of the pages of the longest usable prefix of `key`, and of the state at its end where the model has
    /// recurrent state. Returns the tokens of that prefix and of the longest known one, and the state's slot. With sliding windows,
    /// `windows` receives an entry for each page: held window pages for the last pages, page 0 for the others, which are not read.
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

    /// Returns how many pages of a prompt the tree has, usable or not.
    pub(crate) fn known(&self, key: PageKey<'_>) -> usize {
        self.index.as_ref().map_or(0, |index| index.peek(key) / PAGE_TOKENS)
    }

    /// Returns how many tokens [`Self::lookup`] would find.
    pub(crate) fn peek(&self, key: PageKey<'_>) -> usize {
        self.index.as_ref().map_or(0, |index| index.peek_usable(key, self.usable()))
    }

    /// Returns a function that takes the pages of a prefix in order, and returns after each whether a sequence can start there.
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
            // The tree itself counts as a holder.
            held += usize::from(self.pool.holders(page) > 1);
            let ends = starts(page);
            usable = if ends { held } else { usable };
            ends
        });
        usable
    }

    /// Publishes the pages of `key` (whole pages) with the state after them. Where the tree has other pages of the same content, `pages` is
    /// changed to these. The caller stays a holder of pages and slot.
    pub(crate) fn publish_state(&mut self, key: PageKey<'_>, pages: &mut [PageId], slot: SlotId, purpose: Purpose) {
        let (Some(index), Some(states)) = (&mut self.index, &mut self.states) else { return };
        let depth = key.tokens.len() / PAGE_TOKENS;
        let adopted = index.adopt(key, pages, &mut self.pool);
        let last = pages[..adopted].last().copied();
        if adopted < depth {
            // Misuse, counted by the pool: the pages that entered the tree without a state leave it again.
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

    /// Publishes the pages of `key` (whole pages) with their window pages, but without window pages before page `from`. Where the tree has
    /// other pages of the same content, `pages` is changed to these. The caller stays a holder. The disk tier is to save the window pages
    /// that a sequence reads if it starts from one of the positions `kept`.
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

    /// Keeps the end-of-input checkpoints of a conversation's last two turns. Drops earlier ones, back to the page where another prompt
    /// branches off.
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

    /// Checks that all tables agree.
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

    /// Drops every prefix, checkpoints included.
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

    /// Drops every prefix, and refuses pages of the present sequences: they may have been computed from wrong values.
    pub(crate) fn invalidate(&mut self) {
        self.clear();
        self.invalidations += 1;
    }

    /// Counts the calls of [`Self::invalidate`]. Pages that were computed before the last one are not shared.
    pub(crate) fn invalidations(&self) -> u32 {
        self.invalidations
    }
}

/// Removes the first part from its list.
fn pop(index: &mut PrefixIndex, unsaved: &mut Option<Pending>, part: Part) {
    match part {
        Part::Whole => index.chain.iter_mut().for_each(|chain| chain.entered.pop()),
        Part::Window | Part::State => unsaved.iter_mut().for_each(Pending::pop),
    }
}
