//! The prefix index: a tree over whole pages of tokens that finds KV which was computed before.
//!
//! A node is one page: its [`PAGE_TOKENS`] token ids, its parent, the content of the media up to it, and the salt of
//! its tree. A node's number *is* its page's number, so the node table has one row a page, is allocated once, and
//! tables kept elsewhere (state checkpoints, say) can be indexed by [`PageId`] too. Children are found through one
//! open-addressing table keyed by a secret hash of (parent, salt, media, tokens); a hit is always confirmed by
//! comparing all of them.
//!
//! The pool has the least recently used order: a page goes to the warm end of the idle queue when its last running
//! holder releases it. A holder of a cached page also holds the pages before it, and releases the deepest page first.
//! Hence the coldest idle page is a leaf, and every idle page can be evicted. [`PagePool::idle`] is then the exact,
//! constant-time number of pages that eviction can free. Both operations that add nodes keep that rule.
//!
//! Not here: bytes of KV, requests, scheduling policy.

mod pins;
mod table;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use plimsoll_tier::Expiring;
use thiserror::Error;

use super::hash::fold;
use super::key::PageKey;
use super::kv_event_log::KvEventLog;
use super::pages::{PAGE_TOKENS, PageId, PagePool};
use super::unsaved::{Chain, Link};
use table::{DEAD, Node, Place, ROOT};

/// The result of a lookup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Match {
    /// Pages found, and now held by the caller.
    pub pages: usize,
    /// Tokens of these pages; the caller computes the rest of its prompt.
    pub tokens: usize,
    /// Tokens of the prompt that are in the index, usable or not.
    pub known: usize,
}

/// Content and counters of an index since it was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Nodes in the tree, which is also the number of pages the index holds.
    pub nodes: usize,
    /// Bytes of host memory of the index's tables; constant.
    pub bytes: usize,
    /// Pages that are pinned now.
    pub pinned: usize,
    /// Pages that entered the index.
    pub inserted_pages: u64,
    /// Pages that eviction freed.
    pub evicted_pages: u64,
}

/// Why an index could not be built, or what [`PrefixIndex::check`] found wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexError {
    /// More pages than [`PagePool::PAGES_MAX`].
    #[error("a prefix index over {pages} pages was asked for, the limit is {limit}")]
    TooManyPages {
        /// The requested number of pages.
        pages: usize,
        /// The largest number of pages an index can cover.
        limit: usize,
    },
    /// The host has no memory left for the tables.
    #[error("no host memory for a prefix index over {pages} pages ({bytes} bytes)")]
    OutOfMemory {
        /// The requested number of pages.
        pages: usize,
        /// The bytes the tables would have taken.
        bytes: usize,
    },
    /// A node is not linked the way it should be.
    #[error("the prefix index is broken at page {page}: {what}")]
    Broken {
        /// The page of the broken node.
        page: u32,
        /// The inconsistency.
        what: &'static str,
    },
    /// The number of nodes differs from the counter.
    #[error("the prefix index has {found} nodes, its counter says {counted}")]
    Miscounted {
        /// Nodes found in the table.
        found: usize,
        /// Nodes according to the counter.
        counted: usize,
    },
}

/// Finds the longest cached prefix of a prompt. Serves one [`PagePool`].
#[derive(Debug)]
pub struct PrefixIndex {
    nodes: Box<[Node]>,
    table: Box<[u32]>,
    /// Secrets of the hash: prompts are hostile, and known secrets would let them collide on purpose.
    keys: [u64; 2],
    stats: IndexStats,
    /// The log of changes for external readers.
    kv_event_log: Option<Arc<KvEventLog>>,
    /// Links of the pages, and the pages that the disk tier has not saved yet.
    pub(super) chain: Option<Chain>,
    /// Pinned pages, by the minute in which their pins end.
    pinned: Expiring,
}

impl PrefixIndex {
    /// Builds an empty index over a pool of `pages` pages; the only allocation it ever makes.
    ///
    /// # Errors
    /// [`IndexError::TooManyPages`] above [`PagePool::PAGES_MAX`], [`IndexError::OutOfMemory`] if the host has no memory.
    pub fn new(pages: usize) -> Result<Self, IndexError> {
        // Nothing the index answers depends on the secret, only how long a crafted prompt could keep it busy.
        Self::with_hash_seed(pages, RandomState::new().hash_one(pages))
    }

