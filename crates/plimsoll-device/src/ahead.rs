//! What a thread will read next, fetched into its own cache while it waits for others: products wait for memory, and between them, while
//! one thread normalises, quantizes or samples, memory would do nothing.

use arrayvec::ArrayVec;
use plimsoll_kernels::prefetch;

/// Bytes that a thread fetches ahead at most: a part of the second-level caches of today's servers, all of older ones'.
const BUDGET: usize = 256 << 10;
/// Pieces of them.
pub(crate) const PIECES: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Lines asked for at once.
const LINES: usize = 8;

/// Pieces of memory, the first to be read first, of which a budget's worth is fetched. The memory is only prefetched,
/// never read: an address may have been unmapped or reused since.
#[derive(Default)]
pub(crate) struct Ahead {
    /// Addresses and bytes.
    pieces: ArrayVec<(usize, usize), PIECES>,
    piece: usize,
    /// Bytes of this piece that were asked for.
    asked: usize,
}

impl Ahead {
    /// Adds what is read after all that was added before, as far as there is room.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(BUDGET - self.pieces.iter().map(|(_, len)| len).sum::<usize>());
        if len > 0 && !self.pieces.is_full() {
            self.pieces.push((bytes.as_ptr().addr(), len));
        }
    }

    /// Asks for the next few lines, if there are some left. The caller then does nothing for a moment: processors drop what is asked faster
    /// than memory answers.
    pub(crate) fn fetch(&mut self) -> bool {
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
        let fetches = |pieces: &[&[u8]]| {
            let mut ahead = Ahead::default();
            pieces.iter().for_each(|piece| ahead.add(piece));
            let fetches = std::iter::from_fn(|| ahead.fetch().then_some(())).count();
            assert!(!ahead.fetch(), "it stays at its end");
            fetches
        };
        let at_once = LINES * LINE;
        assert_eq!(fetches(&[]), 0);
        assert_eq!(fetches(&[&all[..0]; 2 * PIECES]), 0, "nothing is no piece");
        assert_eq!(fetches(&[&all]), BUDGET / at_once);
        assert_eq!(fetches(&[&all[..BUDGET - at_once], &[], &all, &all]), BUDGET / at_once);
        assert_eq!(fetches(&[&all[..1]; 2 * PIECES]), PIECES, "a few lines each");
    }
}
