//! The families' rules that fit images and videos to their encoders. Planning, measuring and preparing call this module
//! and do not depend on the family.

use super::tiles::with_thumbnail;
use super::{Canvases, Cut, Longest, PatchVideo, Patches, Pieces, Sampling, Squares, Steps, TileVideo, Tiles};
use crate::image::{Filter, resize_bytes};
use crate::{MediaError, Shape, Size};

/// Bytes of a pixel.
const RGB: u64 = 3;

/// An image processor's rule.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageRule {
    /// Resized, keeping their aspect.
    Patches(Patches),
    /// Cut into tiles of one size, a thumbnail of the whole beside them.
    Tiles(Tiles),
    /// Resized, or cut into tiles that are encoded one by one.
    Pieces(Pieces),
    /// Resized, keeping their aspect, with a bound on the longer side.
    Longest(Longest),
    /// Laid on a canvas of tiles that are encoded one by one, a tile of the whole behind them.
    Canvases(Canvases),
    /// Cut into squares of one size that are encoded one by one, a square of the whole behind them.
    Squares(Squares),
}

/// A video processor's rule.
#[derive(Clone, Debug, PartialEq)]
pub enum VideoRule {
    /// Frames are resized, keeping their aspect, and go through the encoder in groups.
    Patches(PatchVideo),
    /// Every frame is a tile.
    Tiles(TileVideo),
}

/// The processing of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// The size that it is resized to, before any cut into tiles.
    pub canvas: Size,
    /// The size of the encoder's input images, all of them equal.
    pub size: Size,
    /// Number of input images.
    pub images: u64,
    /// Number of groups of images that go through the encoder as one.
    pub groups: u64,
    /// The encoder's input.
    pub shape: Shape,
    /// The filter of the resize.
    pub filter: Filter,
    /// The tiles, and the whole image behind them, if they are encoded one by one.
    pub cut: Option<Cut>,
    /// The sizes in between, if the image is resized several times.
    pub steps: Option<Steps>,
}

impl Fit {
    /// Returns the processing of `images` images in `groups` groups that are resized and encoded whole.
    pub(super) fn whole(size: Size, (images, groups): (u64, u64), shape: Shape, filter: Filter) -> Self {
        Self { canvas: size, size, images, groups, shape, filter, cut: None, steps: None }
    }

    /// Returns the processing of an image in steps. Squares in a grid of rows and columns on a canvas are encoded with shape `one` and size
    /// `seen`. Several squares are followed by the whole image as one more.
    pub(super) fn in_squares(
        canvas: Size,
        (rows, columns): (u64, u64),
        (seen, one): (Size, Shape),
        filter: Filter,
        steps: Steps,
    ) -> Self {
        let count = rows * columns;
        let squares = with_thumbnail(count);
        let shape = Shape { rows: squares * one.rows, sequences: squares, tokens: squares * one.tokens, ..one };
        let cut = (count > 1).then_some(Cut { columns, rows, whole: Some(seen) });
        Self { canvas, cut, steps: Some(steps), ..Self::whole(seen, (count, count), shape, filter) }
    }

    /// Returns the most bytes in memory while an image of this size is resized, without the encoder's input images.
    pub fn held_bytes(&self, image: Size) -> u64 {
        let resize = |from: Size, to: Size| from.pixels() * RGB + resize_bytes(from, to, self.filter);
        let canvas = |to: Size| if to == self.size { 0 } else { to.pixels() * RGB };
        if let Some(steps) = self.steps {
            let made = |(from, to): (Size, Size)| resize(from, to) + to.pixels() * RGB;
            return match steps {
                // The last step makes the whole image behind the squares.
                Steps::Twice { first, square } => [(image, first), (first, self.canvas), (self.canvas, square)]
                    .map(made)
                    .into_iter()
                    .max()
                    .unwrap_or(0),
                // The canvas is filled while the image and its resized form are in memory.
                Steps::Laid { image: laid, tile } => {
                    (made((image, laid)) + self.canvas.pixels() * RGB).max(made((image, tile)))
                }
            };
        }
        let behind = self.cut.and_then(|cut| cut.whole).map_or(0, |whole| resize(image, whole));
        (resize(image, self.canvas) + canvas(self.canvas)).max(behind)
    }
}

