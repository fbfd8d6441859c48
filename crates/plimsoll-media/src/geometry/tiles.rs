//! Images cut into tiles of one size, with a thumbnail of the whole, and videos with one tile per frame: InternVL. Images that are one
//! tile: Gemma 3.

use super::config::{Fields, ProcessorFiles, within};
use super::{Patches, Sampling};
use crate::image::Filter;
use crate::{MediaError, Modality, Shape, Size};

/// The tiling rule of an image processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Size of a tile in pixels.
    pub tile: Size,
    /// Fewest tiles, without the thumbnail.
    pub min_tiles: u64,
    /// Most tiles, without the thumbnail.
    pub max_tiles: u64,
    /// Tokens per tile.
    pub tile_tokens: u64,
    /// Rows of the encoder per tile beside its patches: 1 with a class row, else 0.
    pub class_rows: u64,
    /// The cut of a tile into patches.
    pub patches: Patches,
}

/// The rule of the family's video processor: every frame becomes one tile.
#[derive(Clone, Debug, PartialEq)]
pub struct TileVideo {
    /// The rule of a frame.
    pub frame: Tiles,
    /// The sampling of frames.
    pub sampling: Sampling,
}

impl Tiles {
    /// Returns the rule of a checkpoint's image processor. `patch` is the vision configuration's `patch_size`, `merge` the patches per side
    /// of a token.
    pub fn new(files: &ProcessorFiles, patch: u64, merge: u64) -> Result<Self, MediaError> {
        // InternVL's processor always crops, whatever the image processor's file has, as in transformers.
        Self::cut(&files.image, true, tile_tokens(files)?, (patch, merge))
    }

    /// Returns the rule of Gemma 3: an image is one tile for every aspect. `tokens` are those of a tile, if the files do not name them.
    pub fn one(files: &ProcessorFiles, patch: u64, merge: u64, tokens: u64) -> Result<Self, MediaError> {
        let said = files.processor.image_seq_length.or(files.image.image_seq_length);
        let tokens = within("image_seq_length", said, tokens, 1..=1 << 20)?;
        let mut rule = Self::cut(&files.image, false, tokens, (patch, merge))?;
        rule.patches.filter = files.image.filter(Filter::Bilinear);
        Ok(Self { class_rows: 0, ..rule })
    }

    fn cut(fields: &Fields, crops: bool, tile_tokens: u64, (patch, merge): (u64, u64)) -> Result<Self, MediaError> {
        let side = |key, value| within(key, value, 384, 1..=8192);
        let (height, width) = (side("size.height", fields.size.height)?, side("size.width", fields.size.width)?);
        let patch = within("patch_size", Some(patch), 14, 1..=height.min(width))?;
        let max_tiles = within("max_patches", fields.max_patches, 12, 1..=1024)?;
        let min_tiles = within("min_patches", fields.min_patches, 1, 1..=max_tiles)?;
        let (min_tiles, max_tiles) = if crops { (min_tiles, max_tiles) } else { (1, 1) };
        let tile = Size { height: height as u32, width: width as u32 };
        let pixels = tile.pixels();
        let (filter, window) = (fields.filter(Filter::Bicubic), None);
        let (min_pixels, max_pixels, temporal) = (pixels, pixels, 1);
        let patches = Patches { patch, merge, temporal, min_pixels, max_pixels, window, filter, fills: false };
        Ok(Self { tile, min_tiles, max_tiles, tile_tokens, class_rows: 1, patches })
    }

    /// Returns the most tiles, without the thumbnail, that have at most `tokens` tokens with it, if any do.
    pub fn of_tokens(&self, tokens: u64) -> Option<u64> {
        let all = tokens / self.tile_tokens;
        // Two tiles come with a third.
        (all > 0).then(|| (all - 1).max(1))
    }

