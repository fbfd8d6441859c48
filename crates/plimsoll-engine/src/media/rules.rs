//! Rules for the preparation of media, from a checkpoint's configuration and its processors' files, within the options' limits.

use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_device::{KvShape, WeightTable};
use plimsoll_formats::{
    Audio as AudioConfig, AudioKind, Checkpoint, Gemma4, Intern, MmprojState, Processor, Vision as VisionConfig,
    VisionKind,
};
use plimsoll_media::MediaError;
use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{ImageRule, PatchVideo, Patches, ProcessorFiles, TileVideo, Tiles, VideoRule};
use plimsoll_media::image::Normalize;
use plimsoll_models::Model;

use super::agree::{agree, agree_on_positions, agree_on_tiles};
use super::pieces::{self, Limits};
use super::plan::{Bounds, MediaPlan, Planner, image_bounds, largest_images};
use super::spec::{ImageSpec, Spelling, VideoSpec};
use super::spelling::{self, between, framed, paragraph};
use super::{audio, mmproj};
use crate::api::options::Options;
use crate::api::plan_error::PlanError;

/// The most tokens of an item without a flag, whatever the model's processor allows. Some processors allow an image of 16384 tokens: on a
/// CPU it takes minutes, while all other requests wait. llama.cpp has the same limit.
const ITEM_TOKENS_MAX: u64 = 4096;
/// Tokens of an image of Gemma 4 where the processor's file gives no number.
const IMAGE_TOKENS: u64 = 280;
/// Largest file of a processor's configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Reads a processor's file; `None` if the file does not exist.
fn file(checkpoint: &Checkpoint, name: &'static str) -> Result<Option<String>, PlanError> {
    use std::io::Read;
    let unreadable = |why: std::io::Error| MediaError::BadConfig { key: name, why: why.to_string() };
    let file = match std::fs::File::open(checkpoint.dir().join(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error).into()),
    };
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    Ok(Some(text))
}

/// The preparation of a checkpoint's media, from its processors' files and its encoders' configuration.
#[derive(Debug)]
pub struct MediaRules {
    files: ProcessorFiles,
    /// The vision encoder's configuration.
    config: Option<VisionConfig>,
    /// The audio encoder's configuration, and the transform that makes spectrograms.
    audio: Option<(AudioConfig, Arc<Mel>)>,
    spelling: Spelling,
    max_context: usize,
    /// Finished plans. The planner asks for the same plan several times.
    made: Mutex<Vec<(Bounds, MediaPlan)>>,
}

/// The most finished plans that are kept.
const MADE_MAX: usize = 8;

impl MediaRules {
    /// Whether the model has a vision encoder.
    pub(crate) fn sees(&self) -> bool {
        self.config.is_some()
    }

    /// Whether the model has an audio encoder.
    pub(crate) fn hears(&self) -> bool {
        self.audio.is_some()
    }

