//! The prefetches of a tile.

use std::ops::Range;

/// At most this many rows in a tile.
pub(super) const ROWS: usize = 8;
/// Panels further away than this are not prefetched whole: they, those in use and the rows share the second-level cache. In bytes.
const FAR: usize = 256 << 10;

/// The blocks that a tile prefetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Distance of a prefetch in blocks; past the panel's end it continues at the beginning of the next panel.
    pub(super) blocks: usize,
    /// Distance of the next panel, in bytes.
    pub(super) next: usize,
    /// The first block at which the tile prefetches.
    pub(super) first: usize,
    /// Number of blocks between two prefetches.
    pub(super) every: usize,
}

impl Ahead {
    /// No prefetches.
    pub(super) const NONE: Ahead = Ahead { blocks: 0, next: 0, first: usize::MAX, every: 1 };

    /// Returns the prefetches of the tile that starts at `row`, one of the tiles that multiply panels of `blocks` blocks by `rows`. The
    /// next panels are `next` bytes behind. Many prefetches at once wait for the few line buffers. If all next panels fit the cache,
    /// every eight rows prefetch their share of them. Otherwise only the first eight rows prefetch, `near` blocks ahead.
    pub(super) fn of(rows: &Range<usize>, row: usize, blocks: usize, near: usize, next: usize) -> Ahead {
        let row = row - rows.start;
        let (ahead, every) = if next <= FAR { (blocks, rows.len().div_ceil(ROWS)) } else { (near.min(blocks), 1) };
        let asks = row.is_multiple_of(ROWS) && row / ROWS < every;
        Ahead { blocks: ahead, next, first: if asks { row / ROWS } else { usize::MAX }, every }
    }

    /// Returns the target of the prefetch at `block` of a panel: the distance of its panel in bytes, and its block.
    #[inline(always)]
    pub(super) fn target(self, block: usize, blocks: usize) -> (usize, usize) {
        let ahead = block + self.blocks;
        if ahead < blocks { (0, ahead) } else { (self.next, ahead - blocks) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For all tile sizes, and for short and long panels, every block is prefetched once by the tiles before its use.
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
                // The first blocks of a long panel were prefetched by the one before it.
                let expected: [usize; BLOCKS] = std::array::from_fn(|block| usize::from(next > FAR && block >= 5));
                assert_eq!(asked, [expected, expected.map(|here| 1 - here)], "{rows} rows by {tile}, next {next}");
            }
        }
    }
}
