//! Real towers in the engine: start-up proves them, answers are the reference's, and nothing beside a picture changes them.

use std::sync::Arc;

use plimsoll_engine::media::{MediaItem, MediaSpec, Pixels};
use plimsoll_engine::{EngineHandle, Host, Options, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_media::image::{Rgb, resize, tiles};
use plimsoll_media::{ContentKey, Size};
use plimsoll_models::Grid;
use plimsoll_text::Tokenizer;
use serde_json::Value;

use crate::common::senses::{all_is_back, as_the_reference, drawn, told_apart, towers_kept_to_their_plan};
use crate::common::{self, collect, exact, fixtures, ids, quiet, reference, two_turns, with_drafts};

/// Small enough for a test; pictures of the references fit.
fn small(options: Options) -> Options {
    Options { max_image_pixels: Some(8192), max_video_frames: Some(8), media_bytes: 4 << 20, ..options }
}

fn engine(model: &str, options: &Options) -> EngineHandle {
    let dir = fixtures().join("models").join(model);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap());
    let host = Host::read(options).unwrap();
    start(&checkpoint, tokenizer, options, &host, |_| {}).unwrap_or_else(|error| panic!("{model}: {error}"))
}

/// Drawings as the model's processor makes them fit.
fn item(spec: &MediaSpec, frames: Vec<Rgb>, video: bool, first: usize, seconds: Option<f32>) -> MediaItem {
    let (image, film) = (&spec.image.as_ref().unwrap().rule, &spec.video.as_ref().unwrap().rule);
    let fit = match video {
        true => film.fit(frames.len() as u64, frames[0].size).unwrap(),
        false => image.fit(frames[0].size).unwrap(),
    };
    let content: Vec<u8> = frames.iter().flat_map(|frame| frame.data.iter().copied()).collect();
    let frames: Vec<Rgb> = match video || fit.canvas == fit.size {
        true => frames.iter().map(|frame| resize(frame, fit.size)).collect(),
        false => tiles(&frames[0], fit.canvas, fit.size),
    };
    assert_eq!(frames.len() as u64, fit.pictures);
    let side = |pixels: u32| (u64::from(pixels) / image.patches().patch) as usize;
    let grid = Grid { frames: fit.groups as usize, height: side(fit.size.height), width: side(fit.size.width) };
    let staged = spec.staging.reserve(frames.iter().map(|frame| frame.data.len() as u64).sum()).unwrap();
    let key = ContentKey::of(fit.shape.modality, &spec.parameters, &content);
    let pixels = Arc::new(Pixels { frames, spectrogram: Vec::new(), staged });
    MediaItem { key, shape: fit.shape, grid, first: first as u32, seconds, pixels }
}

/// A case of a reference, as a request.
fn request(engine: &EngineHandle, case: &Value, max_tokens: u32) -> Request {
    let spec = engine.media().unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let prompt = ids(&case["ids"]);
    let (mut media, mut from) = (Vec::new(), 0);
    for picture in case["pictures"].as_array().unwrap() {
        let (seed, frames) = (number(&picture["seed"]), number(&picture["frames"]));
        let size = Size::new(number(&picture["height"]) as u32, number(&picture["width"]) as u32);
        let shots = (0..frames.max(1)).map(|frame| drawn(seed, frame, size)).collect();
        let first = (from..prompt.len()).find(|at| spec.is_placeholder(prompt[*at])).unwrap();
        let seconds = (frames > 0).then(|| case["seconds"].as_f64().unwrap() as f32);
        let item = item(spec, shots, frames > 0, first, seconds);
        let mut left = item.shape.tokens;
        from = first;
        while left > 0 {
            left -= u64::from(spec.is_placeholder(prompt[from]));
            from += 1;
        }
        media.push(item);
    }
    Request { media, logprobs: Some(0), ..common::greedy(&prompt, max_tokens) }
}

fn cases(model: &str) -> Vec<Value> {
    reference(model)["cases"].as_array().unwrap().clone()
}

