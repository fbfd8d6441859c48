//! Images that keep their aspect, with a bound on the longer side: Pixtral, the encoder of Mistral 3.

use super::config::{Fields, ProcessorFiles, within};
use super::patches::{over, sides, size_of_sides};
use super::{Fit, Patches};
use crate::image::Filter;
use crate::{MediaError, Modality, Size};

/// The rule of an image processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Longest {
    /// The cut of an image into patches.
    pub patches: Patches,
    /// The most pixels on a side, before both sides are rounded up to whole tokens.
    pub side: u64,
}

impl Longest {
    /// Returns the rule of a checkpoint's image processor. `patch` is the vision configuration's `patch_size`, `merge` the patches per side
    /// of a token. The processor's own file may have both, too.
    pub fn new(files: &ProcessorFiles, patch: u64, merge: u64) -> Result<Self, MediaError> {
        let (fields, outer) = (&files.image, &files.processor);
        let square = fields.size.height.filter(|height| fields.size.width == Some(*height));
        let side = within("size.longest_edge", fields.size.longest_edge.or(square), 1024, 1..=1 << 16)?;
        let patch = within("patch_size", Some(patch), 16, 1..=1024)?;
        let merge = within("spatial_merge_size", Some(merge), 1, 1..=16)?;
        let said = (outer.patch_size.unwrap_or(patch), outer.spatial_merge_size.unwrap_or(merge));
        if said != (patch, merge) {
            let why = format!("the processor says {said:?}, the encoder {:?}", (patch, merge));
            return Err(MediaError::BadConfig { key: "patch_size, spatial_merge_size", why });
        }
        let filter = fields.filter(Filter::Bicubic);
        let plain = Patches::image(&Fields::default(), None)?;
        let rule = Self { patches: Patches { patch, merge, temporal: 1, filter, ..plain }, side };
        Ok(rule.with_side(side))
    }

    fn with_side(&self, side: u64) -> Self {
        let (min_pixels, max_pixels) = Self { side, ..self.clone() }.pixels();
        Self { side, patches: Patches { min_pixels, max_pixels, ..self.patches.clone() } }
    }

    /// Returns the most tokens on a side.
    pub fn tokens_on_a_side(&self) -> u64 {
        self.side.div_ceil(self.patches.factor())
    }

    /// Returns the fewest and the most pixels of a resized image.
    pub fn pixels(&self) -> (u64, u64) {
        let factor = self.patches.factor();
        (factor * factor, (self.tokens_on_a_side() * factor).pow(2))
    }

    /// Returns this rule with at most this many pixels, as far as one token allows it.
    pub fn limited(&self, pixels: u64) -> Self {
        let factor = self.patches.factor();
        let tokens = (pixels.isqrt() / factor).max(1);
        self.with_side(self.side.min(tokens * factor))
    }

    /// Returns this rule with at most this many tokens, as far as one token allows it.
    pub fn carried_in(&self, tokens: u64) -> Self {
        self.limited(tokens.saturating_mul(self.patches.factor().pow(2)))
    }

    /// Returns the processing of an image of this size. The steps and their rounding are the reference's.
    pub fn fit(&self, size: Size) -> Result<Fit, MediaError> {
        let (h, w) = sides(size)?;
        let ratio = (h as f64 / self.side as f64).max(w as f64 / self.side as f64);
        let reduced = |pixels: u64| if ratio > 1.0 { (pixels as f64 / ratio).floor() as u64 } else { pixels };
        let (high, wide) = (reduced(h), reduced(w));
        if high.min(wide) == 0 {
            let (long, short) = (h.max(w), h.min(w));
            return Err(over("times as long as it is wide: it is too long a strip", long / short, self.side));
        }
        let factor = self.patches.factor();
        let (rows, columns) = (high.div_ceil(factor), wide.div_ceil(factor));
        let size = size_of_sides((rows * factor, columns * factor))?;
        let (shape, filter) = (self.patches.shape_of(Modality::Image, 1, rows, columns), self.patches.filter);
        Ok(Fit::whole(size, (1, 1), shape, filter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule() -> Longest {
        let files = ProcessorFiles::read(Some(r#"{"size": {"longest_edge": 50}}"#), None, None).unwrap();
        Longest::new(&files, 4, 2).unwrap()
    }

    #[test]
    fn limits_leave_whole_tokens() {
        let all = rule();
        assert_eq!((all.tokens_on_a_side(), all.pixels()), (7, (64, 56 * 56)));
        let sides = [0, 64, 255, 256, 49 * 49, u64::MAX].map(|pixels| all.limited(pixels).side);
        assert_eq!(sides, [8, 8, 8, 16, 48, 50]);
        for tokens in 1..60 {
            let carried = all.carried_in(tokens);
            assert!(carried.tokens_on_a_side().pow(2) <= tokens, "{tokens}: {carried:?}");
            for (height, width) in [(1, 1), (300, 300), (7, 300), (300, 8), (50, 50), (49, 51)] {
                // A strip may be less than one pixel wide.
                let Ok(found) = carried.fit(Size { height, width }) else { continue };
                assert!(found.shape.tokens <= tokens && found.size.pixels() <= carried.pixels().1, "{found:?}");
            }
        }
    }

    #[test]
    fn a_strip_without_a_pixel_across_is_refused() {
        let refused = rule().fit(Size::new(1, 60)).unwrap_err().to_string();
        assert!(refused.contains("too long a strip"), "{refused}");
        assert_eq!(rule().fit(Size::new(1, 50)).unwrap().shape.tokens, 7);
    }

    #[test]
    fn the_processor_and_the_encoder_agree() {
        let files = ProcessorFiles::read(Some("{}"), None, Some(r#"{"patch_size": 16}"#)).unwrap();
        let refused = Longest::new(&files, 14, 2).unwrap_err().to_string();
        assert!(refused.contains("(16, 2)") && refused.contains("(14, 2)"), "{refused}");
        let sides = ProcessorFiles::read(Some(r#"{"patch_size": {"height": 14, "width": 14}}"#), None, None).unwrap();
        assert_eq!(Longest::new(&sides, 14, 2).unwrap().side, 1024);
    }
}
