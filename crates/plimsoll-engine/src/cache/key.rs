//! The key of cached pages: the tokens of a prompt, its salt, and the content of its media.
//!
//! Two images have the same placeholder tokens, so tokens alone do not identify a page. A short hash in their place would let an
//! adversary search for a second image that matches another request's pages. Every node of the tree therefore carries 256 bits
//! that identify the content of all media up to it. They are compared in full: a collision would break SHA-256. They begin at a
//! medium's first placeholder, so that prompts share the pages before their images.

use plimsoll_media::ContentKey;

use super::pages::PAGE_TOKENS;

/// The content that a prompt's pages depend on from one position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaMark {
    /// Position of a medium's first placeholder, or of the first generated token if the next turn's prompt gives generated tokens other
    /// positions.
    pub from: u32,
    /// Hash of all media up to and including this one, each chained to the hash before it.
    pub content: ContentKey,
}

/// The key of a prompt's pages.
#[derive(Clone, Copy, Debug)]
pub struct PageKey<'a> {
    /// Prompts of different salts share no pages.
    pub salt: u64,
    /// Tokens of the prompt.
    pub tokens: &'a [u32],
    /// Media of the prompt, ascending.
    pub media: &'a [MediaMark],
}

impl<'a> PageKey<'a> {
    /// The key of a prompt of text alone.
    pub fn text(salt: u64, tokens: &'a [u32]) -> Self {
        Self { salt, tokens, media: &[] }
    }

    /// The key of the first tokens.
    pub(crate) fn first(self, tokens: usize) -> Self {
        Self { tokens: &self.tokens[..tokens], ..self }
    }

    /// Returns the whole pages: tokens, and the content of the media that begin in or before each page.
    pub(super) fn pages(self) -> impl Iterator<Item = (&'a [u32; PAGE_TOKENS], Content)> {
        let chunks = self.tokens.as_chunks::<PAGE_TOKENS>().0.iter();
        (1..).zip(chunks).map(move |(page, chunk)| {
            let end = page * PAGE_TOKENS;
            let mark = self.media.iter().take_while(|mark| (mark.from as usize) < end).last();
            (chunk, mark.map_or([0; 32], |mark| *mark.content.as_bytes()))
        })
    }

    /// Returns how many first tokens agree with the other key, media included. The salt is not compared.
    pub fn common(&self, other: &PageKey<'_>) -> usize {
        let same = self.tokens.iter().zip(other.tokens).take_while(|(a, b)| a == b).count();
        let own = self.media.iter().map(Some).chain(std::iter::once(None));
        let theirs = other.media.iter().map(Some).chain(std::iter::repeat(None));
        let apart = own.zip(theirs).find(|(a, b)| a != b);
        let from = |mark: Option<&MediaMark>| mark.map_or(usize::MAX, |mark| mark.from as usize);
        apart.map_or(same, |(a, b)| same.min(from(a)).min(from(b)))
    }
}

/// The content of the media up to a page; zeros: none.
pub(super) type Content = [u8; 32];

/// A request to keep a prefix in the cache for some time. At most a quarter of all pages is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Tokens of the prompt; whole pages of them are pinned.
    pub tokens: usize,
    /// Minutes, at most [`Self::MINUTES_MAX`].
    pub minutes: u32,
}

impl Pin {
    /// The most prefixes of one prompt.
    pub const MOST: usize = 2;
    /// The longest time.
    pub const MINUTES_MAX: u32 = 60;
    /// In place of minutes: the prefix is pinned on disk alone, while it is saved under a name.
    pub const SAVED: u32 = u32::MAX;
}

/// The end of a pin on disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PinEnd {
    /// After this many minutes.
    Minutes(u32),
    /// When the saved name with this id is removed.
    Removed(u64),
}

#[cfg(test)]
mod tests {
    use plimsoll_media::Modality;

    use super::*;

    fn mark(from: u32, content: u8) -> MediaMark {
        MediaMark { from, content: ContentKey::of(Modality::Image, "", &[content]) }
    }

    #[test]
    fn common_ground_ends_where_a_medium_differs() {
        let tokens: Vec<u32> = (0..60).collect();
        let of = |media| PageKey { salt: 0, tokens: &tokens, media };
        let (a, b) = ([mark(20, 1), mark(40, 2)], [mark(20, 1), mark(40, 3)]);
        let (none, one, other, later): (_, _, _, [MediaMark; 1]) = ([], [mark(20, 1)], [mark(20, 9)], [mark(30, 1)]);
        for (x, y, common) in [
            (of(&a), of(&a), 60),
            (of(&a), of(&b), 40),
            (of(&a), of(&one), 40),
            (of(&one), of(&other), 20),
            (of(&one), of(&later), 20),
            (of(&none), of(&later), 30),
        ] {
            assert_eq!((x.common(&y), y.common(&x)), (common, common), "{x:?} {y:?}");
        }
        assert_eq!(of(&a).first(10).common(&of(&b)), 10);
    }

    #[test]
    fn a_page_depends_on_every_medium_that_begins_in_or_before_it() {
        let tokens: Vec<u32> = (0..64).collect();
        let marks = [mark(15, 1), mark(32, 2)];
        let key = PageKey { salt: 0, tokens: &tokens, media: &marks };
        let contents: Vec<_> = key.pages().map(|(_, content)| content).collect();
        let (first, second) = (*marks[0].content.as_bytes(), *marks[1].content.as_bytes());
        assert_eq!(contents, [first, first, second, second]);
        let later = [mark(16, 1)];
        assert_eq!(PageKey { media: &later, ..key }.pages().next().unwrap().1, [0; 32]);
    }
}