impl ImageRule {
    /// Returns the cut of an input image into patches.
    pub fn patches(&self) -> &Patches {
        match self {
            Self::Patches(rule) => rule,
            Self::Tiles(rule) => &rule.patches,
            Self::Pieces(rule) => &rule.patches,
            Self::Longest(rule) => &rule.patches,
            Self::Canvases(rule) => &rule.patches,
            Self::Squares(rule) => &rule.patches,
        }
    }

    /// Returns the only size of input images, if there is only one.
    pub fn tile(&self) -> Option<Size> {
        match self {
            Self::Patches(_) | Self::Pieces(_) | Self::Longest(_) => None,
            Self::Tiles(rule) => Some(rule.tile),
            Self::Canvases(rule) => Some(rule.tile()),
            Self::Squares(rule) => Some(rule.seen()),
        }
    }

    /// Returns the fewest and the most pixels of a resized image, without a thumbnail's.
    pub fn pixels(&self) -> (u64, u64) {
        match self {
            Self::Patches(rule) => (rule.min_pixels, rule.max_pixels),
            Self::Tiles(rule) => (rule.min_tiles * rule.tile.pixels(), rule.max_tiles * rule.tile.pixels()),
            Self::Pieces(rule) => rule.pixels(),
            Self::Longest(rule) => rule.pixels(),
            Self::Canvases(rule) => rule.pixels(),
            Self::Squares(rule) => rule.pixels(),
        }
    }

    /// Returns this rule with at most this many pixels, as far as the rule's minimum allows it.
    pub fn limited(&self, pixels: u64) -> Result<Self, MediaError> {
        match self {
            Self::Patches(rule) => {
                rule.with_max_pixels(pixels.clamp(rule.min_pixels, rule.max_pixels)).map(Self::Patches)
            }
            Self::Tiles(rule) => {
                let tiles = (pixels / rule.tile.pixels()).clamp(rule.min_tiles, rule.max_tiles);
                rule.with_max_tiles(tiles).map(Self::Tiles)
            }
            Self::Pieces(rule) => Ok(Self::Pieces(rule.limited(pixels))),
            Self::Longest(rule) => Ok(Self::Longest(rule.limited(pixels))),
            Self::Canvases(rule) => Ok(Self::Canvases(rule.limited(pixels))),
            Self::Squares(rule) => Ok(Self::Squares(rule.limited(pixels))),
        }
    }

    /// Returns the processing of an image of this size.
    pub fn fit(&self, size: Size) -> Result<Fit, MediaError> {
        match self {
            Self::Patches(rule) => {
                let resized = rule.resize(size)?;
                let (shape, filter) = (rule.shape(size)?, rule.filter);
                Ok(Fit::whole(resized, (1, 1), shape, filter))
            }
            Self::Tiles(rule) => {
                let ((columns, rows), shape) = (rule.grid(size)?, rule.shape(size)?);
                let Size { height, width } = rule.tile;
                let canvas = Size { height: height * rows as u32, width: width * columns as u32 };
                let (tiles, filter) = (shape.sequences, rule.patches.filter);
                Ok(Fit { canvas, ..Fit::whole(rule.tile, (tiles, tiles), shape, filter) })
            }
            Self::Pieces(rule) => {
                let (cut, shape, filter) = (rule.cut(size)?, rule.shape(size)?, rule.patches.filter);
                let (Some(tiles), Some(cut)) = (&rule.tiles, cut) else {
                    let whole = rule.whole(size)?;
                    return Ok(Fit::whole(whole, (1, 1), shape, filter));
                };
                let Size { height, width } = tiles.tile;
                let canvas = Size { height: height * cut.rows as u32, width: width * cut.columns as u32 };
                let count = cut.columns * cut.rows;
                Ok(Fit { canvas, cut: Some(cut), ..Fit::whole(tiles.tile, (count, count), shape, filter) })
            }
            Self::Longest(rule) => rule.fit(size),
            Self::Canvases(rule) => rule.fit(size),
            Self::Squares(rule) => rule.fit(size),
        }
    }

    /// Returns the most pieces of an image that are encoded one by one.
    pub fn pieces_max(&self) -> u64 {
        match self {
            Self::Patches(_) | Self::Tiles(_) | Self::Longest(_) => 1,
            Self::Pieces(rule) => rule.pieces_max(),
            Self::Canvases(rule) => rule.tiles_max(),
            Self::Squares(rule) => rule.squares_max(),
        }
    }

