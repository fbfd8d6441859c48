//! The plan of media against real encoders: every legal item, in every batch, takes no more than was planned.

use std::path::{Path, PathBuf};

use plimsoll_formats::{Checkpoint, Mmproj};
use plimsoll_media::Size;
use plimsoll_memory::Component;

use super::*;
use crate::plan::{Blueprint, EnginePlan, MemoryLimit, PlanError};

#[path = "plan_pieces_tests.rs"]
mod pieces;

fn fixture_of(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model)
}

fn fixture() -> PathBuf {
    fixture_of("vl-qwen3.5")
}

fn options() -> Options {
    let small =
        Options { batch_max_tokens: 64, graph_max_batch_size: 8, running_max_req_size: 8, ..Options::default() };
    Options { max_image_pixels: Some(16 * 64), max_video_frames: Some(6), media_bytes: 1 << 20, ..small }
}

fn planned(options: &Options) -> Result<(Blueprint, EnginePlan), PlanError> {
    planned_of("vl-qwen3.5", options)
}

fn planned_of(model: &str, options: &Options) -> Result<(Blueprint, EnginePlan), PlanError> {
    let checkpoint = Checkpoint::open(&fixture_of(model)).unwrap();
    let blueprint = Blueprint::new(&checkpoint, options)?;
    let plan = blueprint.plan(options, 1, &MemoryLimit::of_budget(400 << 20, "a test"))?;
    Ok((blueprint, plan))
}

/// All grids that sizes up to a bound become.
fn legal(media: &MediaPlan) -> Vec<Grid> {
    let (image, video) = (media.image.as_ref().unwrap(), media.video.as_ref().unwrap());
    let patches = |size: Size, frames: usize| {
        let side = |pixels: u32| pixels as usize / image.rule.patches().patch as usize;
        Grid { frames, height: side(size.height), width: side(size.width) }
    };
    let mut grids = Vec::new();
    // Every size up to 280, and strips as long as they may be.
    let square = (1..280).flat_map(|h| (1..280).map(move |w| (h, w)));
    let sizes = square.chain((1..40).flat_map(|h| (1..h * 200).step_by(5).map(move |w| (h, w))));
    for (h, w) in sizes {
        let fits = (1..=6).filter_map(|frames| video.rule.fit(frames, Size::new(h, w)).ok());
        let fits = fits.chain(image.rule.fit(Size::new(h, w)).ok());
        grids.extend(fits.map(|fit| patches(fit.size, fit.groups as usize)));
    }
    grids.sort_unstable_by_key(|grid| (grid.frames, grid.height, grid.width));
    grids.dedup();
    grids
}

#[test]
fn a30_no_legal_item_takes_more_than_the_worst_case() {
    // Frames apart, windows, deepstack, and none of these.
    for model in ["vl-qwen3.5", "vl-qwen2.5", "vl-qwen3", "vl-qwen2"] {
        no_legal_item_takes_more(model);
    }
}

fn no_legal_item_takes_more(model: &str) {
    let (blueprint, plan) = planned_of(model, &options()).unwrap();
    let media = plan.media.as_ref().unwrap();
    let encoder = blueprint.model.encoder(EncoderKind::Vision).unwrap();
    let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
    let all = legal(media);
    assert!(all.len() > 200, "{} grids", all.len());
    let dearest = all.iter().map(|grid| planner.run(&[*grid]).unwrap().0).max().unwrap();
    assert_eq!(dearest, media.workspace, "{model}: the worst case is one that occurs");
    let most = all.iter().map(|grid| grid.patches() as u64 / 4).max().unwrap();
    assert_eq!(most, media.video.as_ref().unwrap().tokens_max);
    let ImageRule::Patches(rule) = &media.image.as_ref().unwrap().rule else { panic!("{model} is resized") };
    assert_eq!(media.image_tokens(), rule.worst(|shape| shape.tokens).tokens);
}

