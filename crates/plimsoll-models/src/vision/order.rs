//! The order of an image's patches in a vision encoder, computed by arithmetic instead of a list.
//!
//! Patches come frame by frame and, within a frame, token by token. A token is a square block of patches. Blocks come from left to right
//! and from top to bottom, and so do the patches within a block. An encoder that attends in windows takes the tokens window by window.

use crate::Grid;

impl Grid {
    /// Returns the grid of an audio clip with `frames` frames of its spectrogram.
    pub fn audio(frames: usize) -> Self {
        Self { frames: 1, height: 1, width: frames }
    }

    /// Patches of all frames.
    pub fn patches(&self) -> usize {
        self.frames * self.height * self.width
    }
}

/// The order of an encoder's rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    /// Patches per side of a token.
    pub merge: usize,
    /// Tokens per side of a window. None: the frames are not divided.
    pub window: Option<usize>,
}

/// One frame, in tokens.
#[derive(Clone, Copy, Debug)]
struct Frame {
    /// Tokens before the frame.
    first: usize,
    height: usize,
    width: usize,
}

/// Neighbouring tokens of a frame that are also neighbours in the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first token's index in the prompt's order.
    pub from: usize,
    /// The first token's index in the encoder's order.
    pub to: usize,
    /// The number of tokens.
    pub tokens: usize,
}

impl Order {
    /// Patches of a token.
    pub fn block(&self) -> usize {
        self.merge * self.merge
    }

    fn frames(self, grids: &[Grid]) -> impl Iterator<Item = Frame> + '_ {
        let mut first = 0;
        let frames = grids.iter().flat_map(|grid| std::iter::repeat_n(*grid, grid.frames));
        frames.map(move |grid| {
            let frame = Frame { first, height: grid.height / self.merge, width: grid.width / self.merge };
            first += frame.height * frame.width;
            frame
        })
    }

    /// First row and row count of every frame.
    pub fn whole_frames(self, grids: &[Grid]) -> impl Iterator<Item = (usize, usize)> + '_ {
        let block = self.block();
        self.frames(grids).map(move |frame| (frame.first * block, frame.height * frame.width * block))
    }

    /// First row and row count of every window.
    pub fn windows(self, grids: &[Grid]) -> impl Iterator<Item = (usize, usize)> + '_ {
        let block = self.block();
        let windows = self.frames(grids).flat_map(move |frame| frame.windows(self.window));
        windows.map(move |window| (window.to * block, window.rows * window.columns * block))
    }

    /// Returns the tokens in the encoder's order, in the longest possible runs.
    pub fn runs(self, grids: &[Grid]) -> impl Iterator<Item = Run> + '_ {
        self.frames(grids).flat_map(move |frame| {
            frame.windows(self.window).flat_map(move |window| {
                // The rows of a window as wide as the frame are consecutive.
                let (rows, tokens) = match window.columns == frame.width {
                    true => (1, window.rows * window.columns),
                    false => (window.rows, window.columns),
                };
                (0..rows).map(move |row| Run {
                    from: window.from + row * frame.width,
                    to: window.to + row * tokens,
                    tokens,
                })
            })
        })
    }

    /// The grid, row and column of the patch in the encoder's row `row`.
    pub fn patch(&self, grids: &[Grid], row: usize) -> (Grid, usize, usize) {
        let mut row = row;
        let grid = grids.iter().find(|grid| match row.checked_sub(grid.patches()) {
            Some(rest) => {
                row = rest;
                false
            }
            None => true,
        });
        let grid = *grid.expect("a row of one of the grids");
        let within = row % (grid.height * grid.width);
        let (token, inside) = (within / self.block(), within % self.block());
        let (height, width) = (grid.height / self.merge, grid.width / self.merge);
        let (y, x) = match self.window {
            None => (token / width, token % width),
            Some(side) => {
                let top = token / (side * width) * side;
                let rest = token - top * width;
                let rows = side.min(height - top);
                let left = rest / (rows * side) * side;
                let rest = rest - left * rows;
                let columns = side.min(width - left);
                (top + rest / columns, left + rest % columns)
            }
        };
        (grid, y * self.merge + inside / self.merge, x * self.merge + inside % self.merge)
    }
}

