//! The memory that a tile prefetches.

use std::ops::Range;

/// Rows of a tile, at most.
pub(super) const ROWS: usize = 8;
/// Panels that lie further away are not asked for as a whole: they, those in use and the rows share the second-level cache. In bytes.
const FAR: usize = 256 << 10;

/// The prefetches of a tile, so that weights are in the cache when they are multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Distance in blocks along the panel. Past its end it goes on at the beginning of the next panel that is multiplied.
    pub(super) blocks: usize,
    /// How far behind the panel that one lies.
    pub(super) next: usize,
    /// Asks at this block.
    pub(super) first: usize,
    /// And from each to the next.
    pub(super) every: usize,
}

impl Ahead {
    /// Nothing.
    pub(super) const NONE: Ahead = Ahead { blocks: 0, next: 0, first: usize::MAX, every: 1 };

    /// For the tile from `row` on, one of all that meet panels of `blocks` blocks, which others take the place of, `next` bytes behind
    /// them, with rows `rows`. A burst of questions waits for the few buffers there are: where there is room for all panels to come, every
    /// eight rows ask for their share of them. Otherwise the first eight ask for what they need soon, `near` blocks ahead.
    pub(super) fn of(rows: &Range<usize>, row: usize, blocks: usize, near: usize, next: usize) -> Ahead {
        let row = row - rows.start;
        let (ahead, every) = if next <= FAR { (blocks, rows.len().div_ceil(ROWS)) } else { (near.min(blocks), 1) };
        let asks = row.is_multiple_of(ROWS) && row / ROWS < every;
        Ahead { blocks: ahead, next, first: if asks { row / ROWS } else { usize::MAX }, every }
    }

    /// Where what is asked for at `block` of a panel lies: the panel, by bytes from that one, and its block.
    #[inline(always)]
    pub(super) fn target(self, block: usize, blocks: usize) -> (usize, usize) {
        let ahead = block + self.blocks;
        if ahead < blocks { (0, ahead) } else { (self.next, ahead - blocks) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever tiles rows are cut into, and whether panels are short or long, every block is asked for once: by those before it.
    #[test]
    fn tiles_ask_for_every_block_once() {
        const BLOCKS: usize = 18;
        for rows in (1..=16).chain([23, 24, 128]) {
            let all = 40..40 + rows;
            for (tile, next) in [1, 2, 4, 8].into_iter().flat_map(|tile| [(tile, 5760), (tile, FAR + 1)]) {
                let mut asked = [[0; BLOCKS]; 2];
                for row in all.clone().step_by(tile) {
                    let ahead = Ahead::of(&all, row, BLOCKS, 5, next);
                    for block in (ahead.first..BLOCKS).step_by(ahead.every) {
                        let (panel, block) = ahead.target(block, BLOCKS);
                        asked[usize::from(panel == next)][block] += 1;
                    }
                }
                // The first blocks of a long panel were asked for by the one before it.
                let expected: [usize; BLOCKS] = std::array::from_fn(|block| usize::from(next > FAR && block >= 5));
                assert_eq!(asked, [expected, expected.map(|here| 1 - here)], "{rows} rows by {tile}, next {next}");
            }
        }
    }
}
