//! Images on a canvas of tiles of one size: the aspect is kept, and the rest of the canvas is black. Several tiles are followed by the
//! whole image as one more. Each tile goes through the encoder by itself: Llama 4.

use super::config::{ProcessorFiles, within};
use super::patches::{sides, size_of_sides};
use super::tiles::with_thumbnail;
use super::{Fit, Patches, Steps};
use crate::image::Filter;
use crate::{MediaError, Modality, Shape, Size};

/// The rule of an image processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canvases {
    /// The cut of a tile into patches.
    pub patches: Patches,
    /// Side of a tile in pixels.
    pub side: u64,
    /// Most tiles, without the whole image.
    pub max_tiles: u64,
    /// Whether an image is enlarged as far as a canvas allows; otherwise at most to a tile.
    pub enlarges: bool,
    /// Tokens of a tile.
    pub tile_tokens: u64,
}

/// One side of the size that an image must fit into. The reference divides some sides in single precision.
#[derive(Clone, Copy, Debug)]
struct Bound {
    pixels: u64,
    single: bool,
}

impl Bound {
    /// Returns the image's own side, but no less than `least`, if that is not longer than the canvas; otherwise the canvas's side.
    fn new(canvas: u64, own: u64, least: Option<u64>) -> Self {
        match least.map(|least| own.max(least)).filter(|most| *most <= canvas) {
            Some(pixels) => Self { pixels, single: false },
            None => Self { pixels: canvas, single: true },
        }
    }

    /// Returns the factor that scales `side` to this length.
    fn scale(self, side: u64) -> f64 {
        match self.single {
            true => f64::from(self.pixels as f32 / side as f32),
            false => self.pixels as f64 / side as f64,
        }
    }

    /// Returns another side, multiplied by the scale of this one.
    fn scaled(self, scale: f64, side: u64) -> u64 {
        match self.single {
            true => (side as f32 * scale as f32).floor() as u64,
            false => (side as f64 * scale).floor() as u64,
        }
    }
}

impl Canvases {
    /// Returns the rule of a checkpoint's image processor. `patch` is the vision configuration's `patch_size`, `merge` the patches per side
    /// of a token.
    pub fn new(files: &ProcessorFiles, patch: u64, merge: u64) -> Result<Self, MediaError> {
        let fields = &files.image;
        let [height, side] = [("size.height", fields.size.height), ("size.width", fields.size.width)]
            .map(|(key, value)| within(key, value, 336, 1..=8192));
        let (height, side) = (height?, side?);
        let bad = |key, why: String| Err(MediaError::BadConfig { key, why });
        if height != side {
            return bad("size", format!("tiles of {height} x {side} pixels are not supported, only squares"));
        }
        let patch = within("patch_size", Some(patch), 14, 1..=side)?;
        if !(1..=16).contains(&merge) {
            return bad("pixel_shuffle_ratio", format!("one divided by {merge}; 1 to 16 are supported"));
        }
        if !side.is_multiple_of(patch * merge) {
            return bad("size", format!("{side} pixels are no multiple of {patch} x {merge}"));
        }
        let said = files.processor.patch_size.unwrap_or(patch);
        if said != patch {
            return bad("patch_size", format!("the processor says {said}, the encoder {patch}"));
        }
        let (min_pixels, max_pixels, temporal, window) = (side * side, side * side, 1, None);
        let filter = fields.filter(Filter::Bilinear);
        Ok(Self {
            patches: Patches { patch, merge, temporal, min_pixels, max_pixels, window, filter, fills: false },
            side,
            max_tiles: within("max_patches", fields.max_patches, 16, 1..=1024)?,
            enlarges: fields.resize_to_max_canvas == Some(true),
            tile_tokens: (side / (patch * merge)).pow(2),
        })
    }

    /// Returns the most tiles of an image, the whole image among them.
    pub fn tiles_max(&self) -> u64 {
        with_thumbnail(self.max_tiles)
    }

    /// Returns the fewest and the most pixels of a resized image, without the whole image behind its tiles.
    pub fn pixels(&self) -> (u64, u64) {
        (self.side.pow(2), self.max_tiles * self.side.pow(2))
    }

    /// Returns this rule with at most this many pixels, as far as one tile allows it.
    pub fn limited(&self, pixels: u64) -> Self {
        Self { max_tiles: (pixels / self.side.pow(2)).clamp(1, self.max_tiles), ..self.clone() }
    }

    /// Returns this rule with at most this many tokens, as far as one tile allows it.
    pub fn carried_in(&self, tokens: u64) -> Self {
        let fits = |tiles: &u64| with_thumbnail(*tiles) * self.tile_tokens <= tokens;
        Self { max_tiles: (1..=self.max_tiles).rev().find(fits).unwrap_or(1), ..self.clone() }
    }

