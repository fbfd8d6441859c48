//! What media take: from a checkpoint's configuration and its processors' files to the worst legal items and every byte of them.
//!
//! The tower itself is run on the planner's device, for every legal item that no other one exceeds; what is found is what start-up
//! stresses and what requests are held to. Items are encoded in the workspace of steps: the two never coincide, so the
//! larger of them is planned, not both.

use std::sync::{Mutex, PoisonError};

use plimsoll_device::{DeviceError, KvShape, PlanDevice, WeightTable, Work};
use plimsoll_formats::{Checkpoint, Tower, Vision as VisionConfig};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{PatchVideo, Patches, ProcessorFiles};
use plimsoll_media::image::Normalize;
use plimsoll_media::{MediaError, Modality, OutputPool, Shape, Staging};
use plimsoll_memory::{Bytes, Component, PlanLine};
use plimsoll_models::{Grid, Pictures, PlaceRule, Vision};

use super::{ImageSpec, MediaSpec, VideoSpec};
use crate::options::Options;
use crate::planner::PlanError;

/// Rows of a page of encoder outputs: small beside a picture, so that little of the last page is wasted.
const OUTPUT_PAGE_ROWS: usize = 32;
/// Without a flag of the operator's no item has more tokens than this, whatever the model's processor would make of it: a picture of
/// 16384 tokens, which some processors allow, takes a CPU minutes, and everybody waits for it. llama.cpp draws the line here, too.
const ITEM_TOKENS_MAX: u64 = 4096;
/// Largest file of a processor's configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What a model with a tower takes, and what that costs.
#[derive(Clone, Debug)]
pub struct MediaPlan {
    image: Option<ImageSpec>,
    video: Option<VideoSpec>,
    parameters: String,
    places: PlaceRule,
    items_max: usize,
    batch: usize,
    /// Numbers of an output row.
    width: usize,
    /// Pages of outputs.
    pages: usize,
    media_bytes: u64,
    /// Bytes of a batch's patches.
    patch_bytes: u64,
    /// The batches that take most of the workspace: what the proof runs.
    pub(crate) worst: Vec<Vec<Grid>>,
    /// What they take.
    pub(crate) workspace: usize,
    /// Tokens of the largest item, and its work.
    pub(crate) largest: (u64, Work),
}

/// One legal item that no other exceeds.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    grid: Grid,
    shape: Shape,
}

/// What it takes of the workspace: so much for each in a batch, and so much once.
#[derive(Clone, Copy, Debug)]
struct Cost {
    each: usize,
    once: usize,
}

/// A tower on the planner's device.
struct Planner<'a> {
    tower: &'a dyn Vision,
    weights: &'a WeightTable,
    kv: KvShape,
}

impl Planner<'_> {
    /// Workspace and work of a batch.
    fn run(&self, grids: &[Grid]) -> Result<(usize, Work), DeviceError> {
        let mut device = PlanDevice::new(self.weights, self.kv);
        self.tower.encode(&mut device, &Pictures { grids, patches: &[] })?;
        Ok((device.high_water(), device.work()))
    }

    fn cost(&self, grid: Grid) -> Result<Cost, DeviceError> {
        let (one, two) = (self.run(&[grid])?.0, self.run(&[grid, grid])?.0);
        let each = two.saturating_sub(one);
        Ok(Cost { each, once: one.saturating_sub(each) })
    }

    /// The batches of `batch` items that no other batch exceeds: as many of the item that adds most as there is room for beside one
    /// that makes the most of the part that is needed once.
    fn worst(&self, batch: usize, candidates: &[Candidate]) -> Result<(Vec<Vec<Grid>>, usize), DeviceError> {
        let mut costs = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            costs.push((self.cost(candidate.grid)?, candidate.grid));
        }
        let Some(most) = costs.iter().max_by_key(|(cost, _)| cost.each) else { return Ok((Vec::new(), 0)) };
        let beside = |cost: &Cost| if batch > 1 { cost.once.max(most.0.once) } else { cost.once };
        let other = costs.iter().max_by_key(|(cost, _)| cost.each + beside(cost)).unwrap_or(most);
        let mut mixed = vec![most.1; batch];
        mixed[batch - 1] = other.1;
        let mut batches = vec![mixed, vec![most.1; batch]];
        batches.dedup();
        let mut workspace = 0;
        for grids in &batches {
            workspace = workspace.max(self.run(grids)?.0);
        }
        Ok((batches, workspace))
    }
}