    /// As [`Self::new`] with a fixed secret, so that a test can show that no answer depends on it.
    pub(super) fn with_hash_seed(pages: usize, seed: u64) -> Result<Self, IndexError> {
        let limit = PagePool::PAGES_MAX;
        if pages > limit {
            return Err(IndexError::TooManyPages { pages, limit });
        }
        let bytes = Self::bytes_for(pages);
        let full = |_| IndexError::OutOfMemory { pages, bytes };
        let (mut nodes, mut table) = (Vec::new(), Vec::new());
        nodes.try_reserve_exact(pages).map_err(full)?;
        table.try_reserve_exact(Self::table_len(pages)).map_err(full)?;
        nodes.resize(
            pages,
            Node {
                tokens: [0; PAGE_TOKENS],
                media: [0; 32],
                salt: 0,
                parent: DEAD,
                children: 0,
                hash: 0,
                pinned_until: 0,
            },
        );
        table.resize(Self::table_len(pages), ROOT);
        Ok(Self {
            nodes: nodes.into_boxed_slice(),
            table: table.into_boxed_slice(),
            keys: [fold(seed, 0x9e37_79b9_7f4a_7c15), fold(!seed, 0xd1b5_4a32_d192_ed03)],
            stats: IndexStats { bytes, ..IndexStats::default() },
            kv_event_log: None,
            chain: None,
            pinned: Expiring::default(),
        })
    }

    /// Logs pages that enter and leave from now on. The log has as many rows as the index, which is empty.
    #[must_use]
    pub fn with_event_log(mut self, kv_event_log: KvEventLog) -> Self {
        self.kv_event_log = Some(Arc::new(kv_event_log));
        self
    }

    /// Records the pages that enter from now on, with links from `root` on. The index is empty.
    #[must_use]
    pub fn with_chain(mut self, root: Link) -> Self {
        self.chain = Some(Chain::new(root, self.nodes.len()));
        self
    }

    /// The log of changes for external readers, if there is one.
    #[must_use]
    pub fn kv_event_log(&self) -> Option<&Arc<KvEventLog>> {
        self.kv_event_log.as_ref()
    }

    /// Bytes of host memory an index over `pages` pages takes.
    #[must_use]
    pub const fn bytes_for(pages: usize) -> usize {
        pages * size_of::<Node>() + Self::table_len(pages) * size_of::<u32>()
    }

    /// At most half full, so that a probe is short and always ends at an empty place.
    const fn table_len(pages: usize) -> usize {
        (pages * 2 + 1).next_power_of_two()
    }

