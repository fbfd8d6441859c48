//! The vocabulary as a table: what each token is called, which bytes it stands for, and whether it is special.
//!
//! Two arenas and an index of ids instead of a hundred thousand small strings: the size is known, and looking a
//! token up touches no allocator. The table says nothing about how tokens follow from text.

use std::hash::{BuildHasher, RandomState};

use crate::error::TextError;

/// No token, no neighbour.
pub(crate) const NONE: u32 = u32::MAX;

/// How a token takes part in the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A piece of text.
    Text,
    /// Steers the model and is no text: left out by `skip_special`.
    Special,
    /// An id without a token, or one that stands for nothing.
    Hole,
}

/// What a vocabulary does to the first token of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// Nothing.
    Plain,
    /// One space at the very start is dropped: it was put there when encoding.
    StripSpace,
    /// Every `▁` of the first token is dropped.
    StripMarks,
    /// The first token stands as the vocabulary spells it, since the table's text of it begins with a separating
    /// space; WordPiece's clean-up of English punctuation applies if set.
    Raw {
        /// Whether to clean up.
        cleanup: bool,
    },
}

/// Strings one after the other in one allocation.
#[derive(Default)]
struct Arena {
    bytes: Vec<u8>,
    /// Where each string ends; it starts where the one before ends.
    ends: Vec<u32>,
}

impl Arena {
    fn push(&mut self, bytes: &[u8]) -> Result<(), TextError> {
        self.bytes.extend_from_slice(bytes);
        let end = u32::try_from(self.bytes.len())
            .map_err(|_| TextError::BadTokenizer("the vocabulary has more than 4 GiB of text".to_owned()))?;
        self.ends.push(end);
        Ok(())
    }

    fn get(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..end as usize]
    }
}

/// The tokens of a vocabulary by id, and their ids by name.
pub(crate) struct TokenTable {
    /// The name: the token as the vocabulary spells it.
    raw: Arena,
    /// The bytes that the token stands for.
    text: Arena,
    kinds: Vec<Kind>,
    /// Open addressing over ids, a power of two long, at most half full.
    slots: Vec<u32>,
    hasher: RandomState,
    raw_bytes_max: usize,
}

/// One row of the table.
pub(crate) struct Row<'a> {
    /// The token as the vocabulary spells it; empty for a hole.
    pub(crate) raw: &'a str,
    /// The bytes it stands for.
    pub(crate) text: &'a [u8],
    /// How it takes part in the text.
    pub(crate) kind: Kind,
}

impl TokenTable {
    /// A table with room for `count` tokens. Rows are then added in the order of their ids.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self {
            raw: Arena::default(),
            text: Arena::default(),
            kinds: Vec::with_capacity(count),
            slots: vec![NONE; (count.max(1) * 2).next_power_of_two()],
            hasher: RandomState::new(),
            raw_bytes_max: 0,
        }
    }

    /// Adds the row of the next id. Of two tokens with one name the first owns it.
    pub(crate) fn push(&mut self, row: Row<'_>) -> Result<(), TextError> {
        let id = self.kinds.len() as u32;
        if self.kinds.len() * 2 >= self.slots.len() {
            return Err(TextError::BadTokenizer(format!("more tokens than announced: {id}")));
        }
        self.raw.push(row.raw.as_bytes())?;
        self.text.push(row.text)?;
        self.kinds.push(row.kind);
        self.raw_bytes_max = self.raw_bytes_max.max(row.raw.len());
        if row.kind != Kind::Hole {
            let slot = self.slot_of(row.raw);
            if self.slots[slot] == NONE {
                self.slots[slot] = id;
            }
        }
        Ok(())
    }

    /// The slot that holds the token of this name, or the free one where it would go.
    fn slot_of(&self, raw: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(raw) as usize & mask;
        while self.slots[slot] != NONE && self.raw.get(self.slots[slot]) != raw.as_bytes() {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// The id of the token of this name.
    pub(crate) fn id_of(&self, raw: &str) -> Option<u32> {
        let id = self.slots[self.slot_of(raw)];
        (id != NONE).then_some(id)
    }

    /// One more than the largest id.
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The length in bytes of the longest name.
    pub(crate) fn raw_bytes_max(&self) -> usize {
        self.raw_bytes_max
    }

    /// The token as the vocabulary spells it; empty for a hole and beyond the end.
    pub(crate) fn raw(&self, id: u32) -> &str {
        // Rows are pushed as `&str`, so the fallback is never taken.
        std::str::from_utf8(self.raw.get(id)).unwrap_or_default()
    }

    /// The bytes that the token stands for; empty for a hole and beyond the end.
    pub(crate) fn text(&self, id: u32) -> &[u8] {
        self.text.get(id)
    }

    /// How the token takes part in the text; beyond the end there are only holes.
    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Hole)
    }

    /// What the table occupies on the heap, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let arena = |a: &Arena| a.bytes.capacity() + a.ends.capacity() * 4;
        arena(&self.raw) + arena(&self.text) + self.kinds.capacity() + self.slots.capacity() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_and_the_first_of_two_equal_names_wins() {
        let mut table = TokenTable::with_capacity(4);
        for (raw, text, kind) in
            [("Ġa", " a", Kind::Text), ("</s>", "</s>", Kind::Special), ("", "", Kind::Hole), ("Ġa", "?", Kind::Text)]
        {
            table.push(Row { raw, text: text.as_bytes(), kind }).unwrap();
        }
        assert_eq!(table.id_of("Ġa"), Some(0));
        assert_eq!(table.id_of("</s>"), Some(1));
        assert_eq!(table.id_of(""), None);
        assert_eq!(table.text(0), b" a");
        assert_eq!(table.text(2), b"");
        assert_eq!(table.raw(3), "Ġa");
        assert_eq!(table.kind(9), Kind::Hole);
        assert!(table.push(Row { raw: "x", text: b"x", kind: Kind::Text }).is_err());
    }
}