/// What is left when everything goes that another has at least as much of in every way.
fn undominated(all: Vec<Candidate>) -> Vec<Candidate> {
    // Frames and windows are computed one after another, each by itself: how many there are takes no workspace.
    let sizes = |shape: &Shape| [shape.rows, shape.longest];
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in all {
        let own = sizes(&candidate.shape);
        let under = |a: [u64; 2], b: [u64; 2]| a.iter().zip(b).all(|(a, b)| *a <= b);
        if best.iter().any(|other| under(own, sizes(&other.shape))) {
            continue;
        }
        best.retain(|other| !under(sizes(&other.shape), own));
        best.push(candidate);
    }
    best
}

/// The largest items along a frontier, cut to `tokens_max` tokens.
fn along(rule: &Patches, modality: Modality, groups: u64, frontier: &[(u64, u64)], tokens_max: u64) -> Vec<Candidate> {
    let cut = |&(a, b): &(u64, u64)| (a, b.min(tokens_max / (a * groups)));
    let sides = frontier.iter().map(cut).filter(|(_, b)| *b > 0).flat_map(|(a, b)| [(a, b), (b, a)]);
    let candidate = |(a, b): (u64, u64)| {
        let side = |tokens: u64| (tokens * rule.merge) as usize;
        let grid = Grid { frames: groups as usize, height: side(a), width: side(b) };
        Candidate { grid, shape: rule.shape_of(modality, groups, a, b) }
    };
    undominated(sides.map(candidate).collect())
}

/// Reads a processor's file; none if there is none.
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

/// How a checkpoint's media are prepared: what its processors' files and its tower's configuration say.
#[derive(Debug)]
pub struct MediaRules {
    files: ProcessorFiles,
    config: VisionConfig,
    max_context: usize,
    /// Plans that have been made: the planner is asked again and again.
    made: Mutex<Vec<(Bounds, MediaPlan)>>,
}

/// What of the options decides how large items are.
#[derive(Clone, Debug, PartialEq)]
struct Bounds {
    image: ImageSpec,
    video: VideoSpec,
    batch: usize,
}

/// Plans that are remembered.
const MADE_MAX: usize = 8;

impl MediaRules {
    /// None where the files that say how pictures are prepared are not there: then the model serves text.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Option<Self>, PlanError> {
        let Some(config) = &checkpoint.config.vision else { return Ok(None) };
        if matches!(config.tower, Tower::Intern(_)) {
            tracing::warn!("the model sees pictures as tiles, which nobody here cuts yet: it takes text only");
            return Ok(None);
        }
        let [own, video, outer] = [
            file(checkpoint, "preprocessor_config.json")?,
            file(checkpoint, "video_preprocessor_config.json")?,
            file(checkpoint, "processor_config.json")?,
        ];
        let own = match (own, &outer) {
            (None, None) if checkpoint.has_data() => {
                tracing::warn!("the model has a vision tower, but no preprocessor_config.json: it takes text only");
                return Ok(None);
            }
            // A lone configuration: planned with the processors' own defaults.
            (None, None) => Some(defaults(config)),
            (own, _) => own,
        };
        if config.channels != 3 {
            return Err(MediaError::BadConfig { key: "in_channels", why: "pictures here have three".into() }.into());
        }
        Ok(Some(Self {
            files: ProcessorFiles::read(own.as_deref(), video.as_deref(), outer.as_deref())?,
            config: config.clone(),
            max_context: checkpoint.config.max_context,
            made: Mutex::default(),
        }))
    }

    /// What media take with these options.
    pub(crate) fn plan(
        &self,
        tower: &dyn Vision,
        weights: &WeightTable,
        kv: KvShape,
        options: &Options,
    ) -> Result<MediaPlan, PlanError> {
        let context = options.max_req_total_len.unwrap_or(usize::MAX).min(self.max_context) as u64;
        // Beyond the context no request can carry it.
        let video_tokens_max = if options.max_video_frames.is_some() { context } else { context.min(ITEM_TOKENS_MAX) };
        let image = image(&self.files, &self.config, options, context)?;
        let video = VideoSpec { tokens_max: video_tokens_max, ..video(&self.files, &self.config, options)? };
        let bounds = Bounds { image, video, batch: options.visual_infer_batch_size.max(1) };
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = made.iter().find(|(known, _)| *known == bounds) {
            return plan.sized(options);
        }
        let plan = MediaPlan::new(&bounds, &Planner { tower, weights, kv })?;
        if made.len() == MADE_MAX {
            made.remove(0);
        }
        made.push((bounds, plan.clone()));
        plan.sized(options)
    }
}

