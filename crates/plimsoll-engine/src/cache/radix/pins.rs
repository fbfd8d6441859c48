//! Pinned pages: those that leave the tree last, until a minute comes.

use super::super::key::PageKey;
use super::super::pages::PageId;
use super::PrefixIndex;
use super::table::{Place, ROOT};

impl PrefixIndex {
    /// It is this minute now.
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

    /// Pins the known pages of `key` for so many minutes, from the first on, as long as at most `most` are pinned. Returns how many are
    /// not. Pages that are pinned for longer stay so.
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

    /// Nothing is pinned any more.
    pub(super) fn unpin_all(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.pinned_until = 0);
        self.pinned.clear();
    }
}
