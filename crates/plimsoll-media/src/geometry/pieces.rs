//! Images that are resized whole or, if they are large, cut into tiles with the whole image behind them. Each of these pieces goes
//! through the encoder by itself: LFM2-VL.

use super::config::{Fields, ProcessorFiles, within};
use super::frontier::scale;
use super::patches::{over, sides, size_of_sides};
use super::{Patches, Tiles, round_half_even};
use crate::image::Filter;
use crate::{MediaError, Modality, Shape, Size};

/// The rule of an image processor.
#[derive(Clone, Debug, PartialEq)]
pub struct Pieces {
    /// The cut of a piece into patches, and the bounds on the pixels of a whole image.
    pub patches: Patches,
    /// The tiles of a large image; none if every image stays whole.
    pub tiles: Option<Tiles>,
    /// Whether the whole image follows its tiles.
    pub thumbnail: bool,
    /// Most pixels, with rounded sides, of an image that is not large.
    large_from: f64,
    /// Most tokens of a piece.
    piece_tokens: u64,
}

/// The pieces of an image that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tiles in a row.
    pub columns: u64,
    /// Rows of tiles.
    pub rows: u64,
    /// The size of the whole image, which follows the tiles.
    pub whole: Option<Size>,
}

impl Cut {
    /// Returns the number of tiles, plus one for the whole image, if there is one.
    pub fn pieces(&self) -> u64 {
        self.columns * self.rows + u64::from(self.whole.is_some())
    }
}

fn bad(key: &'static str, why: String) -> MediaError {
    MediaError::BadConfig { key, why }
}

impl Pieces {
    /// Returns the rule of a checkpoint's image processor, with the defaults of transformers.
    pub fn new(files: &ProcessorFiles) -> Result<Self, MediaError> {
        let fields = &files.image;
        if files.processor.use_image_special_tokens == Some(false) {
            return Err(bad("use_image_special_tokens", "false is not supported".into()));
        }
        let patch = within("encoder_patch_size", fields.encoder_patch_size, 16, 1..=1024)?;
        let merge = within("downsample_factor", fields.downsample_factor, 2, 1..=16)?;
        let most = within("max_image_tokens", fields.max_image_tokens, 256, 1..=1 << 20)?;
        let least = within("min_image_tokens", fields.min_image_tokens, 64, 1..=most)?;
        let tolerance = fields.max_pixels_tolerance.unwrap_or(2.0);
        if !(tolerance.is_finite() && tolerance > 0.0) {
            return Err(bad("max_pixels_tolerance", format!("{tolerance} is not a positive number")));
        }
        let token = (patch * merge).pow(2);
        let patches = Patches {
            patch,
            merge,
            temporal: 1,
            min_pixels: least * token,
            max_pixels: most * token,
            filter: fields.filter(Filter::Bilinear),
            ..Patches::image(&Fields::default(), None)?
        };
        let tiles = tiles(fields, &patches)?;
        Ok(Self {
            thumbnail: fields.use_thumbnail.unwrap_or(true),
            large_from: patches.max_pixels as f64 * tolerance,
            piece_tokens: most.max(tiles.as_ref().map_or(0, |tiles| tiles.tile_tokens)),
            patches,
            tiles,
        })
    }

    /// Returns the most tokens of one piece.
    pub fn piece_tokens(&self) -> u64 {
        match &self.tiles {
            Some(_) => self.piece_tokens,
            None => self.whole_tokens(),
        }
    }

    /// Returns the most tokens of a whole image.
    fn whole_tokens(&self) -> u64 {
        self.patches.max_pixels / self.patches.factor().pow(2)
    }

    /// Returns the most pieces of an image.
    pub fn pieces_max(&self) -> u64 {
        self.tiles.as_ref().map_or(1, |tiles| tiles.max_tiles + u64::from(self.thumbnail))
    }

    /// Returns the most tokens of an image, all its pieces together.
    pub fn tokens_max(&self) -> u64 {
        let Some(tiles) = &self.tiles else { return self.whole_tokens() };
        let behind = if self.thumbnail { self.piece_tokens } else { 0 };
        (tiles.max_tiles * tiles.tile_tokens + behind).max(self.piece_tokens)
    }

    /// Returns the largest pieces, in tokens: no other piece has a longer short side and a longer long side than one of them.
    pub fn largest(&self) -> Vec<(u64, u64)> {
        let most = self.piece_tokens();
        (1..=most.isqrt()).map(|short| (short, most / short)).collect()
    }

    /// Returns the fewest and the most pixels of a resized image, without the whole image behind its tiles.
    pub fn pixels(&self) -> (u64, u64) {
        let tiled = self.tiles.as_ref().map_or(0, |tiles| tiles.max_tiles * tiles.tile.pixels());
        (self.patches.min_pixels, self.patches.max_pixels.max(tiled))
    }

