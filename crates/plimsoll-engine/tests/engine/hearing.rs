//! A tower that hears beside one that sees, in the engine: answers are the reference's whatever runs beside them, sounds are found again
//! by content, and nothing larger than what was proven comes in.

#[path = "../../../plimsoll-models/tests/common/played.rs"]
mod played;

use std::sync::Arc;

use played::played;
use plimsoll_engine::media::{MediaItem, MediaSpec, Pixels};
use plimsoll_engine::{EngineHandle, Host, Options, Refusal, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_media::image::Rgb;
use plimsoll_media::{ContentKey, Modality, Shape, Size};
use plimsoll_models::Grid;
use plimsoll_text::Tokenizer;
use serde_json::Value;

use crate::common::senses::{all_is_back, as_the_reference, drawn, told_apart, towers_kept_to_their_plan};
use crate::common::{self, collect, exact, fixtures, ids, reference, two_turns};

/// Small enough for a test; what the references show and play fits.
fn small(options: Options) -> Options {
    let media =
        Options { max_image_pixels: Some(8192), max_video_frames: Some(8), max_audio_seconds: Some(5), ..options };
    Options { media_bytes: 4 << 20, ..media }
}

fn engine(options: &Options) -> EngineHandle {
    let dir = fixtures().join("models/omni");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap());
    let host = Host::read(options).unwrap();
    start(&checkpoint, tokenizer, options, &host, |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

fn sound(spec: &MediaSpec, samples: &[f32], first: usize) -> MediaItem {
    let audio = spec.audio.as_ref().unwrap();
    let frames = audio.mel.frames(samples.len());
    let mut spectrogram = vec![0.0; frames * audio.mel.bands()];
    audio.mel.spectrogram(samples, &mut spectrogram);
    let content: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let tokens = audio.rule.tokens(frames as u64);
    let shape = Shape { modality: Modality::Audio, rows: tokens, sequences: 1, longest: tokens, tokens };
    let staged = spec.staging.reserve((spectrogram.len() * 4) as u64).unwrap();
    MediaItem {
        key: ContentKey::of(Modality::Audio, &spec.parameters, &content),
        shape,
        grid: Grid::sound(frames),
        first: first as u32,
        seconds: None,
        pixels: Arc::new(Pixels { frames: Vec::new(), spectrogram, staged }),
    }
}

fn shown(spec: &MediaSpec, frames: Vec<Rgb>, video: Option<f32>, first: usize) -> MediaItem {
    let size = frames[0].size;
    let groups = if video.is_some() { frames.len().div_ceil(2) } else { 1 };
    let grid = Grid { frames: groups, height: size.height as usize / 4, width: size.width as usize / 4 };
    let modality = if video.is_some() { Modality::Video } else { Modality::Image };
    let (tokens, longest) = ((grid.patches() / 4) as u64, (grid.height * grid.width) as u64);
    let content: Vec<u8> = frames.iter().flat_map(|frame| frame.data.iter().copied()).collect();
    MediaItem {
        key: ContentKey::of(modality, &spec.parameters, &content),
        shape: Shape { modality, rows: tokens * 4, sequences: groups as u64, longest, tokens },
        grid,
        first: first as u32,
        seconds: video,
        pixels: Arc::new(Pixels {
            frames,
            spectrogram: Vec::new(),
            staged: spec.staging.reserve(content.len() as u64).unwrap(),
        }),
    }
}

/// A case of the reference, as a request.
fn request(engine: &EngineHandle, case: &Value, max_tokens: u32) -> Request {
    let spec = engine.media().unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let prompt = ids(&case["ids"]);
    let (mut media, mut from) = (Vec::new(), 0);
    for given in case["items"].as_array().unwrap() {
        let seed = number(&given["seed"]);
        let first = (from..prompt.len()).find(|at| spec.is_placeholder(prompt[*at])).unwrap();
        let item = if given["kind"] == "sound" {
            sound(spec, &played(seed as i64, number(&given["samples"])), first)
        } else {
            let frames = number(&given["frames"]);
            let size = Size::new(number(&given["height"]) as u32, number(&given["width"]) as u32);
            let shots = (0..frames.max(1)).map(|frame| drawn(seed, frame, size)).collect();
            shown(spec, shots, (frames > 0).then(|| case["seconds"].as_f64().unwrap() as f32), first)
        };
        from = first + item.shape.tokens as usize;
        media.push(item);
    }
    Request { media, logprobs: Some(0), ..common::greedy(&prompt, max_tokens) }
}

fn cases() -> Vec<Value> {
    reference("omni")["cases"].as_array().unwrap().clone()
}

#[test]
fn qwen3_omni_hears_what_transformers_hears() {
    let engine = engine(&small(exact()));
    for case in cases() {
        as_the_reference("omni", &case, &collect(engine.submit(request(&engine, &case, 12)).unwrap()));
    }
    towers_kept_to_their_plan(&engine);
    all_is_back(&engine);
    engine.stop();
}

#[test]
fn i9_whatever_runs_beside_a_sound() {
    let cases = cases();
    let alone: Vec<Vec<u32>> = {
        let engine = engine(&small(exact()));
        let answers =
            cases.iter().map(|case| collect(engine.submit(request(&engine, case, 30)).unwrap()).ids).collect();
        engine.stop();
        answers
    };
    let tight = Options { max_total_token_num: Some(320), max_req_total_len: Some(256), ..exact() };
    for options in [
        // Chunks that end inside sounds, several sounds (and pictures) waiting at once, room for few pages.
        Options { batch_max_tokens: 16, graph_max_batch_size: 8, running_max_req_size: 8, ..exact() },
        Options { visual_infer_batch_size: 3, ..exact() },
        Options { prefix_cache: false, ..tight.clone() },
        tight,
    ] {
        let engine = engine(&small(options));
        let readers: Vec<_> =
            (0..15).map(|i| engine.submit(request(&engine, &cases[i % cases.len()], 30)).unwrap()).collect();
        for (i, reader) in readers.into_iter().enumerate() {
            let answer = collect(reader);
            assert_eq!(
                (answer.error, &answer.ids),
                (None, &alone[i % cases.len()]),
                "{}",
                cases[i % cases.len()]["name"]
            );
        }
        all_is_back(&engine);
        engine.stop();
    }
}

#[test]
fn i9_a_second_turn_finds_what_it_would_compute() {
    let [cached, plain] = [true, false].map(|prefix_cache| engine(&small(Options { prefix_cache, ..exact() })));
    let cases = cases();
    let is_film = |item: &Value| item["frames"].as_u64().is_some_and(|frames| frames > 2);
    let film = cases.iter().find(|case| case["items"].as_array().unwrap().iter().any(is_film)).unwrap();
    // Between whole steps, so that places have fractions that need rounding more than once on the way.
    for thousandths in [311, 407, 533] {
        let mut first = request(&cached, film, 100);
        first.media.iter_mut().for_each(|item| {
            item.seconds = item.seconds.map(|_| thousandths as f32 / 1000.0);
        });
        let (found, prompt) = two_turns(&cached, &plain, &first, &[5, 6, 7]);
        assert!(found > prompt + 48, "{found} tokens are found again, {prompt} of them of the first prompt");
    }
    [cached, plain].iter().for_each(EngineHandle::stop);
}

#[test]
fn two_sounds_of_one_length_are_told_apart_and_one_is_found_again() {
    let engine = engine(&small(exact()));
    let case = &cases()[0];
    let mine = request(&engine, case, 8);
    let spec = engine.media().unwrap();
    let mut theirs = mine.clone();
    theirs.media[0] = sound(spec, &played(99, 5_000), mine.media[0].first as usize);
    told_apart(&engine, &mine, &theirs);
    engine.stop();
}

#[test]
fn i6_nothing_longer_than_what_was_proven_comes_in() {
    let engine = engine(&small(exact()));
    let spec = engine.media().unwrap();
    let audio = spec.audio.as_ref().unwrap();
    assert_eq!((audio.rule.max_seconds, audio.tokens_max), (5, 65));
    let case = &cases()[0];
    let good = request(&engine, case, 1);
    let words = |change: &dyn Fn(&mut MediaItem)| {
        let mut bad = good.clone();
        change(&mut bad.media[0]);
        match engine.submit(bad) {
            Err(Refusal::Invalid { message, .. }) => message,
            other => panic!("{:?}", other.map(drop)),
        }
    };
    let long = words(&|item| item.shape.tokens = 66);
    assert!(long.contains("a sound has 66 tokens; 1 to 65 are allowed (--max-audio-seconds)"), "{long}");
    let empty = words(&|item| item.shape.tokens = 0);
    assert!(empty.contains("0 tokens"), "{empty}");
    let lying = words(&|item| item.grid = Grid::sound(item.grid.width + 1));
    assert!(lying.contains("do not agree"), "{lying}");
    let square = words(&|item| item.grid = Grid { frames: 1, height: item.grid.width, width: 1 });
    assert!(square.contains("do not agree"), "{square}");
    let elsewhere = words(&|item| item.first += 1);
    assert!(elsewhere.contains("is said to begin at token"), "{elsewhere}");
    engine.stop();
}