#[test]
fn a30_no_cut_into_tiles_takes_more_than_the_worst_case() {
    let model = "vl-intern-rms";
    let (blueprint, plan) = planned_of(model, &options()).unwrap();
    let media = plan.media.as_ref().unwrap();
    let encoder = blueprint.model.vision().unwrap();
    let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
    let all = legal(media);
    let frames: Vec<usize> = all.iter().map(|grid| grid.frames).collect();
    assert_eq!(frames, [1, 2, 3, 4, 5, 6], "a tile, a video's frames, two to four tiles and a thumbnail");
    let dearest = all.iter().map(|grid| planner.run(&[*grid]).unwrap().0).max().unwrap();
    assert_eq!(dearest, media.workspace, "the worst case is one that occurs");
    assert_eq!((media.image_tokens(), media.video.as_ref().unwrap().tokens_max), (5 * 4, 6 * 4));
    assert_eq!(media.smaller(), (Some(2 * 256), Some(3)));
    // Pixels buy tiles; the thumbnail stands beside them.
    for (pixels, tokens) in [(256, 4), (700, 3 * 4), (768, 4 * 4), (1 << 20, 5 * 4)] {
        let options = Options { max_image_pixels: Some(pixels), ..options() };
        assert_eq!(planned_of(model, &options).unwrap().1.media.unwrap().image_tokens(), tokens, "{pixels} pixels");
    }
    let none = Options { max_image_pixels: Some(255), ..options() };
    let error = planned_of(model, &none).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels leaves 0 tiles"), "{error}");
    // A context that holds no thumbnail holds no second tile.
    let short = Options { max_req_total_len: Some(11), max_video_frames: None, ..options() };
    let media = planned_of(model, &short).unwrap().1.media.unwrap();
    assert_eq!((media.image_tokens(), media.video.unwrap().tokens_max), (4, 2 * 4));
    // A context too short for one tile does not fail the plan; only requests with images are refused.
    let media = planned_of(model, &Options { max_req_total_len: Some(3), ..short }).unwrap().1.media.unwrap();
    assert_eq!((media.image_tokens(), media.video.unwrap().tokens_max), (4, 4));
}