    /// Returns this rule with at most this many pixels, as far as the rule's minimum allows it: fewer tiles, then smaller whole images.
    pub fn limited(&self, pixels: u64) -> Self {
        let tiles = self.tiles.as_ref().map_or(0, |tiles| pixels / tiles.tile.pixels());
        self.with_tiles(tiles, pixels)
    }

    /// Returns this rule with at most this many tokens, as far as the rule's minimum allows it.
    pub fn carried_in(&self, tokens: u64) -> Self {
        let behind = if self.thumbnail { self.piece_tokens } else { 0 };
        let room = tokens.saturating_sub(behind);
        let tiles = if tokens < self.piece_tokens { 0 } else { room };
        let tiles = self.tiles.as_ref().map_or(0, |own| tiles / own.tile_tokens);
        self.with_tiles(tiles, tokens.saturating_mul(self.patches.factor().pow(2)))
    }

    fn with_tiles(&self, most: u64, pixels: u64) -> Self {
        let tiles = self.tiles.as_ref().filter(|tiles| most >= tiles.min_tiles);
        let tiles = tiles.map(|tiles| Tiles { max_tiles: tiles.max_tiles.min(most), ..tiles.clone() });
        let mut patches = self.patches.clone();
        if tiles.is_none() {
            patches.max_pixels = pixels.clamp(patches.min_pixels, patches.max_pixels);
        }
        Self { tiles, patches, ..self.clone() }
    }

    /// Returns the size that a whole image is resized to, even if it is also cut.
    pub fn whole(&self, size: Size) -> Result<Size, MediaError> {
        let (h, w) = sides(size)?;
        let factor = self.patches.factor();
        let round = |side| (round_half_even(side, factor) * factor).max(factor);
        let bounds = (self.patches.min_pixels, self.patches.max_pixels);
        let resized = scale((h, w), factor, (round(h) * round(w), h * w), (round(h), round(w)), bounds);
        // A strip may exceed the bound, which the reference's encoder does not accept either.
        let tokens = resized.0 / factor * (resized.1 / factor);
        if tokens > self.piece_tokens {
            return Err(over("tokens in one piece: it is too long a strip", tokens, self.piece_tokens));
        }
        size_of_sides(resized)
    }

    /// Returns the pieces of an image of this size; none if it stays whole.
    pub fn cut(&self, size: Size) -> Result<Option<Cut>, MediaError> {
        let Patches { patch, .. } = self.patches;
        let factor = self.patches.factor();
        let (h, w) = sides(size)?;
        let round = |side| (round_half_even(side, factor) * factor).max(patch);
        let is_large = (round(h) * round(w)) as f64 > self.large_from;
        let Some(tiles) = self.tiles.as_ref().filter(|_| is_large) else { return Ok(None) };
        let (columns, rows) = tiles.grid(size)?;
        let whole = self.thumbnail.then(|| self.whole(size)).transpose()?;
        Ok(Some(Cut { columns, rows, whole }))
    }

    /// Returns the encoder's input for an image of this size, all its pieces together.
    pub fn shape(&self, size: Size) -> Result<Shape, MediaError> {
        let (Some(tiles), Some(cut)) = (&self.tiles, self.cut(size)?) else {
            return Ok(self.patches.piece(self.whole(size)?));
        };
        let tile = self.patches.piece(tiles.tile);
        let count = cut.columns * cut.rows;
        let all = Shape { rows: count * tile.rows, sequences: count, tokens: count * tile.tokens, ..tile };
        let Some(whole) = cut.whole.map(|whole| self.patches.piece(whole)) else { return Ok(all) };
        Ok(Shape {
            modality: Modality::Image,
            rows: all.rows + whole.rows,
            sequences: all.sequences + 1,
            longest: all.longest.max(whole.longest),
            tokens: all.tokens + whole.tokens,
        })
    }
}

/// Returns the tiles of large images; none if images are not split.
fn tiles(fields: &Fields, patches: &Patches) -> Result<Option<Tiles>, MediaError> {
    let max_tiles = within("max_tiles", fields.max_tiles, 10, 1..=1024)?;
    let min_tiles = within("min_tiles", fields.min_tiles, 2.min(max_tiles), 1..=max_tiles)?;
    if fields.do_image_splitting == Some(false) || max_tiles == 1 {
        return Ok(None);
    }
    // With one tile, the token count would differ from the reference's. With three or more, the reference orders
    // equally near grids arbitrarily.
    if min_tiles != 2 {
        return Err(bad("min_tiles", format!("{min_tiles} is not supported, only 2")));
    }
    let side = within("tile_size", fields.tile_size, 512, 1..=8192)?;
    let factor = patches.factor();
    if !side.is_multiple_of(factor) {
        return Err(bad("tile_size", format!("{side} is not a multiple of a token's {factor} pixels")));
    }
    let tile = Size::new(side as u32, side as u32);
    let (tile_tokens, patches) = ((side / factor).pow(2), patches.clone());
    Ok(Some(Tiles { tile, min_tiles, max_tiles, tile_tokens, class_rows: 0, patches }))
}
