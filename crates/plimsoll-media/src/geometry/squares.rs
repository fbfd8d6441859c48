//! Images that are cut into squares of one size, with the whole image as one more square behind them. Each square goes through the
//! encoder by itself: Idefics3 and SmolVLM.

use super::config::{ProcessorFiles, within};
use super::patches::{sides, size_of_sides};
use super::tiles::with_thumbnail;
use super::{Fit, Patches};
use crate::image::Filter;
use crate::{MediaError, Modality, Shape, Size};

/// The longest side that an image may be resized to.
const LONGEST: u64 = 4096;

/// The rule of an image processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Squares {
    /// The cut of a square into patches. The encoder does not read pixels at the edges that do not fill a patch.
    pub patches: Patches,
    /// Side of a square in pixels.
    pub side: u64,
    /// Pixels of an image's longer side after the first resize.
    pub longest: u64,
    /// Whether images are cut. Otherwise each becomes one square.
    pub splits: bool,
    /// Tokens of a square.
    pub square_tokens: u64,
}

/// The sizes of an image on its way to squares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// Resized to `first`, then to [`Fit::canvas`], and from there to the whole image: Idefics3.
    Twice {
        /// The first size, of the image's aspect.
        first: Size,
        /// The size of a square, with the pixels that the encoder does not read.
        square: Size,
    },
    /// Resized to `image`, in the upper left corner of the black [`Fit::canvas`]. The whole image is resized from the original: Llama 4.
    Laid {
        /// The size on the canvas.
        image: Size,
        /// The size of a tile.
        tile: Size,
    },
}

impl Squares {
    /// Returns the rule of a checkpoint's image processor. `patch` is the vision configuration's `patch_size`, `merge` the patches per side
    /// of a token.
    pub fn new(files: &ProcessorFiles, patch: u64, merge: u64) -> Result<Self, MediaError> {
        let fields = &files.image;
        let side = within("max_image_size.longest_edge", fields.max_image_size.longest_edge, 364, 1..=LONGEST)?;
        let longest = within("size.longest_edge", fields.size.longest_edge, 4 * 364, 1..=LONGEST)?;
        let patch = within("patch_size", Some(patch), 14, 1..=side)?;
        let merge = within("scale_factor", Some(merge), 2, 1..=16)?;
        let rows = side / patch;
        let seen = rows * patch;
        if !rows.is_multiple_of(merge) {
            let why = format!("{rows} patches are no multiple of {merge}");
            return Err(MediaError::BadConfig { key: "max_image_size.longest_edge", why });
        }
        let square_tokens = (rows / merge).pow(2);
        let said = within("image_seq_len", files.processor.image_seq_len, square_tokens, 1..=1 << 20)?;
        if said != square_tokens {
            let why = format!("{said}; a square of {side} pixels has {square_tokens} tokens");
            return Err(MediaError::BadConfig { key: "image_seq_len", why });
        }
        let (min_pixels, max_pixels, temporal, window) = (seen * seen, seen * seen, 1, None);
        let filter = fields.filter(Filter::Lanczos);
        let patches = Patches { patch, merge, temporal, min_pixels, max_pixels, window, filter, fills: false };
        Ok(Self { patches, side, longest, splits: fields.do_image_splitting != Some(false), square_tokens })
    }

    /// Returns the part of a square that the encoder reads.
    pub fn seen(&self) -> Size {
        let side = (self.side / self.patches.patch * self.patches.patch) as u32;
        Size::new(side, side)
    }

    /// Returns the most squares on a side of an image.
    fn most(&self) -> u64 {
        // The shorter side is rounded up to even, so that of a square image it may be one pixel longer.
        if self.splits { (self.longest + self.longest % 2).div_ceil(self.side) } else { 1 }
    }

    /// Returns the most squares of an image, the whole image among them.
    pub fn squares_max(&self) -> u64 {
        with_thumbnail(self.most().pow(2))
    }

    /// Returns the fewest and the most pixels of a resized image, without the whole image behind its squares.
    pub fn pixels(&self) -> (u64, u64) {
        (self.side.pow(2), (self.most() * self.side).pow(2))
    }

    /// Returns this rule with at most this many pixels, as far as one square allows it.
    pub fn limited(&self, pixels: u64) -> Self {
        self.with_most(pixels.isqrt() / self.side)
    }

    /// Returns this rule with at most this many tokens, as far as one square allows it.
    pub fn carried_in(&self, tokens: u64) -> Self {
        let squares = tokens / self.square_tokens;
        self.with_most((1..=self.most()).rev().find(|most| with_thumbnail(most.pow(2)) <= squares).unwrap_or(1))
    }

    fn with_most(&self, most: u64) -> Self {
        let even = |longest: u64| if longest > 1 { longest - longest % 2 } else { longest };
        let longest = if self.splits { self.longest.min(even(most.max(1) * self.side)) } else { self.longest };
        Self { longest, ..self.clone() }
    }