    /// Returns the encoder's input for one of the pieces that are encoded one by one.
    pub fn piece(&self, size: Size) -> Shape {
        match self {
            Self::Canvases(rule) => rule.shape(),
            _ => self.patches().piece(size),
        }
    }
}

impl VideoRule {
    /// Returns the cut of an input frame into patches.
    pub fn patches(&self) -> &Patches {
        match self {
            Self::Patches(rule) => &rule.patches,
            Self::Tiles(rule) => &rule.frame.patches,
        }
    }

    /// Returns the only size of input frames, if there is only one.
    pub fn tile(&self) -> Option<Size> {
        match self {
            Self::Patches(_) => None,
            Self::Tiles(rule) => Some(rule.frame.tile),
        }
    }

    /// Returns the tokens of the largest group of frames.
    pub fn frame_tokens(&self) -> u64 {
        match self {
            Self::Patches(rule) => rule.patches.frontier().iter().map(|(a, b)| a * b).max().unwrap_or(0),
            Self::Tiles(rule) => rule.frame.tile_tokens,
        }
    }

    /// Returns the sampling of frames.
    pub fn sampling(&self) -> &Sampling {
        match self {
            Self::Patches(rule) => &rule.sampling,
            Self::Tiles(rule) => &rule.sampling,
        }
    }

    /// Returns the processing of `frames` frames of this size.
    pub fn fit(&self, frames: u64, size: Size) -> Result<Fit, MediaError> {
        match self {
            Self::Patches(rule) => {
                let resized = rule.resize(frames, size)?;
                let (groups, shape) = (frames.div_ceil(rule.patches.temporal), rule.shape(frames, size)?);
                let filter = rule.patches.filter;
                Ok(Fit::whole(resized, (frames, groups), shape, filter))
            }
            Self::Tiles(rule) => {
                let (tile, shape) = (rule.frame.tile, rule.shape(frames)?);
                let filter = rule.frame.patches.filter;
                Ok(Fit::whole(tile, (frames, frames), shape, filter))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::ProcessorFiles;

    fn tiles() -> (ImageRule, VideoRule) {
        let config = r#"{"max_patches": 6, "size": {"height": 8, "width": 8}}"#;
        let files = ProcessorFiles::read(Some(config), None, Some(r#"{"image_seq_length": 4}"#)).unwrap();
        let image = Tiles::new(&files, 2, 2).unwrap();
        (ImageRule::Tiles(image), VideoRule::Tiles(TileVideo::new(&files, (2, 2), 3).unwrap()))
    }

    #[test]
    fn a_image_of_tiles_is_a_canvas_and_its_thumbnail() {
        let (image, _) = tiles();
        let fit = image.fit(Size::new(16, 24)).unwrap();
        assert_eq!((fit.canvas, fit.size), (Size::new(16, 24), Size::new(8, 8)));
        assert_eq!((fit.images, fit.groups, fit.shape.tokens), (7, 7, 28));
        assert_eq!((image.pixels(), image.tile()), ((64, 6 * 64), Some(Size::new(8, 8))));
        for (pixels, tiles) in [(0, 1), (63, 1), (128, 3), (400, 7), (u64::MAX, 7)] {
            let fit = image.limited(pixels).unwrap().fit(Size::new(16, 24)).unwrap();
            assert!(fit.images <= tiles, "{pixels} pixels: {fit:?}");
        }
    }

    #[test]
    fn a_frame_is_a_tile() {
        let (_, video) = tiles();
        let fit = video.fit(3, Size::new(50, 7)).unwrap();
        assert_eq!((fit.canvas, fit.images, fit.groups, fit.shape.tokens), (Size::new(8, 8), 3, 3, 12));
        let words = video.fit(4, Size::new(50, 7)).unwrap_err().to_string();
        assert_eq!(words, "a video has 4 frames; the limit is 3 (--max-video-frames)");
    }

    #[test]
    fn the_most_tiles_of_so_many_tokens() {
        let (ImageRule::Tiles(rule), _) = tiles() else { panic!("tiles") };
        let most: Vec<_> = [3, 4, 8, 12, 13, 28].map(|tokens| rule.of_tokens(tokens)).to_vec();
        assert_eq!(most, [None, Some(1), Some(1), Some(2), Some(2), Some(6)]);
        for tiles in 1..=6 {
            let tokens = rule.with_max_tiles(tiles).unwrap().worst().tokens;
            assert_eq!(rule.of_tokens(tokens), Some(tiles));
        }
    }
}
