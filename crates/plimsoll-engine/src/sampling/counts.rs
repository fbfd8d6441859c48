//! The tokens of a sequence and their counts, for the penalties. Memory is bounded per sequence.
//!
//! A dense list of entries (so that applying penalties costs time in proportion to the distinct tokens) with an
//! open-addressing table over it. Both are allocated once. Not here: the penalties themselves.

use std::hash::{BuildHasher, RandomState};

use thiserror::Error;

/// A place of the table that is empty.
const EMPTY: u32 = u32::MAX;
/// Set in `Entry::count` if the token is in the prompt; the rest counts the output.
const IN_PROMPT: u32 = 1 << 31;

/// Why a token could not be counted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CountsError {
    /// There is no memory for the tables.
    #[error("no host memory to count {capacity} distinct tokens")]
    OutOfMemory {
        /// The requested capacity.
        capacity: usize,
    },
    /// More distinct tokens than the capacity.
    #[error("token counts have room for {capacity} distinct tokens, one more was given")]
    Full {
        /// The capacity given at build.
        capacity: usize,
    },
    /// A token was taken back that had not been counted.
    #[error("token {token} was taken back from the output, which does not have it")]
    NotCounted {
        /// The token id.
        token: u32,
    },
}

/// One distinct token of a sequence.
#[derive(Debug, Clone, Copy)]
struct Entry {
    token: u32,
    count: u32,
}

/// Occurrences of tokens in one sequence's prompt and output.
///
/// The default has no room and allocates nothing, which serves requests without penalties.
#[derive(Debug, Default)]
pub struct TokenCounts {
    entries: Vec<Entry>,
    table: Box<[u32]>,
    capacity: usize,
    /// Secret odd multiplier: with a known one, a crafted prompt could make every probe long.
    key: u64,
}

impl TokenCounts {
    /// Counts with room for `capacity` distinct tokens: the lesser of vocabulary and longest sequence. The only
    /// allocation they ever make.
    ///
    /// # Errors
    /// [`CountsError::OutOfMemory`] without memory for the tables.
    pub fn new(capacity: usize) -> Result<Self, CountsError> {
        let full = |_| CountsError::OutOfMemory { capacity };
        let (mut entries, mut table) = (Vec::new(), Vec::new());
        entries.try_reserve_exact(capacity).map_err(full)?;
        table.try_reserve_exact(Self::table_len(capacity)).map_err(full)?;
        table.resize(Self::table_len(capacity), EMPTY);
        let key = RandomState::new().hash_one(capacity) | 1;
        Ok(Self { entries, table: table.into_boxed_slice(), capacity, key })
    }

    /// Bytes of host memory that counts with this capacity take.
    #[must_use]
    pub const fn bytes_for(capacity: usize) -> usize {
        capacity * size_of::<Entry>() + Self::table_len(capacity) * size_of::<u32>()
    }

    /// Bytes of host memory these counts take; constant.
    #[must_use]
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.capacity)
    }

    const fn table_len(capacity: usize) -> usize {
        if capacity == 0 { 0 } else { (capacity * 2).next_power_of_two() }
    }

    /// Number of distinct tokens counted.
    #[must_use]
    pub fn distinct(&self) -> usize {
        self.entries.len()
    }

    /// Drops all tokens and keeps the memory, for the next sequence.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.table.fill(EMPTY);
    }

    /// Notes that the prompt contains `token`.
    ///
    /// # Errors
    /// [`CountsError::Full`] if it is new and there is no room.
    pub fn add_prompt(&mut self, token: u32) -> Result<(), CountsError> {
        self.entry(token)?.count |= IN_PROMPT;
        Ok(())
    }

    /// Counts one more `token` in the output.
    ///
    /// # Errors
    /// [`CountsError::Full`] if it is new and there is no room.
    pub fn add_output(&mut self, token: u32) -> Result<(), CountsError> {
        self.entry(token)?.count += 1;
        Ok(())
    }

    /// Takes one `token` of the output back, as when a drafted token is rejected.
    ///
    /// # Errors
    /// [`CountsError::NotCounted`] if the output does not have it.
    pub fn remove_output(&mut self, token: u32) -> Result<(), CountsError> {
        let place = self.place(token);
        let row = place.and_then(|place| self.row_at(place));
        let (Some(place), Some(row)) = (place, row) else {
            return Err(CountsError::NotCounted { token });
        };
        if self.entries[row].count & !IN_PROMPT == 0 {
            return Err(CountsError::NotCounted { token });
        }
        self.entries[row].count -= 1;
        if self.entries[row].count == 0 {
            self.remove(place, row);
        }
        Ok(())
    }

    /// How often the output has `token`, and whether the prompt has it.
    #[must_use]
    pub fn get(&self, token: u32) -> (u32, bool) {
        let row = self.place(token).and_then(|place| self.row_at(place));
        let count = row.map_or(0, |row| self.entries[row].count);
        (count & !IN_PROMPT, count & IN_PROMPT != 0)
    }

    /// Every token of prompt or output with its number of occurrences in the output.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.entries.iter().map(|entry| (entry.token, entry.count & !IN_PROMPT))
    }

    /// Where in the table `token` is, or would go; `None` if there is no table.
    fn place(&self, token: u32) -> Option<usize> {
        let mask = self.table.len().checked_sub(1)?;
        let mut place = self.home(token);
        while self.row_at(place).is_some_and(|row| self.entries[row].token != token) {
            place = (place + 1) & mask;
        }
        Some(place)
    }

    fn row_at(&self, place: usize) -> Option<usize> {
        (self.table[place] != EMPTY).then_some(self.table[place] as usize)
    }

    fn home(&self, token: u32) -> usize {
        let product = u128::from(u64::from(token) ^ self.key) * u128::from(self.key);
        ((product >> 64) as usize ^ product as usize) & (self.table.len() - 1)
    }

    fn entry(&mut self, token: u32) -> Result<&mut Entry, CountsError> {
        let full = CountsError::Full { capacity: self.capacity };
        let Some(place) = self.place(token) else {
            return Err(full);
        };
        if self.table[place] == EMPTY {
            if self.entries.len() == self.capacity {
                return Err(full);
            }
            self.table[place] = self.entries.len() as u32;
            self.entries.push(Entry { token, count: 0 });
        }
        Ok(&mut self.entries[self.table[place] as usize])
    }

    /// Takes an entry out; the last entry takes its row and the table closes the gap.
    fn remove(&mut self, place: usize, row: usize) {
        let last = self.entries.len() - 1;
        if row != last {
            let moved = self.place(self.entries[last].token);
            moved.into_iter().for_each(|moved| self.table[moved] = row as u32);
        }
        self.entries.swap_remove(row);
        let mask = self.table.len() - 1;
        let (mut gap, mut at) = (place, place);
        self.table[gap] = EMPTY;
        loop {
            at = (at + 1) & mask;
            let Some(row) = self.row_at(at) else { return };
            let home = self.home(self.entries[row].token);
            // An entry may move into the gap unless its home lies after the gap.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.table[gap] = self.table[at];
                self.table[at] = EMPTY;
                gap = at;
            }
        }
    }
}