    /// Returns this rule with a request's own bound on tiles. It may be lower than the tested bound, never higher (A31).
    pub fn with_max_tiles(&self, asked: u64) -> Result<Self, MediaError> {
        if asked > self.max_tiles {
            let (limit, unit, flag) = (self.max_tiles, "tiles", Modality::Image.flag());
            return Err(MediaError::OverLimit { what: "image_max_patch_num", asked, limit, unit, flag });
        }
        if asked < self.min_tiles {
            let why = format!("{asked} is less than the fewest tiles, {}", self.min_tiles);
            return Err(MediaError::Malformed { what: "image_max_patch_num", why });
        }
        Ok(Self { max_tiles: asked, ..self.clone() })
    }

    /// Returns columns and rows of tiles for an image: the grid nearest to its aspect, of equally near ones the larger, as long as
    /// the image fills at least half of it.
    pub fn grid(&self, size: Size) -> Result<(u64, u64), MediaError> {
        if size.pixels() == 0 {
            let why = format!("{} × {} has no pixels", size.width, size.height);
            return Err(MediaError::Malformed { what: "an image", why });
        }
        let aspect = f64::from(size.width) / f64::from(size.height);
        let (mut best, mut best_apart) = ((1, 1), f64::INFINITY);
        for (columns, rows) in self.grids() {
            let apart = (aspect - columns as f64 / rows as f64).abs();
            let roomy = 2 * size.pixels() > self.tile.pixels() * columns * rows;
            if apart < best_apart || (apart == best_apart && roomy) {
                (best, best_apart) = ((columns, rows), apart);
            }
        }
        Ok(best)
    }

    /// Returns all grids, ordered by tiles, of equally many the narrower first.
    fn grids(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        (self.min_tiles..=self.max_tiles)
            .flat_map(|tiles| (1..=tiles).filter(move |columns| tiles % columns == 0).map(move |c| (c, tiles / c)))
    }

    /// Returns the encoder's input for an image of this size.
    pub fn shape(&self, size: Size) -> Result<Shape, MediaError> {
        let (columns, rows) = self.grid(size)?;
        Ok(self.shape_of(Modality::Image, with_thumbnail(columns * rows)))
    }

    /// Returns the encoder's input for a video: every frame is one tile.
    pub fn video_shape(&self, frames: u64) -> Shape {
        self.shape_of(Modality::Video, frames)
    }

    /// Returns the most expensive legal image: a strip of exactly `max_tiles` tiles is always the nearest to some aspect.
    pub fn worst(&self) -> Shape {
        self.shape_of(Modality::Image, with_thumbnail(self.max_tiles))
    }

    fn shape_of(&self, modality: Modality, tiles: u64) -> Shape {
        let Patches { patch, .. } = self.patches;
        let (down, across) = (u64::from(self.tile.height) / patch, u64::from(self.tile.width) / patch);
        let longest = down * across + self.class_rows;
        Shape { modality, rows: tiles * longest, sequences: tiles, longest, tokens: tiles * self.tile_tokens }
    }
}

impl TileVideo {
    /// Returns the rule of a checkpoint's video processor, with at most `max_frames`.
    pub fn new(files: &ProcessorFiles, (patch, merge): (u64, u64), max_frames: u64) -> Result<Self, MediaError> {
        let frame = Tiles::cut(&files.video, false, tile_tokens(files)?, (patch, merge))?;
        Ok(Self { frame, sampling: Sampling::middles(&files.video, max_frames)? })
    }

    /// Returns the encoder's input for a video of `frames` frames.
    pub fn shape(&self, frames: u64) -> Result<Shape, MediaError> {
        if frames > self.sampling.max_frames {
            let (limit, flag) = (self.sampling.max_frames, Modality::Video.flag());
            return Err(MediaError::OverLimit { what: "a video", asked: frames, limit, unit: "frames", flag });
        }
        Ok(self.frame.video_shape(frames))
    }
}

fn tile_tokens(files: &ProcessorFiles) -> Result<u64, MediaError> {
    within("image_seq_length", files.processor.image_seq_length, 256, 1..=1 << 20)
}

/// Returns the tiles with a thumbnail, which an image of more than one tile has.
pub(super) fn with_thumbnail(tiles: u64) -> u64 {
    tiles + u64::from(tiles > 1)
}