fn right(model: &str) {
    let engine = engine(model, &small(exact()));
    for case in cases(model) {
        let answer = collect(engine.submit(request(&engine, &case, 12)).unwrap());
        as_the_reference(model, &case, &answer);
    }
    towers_kept_to_their_plan(&engine);
    all_is_back(&engine);
    engine.stop();
}

#[test]
fn qwen3_5_sees_what_transformers_sees() {
    right("vl-qwen3.5");
    right("vl-qwen3.5-moe");
}

#[test]
fn qwen3_vl_sees_what_transformers_sees() {
    right("vl-qwen3");
    right("vl-qwen3-moe");
}

#[test]
fn qwen2_vl_and_qwen2_5_vl_see_what_transformers_sees() {
    right("vl-qwen2");
    right("vl-qwen2.5");
}

#[test]
fn internvl_sees_what_transformers_sees() {
    right("vl-intern");
    right("vl-intern-rms");
}

#[test]
fn i9_whatever_runs_beside_a_picture() {
    beside("vl-qwen3.5");
}

#[test]
fn i9_whatever_runs_beside_tiles() {
    beside("vl-intern");
}

fn beside(model: &str) {
    let cases = cases(model);
    let ask_alone = |options: &Options| -> Vec<Vec<u32>> {
        let engine = engine(model, options);
        let answers =
            cases.iter().map(|case| collect(engine.submit(request(&engine, case, 40)).unwrap()).ids).collect();
        engine.stop();
        answers
    };
    let alone = ask_alone(&small(exact()));
    let tight = Options { max_total_token_num: Some(256), max_req_total_len: Some(192), ..exact() };
    for options in [
        // Chunks that end inside pictures, several pictures at once, room for few pages, drafts.
        Options { batch_max_tokens: 16, graph_max_batch_size: 8, running_max_req_size: 8, ..exact() },
        Options { visual_infer_batch_size: 3, ..exact() },
        if model == "vl-qwen3.5" { with_drafts(2) } else { exact() },
        Options { prefix_cache: false, ..tight.clone() },
        tight,
    ] {
        let engine = engine(model, &small(options));
        let readers: Vec<_> =
            (0..12).map(|i| engine.submit(request(&engine, &cases[i % cases.len()], 40)).unwrap()).collect();
        for (i, reader) in readers.into_iter().enumerate() {
            let answer = collect(reader);
            assert_eq!((answer.error, &answer.ids), (None, &alone[i % cases.len()]));
        }
        quiet(&engine);
        engine.stop();
    }
}

#[test]
fn i9_a_second_turn_after_a_long_video_takes_nothing_that_was_generated_elsewhere() {
    let model = "vl-qwen2.5";
    let [cached, plain] = [true, false].map(|prefix_cache| engine(model, &small(Options { prefix_cache, ..exact() })));
    let cases = cases(model);
    let is_film = |item: &Value| item["frames"].as_u64().is_some_and(|frames| frames > 2);
    let film = cases.iter().find(|case| case["pictures"].as_array().unwrap().iter().any(is_film)).unwrap();
    for (seconds, shared) in [(100.0, false), (0.0, true)] {
        let mut first = request(&cached, film, 60);
        first.media.iter_mut().for_each(|item| item.seconds = item.seconds.map(|_| seconds));
        let (found, prompt) = two_turns(&cached, &plain, &first, &[5, 6, 7]);
        assert_eq!(
            found > prompt,
            shared,
            "{seconds} s between frames: {found} tokens found, {prompt} in the first prompt"
        );
    }
    [cached, plain].iter().for_each(EngineHandle::stop);
}

#[test]
fn two_pictures_of_one_size_are_told_apart() {
    let model = "vl-qwen3.5";
    let engine = engine(model, &small(exact()));
    let case = &cases(model)[0];
    let mine = request(&engine, case, 8);
    let mut theirs = mine.clone();
    let frame = &mine.media[0].pixels.frames[0];
    let other = Rgb { size: frame.size, data: frame.data.iter().map(|value| 255 - value).collect() };
    theirs.media[0] = item(engine.media().unwrap(), vec![other], false, mine.media[0].first as usize, None);
    told_apart(&engine, &mine, &theirs);
    engine.stop();
}