    /// Reads the rules. `None` for a model without encoders, and where the processors' files are missing: the model then takes text only.
    pub(crate) fn read(checkpoint: &Checkpoint, model: &dyn Model) -> Result<Option<Self>, PlanError> {
        let config = checkpoint.config.vision.as_ref().filter(|_| model.vision().is_some());
        let audio = checkpoint.config.audio.as_ref().filter(|_| model.audio().is_some());
        if config.is_none() && audio.is_none() {
            return Ok(None);
        }
        let tiles = config.and_then(|config| match config.encoder {
            VisionKind::Intern(Intern { tiles, .. }) => Some((config, tiles?)),
            _ => None,
        });
        let [own, video, outer] = match (checkpoint.mmproj(), tiles) {
            (MmprojState::Loaded { processor, .. }, _) => {
                let (own, video) = mmproj::files(config, audio, processor);
                [Some(own), video, None]
            }
            (_, Some((config, tiles))) => {
                let preprocessor = file(checkpoint, "preprocessor_config.json")?;
                let (own, video) = mmproj::files_of_original(config, tiles, preprocessor.as_deref())?;
                [Some(own), video, None]
            }
            _ => [
                file(checkpoint, "preprocessor_config.json")?,
                file(checkpoint, "video_preprocessor_config.json")?,
                file(checkpoint, "processor_config.json")?,
            ],
        };
        let own = match (own, &outer) {
            (None, None) if checkpoint.has_data() => {
                if audio.is_some_and(|audio| matches!(audio.encoder, AudioKind::Whisper(_))) {
                    let why = "the file is missing, and the model transcribes nothing without it: add it to the model's directory";
                    return Err(MediaError::BadConfig { key: "preprocessor_config.json", why: why.into() }.into());
                }
                let what = if config.is_some() { "a vision" } else { "an audio" };
                tracing::warn!("the model has {what} encoder, but no preprocessor_config.json: it takes text only");
                return Ok(None);
            }
            // A configuration without weights is planned with the processors' own defaults.
            (None, None) => config.map(defaults),
            (own, _) => own,
        };
        if config.is_some_and(|config| config.channels != 3) {
            return Err(MediaError::BadConfig { key: "in_channels", why: "images here have three".into() }.into());
        }
        let loaded = matches!(checkpoint.mmproj(), MmprojState::Loaded { .. });
        let from_config = !checkpoint.has_data() || loaded || tiles.is_some();
        let outer = outer.or_else(|| config.and_then(sequence_length).filter(|_| from_config));
        let tokenizer = || file(checkpoint, "tokenizer_config.json");
        let gemma = audio.is_some_and(|audio| matches!(audio.encoder, AudioKind::Conformer(_) | AudioKind::Samples));
        let spelling = match config.map(|config| config.encoder) {
            None if gemma => between(tokenizer()?.as_deref())?,
            Some(VisionKind::Qwen3) => Spelling::Timed,
            Some(VisionKind::Intern(_)) => framed(tokenizer()?.as_deref())?,
            Some(VisionKind::Siglip) => paragraph(tokenizer()?.as_deref())?,
            Some(VisionKind::Pixtral(_)) => spelling::rows(outer.as_deref())?,
            Some(VisionKind::Idefics3) => spelling::squares(),
            Some(VisionKind::Llama4(_)) => spelling::tiled(),
            Some(VisionKind::Siglip2(_)) => spelling::pieces(tokenizer()?.as_deref())?,
            Some(VisionKind::Gemma4(_)) => between(tokenizer()?.as_deref())?,
            Some(VisionKind::Omni2_5) => {
                spelling::interleaved(tokenizer()?.as_deref(), ["<|audio_bos|>", "<|audio_eos|>"])?
            }
            Some(VisionKind::Omni) => {
                spelling::interleaved(tokenizer()?.as_deref(), ["<|audio_start|>", "<|audio_end|>"])?
            }
            Some(VisionKind::Qwen2 | VisionKind::Qwen2_5) | None => Spelling::Plain,
        };
        let files = ProcessorFiles::read(own.as_deref(), video.as_deref(), outer.as_deref())?;
        Ok(Some(Self {
            audio: audio
                .map(|audio| audio::mel(&files, audio).map(|mel| (audio.clone(), Arc::new(mel))))
                .transpose()?,
            files,
            spelling,
            config: config.cloned(),
            max_context: checkpoint.config.max_context,
            made: Mutex::default(),
        }))
    }

    /// Returns the media plan for these options. `None` where no item of any kind fits into a request.
    pub(crate) fn plan(
        &self,
        model: &dyn Model,
        weights: &WeightTable,
        kv: &KvShape,
        options: &Options,
    ) -> Result<Option<MediaPlan>, PlanError> {
        let context = options.max_req_total_len.unwrap_or(usize::MAX).min(self.max_context) as u64;
        // No request can carry an item that exceeds the context.
        let tokens_max = if options.max_video_frames.is_some() { context } else { context.min(ITEM_TOKENS_MAX) };
        let (image, video) = match &self.config {
            Some(config) => self.seen(config, options, context, tokens_max)?,
            None => (None, None),
        };
        let audio = match (&self.audio, model.audio()) {
            (Some((config, mel)), Some(_)) => {
                audio::spec(&self.files, config, mel, &Limits { options, usual: ITEM_TOKENS_MAX, context })?
            }
            _ => None,
        };
        let (batch, spelling) = (options.visual_infer_batch_size.max(1), self.spelling.clone());
        let bounds = Bounds { image, video, audio, batch, spelling };
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = made.iter().find(|(known, _)| *known == bounds) {
            return plan.sized(options).map(Some);
        }
        let planner = |encoder| Planner { encoder, weights, kv };
        let vision = model.vision().map(|vision| (vision, planner(vision)));
        let Some(plan) = MediaPlan::new(&bounds, vision, model.audio().map(planner))? else { return Ok(None) };
        if made.len() == MADE_MAX {
            made.remove(0);
        }
        made.push((bounds, plan.clone()));
        plan.sized(options).map(Some)
    }

