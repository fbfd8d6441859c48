//! Images cut into patches at their own aspect: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen3-Omni and Gemma 4.

use super::config::{Fields, within};
use super::frontier::{ASPECT_MAX, RoundedUp, Rule};
use crate::image::Filter;
use crate::{MediaError, Modality, Shape, Size};

/// Longest accepted side. Products of two such sides are exact in floating point.
pub(crate) const SIDE_MAX: u64 = 1 << 24;

/// The resize rule and patch grid of an image processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patches {
    /// Side of a patch in pixels.
    pub patch: u64,
    /// Patches per side of a token.
    pub merge: u64,
    /// Frames per patch.
    pub temporal: u64,
    /// Fewest pixels after the resize, apart from rounding.
    pub min_pixels: u64,
    /// Most pixels after the resize, apart from rounding and strips.
    pub max_pixels: u64,
    /// Tokens per side of an attention window, in models that have windows.
    pub window: Option<u64>,
    /// The filter of the resize.
    pub filter: Filter,
    /// Whether every image is enlarged to the most pixels, as far as whole tokens and its aspect allow it; otherwise images within the
    /// bounds keep their size.
    pub fills: bool,
}

/// Token budgets of Gemma 4's images: the model was trained with these.
const BUDGETS: [u64; 5] = [70, 140, 280, 560, 1120];

impl Patches {
    /// Returns the rule of a checkpoint's image processor. `window` is the vision configuration's `window_size` in pixels, if it has one.
    pub fn image(fields: &Fields, window: Option<u64>) -> Result<Self, MediaError> {
        Self::new(fields, window, (14, (56 * 56, 28 * 28 * 1280)))
    }

    pub(crate) fn new(fields: &Fields, window: Option<u64>, defaults: (u64, (u64, u64))) -> Result<Self, MediaError> {
        let (min_pixels, max_pixels) = fields.pixels(defaults.1)?;
        let patch = within("patch_size", fields.patch_size, defaults.0, 1..=1024)?;
        let merge = within("merge_size", fields.merge_size, 2, 1..=16)?;
        let temporal = within("temporal_patch_size", fields.temporal_patch_size, 2, 1..=16)?;
        let window =
            window.map(|pixels| within("window_size", Some(pixels / (patch * merge)), 0, 1..=1024)).transpose()?;
        let filter = fields.filter(Filter::Bicubic);
        Ok(Self { patch, merge, temporal, min_pixels, max_pixels, window, filter, fills: false })
    }

    /// Returns the rule of Gemma 4's processor of images, or of a video's frames, with `budget` as the default budget of tokens.
    pub fn filling(fields: &Fields, budget: u64) -> Result<Self, MediaError> {
        let patch = within("patch_size", fields.patch_size, 16, 1..=1024)?;
        let merge = within("pooling_kernel_size", fields.pooling_kernel_size, 3, 1..=16)?;
        let budget = fields.max_soft_tokens.unwrap_or(budget);
        if !BUDGETS.contains(&budget) {
            let why = format!("{budget} is none of {BUDGETS:?}");
            return Err(MediaError::BadConfig { key: "max_soft_tokens", why });
        }
        let pixels = |tokens: u64| tokens * (patch * merge) * (patch * merge);
        let (min_pixels, max_pixels, filter) = (pixels(BUDGETS[0]), pixels(budget), fields.filter(Filter::Bicubic));
        Ok(Self { patch, merge, temporal: 1, min_pixels, max_pixels, window: None, filter, fills: true })
    }

    /// Returns this rule with patches as large as tokens: Gemma 4 Unified.
    #[must_use]
    pub fn of_whole_tokens(self) -> Self {
        Self { patch: self.patch * self.merge, merge: 1, ..self }
    }

    /// Returns the encoder's input for an image that was resized to this size.
    pub fn piece(&self, size: Size) -> Shape {
        let side = |pixels: u32| u64::from(pixels) / self.factor();
        self.shape_of(Modality::Image, 1, side(size.height), side(size.width))
    }

    /// Returns the tokens of the most pixels.
    pub(crate) fn budget(&self) -> u64 {
        self.max_pixels / (self.factor() * self.factor())
    }

    /// Returns this rule with a request's own bound on pixels. It may be lower than the tested bound, never higher (A31).
    pub fn with_max_pixels(&self, asked: u64) -> Result<Self, MediaError> {
        if asked > self.max_pixels {
            return Err(MediaError::OverLimit {
                what: "max_pixels",
                asked,
                limit: self.max_pixels,
                unit: "pixels",
                flag: Modality::Image.flag(),
            });
        }
        if asked < self.min_pixels {
            let why = format!("{asked} is less than min_pixels, {}", self.min_pixels);
            return Err(MediaError::Malformed { what: "max_pixels", why });
        }
        let token = self.factor() * self.factor();
        let budget = BUDGETS.iter().rev().map(|tokens| tokens * token).find(|pixels| *pixels <= asked);
        let max_pixels = budget.filter(|_| self.fills).unwrap_or(asked);
        Ok(Self { max_pixels, ..self.clone() })
    }

    /// Returns the pixels per side of a token.
    pub fn factor(&self) -> u64 {
        self.patch * self.merge
    }

    /// Returns the size that an image is resized to.
    pub fn resize(&self, size: Size) -> Result<Size, MediaError> {
        let sides = (u64::from(size.height), u64::from(size.width));
        size_of_sides(match self.fills {
            true => self.fill(sides)?,
            false => resize_within(sides, self.factor(), (self.min_pixels, self.max_pixels))?,
        })
    }

