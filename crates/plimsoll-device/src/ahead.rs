//! Prefetch of the memory that a thread reads next, while it waits for other threads. Matrix products wait for memory. Between them
//! memory would be idle, while one thread normalises, quantizes or samples.

use arrayvec::ArrayVec;
use plimsoll_kernels::prefetch;

/// Most bytes that a thread prefetches: a part of the second-level cache on today's servers, and all of it on older ones.
const BUDGET: usize = 256 << 10;
/// Most pieces of memory that are prefetched.
pub(crate) const PIECES: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Cache lines that one call prefetches.
const LINES: usize = 8;

/// Pieces of memory in the order in which they are read; at most [`BUDGET`] bytes of them are prefetched. The memory is only prefetched,
/// never read: an address may have been unmapped or reused since.
#[derive(Default)]
pub(crate) struct Ahead {
    /// Addresses and bytes.
    pieces: ArrayVec<(usize, usize), PIECES>,
    piece: usize,
    /// Bytes of this piece that were prefetched.
    asked: usize,
}

impl Ahead {
    /// Appends a piece that is read after all earlier ones, as far as there is room.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(BUDGET - self.pieces.iter().map(|(_, len)| len).sum::<usize>());
        if len > 0 && !self.pieces.is_full() {
            self.pieces.push((bytes.as_ptr().addr(), len));
        }
    }

    /// Prefetches the next few lines and returns whether there were any. The caller then pauses for a moment: processors drop prefetches
    /// that are issued faster than memory answers.
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
