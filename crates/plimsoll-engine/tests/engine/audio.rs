//! Audio encoders in the engine, with and without a vision encoder. Answers are the reference's whatever runs beside them. Audio clips are
//! found again by content, and nothing larger than the self-test is accepted.

use plimsoll_engine::media::MediaItem;
use plimsoll_engine::{EngineHandle, Host, LoadedModel, Options, Refusal, Request, Transcript, start};
use plimsoll_models::Grid;
use serde_json::Value;

use crate::common::heard::{audio, cases_of, played, request, small};
use crate::common::senses::{
    all_is_back, as_the_reference, encoders_kept_to_their_plan, outputs_come_back, told_apart,
};
use crate::common::{collect, exact, fixtures, two_turns};

fn engine(options: &Options) -> EngineHandle {
    engine_of("omni", options)
}

/// Qwen2.5-Omni.
const CHUNKS: &str = "omni2.5";
/// A decoder that attends to an encoder's output.
const WHISPER: &str = "whisper";
/// Qwen3-ASR from GGUF, with a clip of eight seconds.
const TRANSCRIBER: &str = "gguf-asr";
/// Gemma 4 unified: its images have 70 tokens, which one step computes.
const UNIFIED: &str = "vl-gemma4-unified-audio";

fn engine_of(model: &str, options: &Options) -> EngineHandle {
    let rows = if model == UNIFIED { options.batch_max_tokens.max(96) } else { options.batch_max_tokens };
    let seconds = if model == TRANSCRIBER { Some(10) } else { options.max_audio_seconds };
    let options = &Options { batch_max_tokens: rows, max_audio_seconds: seconds, ..options.clone() };
    let loaded = LoadedModel::open(&fixtures().join("models").join(model)).unwrap();
    let host = Host::read(options).unwrap();
    start(&loaded.checkpoint, loaded.tokenizer, options, &host, |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

fn cases() -> Vec<Value> {
    cases_of("omni")
}

fn right(model: &str) {
    let engine = engine_of(model, &small(exact()));
    for case in cases_of(model) {
        as_the_reference(model, &case, &collect(engine.submit(request(&engine, &case, 12)).unwrap()));
    }
    encoders_kept_to_their_plan(&engine);
    all_is_back(&engine);
    engine.stop();
}

#[test]
fn qwen3_omni_hears_what_transformers_hears() {
    right("omni");
}

#[test]
fn qwen2_5_omni_hears_what_transformers_hears() {
    right(CHUNKS);
    let engine = engine_of(CHUNKS, &small(exact()));
    let spec = engine.media().unwrap();
    assert!(spec.image.is_some() && spec.video.is_some());
    assert_eq!(spec.transcript(), Some(Transcript::Instructed));
    engine.stop();
}

#[test]
fn qwen3_asr_hears_what_transformers_hears() {
    for model in ["asr", TRANSCRIBER] {
        right(model);
        let engine = engine_of(model, &small(exact()));
        let spec = engine.media().unwrap();
        assert!(spec.image.is_none() && spec.video.is_none());
        let shortest = spec.audio.as_ref().unwrap().rule.min_samples;
        assert_eq!((spec.transcript(), shortest), (Some(Transcript::Tagged), 8000));
        engine.stop();
    }
}

#[test]
#[ignore = "soak"]
fn omni_models_from_gguf_hear_what_transformers_hears() {
    for model in ["vl-gguf-omni", "vl-gguf-omni2.5"] {
        right(model);
        let engine = engine_of(model, &exact());
        let spec = engine.media().unwrap();
        assert!(spec.image.is_some() && spec.video.is_some());
        let longest = spec.audio.as_ref().unwrap().rule.max_seconds;
        assert_eq!(spec.transcript(), Some(Transcript::Instructed));
        // As the published feature extractors; without its file that of Qwen2.5-Omni would take 30 seconds.
        assert!(longest > 30, "{model}: {longest}");
        engine.stop();
    }
}

#[test]
fn gemma_4_hears_what_transformers_hears() {
    right("vl-gemma4-audio");
    let engine = engine_of("vl-gemma4-audio", &small(exact()));
    let spec = engine.media().unwrap();
    assert!(spec.image.is_some() && spec.video.is_some());
    assert_eq!(spec.transcript(), Some(Transcript::Instructed));
    engine.stop();
}

#[test]
fn gemma_4_unified_hears_what_transformers_hears() {
    right(UNIFIED);
}

#[test]
fn whisper_hears_what_transformers_hears() {
    right(WHISPER);
    let engine = engine_of(WHISPER, &small(exact()));
    let spec = engine.media().unwrap();
    assert!(matches!(spec.transcript(), Some(Transcript::Decoded(_))));
    let rule = &spec.audio.as_ref().unwrap().rule;
    assert_eq!((rule.min_samples, rule.max_seconds), (32_000, 2), "every clip is filled up");
    let mut text = request(&engine, &cases_of(WHISPER)[0], 1);
    text.media.clear();
    let Err(Refusal::Invalid { param, message }) = engine.submit(text) else { panic!("it is refused") };
    assert!(param == "model" && message.contains("use /v1/audio/transcriptions"), "{message}");
    engine.stop();
}

#[test]
fn i9_audio_in_company_of_whisper() {
    in_company(WHISPER);
}

#[test]
fn i9_audio_in_company_of_gemma_4() {
    in_company("vl-gemma4-audio");
    in_company(UNIFIED);
}

#[test]
fn i9_audio_in_company() {
    in_company("omni");
}

#[test]
fn i9_audio_in_company_of_chunks() {
    in_company(CHUNKS);
}

#[test]
fn i9_audio_in_company_of_a_model_that_only_hears() {
    in_company("asr");
    in_company(TRANSCRIBER);
}

fn in_company(model: &str) {
    let engine = |options: &Options| engine_of(model, options);
    let cases = cases_of(model);
    let alone: Vec<Vec<u32>> = {
        let engine = engine(&small(exact()));
        let answers =
            cases.iter().map(|case| collect(engine.submit(request(&engine, case, 30)).unwrap()).ids).collect();
        engine.stop();
        answers
    };
    // Unified's longest clip has 328 tokens; Whisper's context is 164.
    let (tokens, longest) = match model {
        UNIFIED => (640, 448),
        WHISPER => (320, 160),
        _ => (320, 256),
    };
    let tight = Options { max_total_token_num: Some(tokens), max_req_total_len: Some(longest), ..exact() };
    for options in [
        // Chunks that end inside audio clips, several audio clips (and images) waiting at once, room for few pages.
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
    let is_video = |item: &Value| item["kind"] == "video";
    let film = cases.iter().find(|case| case["items"].as_array().unwrap().iter().any(is_video)).unwrap();
    let tracked = cases.iter().find(|case| case["name"] == "films").unwrap();
    // Start times between whole steps: places have fractions that are rounded more than once.
    for (case, thousandths) in [(film, 311), (film, 407), (film, 533), (tracked, 533)] {
        let mut first = request(&cached, case, 100);
        first.media.iter_mut().for_each(|item| {
            item.seconds = item.seconds.map(|_| thousandths as f32 / 1000.0);
        });
        let (found, prompt) = two_turns(&cached, &plain, &first, &[5, 6, 7]);
        assert!(found > prompt + 48, "{found} tokens are found again, {prompt} of them of the first prompt");
    }
    [cached, plain].iter().for_each(EngineHandle::stop);
}

#[test]
fn two_audio_of_one_length_are_told_apart_and_one_is_found_again() {
    let engine = engine(&small(exact()));
    let case = &cases()[0];
    let mine = request(&engine, case, 8);
    let spec = engine.media().unwrap();
    let mut theirs = mine.clone();
    theirs.media[0] = audio(spec, &played(99, 5_000), mine.media[0].first as usize);
    told_apart(&engine, &mine, &theirs);
    engine.stop();
}

#[test]
fn i6_nothing_longer_than_the_self_test_is_accepted() {
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
    assert!(long.contains("an audio clip has 66 tokens; 1 to 65 are allowed (--max-audio-seconds)"), "{long}");
    let empty = words(&|item| item.shape.tokens = 0);
    assert!(empty.contains("0 tokens"), "{empty}");
    let lying = words(&|item| item.grid = Grid::audio(item.grid.width + 1));
    assert!(lying.contains("do not agree"), "{lying}");
    let square = words(&|item| item.grid = Grid { frames: 1, height: item.grid.width, width: 1 });
    assert!(square.contains("do not agree"), "{square}");
    let track = words(&|item| item.of_video = true);
    assert!(track.contains("the audio track of a video, which it is not"), "{track}");
    let elsewhere = words(&|item| item.first += 1);
    assert!(elsewhere.contains("is said to begin at token"), "{elsewhere}");
    engine.stop();
}

#[test]
fn audio_is_not_encoded_again_after_a_restart() {
    let ask = |engine: &EngineHandle, other: bool| -> Vec<Request> {
        let with_another_text = |mut request: Request| {
            request.prompt[0] ^= u32::from(other);
            request
        };
        cases().iter().map(|case| with_another_text(request(engine, case, 6))).collect()
    };
    outputs_come_back("omni", &small(exact()), engine, ask);
}
