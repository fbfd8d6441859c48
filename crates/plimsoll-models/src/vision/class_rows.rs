//! Squares of one size, each with a class row after its patches: the embeddings of InternVL and Llama 4.

use plimsoll_device::{Buf, Device, DeviceError, LinearId, Mode};

use super::order::Order;
use crate::encoder_parts::values_of;
use crate::{EncoderInput, Grid};

/// Weights of the embeddings.
pub(super) struct ClassRows {
    pub patch: LinearId,
    pub class: LinearId,
    /// The positions of a square's patches, from left to right and from top to bottom, and the position of the class row.
    pub positions: LinearId,
    /// Whether the class row's position is the first. Otherwise it is the last.
    pub class_first: bool,
    /// Numbers of a patch.
    pub width: usize,
    /// Patches per side of a square.
    pub side: usize,
    pub order: Order,
}

impl ClassRows {
    /// Patches of a square.
    pub fn patches(&self) -> usize {
        self.side * self.side
    }

    /// Rows of a square.
    pub fn rows(&self) -> usize {
        self.patches() + 1
    }

    /// Tokens of a square.
    pub fn tokens(&self) -> usize {
        self.patches() / self.order.block()
    }

    /// The number of squares of these images.
    pub fn squares(&self, images: &EncoderInput<'_>) -> usize {
        let whole = |grid: &Grid| (grid.height, grid.width) == (self.side, self.side);
        assert!(images.grids.iter().all(whole), "squares of {0} × {0} patches", self.side);
        images.grids.iter().map(|grid| grid.frames).sum()
    }

    /// First row and row count of each of `squares` squares.
    pub fn sequences(&self, squares: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let rows = self.rows();
        (0..squares).map(move |square| (square * rows, rows))
    }

    /// Row and column of a patch in its square; none for a class row. The rows of all squares are consecutive.
    pub fn place(&self, row: usize) -> Option<(usize, usize)> {
        let square = [Grid { frames: 1, height: self.side, width: self.side }];
        let row = row % self.rows();
        (row < self.patches()).then(|| {
            let (_, y, x) = self.order.patch(&square, row);
            (y, x)
        })
    }

    /// Writes the embeddings of all squares' patches and class rows to `x`.
    pub fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        let (patches, rows, width) = (self.patches(), self.rows(), self.width);
        let scope = device.mark();
        let input = device.temp(patches, width)?;
        for square in 0..x.rows / rows {
            let values = values_of(images.patches, square * patches, patches, width);
            device.place(input, 0, values, width, 0, Mode::Store);
            let first = square * rows;
            device.linear(input, &[(self.patch, x.span(first, patches))], Mode::Store)?;
            device.embed(x.span(first + patches, 1), self.class, &[0], 1.0);
        }
        device.release(scope);
        let before = usize::from(self.class_first);
        let position = |row: usize| match self.place(row) {
            Some((y, x)) => before + y * self.side + x,
            None if self.class_first => 0,
            None => patches,
        };
        device.add_blended(x, self.positions, &|row| {
            let nothing = (0, 0.0);
            [(position(row) as u32, 1.0), nothing, nothing, nothing]
        });
        Ok(())
    }
}
