//! The pool of window pages: the KV cache of sliding-window layers, of which a sequence keeps only the last positions.
//!
//! A window page holds the positions of one page of the whole context. A sequence holds the window pages that its next row sees. The
//! prefix tree keeps more: a page of the tree may have a window page, which is idle when no sequence holds it. Idle window pages are
//! evicted when others need memory, the coldest first. A sequence can start from a prefix if its last [`WindowPool::tail`] pages have one
//! each.
//!
//! Not here: tokens, bytes of KV, which sequence reads what.

use super::pages::{PAGE_TOKENS, PageId, PagePool, PoolError};

/// No page.
const NIL: u32 = u32::MAX;

/// Window pages, and the pages of the prefix tree that they belong to. No operation allocates after [`WindowPool::new`].
#[derive(Debug)]
pub struct WindowPool {
    pool: PagePool,
    /// The window page of each page of the tree.
    of_page: Box<[u32]>,
    /// The page of the tree that each window page belongs to.
    page_of: Box<[u32]>,
    window: usize,
    evicted: u64,
}

impl WindowPool {
    /// Builds a pool of `total` free window pages beside a pool of `pages` pages, for layers that see `window` positions.
    ///
    /// # Errors
    /// [`PoolError`] if there are too many, or the tables cannot be allocated.
    pub fn new(total: usize, pages: usize, window: usize) -> Result<Self, PoolError> {
        let full = |_| PoolError::OutOfMemory { total, bytes: Self::bytes_for(total, pages) };
        let (mut of_page, mut page_of) = (Vec::new(), Vec::new());
        of_page.try_reserve_exact(pages).map_err(full)?;
        page_of.try_reserve_exact(total).map_err(full)?;
        of_page.resize(pages, NIL);
        page_of.resize(total, NIL);
        let (of_page, page_of) = (of_page.into_boxed_slice(), page_of.into_boxed_slice());
        Ok(Self { pool: PagePool::new(total)?, of_page, page_of, window, evicted: 0 })
    }

    /// Bytes of host memory that the tables of `total` window pages beside `pages` pages take.
    #[must_use]
    pub const fn bytes_for(total: usize, pages: usize) -> usize {
        PagePool::bytes_for(total) + (total + pages) * size_of::<u32>()
    }

    /// The most window pages that a sequence holds at once: for a chunk of `rows` rows, and for the positions that its first row sees.
    #[must_use]
    pub const fn per_sequence(window: usize, rows: usize) -> usize {
        // The first position that is seen may be the last of its page.
        (window - 1 + rows).div_ceil(PAGE_TOKENS) + 1
    }

    /// Pages that the first row of a new page sees beside its own.
    #[must_use]
    pub const fn tail_of(window: usize) -> usize {
        (window - 1).div_ceil(PAGE_TOKENS)
    }

    /// Pages of a prefix that must have window pages so that a sequence can start from it; all, if it has no more.
    #[must_use]
    pub fn tail(&self) -> usize {
        Self::tail_of(self.window)
    }

    /// The first page that a row at `position` sees.
    #[must_use]
    pub fn first_page(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / PAGE_TOKENS
    }

    /// Whether a sequence reads the window page of the `page`-th page from one of the positions `kept` on.
    #[must_use]
    pub(super) fn is_read_from(&self, page: usize, kept: &[usize]) -> bool {
        kept.iter().any(|kept| (page + 1..=page + self.tail()).contains(&(kept / PAGE_TOKENS)))
    }

    /// [`Self::per_sequence`] for this pool.
    #[must_use]
    pub fn need(&self, rows: usize) -> usize {
        Self::per_sequence(self.window, rows)
    }

    /// The holders of window pages, and the free ones.
    #[must_use]
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Window pages that the tree evicted because others needed them.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Makes every window page free, whatever the tables said. No window page may have a holder.
    pub(super) fn start_over(&mut self) {
        self.pool.start_over();
        self.of_page.fill(NIL);
        self.page_of.fill(NIL);
    }

