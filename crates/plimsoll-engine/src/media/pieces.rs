//! How images are prepared that are encoded in pieces: LFM2-VL, Idefics3 and SmolVLM.

use plimsoll_formats::{Tower, Vision as VisionConfig};
use plimsoll_media::MediaError;
use plimsoll_media::geometry::{ImageRule, Pieces, ProcessorFiles, Squares};
use plimsoll_media::image::Normalize;

use super::plan::image_bounds;
use super::spec::ImageSpec;
use crate::api::options::Options;
use crate::plan::error::PlanError;

/// A processor's file that says what the tower's configuration does.
pub(super) fn defaults(config: &VisionConfig) -> String {
    let (patch, merge) = (config.patch, config.merge);
    if config.tower == Tower::Idefics3 {
        // Published models cut images into up to four by four squares.
        let side = patch * config.table_side;
        let longest = (4 * side).min(4096);
        return format!(
            r#"{{"max_image_size": {{"longest_edge": {side}}}, "size": {{"longest_edge": {longest}}}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}}"#
        );
    }
    format!(r#"{{"encoder_patch_size": {patch}, "downsample_factor": {merge}}}"#)
}

/// As the processor says, made no larger than asked, or than the usual tokens where nothing is asked, or than a request can carry.
pub(super) fn image(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    [usual, context]: [u64; 2],
) -> Result<ImageSpec, PlanError> {
    let rule = Pieces::new(files)?;
    let (said, is) = ([rule.patches.patch, rule.patches.merge], [config.patch, config.merge]);
    if said.iter().zip(is).any(|(said, is)| *said != is as u64) {
        let why = format!("the processor says {said:?}, the tower {is:?}");
        return Err(MediaError::BadConfig { key: "encoder_patch_size, downsample_factor", why }.into());
    }
    let rule = match asked(options, rule.patches.min_pixels)? {
        Some(pixels) => rule.limited(pixels),
        None => rule.carried_in(usual),
    };
    // A context too short for one image does not fail the plan; only requests with images are refused.
    let rule = rule.carried_in(context);
    let tokens_max = rule.tokens_max();
    let rule = ImageRule::Pieces(rule);
    let normalize = Normalize::new(&files.image, Normalize::HALVES)?;
    let bounds = image_bounds(&rule);
    Ok(ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max, bounds })
}

/// The most pixels that are asked for, which must be at least so many.
fn asked(options: &Options, least: u64) -> Result<Option<u64>, PlanError> {
    match options.max_image_pixels {
        Some(asked) if asked < least => {
            let problem = format!("leaves {asked} pixels; this model's processor makes {least} at least");
            Err(PlanError::Option { flag: "--max-image-pixels", problem })
        }
        asked => Ok(asked),
    }
}

/// As the processor of Idefics3 says, made no larger than asked, or than the usual tokens where nothing is asked, or than a request can
/// carry.
pub(super) fn squares(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    [usual, context]: [u64; 2],
) -> Result<ImageSpec, PlanError> {
    let rule = Squares::new(files, config.patch as u64, config.merge as u64)?;
    let (said, is) = (rule.side / config.patch as u64, config.table_side as u64);
    if said != is {
        let why = format!("squares of {} pixels have {said} patches on a side, the tower has {is}", rule.side);
        return Err(MediaError::BadConfig { key: "max_image_size", why }.into());
    }
    let rule = match asked(options, rule.pixels().0)? {
        Some(pixels) => rule.limited(pixels),
        None => rule.carried_in(usual),
    };
    // A context too short for one image does not fail the plan; only requests with images are refused.
    let rule = rule.carried_in(context);
    let tokens_max = rule.squares_max() * rule.square_tokens;
    let rule = ImageRule::Squares(rule);
    let normalize = Normalize::new(&files.image, Normalize::HALVES)?;
    let bounds = image_bounds(&rule);
    Ok(ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max, bounds })
}
