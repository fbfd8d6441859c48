//! The index's nodes: one row for each page, and an open-addressing table that finds them.

use super::super::hash::fold;
use super::super::key::Content;
use super::super::pages::{PAGE_TOKENS, PageId, PagePool};
use super::PrefixIndex;

/// The parent of a node that starts a prompt, and an empty place in the table.
pub(super) const ROOT: u32 = u32::MAX;
/// The parent of a row that is not a node now.
pub(super) const DEAD: u32 = u32::MAX - 1;

/// One page of a known prefix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) tokens: [u32; PAGE_TOKENS],
    pub(super) media: Content,
    pub(super) salt: u64,
    pub(super) parent: u32,
    pub(super) children: u32,
    pub(super) hash: u32,
    /// The minute in which its pin ends.
    pub(super) pinned_until: u32,
}

/// The key of a node.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) parent: u32,
    pub(super) salt: u64,
    pub(super) media: Content,
    pub(super) tokens: &'a [u32; PAGE_TOKENS],
}

impl PrefixIndex {
    pub(super) fn hash(&self, at: &Place<'_>) -> u32 {
        let [first, second] = self.keys;
        let mut hash = fold(at.salt ^ first, u64::from(at.parent) ^ second);
        // Part of a digest spreads places as well as all of it; it is compared in full.
        let [media, ..] = at.media.as_chunks::<8>().0 else { return 0 };
        hash = fold(hash ^ second, u64::from_le_bytes(*media) ^ first);
        for four in at.tokens.as_chunks::<4>().0 {
            let low = u64::from(four[0]) | u64::from(four[1]) << 32;
            let high = u64::from(four[2]) | u64::from(four[3]) << 32;
            hash = fold(low ^ hash, high ^ second);
        }
        (hash >> 32) as u32 ^ hash as u32
    }

    pub(super) fn find(&self, hash: u32, at: &Place<'_>) -> Option<u32> {
        let mask = self.table.len() - 1;
        let mut place = hash as usize & mask;
        loop {
            // An empty place holds ROOT, which is no row of the node table.
            let node = self.nodes.get(self.table[place] as usize)?;
            let of_tree = node.hash == hash && node.parent == at.parent && node.salt == at.salt;
            if of_tree && node.tokens == *at.tokens && node.media == at.media {
                return Some(self.table[place]);
            }
            place = (place + 1) & mask;
        }
    }

    /// Makes `page` the node at its place; false if the page may not enter (misuse, counted by the pool).
    pub(super) fn attach(&mut self, hash: u32, at: &Place<'_>, page: PageId, pool: &mut PagePool) -> bool {
        if page.index() >= self.nodes.len() || !pool.cache(page) {
            return false;
        }
        let Place { parent, salt, media, tokens } = *at;
        self.nodes[page.index()] = Node { tokens: *tokens, media, salt, parent, children: 0, hash, pinned_until: 0 };
        if let Some(above) = self.nodes.get_mut(parent as usize) {
            above.children += 1;
        }
        let mask = self.table.len() - 1;
        let mut place = hash as usize & mask;
        while self.table[place] != ROOT {
            place = (place + 1) & mask;
        }
        self.table[place] = page.0;
        self.stats.nodes += 1;
        self.stats.inserted_pages += 1;
        if let Some(kv_event_log) = self.kv_event_log.as_ref().filter(|_| salt == 0 && media == [0; 32]) {
            kv_event_log.stored(page, (parent != ROOT).then_some(PageId(parent)), tokens);
        }
        if let Some(chain) = &mut self.chain {
            chain.entered(page, (parent != ROOT).then_some(PageId(parent)), tokens, &media, salt);
        }
        true
    }

    /// Takes a leaf out of the tree. The table closes the gap behind it, so no tombstones build up.
    pub(super) fn detach(&mut self, page: PageId) {
        let Node { hash, parent, pinned_until, .. } = self.nodes[page.index()];
        self.pinned.remove(pinned_until, 1);
        self.nodes[page.index()].parent = DEAD;
        if let Some(above) = self.nodes.get_mut(parent as usize) {
            above.children -= 1;
        }
        let mask = self.table.len() - 1;
        let mut gap = hash as usize & mask;
        while self.table[gap] != page.0 {
            gap = (gap + 1) & mask;
        }
        let mut place = gap;
        loop {
            place = (place + 1) & mask;
            let Some(node) = self.nodes.get(self.table[place] as usize) else {
                break;
            };
            let home = node.hash as usize & mask;
            // An entry may move into the gap unless its home lies after the gap.
            if place.wrapping_sub(home) & mask >= place.wrapping_sub(gap) & mask {
                self.table[gap] = self.table[place];
                gap = place;
            }
        }
        self.table[gap] = ROOT;
        self.stats.nodes -= 1;
        self.kv_event_log.iter().for_each(|kv_event_log| kv_event_log.removed(page));
    }
}
