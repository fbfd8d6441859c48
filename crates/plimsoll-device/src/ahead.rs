//! What a thread will read next, fetched into its own cache while it waits for others: products wait for memory, and between them, while
//! one thread normalises, quantizes or samples, memory would do nothing.

use arrayvec::ArrayVec;
use plimsoll_kernels::prefetch;

/// Bytes that a thread fetches ahead at most: a part of its second-level cache.
const BUDGET: usize = 256 << 10;
/// Pieces of them.
const PIECES: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Lines asked for at once.
const LINES: usize = 8;

/// Pieces of memory, the first to be read first, of which a budget's worth is fetched. It is only asked for, never read: an address may
/// have become another's, or nobody's.
#[derive(Default)]
pub struct Ahead {
    /// Addresses and bytes.
    pieces: ArrayVec<(usize, usize), PIECES>,
    piece: usize,
    /// Bytes of this piece that were asked for.
    asked: usize,
    budget: usize,
}

impl Ahead {
    /// Nothing yet.
    pub fn new() -> Self {
        Self { budget: BUDGET, ..Self::default() }
    }

    /// Adds what is read after all that was added before, as far as there is room. Whether there is more.
    pub fn add(&mut self, bytes: &[u8]) -> bool {
        let len = bytes.len().min(self.budget);
        self.budget -= len;
        self.pieces.push((bytes.as_ptr().addr(), len));
        self.budget > 0 && !self.pieces.is_full()
    }

    /// Asks for the next few lines, if there are some left. The caller then does nothing for a moment: processors drop what is asked faster
    /// than memory answers.
    pub fn fetch(&mut self) -> bool {
        let Some((at, len)) = self.pieces.get(self.piece) else { return false };
        for line in 0..LINES {
            prefetch(std::ptr::without_provenance(at + self.asked + line * LINE));
        }
        self.asked += LINES * LINE;
        if self.asked >= *len {
            (self.piece, self.asked) = (self.piece + 1, 0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_fetched_than_the_budget_and_nothing_twice() {
        let all = vec![0; 2 * BUDGET];
        let lines = |pieces: &[&[u8]]| {
            let mut ahead = Ahead::new();
            let more: Vec<_> = pieces.iter().map(|piece| ahead.add(piece)).collect();
            let fetches = std::iter::from_fn(|| ahead.fetch().then_some(())).count();
            assert!(!ahead.fetch(), "it stays at its end");
            (more, fetches)
        };
        let at_once = LINES * LINE;
        assert_eq!(lines(&[]), (vec![], 0));
        assert_eq!(lines(&[&all]), (vec![false], BUDGET / at_once));
        assert_eq!(lines(&[&all[..BUDGET - at_once], &all]), (vec![true, false], BUDGET / at_once));
        assert_eq!(lines(&[&all[..1]; PIECES]), (vec![true, true, true, false], PIECES), "a piece is a line at least");
    }
}