impl MediaPlan {
    /// Of items within bounds; without pools yet.
    fn new(bounds: &Bounds, planner: &Planner<'_>) -> Result<Self, PlanError> {
        let Bounds { image, video, batch } = bounds;
        let mut candidates = along(&image.rule, Modality::Image, 1, &image.rule.frontier(), image.tokens_max);
        let mut video_tokens = 0;
        for frames in 1..=video.rule.sampling.max_frames {
            let (rule, groups) = (&video.rule.patches, frames.div_ceil(video.rule.patches.temporal));
            let legal = along(rule, Modality::Video, groups, &video.rule.frontier(frames), video.tokens_max);
            video_tokens = legal.iter().map(|candidate| candidate.shape.tokens).max().unwrap_or(0).max(video_tokens);
            candidates = undominated([candidates, legal].concat());
        }
        let largest = candidates.iter().max_by_key(|candidate| candidate.shape.tokens);
        let Some(largest) = largest else {
            let why = "the context is too short for any picture".into();
            return Err(MediaError::BadConfig { key: "min_pixels", why }.into());
        };
        let (worst, workspace) = planner.worst(*batch, &candidates)?;
        let video = VideoSpec { tokens_max: video_tokens, ..video.clone() };
        Ok(Self {
            parameters: format!("{image:?} {video:?}"),
            patch_bytes: *batch as u64 * largest.shape.rows * (planner.tower.patch_width() * size_of::<f32>()) as u64,
            image: Some(image.clone()),
            video: Some(video),
            places: planner.tower.place_rule(),
            items_max: 0,
            batch: *batch,
            width: planner.tower.output_width(),
            pages: 0,
            media_bytes: 0,
            worst,
            workspace,
            largest: (largest.shape.tokens, planner.run(&[largest.grid])?.1),
        })
    }

    /// The same with the pools that `options` ask for.
    fn sized(&self, options: &Options) -> Result<Self, PlanError> {
        let pages = pages(options, self.width, self.largest.0 as usize, self.batch)?;
        let items_max = options.max_media_per_request;
        Ok(Self { pages, items_max, media_bytes: options.media_bytes, ..self.clone() })
    }

    /// What requests are checked against, with the pool of outputs.
    pub(crate) fn start(&self) -> MediaSpec {
        MediaSpec {
            image: self.image.clone(),
            video: self.video.clone(),
            parameters: self.parameters.clone(),
            places: self.places,
            items_max: self.items_max,
            batch: self.batch,
            staging: Staging::new(self.media_bytes),
            outputs: OutputPool::new(self.width, OUTPUT_PAGE_ROWS, self.pages),
        }
    }

    /// Bytes of the pool of outputs, and of a batch's patches.
    pub(crate) fn encoder_bytes(&self) -> u64 {
        OutputPool::bytes_for(self.width, OUTPUT_PAGE_ROWS, OUTPUT_PAGE_ROWS, self.pages) + self.patch_bytes
    }

    /// Its lines in the plan.
    pub(crate) fn lines(&self) -> [PlanLine; 2] {
        let (pages, rows) = (self.pages, self.pages * OUTPUT_PAGE_ROWS);
        let (tokens, batch, width) = (self.largest.0, self.batch, self.width);
        let detail = format!(
            "{rows} tokens x {width} numbers in {pages} pages; patches of {batch} x {tokens} tokens: {}",
            Bytes(self.patch_bytes)
        );
        let outputs = PlanLine { component: Component::EncoderOutputs, bytes: self.encoder_bytes(), detail };
        let detail = "a bound and no forecast: media while they are decoded, their pixels until requests end".into();
        [outputs, PlanLine { component: Component::MediaStaging, bytes: self.media_bytes, detail }]
    }

    /// For the line of the step workspace.
    pub(crate) fn words(&self) -> String {
        let (tokens, batch) = (self.largest.0, self.batch);
        format!("; or, between steps, {batch} media of up to {tokens} tokens: {}", Bytes(self.workspace as u64))
    }

    /// The next smaller bounds worth trying: pixels of a picture, frames of a video.
    pub(crate) fn smaller(&self) -> (Option<u64>, Option<u64>) {
        let image = self.image.as_ref().map(|image| (image.rule.max_pixels / 2, image.rule.min_pixels));
        let video = self.video.as_ref().map(|video| (video.rule.sampling.max_frames / 2, video.rule.patches.temporal));
        let allowed = |bound: Option<(u64, u64)>| bound.filter(|(value, least)| value >= least).map(|(value, _)| value);
        (allowed(image), allowed(video))
    }

    /// Bytes of outputs and of pixels that `pictures` of the largest size take. The outputs have room for any one item: a video may come.
    pub fn bytes_of_pictures(&self, pictures: u64) -> (u64, u64) {
        let tokens = self.image.as_ref().map_or(0, |image| image.tokens_max);
        let pages = OutputPool::bytes_for(self.width, OUTPUT_PAGE_ROWS, tokens as usize, 1);
        let any = OutputPool::bytes_for(self.width, OUTPUT_PAGE_ROWS, self.largest.0 as usize, 1);
        let side = self.image.as_ref().map_or(0, |image| image.rule.factor());
        ((pictures * pages).max(any), pictures * tokens * side * side * 3)
    }