impl Order {
    /// Returns the index in the encoder of the `token`-th token of a prompt: the reverse of [`Self::runs`].
    pub fn place(&self, grids: &[Grid], token: usize) -> usize {
        let Some(side) = self.window else { return token };
        let own = self.frames(grids).take_while(|frame| frame.first <= token).last();
        let Frame { first, height, width } = own.expect("a token of one of the grids");
        let (y, x) = ((token - first) / width, (token - first) % width);
        let (top, left) = (y / side * side, x / side * side);
        let (rows, columns) = (side.min(height - top), side.min(width - left));
        first + top * width + left * rows + (y - top) * columns + x - left
    }
}

/// One window of a frame.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// The window's first token in the frame's order, and in the order of windows.
    from: usize,
    to: usize,
    rows: usize,
    columns: usize,
}

impl Frame {
    fn windows(self, side: Option<usize>) -> impl Iterator<Item = Window> {
        let (high, wide) = side.map_or((self.height, self.width), |side| (side, side));
        let mut to = self.first;
        let corners = (0..self.height)
            .step_by(high.max(1))
            .flat_map(move |top| (0..self.width).step_by(wide.max(1)).map(move |left| (top, left)));
        corners.map(move |(top, left)| {
            let (rows, columns) = (high.min(self.height - top), wide.min(self.width - left));
            let window = Window { from: self.first + top * self.width + left, to, rows, columns };
            to += rows * columns;
            window
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRIDS: [Grid; 2] = [Grid { frames: 2, height: 6, width: 10 }, Grid { frames: 1, height: 4, width: 2 }];

    #[test]
    fn windows_runs_and_patches_agree() {
        for window in [None, Some(1), Some(2), Some(4), Some(9)] {
            let order = Order { merge: 2, window };
            let tokens: usize = GRIDS.iter().map(|grid| grid.patches() / 4).sum();
            let mut from = vec![usize::MAX; tokens];
            for run in order.runs(&GRIDS) {
                (0..run.tokens).for_each(|i| from[run.to + i] = run.from + i);
            }
            for (to, from) in from.iter().enumerate() {
                assert_eq!(order.place(&GRIDS, *from), to);
                // The same patch by its row and column, found through the order without windows.
                let plain = Order { window: None, ..order };
                for inside in 0..4 {
                    assert_eq!(order.patch(&GRIDS, to * 4 + inside), plain.patch(&GRIDS, from * 4 + inside));
                }
            }
            let mut sorted = from.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..tokens), "every token once");
            for sequences in [order.windows(&GRIDS).collect::<Vec<_>>(), order.whole_frames(&GRIDS).collect()] {
                let ends = sequences.iter().scan(0, |end, (first, rows)| {
                    assert_eq!(first, end);
                    *end += rows;
                    Some(*end)
                });
                assert_eq!(ends.last(), Some(4 * tokens));
            }
            for (first, rows) in order.windows(&GRIDS) {
                let (_, top, left) = order.patch(&GRIDS, first);
                for row in first..first + rows {
                    let (_, y, x) = order.patch(&GRIDS, row);
                    let side = 2 * window.unwrap_or(5);
                    assert!((top..top + side).contains(&y) && (left..left + side).contains(&x));
                }
            }
        }
    }

    #[test]
    fn frames_without_windows_are_one_run_each() {
        let runs: Vec<Run> = Order { merge: 2, window: None }.runs(&GRIDS).collect();
        assert_eq!(
            runs.iter().map(|run| (run.from, run.to, run.tokens)).collect::<Vec<_>>(),
            [(0, 0, 15), (15, 15, 15), (30, 30, 2)]
        );
    }
}