    /// Resizes to the pixels of the token budget. Each side is rounded down to whole tokens; the short one has at least one.
    /// Arithmetic and order are the reference's.
    pub(crate) fn fill(&self, sides: (u64, u64)) -> Result<(u64, u64), MediaError> {
        check_long(sides)?;
        let (factor, budget) = (self.factor(), self.budget());
        let (h, w) = (sides.0 as f64, sides.1 as f64);
        let scale = ((budget * factor * factor) as f64 / (sides.0 * sides.1) as f64).sqrt();
        let down = |side: f64| (scale * side / factor as f64).floor() as u64;
        let strip = |long: f64, short: f64| ((long / short).floor() as u64).min(budget);
        let (rows, columns) = match (down(h), down(w)) {
            (0, _) => (1, strip(w, h)),
            (_, 0) => (strip(h, w), 1),
            both => both,
        };
        Ok((rows * factor, columns * factor))
    }

    /// Returns the encoder's input for an image of this size.
    pub fn shape(&self, size: Size) -> Result<Shape, MediaError> {
        let resized = self.resize(size)?;
        let (a, b) = (u64::from(resized.height) / self.factor(), u64::from(resized.width) / self.factor());
        Ok(self.shape_of(Modality::Image, 1, a, b))
    }

    /// Returns the most expensive legal image, for a cost that never falls when a field of the shape grows.
    pub fn worst(&self, cost: impl Fn(&Shape) -> u64) -> Shape {
        self.costliest(Modality::Image, 1, &self.frontier(), cost)
    }

    /// Returns for every short side of a legal image the longest long side, in tokens. No legal image is larger than
    /// all of them; a cost that never falls with either side has its maximum among them.
    pub fn frontier(&self) -> Vec<(u64, u64)> {
        if self.fills {
            let budget = self.budget();
            return (1..=budget.isqrt()).map(|short| (short, budget / short)).collect();
        }
        let rule = Rule::of_one(self.factor(), (self.min_pixels, self.max_pixels));
        rule.frontier(&mut RoundedUp::default(), |sides| check_sides(sides).map(|()| sides).ok())
    }

    pub(crate) fn costliest(
        &self,
        modality: Modality,
        frames: u64,
        frontier: &[(u64, u64)],
        cost: impl Fn(&Shape) -> u64,
    ) -> Shape {
        let both = frontier.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
        let shapes = both.map(|(a, b)| self.shape_of(modality, frames, a, b));
        shapes.max_by_key(|shape| cost(shape)).unwrap_or(self.shape_of(modality, frames, 1, 1))
    }

    /// Returns the shape of `frames` groups of frames, each of `a` × `b` tokens.
    pub fn shape_of(&self, modality: Modality, frames: u64, a: u64, b: u64) -> Shape {
        let windows = self.window.map_or(1, |side| a.div_ceil(side) * b.div_ceil(side));
        let tokens = frames * a * b;
        let per_token = self.merge * self.merge;
        // Layers without windows attend over whole frames, so the longest sequence is a frame in every family.
        Shape { modality, rows: tokens * per_token, sequences: frames * windows, longest: a * b * per_token, tokens }
    }
}

/// Resizes one image: sides in multiples of `factor`, pixels within bounds, aspect kept as well as that allows.
pub(crate) fn resize_within(sides: (u64, u64), factor: u64, bounds: (u64, u64)) -> Result<(u64, u64), MediaError> {
    check_sides(sides)?;
    Ok(Rule::of_one(factor, bounds).resize(sides))
}

pub(crate) fn check_sides(sides: (u64, u64)) -> Result<(), MediaError> {
    let (short, long) = check_long(sides)?;
    if long > ASPECT_MAX * short {
        return Err(over("times the short side as its long side", long.div_ceil(short), ASPECT_MAX));
    }
    Ok(())
}

/// Returns the short and the long side.
fn check_long((h, w): (u64, u64)) -> Result<(u64, u64), MediaError> {
    let (short, long) = (h.min(w), h.max(w));
    if short == 0 {
        return Err(MediaError::Malformed { what: "an image", why: format!("{w} × {h} has no pixels") });
    }
    match long > SIDE_MAX {
        true => Err(over("pixels on a side", long, SIDE_MAX)),
        false => Ok((short, long)),
    }
}

pub(crate) fn over(unit: &'static str, asked: u64, limit: u64) -> MediaError {
    MediaError::OverLimit { what: "an image", asked, limit, unit, flag: "fixed by the model's processor" }
}

pub(crate) fn size_of_sides((height, width): (u64, u64)) -> Result<Size, MediaError> {
    match (u32::try_from(height), u32::try_from(width)) {
        (Ok(height), Ok(width)) => Ok(Size { height, width }),
        _ => Err(over("pixels on a side", height.max(width), u64::from(u32::MAX))),
    }
}

/// Returns height and width of an image, which has pixels and no side over the limit.
pub(crate) fn sides(size: Size) -> Result<(u64, u64), MediaError> {
    let (h, w) = (u64::from(size.height), u64::from(size.width));
    match (h * w, h.max(w)) {
        (0, _) => Err(MediaError::Malformed { what: "an image", why: format!("{w} × {h} has no pixels") }),
        (_, longest) if longest > SIDE_MAX => Err(over("pixels on a side", longest, SIDE_MAX)),
        _ => Ok((h, w)),
    }
}