    /// Returns the size of one tile.
    pub fn tile(&self) -> Size {
        Size::new(self.side as u32, self.side as u32)
    }

    /// Returns the encoder's input for one tile.
    pub fn shape(&self) -> Shape {
        let tokens = self.tile_tokens.isqrt();
        let one = self.patches.shape_of(Modality::Image, 1, tokens, tokens);
        // A class row follows the patches.
        Shape { rows: one.rows + 1, longest: one.longest + 1, ..one }
    }

    /// Returns the rows and columns of tiles that enlarge the image least, or else reduce it least; of several grids the smallest.
    fn canvas(&self, (h, w): (u64, u64)) -> (u64, u64) {
        // Single precision, as in the reference.
        let scale = |(rows, columns): (u64, u64)| {
            let along = |tiles: u64, pixels: u64| (tiles * self.side) as f32 / pixels as f32;
            along(rows, h).min(along(columns, w))
        };
        let rows = 1..=self.max_tiles;
        let all = || rows.clone().flat_map(|rows| (1..=self.max_tiles / rows).map(move |columns| (rows, columns)));
        let better = |a: f32, b: f32| match (a >= 1.0, b >= 1.0) {
            (true, true) if self.enlarges => a > b,
            (true, true) => a < b,
            (false, false) => a > b,
            (a_enlarges, _) => a_enlarges,
        };
        let (mut best, mut best_scale) = ((1, 1), scale((1, 1)));
        for grid in all() {
            let own = scale(grid);
            if better(own, best_scale) || own == best_scale && grid.0 * grid.1 < best.0 * best.1 {
                (best, best_scale) = (grid, own);
            }
        }
        best
    }

    /// Returns the size of the image on its canvas.
    fn placed(&self, (h, w): (u64, u64), canvas: (u64, u64)) -> (u64, u64) {
        let least = (!self.enlarges).then_some(self.side);
        let (high, wide) = (Bound::new(canvas.0, h, least), Bound::new(canvas.1, w, least));
        let (by_height, by_width) = (high.scale(h), wide.scale(w));
        // The reference compares a number of double and one of single precision in single precision.
        let narrower = match high.single || wide.single {
            true => (by_width as f32) < by_height as f32,
            false => by_width < by_height,
        };
        match narrower {
            true => (wide.scaled(by_width, h).min(high.pixels).max(1), wide.pixels),
            false => (high.pixels, high.scaled(by_height, w).min(wide.pixels).max(1)),
        }
    }

    /// Returns the processing of an image of this size.
    pub fn fit(&self, size: Size) -> Result<Fit, MediaError> {
        let own = sides(size)?;
        let grid = self.canvas(own);
        let (canvas, tile) = ((grid.0 * self.side, grid.1 * self.side), self.tile());
        let steps = Steps::Laid { image: size_of_sides(self.placed(own, canvas))?, tile };
        Ok(Fit::in_squares(size_of_sides(canvas)?, grid, (tile, self.shape()), self.patches.filter, steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(max_patches: u64) -> Canvases {
        let config = format!(r#"{{"max_patches": {max_patches}, "size": {{"height": 16, "width": 16}}}}"#);
        Canvases::new(&ProcessorFiles::read(Some(&config), None, None).unwrap(), 4, 2).unwrap()
    }

    #[test]
    fn images_are_laid_on_the_smallest_canvas_that_holds_them() {
        for ((height, width), (rows, columns), laid) in [
            ((16, 16), (1, 1), (16, 16)),
            ((9, 14), (1, 1), (10, 16)),
            ((32, 48), (2, 3), (32, 48)),
            ((17, 16), (2, 1), (17, 16)),
            // Too large for all canvases.
            ((100, 100), (2, 2), (32, 32)),
            ((7, 90), (1, 6), (7, 90)),
        ] {
            let fit = rule(6).fit(Size::new(height, width)).unwrap();
            let Some(Steps::Laid { image, .. }) = fit.steps else { panic!("{fit:?}") };
            let found = (fit.canvas.height / 16, fit.canvas.width / 16);
            assert_eq!((found, image), ((rows, columns), Size::new(laid.0, laid.1)), "{height} x {width}");
            assert_eq!(fit.shape.tokens, with_thumbnail(u64::from(rows * columns)) * 4);
        }
    }

    #[test]
    fn limits_leave_whole_tiles() {
        let all = rule(16);
        assert_eq!((all.tiles_max(), all.tile_tokens, all.pixels()), (17, 4, (256, 4096)));
        assert_eq!([0, 255, 512, 5000].map(|pixels| all.limited(pixels).tiles_max()), [1, 1, 3, 17]);
        assert_eq!([0, 4, 8, 12, 67, 68].map(|tokens| all.carried_in(tokens).tiles_max()), [1, 1, 1, 3, 16, 17]);
    }
}
