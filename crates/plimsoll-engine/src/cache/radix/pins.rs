//! Pinned pages: the last that leave the tree, until their minute comes.

use super::super::key::PageKey;
use super::super::pages::PageId;
use super::PrefixIndex;
use super::table::{Place, ROOT};

impl PrefixIndex {
    /// Sets the current minute.
    pub(in crate::cache) fn advance(&mut self, minute: u32) {
        self.pinned.advance(minute);
    }

    /// Pages that are pinned now.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.pinned.total() as usize
    }

    /// Whether a page is pinned now.
    #[must_use]
    pub fn is_pinned(&self, page: PageId) -> bool {
        self.pinned.is_pinned(self.nodes[page.index()].pinned_until)
    }

    /// Pins the cached pages of `key` for `minutes`, from the first on, while at most `most` are pinned. Returns how many pages were not
    /// pinned for that reason. A pin that ends later stays.
    pub(in crate::cache) fn pin(&mut self, key: PageKey<'_>, minutes: u32, most: usize) -> usize {
        let (mut parent, mut refused) = (ROOT, 0);
        let until = self.pinned.after(minutes);
        for (tokens, media) in key.pages() {
            let at = Place { parent, salt: key.salt, media, tokens };
            let Some(found) = self.find(self.hash(&at), &at) else { break };
            parent = found;
            let before = self.nodes[found as usize].pinned_until;
            if before >= until {
                continue;
            }
            if !self.pinned.is_pinned(before) && self.pinned() >= most {
                refused += 1;
                continue;
            }
            self.pinned.remove(before, 1);
            self.pinned.add(until, 1);
            self.nodes[found as usize].pinned_until = until;
        }
        refused
    }

    /// Ends all pins.
    pub(super) fn unpin_all(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.pinned_until = 0);
        self.pinned.clear();
    }
}