    /// Returns the preparation of images and videos.
    fn seen(
        &self,
        config: &VisionConfig,
        options: &Options,
        context: u64,
        tokens_max: u64,
    ) -> Result<(Option<ImageSpec>, Option<VideoSpec>), PlanError> {
        let files = &self.files;
        let limits = Limits { options, usual: ITEM_TOKENS_MAX, context };
        Ok(match config.encoder {
            VisionKind::Intern(_) => {
                let image = tiles(files, config, options, context)?;
                (Some(image), tile_video(files, config, options, tokens_max)?)
            }
            VisionKind::Siglip => (Some(tiles(files, config, options, context)?), None),
            VisionKind::Siglip2(_) => (Some(pieces::image(files, config, &limits)?), None),
            VisionKind::Pixtral(_) => (Some(pieces::longest(files, config, &limits)?), None),
            VisionKind::Idefics3 => (Some(pieces::squares(files, config, &limits)?), None),
            VisionKind::Llama4(_) => (Some(pieces::canvases(files, config, &limits)?), None),
            // A model without a token for videos takes none.
            VisionKind::Gemma4(_) if config.tokens.video == config.tokens.image => {
                (Some(image(files, config, options, context)?), None)
            }
            _ => {
                let image = image(files, config, options, context)?;
                (Some(image), Some(video(files, config, options, tokens_max)?))
            }
        })
    }
}