    /// Returns content and counters.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        IndexStats { pinned: self.pinned(), ..self.stats }
    }

    /// Finds the longest known prefix of `key` and makes the caller a holder of its pages, in order, in `pages`
    /// (cleared first; reserve `key.tokens.len() / PAGE_TOKENS` to keep this free of allocation).
    ///
    /// At least one token is always left to compute, since a step must produce the first logits. Equal tokens with
    /// other media or under another salt never match. The caller must release every page, by [`Self::donate`] or
    /// [`PagePool::release_all`].
    pub fn lookup(&mut self, key: PageKey<'_>, pool: &mut PagePool, pages: &mut Vec<PageId>) -> Match {
        self.lookup_usable(key, pool, pages, |_| true)
    }

    /// As [`Self::lookup`], for prefixes that end with a `usable` page; it is called for each page in order.
    pub fn lookup_usable(
        &mut self,
        key: PageKey<'_>,
        pool: &mut PagePool,
        pages: &mut Vec<PageId>,
        mut usable: impl FnMut(PageId) -> bool,
    ) -> Match {
        pages.clear();
        let mut last = 0;
        let known = self.matched_pages(key, |page| {
            pages.push(PageId(page));
            last = if usable(PageId(page)) { pages.len() } else { last };
        });
        let known = known * PAGE_TOKENS;
        pages.truncate(last);
        for &page in pages.iter() {
            pool.retain(page);
        }
        Match { pages: pages.len(), tokens: pages.len() * PAGE_TOKENS, known }
    }

    /// How many tokens [`Self::lookup`] would find, without holding, warming or counting anything; for pricing.
    #[must_use]
    pub fn peek(&self, key: PageKey<'_>) -> usize {
        self.peek_usable(key, |_| true)
    }

    /// As [`Self::peek`], for prefixes that end with a `usable` page.
    #[must_use]
    pub fn peek_usable(&self, key: PageKey<'_>, mut usable: impl FnMut(PageId) -> bool) -> usize {
        let (mut depth, mut last) = (0, 0);
        self.matched_pages(key, |page| {
            depth += 1;
            if usable(PageId(page)) {
                last = depth;
            }
        });
        last * PAGE_TOKENS
    }

    /// As [`Self::insert`], but where the tree has another page of the same content, `pages` is changed to it: the caller holds that page
    /// and releases its own. Returns how many of the pages are in the tree now, from the first on.
    pub fn adopt(&mut self, key: PageKey<'_>, pages: &mut [PageId], pool: &mut PagePool) -> usize {
        let (mut parent, mut depth) = (ROOT, 0);
        for (chunk, page) in key.pages().zip(pages) {
            let at = Place { parent, salt: key.salt, media: chunk.1, tokens: chunk.0 };
            let hash = self.hash(&at);
            match self.find(hash, &at) {
                Some(known) if known == page.0 => {}
                Some(known) => {
                    pool.retain(PageId(known));
                    pool.release(*page);
                    *page = PageId(known);
                }
                // Another holder may not hold the tree's pages before this one. While it runs, these pages could then never be evicted.
                None if pool.holders(*page) > 1 => break,
                None if self.attach(hash, &at, *page, pool) => {}
                None => break,
            }
            (parent, depth) = (page.0, depth + 1);
        }
        depth
    }

    /// Children of a page's node; 0 for a page without a node.
    #[must_use]
    pub fn children(&self, page: PageId) -> u32 {
        if self.knows(page) { self.nodes[page.index()].children } else { 0 }
    }

    /// Whether the page is a node of the tree.
    #[must_use]
    pub fn knows(&self, page: PageId) -> bool {
        self.nodes[page.index()].parent != DEAD
    }

    /// The page before this one in its prompt; none for a prompt's first page, and for a page without a node.
    #[must_use]
    pub fn parent(&self, page: PageId) -> Option<PageId> {
        let parent = self.nodes[page.index()].parent;
        (parent != ROOT && parent != DEAD).then_some(PageId(parent))
    }

    /// Removes a leaf from the tree, even while sequences hold its page. Returns its parent, and whether the page became free.
    pub(super) fn remove_leaf(&mut self, page: PageId, pool: &mut PagePool) -> (Option<PageId>, bool) {
        if !self.knows(page) || self.children(page) > 0 {
            return (None, false);
        }
        let parent = self.parent(page);
        self.detach(page);
        let free = pool.uncache(page);
        self.stats.evicted_pages += u64::from(free);
        (parent, free)
    }

    /// Shares the pages of a sequence that continues to run; returns the number of added pages.
    ///
    /// `pages[i]` holds `key.tokens[i * PAGE_TOKENS..][..PAGE_TOKENS]`; the caller holds every one of them and keeps its
    /// claims, the index adds its own. Only whole pages count. A prefix that is known already keeps its page; where
    /// that is not the caller's own page the rest is left to [`Self::donate`], because a running sequence that held a
    /// page without its predecessor would make idle pages impossible to evict.
    pub fn insert(&mut self, key: PageKey<'_>, pages: &[PageId], pool: &mut PagePool) -> usize {
        let (mut parent, mut added) = (ROOT, 0);
        for (chunk, &page) in key.pages().zip(pages) {
            let at = Place { parent, salt: key.salt, media: chunk.1, tokens: chunk.0 };
            let hash = self.hash(&at);
            match self.find(hash, &at) {
                Some(known) if known == page.0 => {}
                Some(_) => break,
                None if self.attach(hash, &at, page, pool) => added += 1,
                None => break,
            }
            parent = page.0;
        }
        added
    }

    /// Takes over all the pages of a finished sequence: pages new to the tree become part of the index, the rest is released.
    ///
    /// As [`Self::insert`], but the caller's claim on every one of `pages` is gone afterwards, the partly filled last page's
    /// included. Where a prefix is known under another page, that page stays and the sequence's own is
    /// released. Returns how many pages were added.
    pub fn donate(&mut self, key: PageKey<'_>, pages: &[PageId], pool: &mut PagePool) -> usize {
        let (mut parent, mut depth, mut added, mut foreign) = (ROOT, 0, 0, false);
        for (chunk, &page) in key.pages().zip(pages) {
            let at = Place { parent, salt: key.salt, media: chunk.1, tokens: chunk.0 };
            let hash = self.hash(&at);
            parent = match self.find(hash, &at) {
                Some(known) => {
                    if known != page.0 {
                        // Held until the way back below, which leaves it warmer than what is added under it.
                        pool.retain(PageId(known));
                        foreign = true;
                    }
                    known
                }
                // Another holder (a fork) of this page may not hold the known pages before it.
                None if foreign && pool.holders(page) > 1 => break,
                None if self.attach(hash, &at, page, pool) => {
                    added += 1;
                    page.0
                }
                None => break,
            };
            depth += 1;
        }
        for (i, &page) in pages.iter().enumerate().rev() {
            pool.release(page);
            if i < depth {
                if parent != page.0 {
                    pool.release(PageId(parent));
                }
                parent = self.nodes[parent as usize].parent;
            }
        }
        added
    }

    /// Frees the coldest idle leaf; if `pins`, a pinned leaf only where there is no other. Takes constant time unless pages are pinned.
    /// Returns its page and its parent; none if no page is idle.
    pub(super) fn evict_one(&mut self, pool: &mut PagePool, pins: bool) -> Option<(PageId, Option<PageId>)> {
        // A holder may release its pages in the wrong order: then a page is colder than the leaf below it.
        let leaf = |page: PageId| self.nodes[page.index()].children == 0;
        let page = pool.coldest_of(|page| leaf(page) && !(pins && self.is_pinned(page)));
        let page = page.or_else(|| pool.coldest_of(leaf))?;
        Some((page, self.remove_leaf(page, pool).0))
    }

    /// Drops every prefix. Idle pages become free, pages of running sequences stay with them.
    pub fn clear(&mut self, pool: &mut PagePool) {
        for (page, node) in self.nodes.iter_mut().enumerate() {
            if node.parent != DEAD {
                node.parent = DEAD;
                node.children = 0;
                pool.uncache(PageId(page as u32));
            }
        }
        self.forget();
    }

    /// Drops every prefix without releasing pages: the pool starts over too.
    pub(crate) fn start_over(&mut self) {
        self.nodes.iter_mut().for_each(|node| (node.parent, node.children) = (DEAD, 0));
        self.forget();
    }

    fn forget(&mut self) {
        self.unpin_all();
        self.table.fill(ROOT);
        self.stats.nodes = 0;
        self.kv_event_log.iter().for_each(|kv_event_log| kv_event_log.cleared());
        self.chain.iter_mut().for_each(|chain| chain.entered.clear());
    }

    /// Compares nodes, links, table and the pool's cached pages. Costs time in proportion to the pool.
    ///
    /// # Errors
    /// [`IndexError::Broken`] names the first page that is wrong, [`IndexError::Miscounted`] a wrong number of nodes.
    pub fn check(&self, pool: &PagePool) -> Result<(), IndexError> {
        let (mut found, mut children_counted, mut children) = (0, 0, 0);
        for (page, node) in (0u32..).zip(&self.nodes) {
            let broken = |what| Err(IndexError::Broken { page, what });
            let live = node.parent != DEAD;
            if live != pool.is_cached(PageId(page)) {
                return broken("index and pool disagree on whether it is cached");
            }
            if !live {
                continue;
            }
            let at = Place { parent: node.parent, salt: node.salt, media: node.media, tokens: &node.tokens };
            if self.find(node.hash, &at) != Some(page) {
                return broken("the table does not lead to it");
            }
            if node.parent != ROOT {
                children += 1;
                let parent = &self.nodes[node.parent as usize];
                if parent.parent == DEAD || parent.salt != node.salt {
                    return broken("its parent is not of its tree");
                }
            }
            found += 1;
            children_counted += node.children;
        }
        let filled = self.table.iter().filter(|&&place| place != ROOT).count();
        if found != self.stats.nodes || filled != found || children != children_counted {
            return Err(IndexError::Miscounted { found, counted: self.stats.nodes });
        }
        Ok(())
    }

    /// Walks down the tree along `key`, calls `visit` for each node, and returns how many pages matched.
    fn matched_pages(&self, key: PageKey<'_>, mut visit: impl FnMut(u32)) -> usize {
        let pages_max = key.tokens.len().saturating_sub(1) / PAGE_TOKENS;
        let (mut parent, mut matched) = (ROOT, 0);
        for (tokens, media) in key.pages().take(pages_max) {
            let at = Place { parent, salt: key.salt, media, tokens };
            let Some(node) = self.find(self.hash(&at), &at) else { break };
            visit(node);
            (parent, matched) = (node, matched + 1);
        }
        matched
    }
}
