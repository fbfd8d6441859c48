//! The plan of media against real towers: every legal item, in every company, takes no more than was planned.

use std::path::{Path, PathBuf};

use plimsoll_media::Size;

use super::*;
use crate::planner::{Blueprint, EnginePlan, Line};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/vl-qwen3.5")
}

fn options() -> Options {
    let small =
        Options { batch_max_tokens: 64, graph_max_batch_size: 8, running_max_req_size: 8, ..Options::default() };
    Options { max_image_pixels: Some(16 * 64), max_video_frames: Some(6), media_bytes: 1 << 20, ..small }
}

fn planned(options: &Options) -> Result<(Blueprint, EnginePlan), PlanError> {
    let checkpoint = Checkpoint::open(&fixture()).unwrap();
    let blueprint = Blueprint::new(&checkpoint, options)?;
    let plan = blueprint.plan(options, 1, &Line::of_budget(400 << 20, "a test"))?;
    Ok((blueprint, plan))
}

/// All grids that sizes up to a bound become.
fn legal(media: &MediaPlan) -> Vec<Grid> {
    let (image, video) = (media.image.as_ref().unwrap(), media.video.as_ref().unwrap());
    let patches = |size: Size, frames: usize| {
        let side = |pixels: u32| pixels as usize / image.rule.patch as usize;
        Grid { frames, height: side(size.height), width: side(size.width) }
    };
    let mut grids = Vec::new();
    // Every size up to 280, and strips as long as they may be.
    let square = (1..280).flat_map(|h| (1..280).map(move |w| (h, w)));
    let sizes = square.chain((1..40).flat_map(|h| (1..h * 200).step_by(5).map(move |w| (h, w))));
    for (h, w) in sizes {
        grids.extend(image.rule.resize(Size::new(h, w)).ok().map(|size| patches(size, 1)));
        for frames in 1..=6 {
            let size = video.rule.resize(frames, Size::new(h, w)).ok();
            grids.extend(size.map(|size| patches(size, frames.div_ceil(2) as usize)));
        }
    }
    grids.sort_unstable_by_key(|grid| (grid.frames, grid.height, grid.width));
    grids.dedup();
    grids
}

#[test]
fn a30_no_legal_item_takes_more_than_the_worst_case() {
    let (blueprint, plan) = planned(&options()).unwrap();
    let media = plan.media.as_ref().unwrap();
    let tower = blueprint.model.vision().unwrap();
    let planner = Planner { tower, weights: &blueprint.weights, kv: plan.kv };
    let all = legal(media);
    assert!(all.len() > 200, "{} grids", all.len());
    let dearest = all.iter().map(|grid| planner.run(&[*grid]).unwrap().0).max().unwrap();
    assert_eq!(dearest, media.workspace, "the worst case is one that occurs");
    let most = all.iter().map(|grid| grid.patches() as u64 / 4).max().unwrap();
    assert_eq!(most, media.video.as_ref().unwrap().tokens_max);
    assert_eq!(media.image_tokens(), media.image.as_ref().unwrap().rule.worst(|shape| shape.tokens).tokens);
}

#[test]
fn a28_no_company_of_legal_items_takes_more_than_the_proven_batch() {
    for batch in [2, 3] {
        let options = Options { visual_infer_batch_size: batch, ..options() };
        let (blueprint, plan) = planned(&options).unwrap();
        let media = plan.media.as_ref().unwrap();
        let tower = blueprint.model.vision().unwrap();
        let planner = Planner { tower, weights: &blueprint.weights, kv: plan.kv };
        let all = legal(media);
        let mut state = 7_usize;
        for _ in 0..3000 {
            let mut any = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                all[(state >> 33) % all.len()]
            };
            let company: Vec<_> = (0..batch).map(|_| any()).collect();
            let (bytes, _) = planner.run(&company).unwrap();
            assert!(bytes <= media.workspace, "{company:?} take {bytes} of {}", media.workspace);
        }
    }
}

#[test]
fn a26_the_batch_is_what_was_asked_and_never_none() {
    for batch in 1..=4 {
        let options = Options { visual_infer_batch_size: batch, ..options() };
        assert_eq!(planned(&options).unwrap().1.media.unwrap().batch, batch);
    }
    let none = planned(&Options { visual_infer_batch_size: 0, ..options() }).err().unwrap().to_string();
    assert!(none.contains("--visual-infer-batch-size is 0"), "{none}");
}

#[test]
fn tower_and_model_share_one_workspace() {
    let (_, plan) = planned(&options()).unwrap();
    let media = plan.media.as_ref().unwrap();
    let (mut blueprint, _) = planned(&options()).unwrap();
    blueprint.media = None;
    let text = blueprint.plan(&options(), 1, &Line::of_budget(400 << 20, "a test")).unwrap();
    let scratch = plimsoll_device::cpu::scratch_bytes(&blueprint.model.shape(options().kv_dtype), 1);
    assert_eq!(plan.workspace, text.workspace.max(media.workspace + scratch), "the larger of the two, not both");
    let text = plan.plan.to_string();
    for words in ["encoder_outputs", "media_staging", "between steps"] {
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(plan.plan.bytes(Component::EncoderOutputs), media.encoder_bytes());
    assert_eq!(plan.plan.bytes(Component::MediaStaging), 1 << 20);
}

#[test]
fn what_does_not_fit_says_which_flags_make_media_smaller() {
    let checkpoint = Checkpoint::open(&fixture()).unwrap();
    let huge = Options { max_image_pixels: None, media_bytes: 1 << 30, ..options() };
    let blueprint = Blueprint::new(&checkpoint, &huge).unwrap();
    let error = blueprint.plan(&huge, 1, &Line::of_budget(400 << 20, "a test")).err().unwrap().to_string();
    for flag in ["--max-image-pixels", "--max-video-frames", "--encoder-output-bytes", "--media-bytes"] {
        assert!(error.contains(flag), "{error}");
    }
    let tight = Options { encoder_output_bytes: Some(1000), ..options() };
    let error = planned(&tight).err().unwrap().to_string();
    assert!(error.contains("--encoder-output-bytes is 1000") && error.contains("--max-image-pixels"), "{error}");
    let none = Options { max_image_pixels: Some(10), ..options() };
    let error = planned(&none).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels leaves 10"), "{error}");
}

#[test]
fn a_lone_configuration_is_planned_with_the_processors_defaults() {
    let dir = std::env::temp_dir().join(format!("plimsoll-lone-vision-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(fixture().join("config.json"), dir.join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let options = || Options { max_image_pixels: Some(1 << 16), ..options() };
    let blueprint = Blueprint::new(&checkpoint, &options()).unwrap();
    assert_eq!(blueprint.media.as_ref().unwrap().image.as_ref().unwrap().rule.patch, 4);
    // With weights the files must be there: without them pictures would be prepared in a way that nobody has named.
    for name in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture().join(name), dir.join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(Blueprint::new(&checkpoint, &options()).unwrap().media.is_none());
    // And they must agree with the tower.
    std::fs::write(dir.join("preprocessor_config.json"), r#"{"patch_size": 14, "merge_size": 2}"#).unwrap();
    let error = Blueprint::new(&checkpoint, &options()).err().unwrap().to_string();
    assert!(error.contains("patch_size"), "{error}");
    std::fs::remove_dir_all(&dir).unwrap();
}
