//! Preparation of images that are encoded in pieces (LFM2-VL, Idefics3, SmolVLM and Llama 4), or have a bound on their sides (Mistral 3).
//! Rules follow the processor. They are limited to the options' pixels, or without that option to the usual tokens. No image exceeds the
//! tokens of a request.

use plimsoll_formats::Vision as VisionConfig;
use plimsoll_media::MediaError;
use plimsoll_media::geometry::{Canvases, ImageRule, Longest, Pieces, ProcessorFiles, Squares};
use plimsoll_media::image::Normalize;

use super::plan::image_bounds;
use super::spec::ImageSpec;
use crate::api::options::Options;
use crate::api::plan_error::PlanError;

/// The limits of an image rule.
pub(super) struct Limits<'a> {
    pub options: &'a Options,
    /// Tokens of an image without `--max-image-pixels`.
    pub usual: u64,
    /// Tokens of a request.
    pub context: u64,
}

impl Limits<'_> {
    /// Returns the rule with fewer pixels or tokens. Its images have at least `least` pixels.
    fn bound<R>(
        &self,
        rule: &R,
        least: u64,
        limited: fn(&R, u64) -> R,
        carried_in: fn(&R, u64) -> R,
    ) -> Result<R, PlanError> {
        let rule = match self.options.max_image_pixels {
            Some(asked) if asked < least => {
                let problem = format!("leaves {asked} pixels; this model's processor makes {least} at least");
                return Err(PlanError::Option { flag: "--max-image-pixels", problem });
            }
            Some(asked) => limited(rule, asked),
            None => carried_in(rule, self.usual),
        };
        // A context too short for one image does not fail the plan; only requests with images are refused.
        Ok(carried_in(&rule, self.context))
    }
}

fn spec((rule, tokens_max): (ImageRule, u64), normalize: Normalize, config: &VisionConfig) -> ImageSpec {
    let bounds = image_bounds(&rule);
    ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max, bounds }
}

/// Checks that the processor's squares, which `key` names, have as many patches on a side as the encoder has positions.
fn agree_on_side(key: &'static str, what: &str, side: u64, config: &VisionConfig) -> Result<(), PlanError> {
    let (said, is) = (side / config.patch as u64, config.table_side as u64);
    if said == is {
        return Ok(());
    }
    let why = format!("{what} of {side} pixels have {said} patches on a side, the encoder has {is}");
    Err(MediaError::BadConfig { key, why }.into())
}

/// The image rule of LFM2-VL.
pub(super) fn image(
    files: &ProcessorFiles,
    config: &VisionConfig,
    limits: &Limits<'_>,
) -> Result<ImageSpec, PlanError> {
    let rule = Pieces::new(files)?;
    let (said, is) = ([rule.patches.patch, rule.patches.merge], [config.patch, config.merge]);
    if said.iter().zip(is).any(|(said, is)| *said != is as u64) {
        let why = format!("the processor says {said:?}, the encoder {is:?}");
        return Err(MediaError::BadConfig { key: "encoder_patch_size, downsample_factor", why }.into());
    }
    let rule = limits.bound(&rule, rule.patches.min_pixels, Pieces::limited, Pieces::carried_in)?;
    let tokens_max = rule.tokens_max();
    let normalize = Normalize::new(&files.image, Normalize::HALVES)?;
    Ok(spec((ImageRule::Pieces(rule), tokens_max), normalize, config))
}

/// The image rule of Idefics3 and SmolVLM.
pub(super) fn squares(
    files: &ProcessorFiles,
    config: &VisionConfig,
    limits: &Limits<'_>,
) -> Result<ImageSpec, PlanError> {
    let rule = Squares::new(files, config.patch as u64, config.merge as u64)?;
    agree_on_side("max_image_size", "squares", rule.side, config)?;
    let rule = limits.bound(&rule, rule.pixels().0, Squares::limited, Squares::carried_in)?;
    let tokens_max = rule.squares_max() * rule.square_tokens;
    let normalize = Normalize::new(&files.image, Normalize::HALVES)?;
    Ok(spec((ImageRule::Squares(rule), tokens_max), normalize, config))
}

/// The image rule of Llama 4.
pub(super) fn canvases(
    files: &ProcessorFiles,
    config: &VisionConfig,
    limits: &Limits<'_>,
) -> Result<ImageSpec, PlanError> {
    let rule = Canvases::new(files, config.patch as u64, config.merge as u64)?;
    agree_on_side("size", "tiles", rule.side, config)?;
    let rule = limits.bound(&rule, rule.pixels().0, Canvases::limited, Canvases::carried_in)?;
    let tokens_max = rule.tiles_max() * rule.tile_tokens;
    let normalize = Normalize::rounded(&files.image, Normalize::HALVES)?;
    Ok(spec((ImageRule::Canvases(rule), tokens_max), normalize, config))
}

/// The image rule of Mistral 3.
pub(super) fn longest(
    files: &ProcessorFiles,
    config: &VisionConfig,
    limits: &Limits<'_>,
) -> Result<ImageSpec, PlanError> {
    let rule = Longest::new(files, config.patch as u64, config.merge as u64)?;
    let rule = limits.bound(&rule, rule.pixels().0, Longest::limited, Longest::carried_in)?;
    let tokens_max = rule.tokens_on_a_side().pow(2);
    let normalize = Normalize::new(&files.image, Normalize::CLIP)?;
    Ok(spec((ImageRule::Longest(rule), tokens_max), normalize, config))
}
