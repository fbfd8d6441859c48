//! The vocabulary as a table: the name of each token, its bytes, and whether it is special.
//!
//! Two arenas and an index of ids replace a hundred thousand small strings. The size is known, and looking a token up does not allocate.
//! The table does not contain the rules of encoding.

use std::hash::{BuildHasher, RandomState};

use crate::error::TextError;

/// The id for no token and for no neighbour.
pub(crate) const NONE: u32 = u32::MAX;

/// The role of a token in the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A piece of text.
    Text,
    /// A control token, which is not text: `skip_special` leaves it out.
    Special,
    /// An id without a token, or a token without text.
    Hole,
}

/// The vocabulary's rule for the first token of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// The token is not changed.
    Plain,
    /// One space at the start is dropped, because encoding added it.
    StripSpace,
    /// Every `▁` of the first token is dropped.
    StripMarks,
    /// The first token is written as the vocabulary spells it, since its text in the table begins with a separating space. WordPiece's
    /// clean-up of English punctuation applies if `cleanup` is set.
    Raw {
        /// Whether to clean up English punctuation.
        cleanup: bool,
    },
}

/// Strings one after the other in one allocation.
#[derive(Default)]
struct Arena {
    bytes: Vec<u8>,
    /// The end of each string, which is the start of the next.
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
    /// The names: each token as the vocabulary spells it.
    raw: Arena,
    /// The bytes of each token's text.
    text: Arena,
    kinds: Vec<Kind>,
    /// A hash table of ids with open addressing: its length is a power of two, and it is at most half full.
    slots: Vec<u32>,
    hasher: RandomState,
    raw_bytes_max: usize,
}

/// One row of the table.
pub(crate) struct Row<'a> {
    /// The token as the vocabulary spells it; empty for a hole.
    pub(crate) raw: &'a str,
    /// The bytes of the token's text.
    pub(crate) text: &'a [u8],
    /// The role of the token in the text.
    pub(crate) kind: Kind,
}

impl TokenTable {
    /// Returns a table with room for `count` tokens. Rows are then added in the order of their ids.
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

    /// Adds the row of the next id. If two tokens have one name, the name belongs to the first.
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

    /// The slot with the token of this name, or the free slot for it.
    fn slot_of(&self, raw: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(raw) as usize & mask;
        while self.slots[slot] != NONE && self.raw.get(self.slots[slot]) != raw.as_bytes() {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// The id of the token with this name.
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

    /// The bytes of the token's text; empty for a hole and beyond the end.
    pub(crate) fn text(&self, id: u32) -> &[u8] {
        self.text.get(id)
    }

    /// The role of the token in the text. Ids beyond the end are holes.
    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Hole)
    }

    /// The heap bytes of the table.
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
