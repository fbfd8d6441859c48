//! How images are prepared that are encoded in pieces: LFM2-VL.

use plimsoll_formats::Vision as VisionConfig;
use plimsoll_media::MediaError;
use plimsoll_media::geometry::{ImageRule, Pieces, ProcessorFiles};
use plimsoll_media::image::Normalize;

use super::plan::image_bounds;
use super::spec::ImageSpec;
use crate::api::options::Options;
use crate::plan::error::PlanError;

/// A processor's file that says what the tower's configuration does.
pub(super) fn defaults(config: &VisionConfig) -> String {
    let (patch, merge) = (config.patch, config.merge);
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
    let rule = match options.max_image_pixels {
        Some(asked) if asked < rule.patches.min_pixels => {
            let least = rule.patches.min_pixels;
            let problem = format!("leaves {asked} pixels; this model's processor makes {least} at least");
            return Err(PlanError::Option { flag: "--max-image-pixels", problem });
        }
        Some(asked) => rule.limited(asked),
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