#[test]
fn tiles_must_be_the_encoders() {
    let dir = std::env::temp_dir().join(format!("plimsoll-tiles-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"] {
        std::fs::copy(fixture_of("vl-intern").join(name), dir.join(name)).unwrap();
    }
    let planned = || {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        Blueprint::new(&checkpoint, &options())?.media_plan(&options())
    };
    // The processor's default is 256 tokens a tile, and its file is not there.
    let error = planned().err().unwrap().to_string();
    assert!(error.contains("16 x 16 pixels and 256 tokens, the encoder 16 x 16 and 4"), "{error}");
    std::fs::write(dir.join("processor_config.json"), r#"{"image_seq_length": 4}"#).unwrap();
    assert!(planned().unwrap().unwrap().video.is_some());
    std::fs::write(dir.join("video_preprocessor_config.json"), r#"{"size": {"height": 32, "width": 32}}"#).unwrap();
    assert!(planned().unwrap().unwrap().video.is_none(), "frames that the encoder cannot see");
    // Without weights it is planned by the processors' defaults.
    ["model.safetensors", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
        .iter()
        .for_each(|name| std::fs::remove_file(dir.join(name)).unwrap());
    let media = planned().unwrap().unwrap();
    assert_eq!(media.image_tokens(), 5 * 4, "1024 pixels");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Returns the plan of a model with this file for its video processor.
fn planned_video(model: &str, name: &str, file: &str, options: Options) -> Result<MediaPlan, String> {
    let dir = std::env::temp_dir().join(format!("plimsoll-video-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"] {
        std::fs::copy(fixture_of(model).join(name), dir.join(name)).unwrap();
    }
    std::fs::write(dir.join("video_preprocessor_config.json"), file).unwrap();
    let (done, planned) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let plan = Blueprint::new(&checkpoint, &options).and_then(|blueprint| blueprint.media_plan(&options));
        std::fs::remove_dir_all(&dir).unwrap();
        let _ = done.send(plan.map(Option::unwrap).map_err(|error| error.to_string()));
    });
    planned.recv_timeout(std::time::Duration::from_secs(60)).expect("it is planned in time")
}

#[test]
fn a_videos_bounds_are_no_larger_than_a_request() {
    let sizes = r#""patch_size": 4, "merge_size": 2, "temporal_patch_size": 2"#;
    let with = |model: &str, name: &str, bounds: [u64; 2], options: Options| {
        let [min, max] = bounds;
        let file = format!(
            r#"{{{sizes}, "min_pixels": {min}, "max_pixels": {max}, "size": {{"shortest_edge": {min}, "longest_edge": {max}}}}}"#
        );
        planned_video(model, name, &file, options)
    };
    for model in ["vl-qwen2.5", "vl-qwen3"] {
        for max_video_frames in [None, Some(6)] {
            let options = || Options { max_video_frames, ..options() };
            // Such images would be tried one by one.
            for huge in [1 << 40, 1 << 22] {
                let error = with(model, "huge", [huge, huge], options()).err().unwrap();
                assert!(error.contains("min_pixels"), "{error}");
            }
            let plan = with(model, "wide", [4096, 1 << 40], options()).unwrap();
            let most = 4096 * 64 * if model == "vl-qwen3" { 2 } else { 1 };
            assert_eq!(plan.video.unwrap().rule.patches().max_pixels, most, "{model}");
        }
        // The largest frames that are tried, for each of many frames.
        with(model, "long", [200_000, 200_000], Options { max_video_frames: None, ..options() }).unwrap();
    }
}

#[test]
fn images_and_frames_that_fill_a_budget_take_no_more_than_the_worst_of_them() {
    let asked = || Options { max_image_pixels: None, max_video_frames: Some(3), batch_max_tokens: 128, ..options() };
    // Audio, which one of these models takes too, needs less than images.
    let options = || Options { max_audio_seconds: Some(1), ..asked() };
    // Whether an image's 70 tokens are computed in one step is the model's.
    for (model, in_one_step) in [("vl-gemma4", 70), ("vl-gemma4-e2b", 0), ("vl-gemma4-unified", 70)] {
        let (blueprint, plan) = planned_of(model, &options()).unwrap();
        let media = plan.media.as_ref().unwrap();
        assert_eq!((media.image_tokens(), media.rows_in_one_step()), (70, in_one_step), "{model}");
        assert_eq!(media.video.as_ref().unwrap().tokens_max, 3 * 70);
        let encoder = blueprint.model.encoder(EncoderKind::Vision).unwrap();
        let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
        let legal = legal(media).into_iter();
        let dearest = legal.map(|grid| planner.run(&[grid]).unwrap().0).max().unwrap();
        assert_eq!(dearest, media.workspace, "{model}: the worst case is one that occurs");
        // The least budget has 70 tokens of nine by nine pixels.
        let error =
            planned_of(model, &Options { max_image_pixels: Some(5669), ..options() }).err().unwrap().to_string();
        assert!(error.contains("--max-image-pixels") && error.contains("5670"), "{error}");
    }
}

#[test]
fn a_budget_that_the_encoder_has_no_positions_for_is_refused_by_name() {
    let dir = std::env::temp_dir().join(format!("plimsoll-budget-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture_of("vl-gemma4").join(name), dir.join(name)).unwrap();
    }
    let own = std::fs::read_to_string(fixture_of("vl-gemma4").join("preprocessor_config.json")).unwrap();
    let refusal = |tokens: u64| {
        let file = own.replace("\"max_soft_tokens\": 70", &format!("\"max_soft_tokens\": {tokens}"));
        std::fs::write(dir.join("preprocessor_config.json"), file).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let options = Options { max_image_pixels: None, batch_max_tokens: 2048, ..options() };
        let planned = Blueprint::new(&checkpoint, &options).and_then(|blueprint| blueprint.media_plan(&options));
        planned.expect_err("refused").to_string()
    };
    let (long, odd) = (refusal(140), refusal(100));
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(long.contains("420 patches on a side, the encoder has 216 positions"), "{long}");
    assert!(odd.contains("max_soft_tokens") && odd.contains("100 is none of"), "{odd}");
}

#[test]
fn a28_no_company_of_legal_items_takes_more_than_the_self_test() {
    for (batch, model) in [(2, "vl-qwen3.5"), (3, "vl-qwen2.5"), (3, "vl-qwen3"), (3, "vl-intern")] {
        let options = Options { visual_infer_batch_size: batch, ..options() };
        let (blueprint, plan) = planned_of(model, &options).unwrap();
        let media = plan.media.as_ref().unwrap();
        let encoder = blueprint.model.encoder(EncoderKind::Vision).unwrap();
        let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
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
fn encoder_and_model_share_one_workspace() {
    let (_, plan) = planned(&options()).unwrap();
    let media = plan.media.as_ref().unwrap();
    let (mut blueprint, _) = planned(&options()).unwrap();
    blueprint.media = None;
    let text = blueprint.plan(&options(), 1, &MemoryLimit::of_budget(400 << 20, "a test")).unwrap();
    let scratch =
        plimsoll_device::cpu::scratch_bytes(&blueprint.weights.shaped(blueprint.model.shape(options().kv_dtype)), 1);
    // Where no request takes more than a step, no chunk of a prompt waits between layers either.
    let short = Options { max_req_total_len: Some(options().batch_max_tokens), ..options() };
    let least = blueprint.plan(&short, 1, &MemoryLimit::of_budget(400 << 20, "a test")).unwrap();
    let chunk = text.workspace - least.workspace;
    let larger = text.workspace.max(chunk + media.workspace + scratch);
    assert_eq!(plan.workspace, larger, "a chunk and the larger of the two, not both");
    assert!(chunk > 0);
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
    let error = blueprint.plan(&huge, 1, &MemoryLimit::of_budget(400 << 20, "a test")).err().unwrap();
    let PlanError::DoesNotFit(shortfall) = error else { panic!("{error}") };
    let error = shortfall.details();
    // Where videos are the larger ones, smaller images save nothing.
    for flag in ["--max-video-frames", "--media-bytes"] {
        assert!(error.contains(flag), "{error}");
    }
    assert_eq!(blueprint.media_plan(&options()).unwrap().unwrap().smaller(), (Some(16 * 32), Some(3)));
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
    let media = blueprint.media_plan(&options()).unwrap().unwrap();
    assert_eq!(media.image.as_ref().unwrap().rule.patches().patch, 4);
    // A checkpoint with weights needs the files: without them the image preprocessing is unknown, and the model takes
    // text only.
    for name in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture().join(name), dir.join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(Blueprint::new(&checkpoint, &options()).unwrap().media_plan(&options()).unwrap().is_none());
    // And they must agree with the encoder.
    std::fs::write(dir.join("preprocessor_config.json"), r#"{"patch_size": 14, "merge_size": 2}"#).unwrap();
    let error = Blueprint::new(&checkpoint, &options()).unwrap().media_plan(&options()).err().unwrap().to_string();
    assert!(error.contains("patch_size"), "{error}");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a30_no_mix_of_audio_exceeds_the_self_test() {
    let options = Options { visual_infer_batch_size: 3, max_audio_seconds: Some(8), ..options() };
    let (blueprint, plan) = planned_of("omni", &options).unwrap();
    let media = plan.media.as_ref().unwrap();
    let encoder = blueprint.model.encoder(EncoderKind::Audio).unwrap();
    let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
    let audio = media.audio.as_ref().unwrap();
    let most = audio.rule.frames_max() as usize;
    assert_eq!((media.audio_seconds(), most, audio.tokens_max, media.audio(8)), (8, 800, 104, (104, 800 * 20 * 4)));
    let heard = media.worst.iter().filter(|(sense, _)| *sense == EncoderKind::Audio);
    assert_eq!(heard.map(|(_, grids)| grids.clone()).collect::<Vec<_>>(), [vec![Grid::audio(most); 3]]);
    for one in (2..=most).step_by(7) {
        let company = [Grid::audio(one), Grid::audio(most - one / 2), Grid::audio(most)];
        assert!(planner.run(&company).unwrap().0 <= media.workspace, "{company:?}");
    }
    assert!(media.patch_bytes >= (3 * most * 20 * 4) as u64);
    // Asked for less than a second can be carried: audio clips are not taken, images are.
    let short = Options { max_req_total_len: Some(12), max_image_pixels: Some(8 * 64), ..options };
    let media = blueprint.media_plan(&short).unwrap().unwrap();
    assert!(media.audio.is_none() && media.image.is_some());
    assert_eq!((media.audio_seconds(), media.shorter()), (0, None));
}

#[test]
fn a30_no_mix_of_audio_in_chunks_exceeds_the_self_test() {
    let options = Options { visual_infer_batch_size: 3, max_audio_seconds: Some(8), ..options() };
    let (blueprint, plan) = planned_of("omni2.5", &options).unwrap();
    let media = plan.media.as_ref().unwrap();
    let encoder = blueprint.model.encoder(EncoderKind::Audio).unwrap();
    let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
    // 25 tokens a second, of two rows each.
    assert_eq!((media.audio_seconds(), media.audio(8)), (8, (200, 800 * 20 * 4)));
    for one in (3..=800).step_by(7) {
        let company = [Grid::audio(one), Grid::audio(800 - one / 2), Grid::audio(800)];
        assert!(planner.run(&company).unwrap().0 <= media.workspace, "{company:?}");
    }
    // Without a flag: no more tokens than the largest item.
    let (_, plan) = planned_of("omni2.5", &Options { max_audio_seconds: None, ..options }).unwrap();
    assert_eq!(plan.media.unwrap().audio_seconds(), 4096 / 25);
}

/// A Whisper without audio would continue texts, which it cannot.
#[test]
fn a_decoder_of_audio_is_not_planned_without_audio() {
    let short = Options { max_req_total_len: Some(104), max_image_pixels: None, max_video_frames: None, ..options() };
    let error = planned_of("whisper", &short).err().unwrap().to_string();
    assert_eq!(error, "--max-req-total-len leaves 104 tokens; a clip takes 100: give at least 105");
    let bare = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture_of("whisper").join(file), bare.path().join(file)).unwrap();
    }
    let error = Blueprint::new(&Checkpoint::open(bare.path()).unwrap(), &options()).err().unwrap().to_string();
    assert!(error.contains("preprocessor_config.json: the file is missing"), "{error}");
}

#[test]
fn without_a_flag_no_audio_has_more_tokens_than_the_largest_item() {
    let (_, plan) = planned_of("omni", &options()).unwrap();
    let media = plan.media.unwrap();
    // 13 tokens a second; the context of the fixture is 4096.
    assert_eq!((media.audio_seconds(), media.shorter()), (315, Some(157)));
    assert_eq!(media.largest().0, 315 * 13);
}

#[test]
fn images_of_a_gguf_model_are_prepared_as_those_of_the_same_model_elsewhere() {
    for family in ["qwen3.5", "qwen3.5-moe", "qwen3-moe", "qwen2", "intern", "intern-rms"] {
        let media = |model: String| {
            let checkpoint = Checkpoint::open(&fixture_of(&model)).unwrap();
            let media = Blueprint::new(&checkpoint, &options()).unwrap().media_plan(&options()).unwrap();
            (checkpoint.config.vision.clone().unwrap(), media.expect("images"))
        };
        let ((config, gguf), (twin, plain)) = (media(format!("vl-gguf-{family}")), media(format!("vl-{family}")));
        assert_eq!(config, twin, "{family}");
        assert_eq!(gguf.image, plain.image, "{family}");
    }
}

#[test]
fn the_plan_says_what_the_vision_encoder_takes() {
    let (seeing, plan) = planned_of("vl-gguf-qwen3.5", &options()).unwrap();
    let words = plan.plan.to_string();
    assert!(words.contains("of them the vision encoder's"), "{words}");
    let checkpoint = Checkpoint::open_with(&fixture_of("vl-gguf-qwen3.5"), &Mmproj::Off).unwrap();
    let blueprint = Blueprint::new(&checkpoint, &options()).unwrap();
    let text = blueprint.plan(&options(), 1, &MemoryLimit::of_budget(400 << 20, "a test")).unwrap();
    assert!(!text.plan.to_string().contains("vision") && text.media.is_none());
    let weights = |plan: &EnginePlan| plan.plan.bytes(Component::Weights);
    let encoder = seeing.weights.bytes_below("visual.") as u64;
    assert!(words.contains(&format!("; {} of them", plimsoll_memory::Bytes(encoder))), "{encoder}: {words}");
    // The rest is frequencies, which no file has.
    let more = weights(&plan) - weights(&text);
    assert!((encoder..encoder + 256).contains(&more), "{encoder}, {more}");
}
