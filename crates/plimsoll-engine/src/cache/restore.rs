//! A prefix that is being restored from the disk tier: its pages, window pages and state.
//!
//! It holds them as a sequence would. When all are filled they enter the tree, and any sequence finds them. Otherwise they return to
//! their pools.

use super::key::PageKey;
use super::lease::SharedCache;
use super::pages::{PAGE_TOKENS, PageId};
use super::states::{Purpose, SlotId};

/// Pages of one prefix that are being filled.
#[derive(Debug)]
pub struct Restore {
    cache: SharedCache,
    /// First the pages that the tree had at the beginning, then the pages that were taken.
    pages: Vec<PageId>,
    known: usize,
    /// Window pages of the last pages.
    windows: Vec<PageId>,
    slot: Option<SlotId>,
    /// [`super::KvCache::invalidations`] at the beginning.
    invalidations: u32,
}

impl Restore {
    /// Holds the pages that the tree has of the first `pages` pages of `key`. The key has at least one token more.
    pub fn begin(cache: &SharedCache, key: PageKey<'_>, pages: usize) -> Self {
        let mut held = Vec::with_capacity(pages);
        let invalidations = {
            let cache = &mut *cache.borrow_mut();
            if let Some(index) = &mut cache.index {
                index.lookup(key.first(pages * PAGE_TOKENS + 1), &mut cache.pool, &mut held);
            }
            cache.invalidations()
        };
        let known = held.len();
        Self { cache: cache.clone(), pages: held, known, windows: Vec::new(), slot: None, invalidations }
    }

    /// Pages that the tree had at the beginning.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Takes the next page to fill. None if fewer than `spare` pages would be left.
    pub fn take_page(&mut self, spare: usize) -> Option<PageId> {
        let cache = &mut *self.cache.borrow_mut();
        let page = if cache.pool.available() > spare { cache.take() } else { None };
        self.pages.extend(page);
        page
    }

    /// Takes the next window page to fill; the last belongs to the last page.
    pub fn take_window(&mut self, spare: usize) -> Option<PageId> {
        let cache = &mut *self.cache.borrow_mut();
        cache.windows.as_ref().filter(|windows| windows.pool().available() > spare)?;
        let window = cache.take_window();
        self.windows.extend(window);
        window
    }

    /// Takes the slot for the state after the last page.
    pub fn take_slot(&mut self) -> Option<SlotId> {
        let cache = &mut *self.cache.borrow_mut();
        self.slot = cache.take_slot();
        self.slot
    }

    /// Publishes all pages that were taken. Returns false, and publishes nothing, if the cache was invalidated meanwhile.
    pub fn publish(mut self, key: PageKey<'_>) -> bool {
        let cache = &mut *self.cache.borrow_mut();
        if self.invalidations != cache.invalidations() {
            return false;
        }
        let key = key.first(self.pages.len() * PAGE_TOKENS);
        if let Some(slot) = self.slot {
            cache.publish_state(key, &mut self.pages, slot, Purpose::EndOfInput);
        } else if cache.windows.is_some() {
            let from = self.pages.len() - self.windows.len();
            self.windows.splice(..0, std::iter::repeat_n(PageId(0), from));
            cache.publish_windows(key, &mut self.pages, &mut self.windows, from, &[]);
            self.windows.drain(..from);
        } else if let Some(index) = &mut cache.index {
            index.donate(key, &self.pages, &mut cache.pool);
            self.pages.clear();
        }
        true
    }

    /// Drops everything without releasing it: the pools start over.
    pub fn forget(mut self) {
        self.pages.clear();
        self.windows.clear();
        self.slot = None;
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        // `publish` holds the cache until it returns; a `Restore` drops after that.
        let cache = &mut *self.cache.borrow_mut();
        if let Some(windows) = &mut cache.windows {
            self.windows.drain(..).rev().for_each(|window| windows.release(window, false));
        }
        if let (Some(states), Some(slot)) = (&mut cache.states, self.slot.take()) {
            states.release(slot);
        }
        cache.pool.release_all(&self.pages);
        self.pages.clear();
    }
}
