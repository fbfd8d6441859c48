//! Pictures cut into tiles of one size, with a thumbnail of the whole: InternVL.

use super::config::{Fields, ProcessorFiles, within};
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
    /// Side of a patch inside a tile, in pixels.
    pub patch: u64,
}

impl Tiles {
    /// The image processor of a checkpoint; `patch` is the vision configuration's `patch_size`.
    pub fn new(files: &ProcessorFiles, patch: u64) -> Result<Self, MediaError> {
        let tile_tokens = within("image_seq_length", files.processor.image_seq_length, 256, 1..=1 << 20)?;
        // InternVL's processor crops whatever the image processor's own default is; only the file can say no.
        let crops = files.image.crop_to_patches.unwrap_or(true);
        Self::cut(&files.image, crops, tile_tokens, patch)
    }

    fn cut(fields: &Fields, crops: bool, tile_tokens: u64, patch: u64) -> Result<Self, MediaError> {
        let side = |key, value| within(key, value, 384, 1..=8192);
        let (height, width) = (side("size.height", fields.size.height)?, side("size.width", fields.size.width)?);
        let patch = within("patch_size", Some(patch), 14, 1..=height.min(width))?;
        let max_tiles = within("max_patches", fields.max_patches, 12, 1..=1024)?;
        let min_tiles = within("min_patches", fields.min_patches, 1, 1..=max_tiles)?;
        let (min_tiles, max_tiles) = if crops { (min_tiles, max_tiles) } else { (1, 1) };
        let tile = Size { height: height as u32, width: width as u32 };
        Ok(Self { tile, min_tiles, max_tiles, tile_tokens, patch })
    }

    /// The same with a request's own bound on tiles, which may be lower than what was stressed, never higher (A31).
    pub fn with_max_tiles(&self, asked: u64) -> Result<Self, MediaError> {
        if asked > self.max_tiles {
            let (limit, unit, flag) = (self.max_tiles, "tiles", "--max-image-tiles");
            return Err(MediaError::OverLimit { what: "image_max_patch_num", asked, limit, unit, flag });
        }
        if asked < self.min_tiles {
            let why = format!("{asked} is less than the fewest tiles, {}", self.min_tiles);
            return Err(MediaError::Malformed { what: "image_max_patch_num", why });
        }
        Ok(Self { max_tiles: asked, ..self.clone() })
    }

    /// Columns and rows of tiles for a picture: the grid nearest to its aspect, of equally near ones the larger, as long as
    /// the picture fills at least half of it.
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

    /// All grids, those of fewer tiles first, of equally many the narrower first.
    fn grids(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        (self.min_tiles..=self.max_tiles)
            .flat_map(|tiles| (1..=tiles).filter(move |columns| tiles % columns == 0).map(move |c| (c, tiles / c)))
    }

    /// What the encoder sees of a picture of this size.
    pub fn shape(&self, size: Size) -> Result<Shape, MediaError> {
        let (columns, rows) = self.grid(size)?;
        Ok(self.shape_of(Modality::Image, with_thumbnail(columns * rows)))
    }

    /// What the encoder sees of a video: every frame is one tile.
    pub fn video_shape(&self, frames: u64) -> Shape {
        self.shape_of(Modality::Video, frames)
    }

    /// The legal picture that costs most: a strip of exactly `max_tiles` tiles is always the nearest to some aspect.
    pub fn worst(&self) -> Shape {
        self.shape_of(Modality::Image, with_thumbnail(self.max_tiles))
    }

    fn shape_of(&self, modality: Modality, tiles: u64) -> Shape {
        let (down, across) = (u64::from(self.tile.height) / self.patch, u64::from(self.tile.width) / self.patch);
        // One row for the class token that every tile carries.
        let longest = down * across + 1;
        Shape { modality, rows: tiles * longest, sequences: tiles, longest, tokens: tiles * self.tile_tokens }
    }
}

/// A picture of more than one tile comes with a thumbnail.
fn with_thumbnail(tiles: u64) -> u64 {
    tiles + u64::from(tiles > 1)
}
