//! The parts that the disk tier is to save: pages of the tree, window pages and states that are new.
//!
//! Each is named by the tree page that it belongs to, and is in its list once. Parts that have left the tree meanwhile are skipped when
//! their turn comes.

use std::collections::VecDeque;
use std::sync::Arc;

use plimsoll_tier::{Name, Store, Tag};
use sha2::{Digest, Sha256};

use super::key::{Content, PageKey};
use super::pages::{PAGE_TOKENS, PageId};

/// A hash of a prefix up to a page's end: of all its tokens and media, and of the model's identity.
pub type Link = [u8; 32];

/// One kind of part of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A page of the whole context.
    Whole,
    /// A page of the sliding-window layers.
    Window,
    /// The recurrent state after a page.
    State,
}

impl Part {
    /// All parts. The order is the reverse of saving: states are the fewest in memory, so they are saved first.
    pub const ALL: [Part; 3] = [Part::Whole, Part::Window, Part::State];
}

/// Returns the link of the prefix that continues `before` by one page.
fn link(before: &Link, tokens: &[u32; PAGE_TOKENS], media: &Content) -> Link {
    let mut hash = Sha256::new();
    hash.update(before);
    hash.update(media);
    tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    hash.finalize().into()
}

/// Returns the links of a prompt's pages, in order; `root` is the link of the empty prompt.
pub(crate) fn links(root: Link, key: PageKey<'_>) -> impl Iterator<Item = Link> {
    key.pages().scan(root, |before, (tokens, media)| {
        *before = link(before, tokens, &media);
        Some(*before)
    })
}

/// Returns the name of a part: the model, the prefix, the kind. 184 bits of the prefix's link are enough: a collision would break
/// truncated SHA-256.
pub(crate) fn part_name(tag: &Tag, link: &Link, part: Part) -> Name {
    let mut name = [part as u8; 32];
    name[..8].copy_from_slice(tag);
    name[8..31].copy_from_slice(&link[..23]);
    name
}

/// The last byte of the names of blocks of encoder outputs: the kind after those of [`Part::ALL`].
pub(crate) const OUTPUT_KIND: usize = Part::ALL.len();

/// The name of a block of encoder outputs: the model's tag, and a hash of medium and block.
pub(crate) fn block_name(tag: &Tag, link: &Link) -> Name {
    let mut name = part_name(tag, link, Part::Whole);
    name[31] = OUTPUT_KIND as u8;
    name
}

/// The part of the disk cache that saved prefixes need.
pub(crate) struct SavedPrefixes {
    pub store: Arc<Store>,
    pub root: Link,
    pub tag: Tag,
    /// Bytes of each kind of part; 0 for kinds that the model does not have.
    pub part_bytes: [usize; 3],
}

/// Rows of a table that wait, each once, first in, first out.
#[derive(Debug)]
pub(crate) struct Pending {
    queue: VecDeque<u32>,
    waits: Box<[bool]>,
}

impl Pending {
    /// An empty queue for all of `rows` rows.
    pub fn new(rows: usize) -> Self {
        Self { queue: VecDeque::with_capacity(rows), waits: vec![false; rows].into_boxed_slice() }
    }

    pub const fn bytes_for(rows: usize) -> usize {
        rows * (size_of::<u32>() + size_of::<bool>())
    }

    pub fn push(&mut self, page: PageId) {
        if let Some(waits @ false) = self.waits.get_mut(page.index()) {
            *waits = true;
            self.queue.push_back(page.0);
        }
    }

    pub fn first(&self) -> Option<PageId> {
        self.queue.front().copied().map(PageId)
    }

    pub fn pop(&mut self) {
        if let Some(page) = self.queue.pop_front() {
            self.waits[page as usize] = false;
        }
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn clear(&mut self) {
        self.queue.clear();
        self.waits.fill(false);
    }
}

/// The links of all pages of a tree, and the pages that have entered it.
#[derive(Debug)]
pub(super) struct Chain {
    root: Link,
    links: Box<[Link]>,
    pub entered: Pending,
}

impl Chain {
    pub fn new(root: Link, pages: usize) -> Self {
        Self { root, links: vec![[0; 32]; pages].into_boxed_slice(), entered: Pending::new(pages) }
    }

    pub const fn bytes_for(pages: usize) -> usize {
        pages * size_of::<Link>() + Pending::bytes_for(pages)
    }

    /// Records a page that has entered the tree below another one, or as a prompt's first. Prompts with a salt of their own are not kept.
    pub fn entered(
        &mut self,
        page: PageId,
        parent: Option<PageId>,
        tokens: &[u32; PAGE_TOKENS],
        media: &Content,
        salt: u64,
    ) {
        if salt == 0 {
            let before = parent.map_or(&self.root, |parent| &self.links[parent.index()]);
            self.links[page.index()] = link(before, tokens, media);
            self.entered.push(page);
        }
    }

    pub fn link(&self, page: PageId) -> &Link {
        &self.links[page.index()]
    }
}

/// Bytes of host memory of the lists beside a pool of `pages` pages; `second`: the model has window pages or states.
pub(crate) const fn unsaved_bytes(pages: usize, second: bool) -> usize {
    Chain::bytes_for(pages) + if second { Pending::bytes_for(pages) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::MediaMark;
    use plimsoll_media::{ContentKey, Modality};

    #[test]
    fn a_link_stands_for_everything_before_it() {
        let tokens: Vec<u32> = (0..64).collect();
        let all = |root: u8, tokens: &[u32], media: &[MediaMark]| {
            links([root; 32], PageKey { salt: 0, tokens, media }).collect::<Vec<Link>>()
        };
        let base = all(1, &tokens, &[]);
        assert_eq!(base.len(), 4);
        let same = |other: &[Link]| base.iter().zip(other).take_while(|(a, b)| a == b).count();
        let other = |at: usize| {
            let mut other = tokens.clone();
            other[at] += 1;
            all(1, &other, &[])
        };
        assert_eq!([0, 15, 16, 47, 63].map(|at| same(&other(at))), [0, 0, 1, 2, 3]);
        // Links after the difference differ too.
        assert!(other(0).iter().all(|link| !base.contains(link)));
        assert_eq!(same(&all(2, &tokens, &[])), 0, "another model");
        let mark = MediaMark { from: 20, content: ContentKey::of(Modality::Image, "", &[1]) };
        assert_eq!(same(&all(1, &tokens, &[mark])), 1);
        assert_eq!(all(1, &tokens[..63], &[]), base[..3], "whole pages alone");
    }

    #[test]
    fn a_row_waits_once() {
        let mut pending = Pending::new(4);
        for page in [2, 1, 2, 3, 9] {
            pending.push(PageId(page));
        }
        let mut order = Vec::new();
        while let Some(page) = pending.first() {
            order.push(page.0);
            pending.pop();
        }
        assert_eq!(order, [2, 1, 3]);
        pending.push(PageId(2));
        assert_eq!(pending.len(), 1);
        pending.clear();
        pending.push(PageId(2));
        assert_eq!(pending.first(), Some(PageId(2)));
    }
}