    /// Returns the processing of an image of this size.
    pub fn fit(&self, size: Size) -> Result<Fit, MediaError> {
        let (h, w) = sides(size)?;
        let first = rescaled((h, w), self.longest);
        let canvas = if self.splits { whole_squares(first, self.side) } else { (self.side, self.side) };
        let grid = (canvas.0 / self.side, canvas.1 / self.side);
        let square = Size::new(self.side as u32, self.side as u32);
        let steps = Steps::Twice { first: size_of_sides(first)?, square };
        Ok(Fit::in_squares(size_of_sides(canvas)?, grid, (self.seen(), self.shape()), self.patches.filter, steps))
    }

    /// Returns the encoder's input for one square.
    pub fn shape(&self) -> Shape {
        let side = self.square_tokens.isqrt();
        self.patches.shape_of(Modality::Image, 1, side, side)
    }
}

/// Resizes so that the longer side becomes `longest`; the other keeps the aspect and is even. The steps and their rounding are
/// the reference's.
fn rescaled((h, w): (u64, u64), longest: u64) -> (u64, u64) {
    let aspect = w as f64 / h as f64;
    let even = |side: f64| (side as u64 + side as u64 % 2).max(1);
    match w >= h {
        true => (even(longest as f64 / aspect), longest),
        false => (longest, even(longest as f64 * aspect)),
    }
}

/// Rounds both sides up to whole squares, the longer one first.
fn whole_squares((h, w): (u64, u64), side: u64) -> (u64, u64) {
    let aspect = w as f64 / h as f64;
    // A quotient may be rounded down to zero.
    let up = |pixels: u64| pixels.max(1).div_ceil(side) * side;
    match w >= h {
        true => (up((up(w) as f64 / aspect) as u64), up(w)),
        false => (up(h), up((up(h) as f64 * aspect) as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(config: &str) -> Squares {
        Squares::new(&ProcessorFiles::read(Some(config), None, None).unwrap(), 4, 2).unwrap()
    }

    /// Returns squares of 16 pixels that the encoder reads completely: four tokens.
    fn sixteen() -> Squares {
        rule(r#"{"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}"#)
    }

    #[test]
    fn limits_leave_whole_squares() {
        let all = sixteen();
        assert_eq!((all.squares_max(), all.square_tokens, all.pixels()), (17, 4, (256, 4096)));
        let squares = [0, 255, 256, 1023, 1024, 4096, u64::MAX].map(|pixels| all.limited(pixels).squares_max());
        assert_eq!(squares, [1, 1, 1, 1, 5, 17, 17]);
        let squares = [0, 4, 16, 20, 67, 68, u64::MAX].map(|tokens| all.carried_in(tokens).squares_max());
        assert_eq!(squares, [1, 1, 1, 5, 10, 17, 17]);
    }

    #[test]
    fn no_image_has_more_squares_than_the_most() {
        let all = sixteen();
        for height in [1, 2, 15, 16, 17, 63, 64, 65, 1000] {
            for width in [1, 2, 15, 16, 17, 63, 64, 65, 1000] {
                let fit = all.fit(Size { height, width }).unwrap();
                assert!(fit.shape.sequences <= all.squares_max(), "{height} × {width}: {fit:?}");
                assert_eq!(fit.cut.map_or(1, |cut| cut.pieces()), fit.shape.sequences);
            }
        }
        // Odd sides, with the shorter one rounded up by one pixel, and a quotient that is rounded down to zero.
        let odd = |longest: u64, side: u64| {
            let config =
                format!(r#"{{"size": {{"longest_edge": {longest}}}, "max_image_size": {{"longest_edge": {side}}}}}"#);
            Squares::new(&ProcessorFiles::read(Some(&config), None, None).unwrap(), 1, 1).unwrap()
        };
        let fit = odd(81, 27).fit(Size::new(500, 500)).unwrap();
        assert_eq!((fit.shape.sequences, odd(81, 27).squares_max()), (17, 17), "{fit:?}");
        assert_eq!(odd(81, 27).limited(81 * 81).squares_max(), 10);
        assert_eq!(odd(49, 49).fit(Size::new(4900, 1)).unwrap().canvas, Size::new(49, 49));
        let whole = rule(r#"{"do_image_splitting": false, "max_image_size": {"longest_edge": 16}}"#);
        let fit = whole.fit(Size::new(100, 3)).unwrap();
        assert_eq!((fit.canvas, fit.cut, fit.shape.tokens), (Size::new(16, 16), None, 4));
        assert_eq!((whole.squares_max(), whole.pixels()), (1, (256, 256)));
    }

    #[test]
    fn pixels_that_fill_no_patch_are_left_out() {
        let rule = rule(r#"{"size": {"longest_edge": 36}, "max_image_size": {"longest_edge": 18}}"#);
        let fit = rule.fit(Size::new(36, 36)).unwrap();
        assert_eq!((fit.canvas, fit.size, fit.shape.tokens), (Size::new(36, 36), Size::new(16, 16), 5 * 4));
        let files = ProcessorFiles::read(Some(r#"{"max_image_size": {"longest_edge": 20}}"#), None, None).unwrap();
        let refused = Squares::new(&files, 4, 2).unwrap_err().to_string();
        assert!(refused.contains("5 patches are no multiple of 2"), "{refused}");
    }
}
