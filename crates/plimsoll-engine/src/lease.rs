//! Pages of one sequence, owned: whatever way a sequence ends, its pages go back.
//!
//! The pool and the prefix index live on the engine thread, behind one shared cell, so that a lease can give its pages
//! back in `Drop` without anybody's help.

use std::cell::RefCell;
use std::rc::Rc;

use crate::cache::{PAGE_TOKENS, PageId, PagePool, PrefixIndex};

/// The page pool and the index over it.
#[derive(Debug)]
pub struct KvCache {
    /// Every page of the generation.
    pub pool: PagePool,
    /// Which prefixes they hold; none when prefix caching is off.
    pub index: Option<PrefixIndex>,
}

impl KvCache {
    /// One more page: a free one, or one the index gives up. None when every page is held by a sequence.
    fn take(&mut self) -> Option<PageId> {
        if self.pool.free() == 0 {
            self.index.as_mut()?.evict(1, &mut self.pool);
        }
        self.pool.alloc()
    }
}

impl KvCache {
    /// Forgets every prefix that no sequence holds. Their pages are free now; `pages` receives them, in ascending order.
    pub fn evict_idle(&mut self, pages: &mut Vec<u32>) {
        pages.clear();
        if let Some(index) = &mut self.index {
            index.evict_with(usize::MAX, &mut self.pool, |page| pages.push(page.0));
        }
        pages.sort_unstable();
    }

    /// After a panic, when nobody knows whether the tables are whole and no sequence is left: every page is free, every prefix
    /// forgotten.
    pub fn start_over(&mut self) {
        self.pool.start_over();
        if let Some(index) = &mut self.index {
            index.start_over();
        }
    }

    /// I4, when no sequence is left: every page is free, or held by the index alone.
    pub fn assert_at_rest(&self) {
        debug_assert_eq!(self.pool.used(), self.pool.idle(), "I4: pages without a holder");
    }
}

/// The cache as sequences and scheduler share it.
pub type SharedCache = Rc<RefCell<KvCache>>;

/// The pages of one sequence, in order of position.
#[derive(Debug)]
pub struct PageLease {
    cache: SharedCache,
    pages: Vec<PageId>,
    ids: Vec<u32>,
}

impl PageLease {
    /// No pages yet. `pages` and `ids` have room for all it may come to, so that growing never allocates.
    pub fn new(cache: &SharedCache, pages: Vec<PageId>, ids: Vec<u32>) -> Self {
        debug_assert!(pages.is_empty() && ids.is_empty());
        Self { cache: Rc::clone(cache), pages, ids }
    }

    /// Positions the pages have room for.
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// Page ids as the device takes them.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Takes the cached pages of `tokens`' longest known prefix. Returns the tokens they hold.
    pub fn take_prefix(&mut self, salt: u64, tokens: &[u32]) -> usize {
        debug_assert!(self.pages.is_empty(), "a prefix comes first");
        let cache = &mut *self.cache.borrow_mut();
        let Some(index) = &mut cache.index else { return 0 };
        let found = index.lookup(salt, tokens, &mut cache.pool, &mut self.pages);
        self.ids.clear();
        self.ids.extend(self.pages.iter().map(|page| page.0));
        found.tokens
    }

    /// Grows to hold `positions`. False when the pool has no page left; what was taken stays.
    pub fn grow(&mut self, positions: usize) -> bool {
        while self.capacity() < positions {
            let Some(page) = self.cache.borrow_mut().take() else { return false };
            self.pages.push(page);
            self.ids.push(page.0);
        }
        true
    }

    /// Lets others find the whole pages of `tokens`, which these pages hold.
    pub fn publish(&self, salt: u64, tokens: &[u32]) {
        let cache = &mut *self.cache.borrow_mut();
        if let Some(index) = &mut cache.index {
            index.insert(salt, tokens, &self.pages, &mut cache.pool);
        }
    }

    /// Ends the lease and leaves what `tokens` computed to the index.
    pub fn donate(&mut self, salt: u64, tokens: &[u32]) {
        let cache = &mut *self.cache.borrow_mut();
        if let Some(index) = &mut cache.index {
            index.donate(salt, tokens, &self.pages, &mut cache.pool);
            self.pages.clear();
            self.ids.clear();
        }
    }

    /// Lets go of every page without giving it back: the pool starts over.
    pub fn forget(&mut self) {
        self.pages.clear();
        self.ids.clear();
    }

    /// Gives every page back.
    pub fn clear(&mut self) {
        self.cache.borrow_mut().pool.release_all(&self.pages);
        self.pages.clear();
        self.ids.clear();
    }
}

impl Drop for PageLease {
    fn drop(&mut self) {
        self.clear();
    }
}