    /// Takes a window page: a free one, or the coldest idle one. None when sequences hold every one.
    pub(super) fn take(&mut self, pinned: impl Fn(PageId) -> bool) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.evict_coldest(pinned);
        }
        self.pool.alloc()
    }

    /// Evicts the coldest idle window page of an unpinned page of the tree; of a pinned page if there is no other. Returns it; none if none
    /// is idle.
    pub(super) fn evict_coldest(&mut self, pinned: impl Fn(PageId) -> bool) -> Option<PageId> {
        let page_of = &self.page_of;
        let window = self.pool.coldest_of(|window| !pinned(PageId(page_of[window.index()])));
        let window = window.or_else(|| self.pool.coldest())?;
        self.forget(PageId(self.page_of[window.index()]));
        self.evicted += 1;
        Some(window)
    }

    /// The window page of a page of the tree.
    #[must_use]
    pub fn of(&self, page: PageId) -> Option<PageId> {
        self.of_page.get(page.index()).filter(|window| **window != NIL).map(|window| PageId(*window))
    }

    /// Adds a holder to a window page that is held or idle.
    pub(super) fn retain(&mut self, window: PageId) {
        self.pool.retain(window);
    }

    /// Removes a holder. `cold`: if the window page is idle now, it is evicted first.
    pub(crate) fn release(&mut self, window: PageId, cold: bool) {
        self.pool.release(window);
        if cold {
            self.pool.chill(window);
        }
    }

    /// Keeps a whole window page for a page of the tree with the same positions. The caller holds it, and gets back the window page to
    /// continue with. If the tree has one already, the caller holds that one instead.
    pub(super) fn keep(&mut self, page: PageId, window: PageId) -> PageId {
        match self.of(page) {
            Some(known) if known == window => {}
            Some(known) => {
                self.pool.retain(known);
                self.pool.release(window);
                return known;
            }
            // A window page of another tree page is never offered: when a page is exchanged for the tree's, its window page is exchanged
            // here too.
            None if self.page_of[window.index()] == NIL && self.pool.cache(window) => {
                self.of_page[page.index()] = window.0;
                self.page_of[window.index()] = page.0;
            }
            None => {}
        }
        window
    }

    /// Drops the window page of a page that has left the tree.
    pub(super) fn forget(&mut self, page: PageId) {
        let Some(window) = self.of(page) else { return };
        self.of_page[page.index()] = NIL;
        self.page_of[window.index()] = NIL;
        self.pool.uncache(window);
    }

    /// Returns a function that takes the pages of a prefix in order, and returns after each whether a sequence can start there.
    pub(super) fn startable(&self) -> impl FnMut(PageId) -> bool {
        let (mut pages, mut covered) = (0, 0);
        move |page| {
            pages += 1;
            covered = if self.of(page).is_some() { covered + 1 } else { 0 };
            covered >= self.tail().min(pages)
        }
    }

    /// Compares tables and lists. Costs time in proportion to both pools.
    ///
    /// # Errors
    /// As [`PagePool::check`].
    ///
    /// # Panics
    /// When the tables disagree; for tests.
    pub fn check(&self) -> Result<(), PoolError> {
        let mut kept = 0;
        for (page, window) in (0..).zip(&self.of_page).filter(|(_, window)| **window != NIL) {
            assert_eq!(self.page_of[*window as usize], page, "a window page and its page");
            kept += 1;
        }
        for (window, page) in (0..).zip(&self.page_of) {
            assert_eq!(*page != NIL, self.pool.is_cached(PageId(window)), "a window page that the tree has");
        }
        assert_eq!(kept, self.page_of.iter().filter(|page| **page != NIL).count(), "window pages of the tree");
        self.pool.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_sees_its_window_and_its_chunk() {
        // Rows at 16·n + 15 and after it: the worst place in a page.
        for (window, rows) in [(1, 1), (2, 1), (16, 1), (17, 5), (512, 512), (1000, 33), (40, 40)] {
            let most = (0..200usize).map(|position| {
                let first = (position + 1).saturating_sub(window) / PAGE_TOKENS;
                (position + rows).div_ceil(PAGE_TOKENS) - first
            });
            let need = WindowPool::per_sequence(window, rows);
            assert!(most.max().unwrap() <= need, "{window} and {rows}");
            let deep = 16 * 1000;
            let tail = deep / PAGE_TOKENS - (deep + 1 - window) / PAGE_TOKENS;
            assert_eq!(WindowPool::tail_of(window), tail, "{window}");
        }
    }

    #[test]
    fn a_prefix_starts_where_its_last_pages_have_windows() {
        // 33 positions: two pages before the row's own.
        let mut windows = WindowPool::new(8, 8, 33).unwrap();
        for page in [0, 1, 3, 4, 5] {
            let window = windows.take(|_| false).unwrap();
            assert_eq!(windows.keep(PageId(page), window), window);
            windows.release(window, false);
        }
        let mut startable = windows.startable();
        let found: Vec<bool> = (0..7).map(|page| startable(PageId(page))).collect();
        assert_eq!(found, [true, true, false, false, true, true, false]);
        drop(startable);
        windows.check().unwrap();
    }

    #[test]
    fn the_coldest_window_page_goes_first_and_held_ones_stay() {
        let mut windows = WindowPool::new(3, 9, 33).unwrap();
        let all: Vec<PageId> = (0..3).map(|_| windows.take(|_| false).unwrap()).collect();
        assert_eq!(windows.take(|_| false), None);
        (0..3).for_each(|i| assert_eq!(windows.keep(PageId(5 + i as u32), all[i]), all[i]));
        assert_eq!(windows.take(|_| false), None, "sequences hold them all");
        windows.release(all[1], false);
        windows.release(all[0], true);
        let taken = windows.take(|_| false).unwrap();
        assert_eq!(taken, all[0], "the cold one, though it came last");
        assert_eq!([5, 6, 7].map(|page| windows.of(PageId(page)).is_some()), [false, true, true]);
        // Another sequence has computed the same page.
        assert_eq!(windows.keep(PageId(6), taken), all[1], "the tree's own is gone on with");
        assert_eq!((windows.pool().free(), windows.evicted()), (1, 1));
        windows.check().unwrap();
        windows.forget(PageId(6));
        windows.release(all[1], false);
        windows.release(all[2], false);
        assert_eq!((windows.pool().free(), windows.pool().idle()), (2, 1));
        windows.check().unwrap();
    }
}