/// Returns a processor's file with the same values as the encoder's configuration.
fn defaults(config: &VisionConfig) -> String {
    if let VisionKind::Intern(_) | VisionKind::Siglip | VisionKind::Llama4(_) = config.encoder {
        let side = config.table_side * config.patch;
        return format!(r#"{{"size": {{"height": {side}, "width": {side}}}}}"#);
    }
    if let VisionKind::Siglip2(_) | VisionKind::Idefics3 | VisionKind::Pixtral(_) = config.encoder {
        return mmproj::files(Some(config), None, &Processor::default()).0;
    }
    let (patch, merge, temporal) = (config.patch, config.merge, config.temporal);
    if let VisionKind::Gemma4(_) = config.encoder {
        return format!(
            r#"{{"image_processor_type": "Gemma4", "patch_size": {patch}, "pooling_kernel_size": {merge}}}"#
        );
    }
    format!(r#"{{"patch_size": {patch}, "merge_size": {merge}, "temporal_patch_size": {temporal}}}"#)
}

/// Returns the outer processor's file of a model that cuts images into tiles; `None` for other models.
fn sequence_length(config: &VisionConfig) -> Option<String> {
    let tokens = (config.table_side / config.merge).pow(2);
    matches!(config.encoder, VisionKind::Intern(_)).then(|| format!(r#"{{"image_seq_length": {tokens}}}"#))
}

/// Returns the preparation of images: as the processor says, within the options' limit and a request's tokens.
fn image(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    context: u64,
) -> Result<ImageSpec, PlanError> {
    let rule = match config.encoder {
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => {
            Patches::filling(&files.image, IMAGE_TOKENS)?.of_whole_tokens()
        }
        VisionKind::Gemma4(_) => Patches::filling(&files.image, IMAGE_TOKENS)?,
        _ => Patches::image(&files.image, config.window.map(|pixels| pixels as u64))?,
    };
    agree(&rule, config)?;
    agree_on_positions(&rule, config)?;
    let token = rule.factor() * rule.factor();
    let asked = options.max_image_pixels.unwrap_or(ITEM_TOKENS_MAX * token);
    // A context too short for one image does not fail the plan; only requests with images are refused.
    let carried = context.saturating_mul(token).max(rule.min_pixels);
    let most = rule.max_pixels.min(asked).min(carried);
    if most < rule.min_pixels {
        let problem = format!("leaves {most} pixels; this model's processor makes {} at least", rule.min_pixels);
        return Err(PlanError::Option { flag: "--max-image-pixels", problem });
    }
    let rule = ImageRule::Patches(rule.with_max_pixels(most)?);
    let tokens = largest_images(&rule, context);
    let tokens_max = tokens.iter().map(|candidate| candidate.shape.tokens).max().unwrap_or(0);
    let normalize = match config.encoder {
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => Normalize::unit_range(&files.image)?,
        VisionKind::Gemma4(_) => Normalize::centred(&files.image)?,
        _ => Normalize::new(&files.image, Normalize::CLIP)?,
    };
    let bounds = image_bounds(&rule);
    Ok(ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max, bounds })
}

/// Returns the preparation of images that are cut into tiles.
fn tiles(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    context: u64,
) -> Result<ImageSpec, PlanError> {
    let (patch, merge) = (config.patch as u64, config.merge as u64);
    let (rule, means) = match config.encoder {
        VisionKind::Siglip => {
            let tokens = (config.table_side / config.merge).pow(2) as u64;
            (Tiles::one(files, patch, merge, tokens)?, Normalize::HALVES)
        }
        _ => (Tiles::new(files, patch, merge)?, Normalize::CLIP),
    };
    agree_on_tiles(&rule, config)?;
    let asked = match options.max_image_pixels {
        Some(pixels) => pixels / rule.tile.pixels(),
        None => rule.of_tokens(ITEM_TOKENS_MAX).unwrap_or(1),
    };
    // A context too short for one image does not fail the plan; only requests with images are refused.
    let carried = rule.of_tokens(context).unwrap_or(0).max(rule.min_tiles);
    let most = rule.max_tiles.min(asked).min(carried);
    if most < rule.min_tiles {
        let problem = format!("leaves {most} tiles; this model's processor makes {} at least", rule.min_tiles);
        return Err(PlanError::Option { flag: "--max-image-pixels", problem });
    }
    let rule = rule.with_max_tiles(most)?;
    let normalize = Normalize::new(&files.image, means)?;
    let tokens_max = rule.worst().tokens;
    let rule = ImageRule::Tiles(rule);
    let bounds = image_bounds(&rule);
    Ok(ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max, bounds })
}

/// Returns the preparation of their videos. `None` if frames do not have the size that the encoder takes.
fn tile_video(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    tokens_max: u64,
) -> Result<Option<VideoSpec>, PlanError> {
    let rule = |frames| TileVideo::new(files, (config.patch as u64, config.merge as u64), frames);
    let frame = rule(1)?.frame;
    if let Err(why) = agree_on_tiles(&frame, config) {
        tracing::warn!(%why, "the model's video processor and its encoder do not agree: it takes no videos");
        return Ok(None);
    }
    let carried = (tokens_max / frame.tile_tokens).max(1);
    let frames = options.max_video_frames.map_or(carried, |most| most.min(carried));
    if frames == 0 {
        let problem = "leaves no frame of a video".into();
        return Err(PlanError::Option { flag: "--max-video-frames", problem });
    }
    let normalize = Normalize::new(&files.video, Normalize::CLIP)?;
    let (rule, placeholder) = (VideoRule::Tiles(rule(frames)?), config.tokens.video);
    Ok(Some(VideoSpec { rule, normalize, placeholder, tokens_max, bounds: [].into() }))
}

/// Returns the preparation of lists of frames. The tokens and the largest grids are filled in later.
fn video(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    tokens_max: u64,
) -> Result<VideoSpec, PlanError> {
    let (budget, means) = match config.encoder {
        VisionKind::Qwen3 => (Budget::Video, Normalize::HALVES),
        _ => (Budget::Frame, Normalize::CLIP),
    };
    let window = config.window.map(|pixels| pixels as u64);
    let mut rule = match config.encoder {
        VisionKind::Omni => PatchVideo::omni(files, window)?,
        VisionKind::Omni2_5 => PatchVideo::omni2_5(files, window)?,
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => PatchVideo::filling(files)?.of_whole_tokens(),
        VisionKind::Gemma4(_) => PatchVideo::filling(files)?,
        _ => PatchVideo::new(&files.video, budget, window)?,
    };
    agree(&rule.patches, config)?;
    agree_on_positions(&rule.patches, config)?;
    // Frames become smaller, so that the frames under one bound (all, or one patch's) are no larger than any item.
    let shared = if budget == Budget::Video { rule.patches.temporal } else { 1 };
    let token = rule.patches.factor().pow(2) * shared;
    let most = if options.max_video_frames.is_some() { tokens_max.max(ITEM_TOKENS_MAX) } else { ITEM_TOKENS_MAX };
    let (min, max) = (rule.patches.min_pixels, rule.patches.max_pixels.min(most.saturating_mul(token)));
    if max < min {
        let why = format!("a video of {most} tokens has {max} at most, not {min}");
        return Err(MediaError::BadConfig { key: "min_pixels", why }.into());
    }
    rule.patches.max_pixels = max;
    if let Some(most) = options.max_video_frames {
        if most < rule.patches.temporal {
            let problem = format!("is {most}; a patch has {} frames", rule.patches.temporal);
            return Err(PlanError::Option { flag: "--max-video-frames", problem });
        }
        rule.sampling.max_frames = rule.sampling.max_frames.min(most);
    }
    let normalize = match config.encoder {
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => Normalize::unit_range(&files.video)?,
        VisionKind::Gemma4(_) => Normalize::centred(&files.video)?,
        _ => Normalize::new(&files.video, means)?,
    };
    let (rule, placeholder) = (VideoRule::Patches(rule), config.tokens.video);
    Ok(VideoSpec { rule, normalize, placeholder, tokens_max, bounds: [].into() })
}