    /// Tokens of the largest item, and its work.
    pub fn largest(&self) -> (u64, Work) {
        self.largest
    }

    /// Tokens of the largest picture.
    pub fn image_tokens(&self) -> u64 {
        self.image.as_ref().map_or(0, |image| image.tokens_max)
    }
}

/// Pages of the pool: as asked, or for a batch and one item more. One item must fit.
fn pages(options: &Options, width: usize, tokens: usize, batch: usize) -> Result<usize, PlanError> {
    let page = (OUTPUT_PAGE_ROWS * width * size_of::<f32>()) as u64;
    let one = tokens.div_ceil(OUTPUT_PAGE_ROWS);
    let Some(bytes) = options.encoder_output_bytes else { return Ok(one * (batch + 1)) };
    let pages = usize::try_from(bytes / page).unwrap_or(usize::MAX);
    if pages < one || pages > 1 << 24 {
        let needed = one as u64 * page;
        return Err(PlanError::Option {
            flag: "--encoder-output-bytes",
            problem: format!(
                "is {bytes}; one item of {tokens} tokens takes {needed} ({} at most): or make items smaller by \
                 --max-image-pixels and --max-video-frames",
                Bytes(page << 24)
            ),
        });
    }
    Ok(pages)
}

/// A processor's file that says what the tower's configuration does.
fn defaults(config: &VisionConfig) -> String {
    let (patch, merge, temporal) = (config.patch, config.merge, config.temporal);
    format!(r#"{{"patch_size": {patch}, "merge_size": {merge}, "temporal_patch_size": {temporal}}}"#)
}

/// The processor and the tower must agree on what a patch is.
fn agree(rule: &Patches, config: &VisionConfig) -> Result<(), PlanError> {
    let (said, is) = ([rule.patch, rule.merge, rule.temporal], [config.patch, config.merge, config.temporal]);
    if said.iter().zip(is).all(|(said, is)| *said == is as u64) {
        return Ok(());
    }
    let why = format!("the processor says {said:?}, the tower {is:?}");
    Err(MediaError::BadConfig { key: "patch_size, merge_size, temporal_patch_size", why }.into())
}

/// How pictures are prepared: as the processor says, made no larger than asked or than a request can carry.
fn image(
    files: &ProcessorFiles,
    config: &VisionConfig,
    options: &Options,
    context: u64,
) -> Result<ImageSpec, PlanError> {
    let mut rule = Patches::image(&files.image, config.window.map(|pixels| pixels as u64))?;
    agree(&rule, config)?;
    let token = rule.factor() * rule.factor();
    let asked = options.max_image_pixels.unwrap_or(ITEM_TOKENS_MAX * token);
    let carried = context.saturating_mul(token);
    rule.max_pixels = rule.max_pixels.min(asked).min(carried);
    if rule.max_pixels < rule.min_pixels {
        return Err(PlanError::Option {
            flag: "--max-image-pixels",
            problem: format!(
                "leaves {} pixels; this model's processor makes {} at least",
                rule.max_pixels, rule.min_pixels
            ),
        });
    }
    let tokens = along(&rule, Modality::Image, 1, &rule.frontier(), context);
    let tokens_max = tokens.iter().map(|candidate| candidate.shape.tokens).max().unwrap_or(0);
    let normalize = Normalize::new(&files.image, Normalize::CLIP)?;
    Ok(ImageSpec { rule, normalize, placeholder: config.tokens.image, tokens_max })
}

/// How lists of frames are prepared; how many tokens they come to is found later.
fn video(files: &ProcessorFiles, config: &VisionConfig, options: &Options) -> Result<VideoSpec, PlanError> {
    let (budget, means) = match config.tower {
        Tower::Qwen3 => (Budget::Video, Normalize::HALVES),
        _ => (Budget::Frame, Normalize::CLIP),
    };
    let mut rule = PatchVideo::new(&files.video, budget, config.window.map(|pixels| pixels as u64))?;
    agree(&rule.patches, config)?;
    if budget == Budget::Video && options.max_video_frames.is_none() {
        // Frames become smaller, so that all of them fit.
        let most = ITEM_TOKENS_MAX * rule.patches.factor().pow(2) * rule.patches.temporal;
        rule.patches.max_pixels = rule.patches.max_pixels.min(most).max(rule.patches.min_pixels);
    }
    if let Some(most) = options.max_video_frames {
        if most < rule.patches.temporal {
            let problem = format!("is {most}; a patch has {} frames", rule.patches.temporal);
            return Err(PlanError::Option { flag: "--max-video-frames", problem });
        }
        rule.sampling.max_frames = rule.sampling.max_frames.min(most);
    }
    let normalize = Normalize::new(&files.video, means)?;
    Ok(VideoSpec { rule, normalize, placeholder: config.tokens.video, tokens_max: 0 })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
