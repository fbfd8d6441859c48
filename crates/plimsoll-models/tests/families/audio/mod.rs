//! A model for audio and images, against transformers: spectrograms, the audio encoder's output, token positions
//! (between whole steps behind a video), and answers. An item's embeddings do not depend on the other items of the
//! batch.

mod lengths;
#[path = "../../common/played.rs"]
mod played;
mod tracks;

use crate::common::{Part, Rig, argmax, checkpoint, folder, ids, image, logprob, reference};
use played::played;
use plimsoll_device::{Declare, DtypePolicy, KvDtype, PlanDevice};
use plimsoll_formats::{Audio, AudioKind, Vision};
use plimsoll_media::Size;
use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::{AudioRule, Patches, ProcessorFiles};
use plimsoll_media::image::{Normalize, Rgb, patchify, patchify_len};
use plimsoll_models::{EncoderInput, EncoderKind, Grid};
use serde_json::Value;
use std::path::PathBuf;

const MODEL: &str = "omni";
const CHUNKS: &str = "omni2.5";
const CONFORMER: &str = "vl-gemma4-audio";
const WHISPER: &str = "whisper";
const UNIFIED: &str = "vl-gemma4-unified-audio";
const CONFORMER_IN_FILES: &str = "vl-gguf-gemma4-audio";
/// GGUF models, each with a model that has the processor's files for the same media.
const TWINS: [(&str, &str); 3] = [("vl-gguf-omni", MODEL), ("vl-gguf-omni2.5", CHUNKS), ("gguf-asr", "asr")];
/// Largest difference allowed between a log-probability and its reference.
const LOGPROB_TOLERANCE: f64 = 2e-3;
/// Largest difference allowed between a number of an encoder's output and its reference, as a share of the row's largest.
const TOWER_TOLERANCE: f64 = 1e-4;
/// Largest difference allowed between a number of a spectrogram (or a patch) and its reference, of values between -1 and 2.
const MEL_TOLERANCE: f64 = 2e-5;
/// The reference has every 131st value of the patches, and every 997th of the published spectrogram.
const PATCH_STEP: usize = 131;
const MEL_STEP: usize = 997;

/// The folder with the processor's files of a model.
fn prepared(model: &str) -> PathBuf {
    folder(TWINS.iter().find(|(own, _)| *own == model).map_or(model, |(_, twin)| *twin))
}

fn files(model: &str) -> ProcessorFiles {
    let text = |name: &str| std::fs::read_to_string(prepared(model).join(name)).ok();
    let [own, video] = ["preprocessor_config.json", "video_preprocessor_config.json"].map(text);
    ProcessorFiles::read(own.as_deref(), video.as_deref(), None).unwrap()
}

fn encoders(model: &str) -> (Vision, Audio) {
    let config = checkpoint(model).config;
    (config.vision.clone().expect("a vision encoder"), config.audio.clone().expect("an audio encoder"))
}

fn rule(model: &str) -> AudioRule {
    rule_of(&files(model), &encoders(model).1)
}

/// Returns the rule for frames and tokens, according to the feature extractor and the encoder.
fn rule_of(files: &ProcessorFiles, audio: &Audio) -> AudioRule {
    let windows = match &audio.encoder {
        AudioKind::Windows(windows) => windows,
        AudioKind::Chunks(chunks) => return AudioRule::chunks(&files.audio, chunks.half_window as u64, 60).unwrap(),
        AudioKind::Conformer(_) => return AudioRule::gemma4(&files.audio, 60).unwrap(),
        AudioKind::Whisper(own) => return AudioRule::fixed(&files.audio, own.frames() as u64, 60).unwrap(),
        AudioKind::Samples => return AudioRule::samples(&files.audio, audio.bands as u64, 60).unwrap(),
    };
    let (half, together) = (windows.half_window as u64, windows.attention_window as u64);
    AudioRule::windows(&files.audio, half, together, 60).unwrap()
}

fn spectrogram(rule: &AudioRule, samples: &[f32], bands: usize) -> Vec<f32> {
    let mel = Mel::new(rule, bands);
    let mut out = vec![0.0; mel.frames(samples.len()) * bands];
    mel.spectrogram(samples, &mut out);
    out
}

/// One item of a prompt.
struct Item {
    sense: EncoderKind,
    grid: Grid,
    seconds: Option<f32>,
    patches: Vec<f32>,
    tokens: usize,
    /// Whether it is the audio track of the video before it.
    of_video: bool,
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn item(model: &str, value: &Value, seconds: f32) -> Item {
    let (kind, seed) = (value["kind"].as_str().unwrap(), number(&value["seed"]));
    if kind == "sound" {
        let samples = number(&value["samples"]);
        let (rule, bands) = (rule(model), encoders(model).1.bands);
        let patches = spectrogram(&rule, &played(seed as i64, samples), bands);
        let frames = number(&value["frames"]);
        assert_eq!(patches.len(), frames * bands, "{samples} samples");
        let shape = rule.shape(samples as u64).unwrap();
        let grid = Grid::audio(frames);
        let (tokens, of_video) = (shape.tokens as usize, value["of_video"].as_bool() == Some(true));
        return Item { sense: EncoderKind::Audio, grid, seconds: None, patches, tokens, of_video };
    }
    let size = Size::new(number(&value["height"]) as u32, number(&value["width"]) as u32);
    let frames = number(&value["frames"]);
    let shots: Vec<Rgb> = (0..frames.max(1)).map(|frame| image(seed, frame, size)).collect();
    let (files, video) = (files(model), kind == "video");
    let fields = if video { &files.video } else { &files.image };
    let (rule, normalize) = (Patches::image(fields, None).unwrap(), Normalize::new(fields, Normalize::CLIP).unwrap());
    let mut patches = vec![0.0; patchify_len(&rule, shots.len(), size)];
    patchify(&shots, &rule, &normalize, &mut patches);
    let [groups, height, width] = [0, 1, 2].map(|i| number(&value["grid"][i]));
    let grid = Grid { frames: groups, height, width };
    let tokens = groups * height * width / 4;
    Item { sense: EncoderKind::Vision, grid, seconds: video.then_some(seconds), patches, tokens, of_video: false }
}

fn items(model: &str, value: &Value) -> Vec<Item> {
    let seconds = value["seconds"].as_f64().unwrap() as f32;
    value["items"].as_array().unwrap().iter().map(|value| item(model, value, seconds)).collect()
}

fn cases(model: &str) -> Vec<Value> {
    reference(model)["cases"].as_array().unwrap().clone()
}

/// Returns the encoders' rows of all items of a prompt, each item encoded alone. All rows are as wide as an image's.
fn encode(rig: &mut Rig, items: &[Item]) -> Vec<Vec<f32>> {
    let width = rig.model.vision().unwrap().output_width();
    let each = items.iter().flat_map(|item| {
        let rows = rig.encode(item.sense, &[item.grid], &item.patches);
        assert_eq!(rows.len(), item.tokens, "{:?}", item.grid);
        rows
    });
    let mut rows: Vec<Vec<f32>> = each.collect();
    // Audio rows have nothing for the model's first layers.
    rows.iter_mut().for_each(|row| row.resize(width, 0.0));
    rows
}

fn check_patches(items: &[Item], value: &Value) -> f64 {
    let mut expected = numbers(&value["patches"]).into_iter();
    let mut worst: f64 = 0.0;
    for item in items {
        for found in item.patches.iter().step_by(PATCH_STEP) {
            let off = (f64::from(*found) - expected.next().expect("as many values")).abs();
            assert!(off < MEL_TOLERANCE, "{:?}: {found} is off by {off}", item.grid);
            worst = worst.max(off);
        }
    }
    assert!(expected.next().is_none());
    worst
}

fn check_encoders(rows: &[Vec<f32>], value: &Value) -> f64 {
    let mut worst: f64 = 0.0;
    for pair in value["rows"].as_array().unwrap() {
        let (row, expected) = (&rows[number(&pair[0])], numbers(&pair[1]));
        let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        for (i, (found, expected)) in row.iter().zip(&expected).enumerate() {
            let difference = (f64::from(*found) - expected).abs() / largest;
            assert!(difference <= TOWER_TOLERANCE, "{}: column {i} is {found} instead of {expected}", value["name"]);
            worst = worst.max(difference);
        }
        assert!(row[expected.len()..].iter().all(|more| *more == 0.0));
    }
    worst
}

/// Returns a prompt with its places and encoder rows, and `tokens` after it.
fn part(model: &str, rig: &Rig, value: &Value, items: &[Item], rows: Vec<Vec<f32>>, tokens: &[u32]) -> Part {
    let (vision, audio) = encoders(model);
    let prompt = ids(&value["ids"]);
    let planes = [vision.tokens.image, vision.tokens.video];
    let mut places = vec![[0.0; 3]; prompt.len()];
    let placed = tracks::placed(items);
    let places_of = rig.model.vision().unwrap().place_rule().unwrap();
    let next = places_of.places(|token| planes.contains(&prompt[token]), &placed, &mut places).text.at(0);
    for (token, (found, expected)) in places.iter().zip(value["places"].as_array().unwrap()).enumerate() {
        for (found, expected) in found.iter().zip(numbers(expected)) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "{}: token {token}: {found}, {expected}",
                value["name"]
            );
        }
    }
    assert!((f64::from(next) - value["next"].as_f64().unwrap()).abs() < 1e-5, "{}: {next}", value["name"]);
    let mut part = Part::new(&[prompt.as_slice(), tokens].concat(), 0, None, 0);
    part.places = places;
    part.places.extend((0..tokens.len()).map(|i| [next + i as f32; 3]));
    part.media = tracks::taking_turns(&prompt, items, rows, (&planes, audio.placeholder));
    tracks::interleaved(value, &prompt, items, (&places_of, vision.tokens.video));
    part
}

#[test]
fn answers_are_the_references() {
    let between = seen_and_heard(MODEL);
    assert!(between > 40, "{between} places between whole steps");
}

/// Qwen2.5-Omni: frames are placed at whole steps.
#[test]
fn answers_of_chunks_are_the_references() {
    assert_eq!(seen_and_heard(CHUNKS), 0, "places between whole steps");
}

/// Qwen3-Omni and Qwen2.5-Omni from GGUF.
#[test]
fn answers_of_gguf_models_are_the_references() {
    assert!(seen_and_heard("vl-gguf-omni") > 40, "places between whole steps");
    assert_eq!(seen_and_heard("vl-gguf-omni2.5"), 0, "places between whole steps");
}

/// Checks prompts with all kinds of items. Returns how many of their places lie between whole steps.
fn seen_and_heard(model: &str) -> usize {
    let mut rig = Rig::new(model, false);
    let (mut mel, mut encoder, mut answers, mut between) = (0.0f64, 0.0f64, 0.0f64, 0);
    for value in cases(model) {
        let items = items(model, &value);
        mel = mel.max(check_patches(&items, &value));
        let rows = encode(&mut rig, &items);
        encoder = encoder.max(check_encoders(&rows, &value));
        let greedy = ids(&value["greedy"]);
        let placeholders = items.iter().map(|item| item.tokens).sum::<usize>();
        let part = part(model, &rig, &value, &items, rows, &greedy);
        assert_eq!(part.media.len(), placeholders, "a placeholder for every row");
        between += part.places.iter().flatten().filter(|place| place.fract() != 0.0).count();
        answers = answers.max(check_answer(&mut rig, &value, &part));
    }
    println!(
        "spectrogram off by {mel:.1e}, encoders by {encoder:.1e} of a row's largest, log-probabilities by {answers:.1e}"
    );
    between
}

/// Checks the answer's tokens and log-probabilities, in one pass and in chunks. Returns the largest difference.
fn check_answer(rig: &mut Rig, value: &Value, part: &Part) -> f64 {
    let logits = rig.step(std::slice::from_ref(part));
    let (first, mut answers) = (ids(&value["ids"]).len() - 1, 0.0f64);
    let mut compare = |row: usize, id: u32, expected: &Value| {
        let difference = (logprob(&logits[row], id) - expected.as_f64().unwrap()).abs();
        assert!(difference <= LOGPROB_TOLERANCE, "{}: row {row} off by {difference}", value["name"]);
        answers = answers.max(difference);
    };
    value["top5"].as_array().unwrap().iter().for_each(|p| compare(first, p[0].as_u64().unwrap() as u32, &p[1]));
    for (i, (id, expected)) in
        ids(&value["greedy"]).iter().zip(value["greedy_logprobs"].as_array().unwrap()).enumerate()
    {
        assert_eq!(argmax(&logits[first + i]), *id, "{}: greedy token {i}", value["name"]);
        compare(first + i, *id, expected);
    }
    in_chunks(rig, part, &logits);
    answers
}

/// Qwen3-ASR: a model with an audio encoder only. Short clips are padded with silence.
#[test]
fn a_model_that_only_hears_answers_as_the_reference() {
    for model in ["asr", "gguf-asr"] {
        assert!(Rig::new(model, false).model.vision().is_none());
        answers_as_the_reference(model);
    }
}

/// Gemma 4 E2B and E4B.
#[test]
fn a_conformer_hears_what_transformers_hears() {
    for model in [CONFORMER, CONFORMER_IN_FILES] {
        assert!(Rig::new(model, false).model.vision().is_some());
        answers_as_the_reference(model);
    }
}

/// Gemma 4 Unified: audio samples without a spectrogram.
#[test]
fn samples_through_a_projection_are_the_references() {
    answers_as_the_reference(UNIFIED);
}

/// Whisper: the decoder attends to the encoder's rows, which precede its tokens.
#[test]
fn a_decoder_attends_to_an_encoders_output_as_the_reference() {
    answers_as_the_reference(WHISPER);
}

/// Checks prompts with audio only.
fn answers_as_the_reference(model: &str) {
    let mut rig = Rig::new(model, false);
    let config = checkpoint(model).config.audio.clone().expect("an audio encoder");
    // A GGUF model without a twin has no processor's files.
    let text = |name: &str| std::fs::read_to_string(prepared(model).join(name)).ok();
    let [own, outer] = ["preprocessor_config.json", "processor_config.json"].map(text);
    let files = ProcessorFiles::read(own.as_deref(), None, outer.as_deref()).unwrap();
    let rule = match rule_of(&files, &config) {
        fixed if fixed.min_samples > 0 => fixed,
        rule => rule.filled_up(&files.audio, 0).unwrap(),
    };
    for pair in reference(model)["lengths"].as_array().into_iter().flatten() {
        assert_eq!(rule.shape(pair[0].as_u64().unwrap()).unwrap().tokens, pair[1].as_u64().unwrap(), "{pair}");
    }
    let mel = Mel::new(&rule, config.bands);
    let (mut encoder, mut answers) = (0.0f64, 0.0f64);
    for value in reference(model)["cases"].as_array().unwrap() {
        let one = |item: &Value| {
            let mut samples = played(item["seed"].as_i64().unwrap(), number(&item["samples"]));
            let tokens = rule.shape(samples.len() as u64).unwrap().tokens as usize;
            samples.resize(rule.filled(samples.len() as u64) as usize, 0.0);
            let grid = Grid::audio(mel.frames(samples.len()));
            assert_eq!(grid.width, number(&item["frames"]));
            let mut patches = vec![0.0; grid.width * config.bands];
            mel.spectrogram(&samples, &mut patches);
            Item { sense: EncoderKind::Audio, grid, seconds: None, patches, tokens, of_video: false }
        };
        let items: Vec<Item> = value["items"].as_array().unwrap().iter().map(one).collect();
        check_patches(&items, value);
        let mut rows = Vec::new();
        for item in &items {
            let own = rig.encode(item.sense, &[item.grid], &item.patches);
            assert_eq!(own.len(), item.tokens, "{:?}", item.grid);
            rows.extend(own);
        }
        encoder = encoder.max(check_encoders(&rows, value));
        let prompt = ids(&value["ids"]);
        let mut part = Part::new(&[prompt.as_slice(), &ids(&value["greedy"])].concat(), 0, None, 0);
        let media = prompt.iter().enumerate().filter(|(_, token)| **token == config.placeholder).map(|(at, _)| at);
        part.media = media.zip(rows).collect();
        assert_eq!(part.media.len(), items.iter().map(|item| item.tokens).sum::<usize>());
        answers = answers.max(check_answer(&mut rig, value, &part));
    }
    println!("encoder off by {encoder:.1e} of a row's largest, log-probabilities by {answers:.1e}");
}

/// The same prompt in chunks that cut through media, beside a sequence without media: the same bits.
fn in_chunks(rig: &mut Rig, whole: &Part, logits: &[Vec<f32>]) {
    let mut start = 0;
    for length in [5, 9, 1, 14, 7].into_iter().cycle() {
        let end = (start + length).min(whole.tokens.len());
        if start == end {
            break;
        }
        let mut chunk = Part::new(&whole.tokens[start..end], start, None, 0);
        chunk.places = whole.places.get(start..end).unwrap_or_default().to_vec();
        let inside = whole.media.iter().filter(|(row, _)| (start..end).contains(row));
        chunk.media = inside.map(|(row, values)| (row - start, values.clone())).collect();
        let other = Part { sequence: 1, ..Part::new(&[7, 8, 9], 0, None, 1) };
        assert_eq!(rig.step(&[other, chunk])[3..], logits[start..end], "tokens {start}..{end}");
        start = end;
    }
}

/// Encodes every audio clip alone, all together, and all in another order: the same bits.
#[test]
fn no_audio_depends_on_its_company() {
    not_of_its_company(MODEL, &rule(MODEL));
    not_of_its_company(CHUNKS, &rule(CHUNKS));
    not_of_its_company(CONFORMER, &AudioRule::gemma4(&ProcessorFiles::default().audio, 30).unwrap());
    for (model, _) in TWINS {
        not_of_its_company(
            model,
            &rule_of(&files(model), checkpoint(model).config.audio.as_ref().expect("an audio encoder")),
        );
    }
    not_of_its_company(WHISPER, &AudioRule::fixed(&ProcessorFiles::default().audio, 200, 30).unwrap());
}

fn not_of_its_company(model: &str, rule: &AudioRule) {
    let mut rig = Rig::new(model, false);
    let bands = checkpoint(model).config.audio.as_ref().expect("an audio encoder").bands;
    let clips: Vec<(Grid, Vec<f32>)> = [201, 5_000, 15_999, 16_000, 16_160, 33_000, 70_000]
        .into_iter()
        .enumerate()
        .map(|(seed, samples)| {
            let values = spectrogram(rule, &played(seed as i64, samples), bands);
            (Grid::audio(values.len() / bands), values)
        })
        .collect();
    let items: Vec<(Grid, &[f32])> = clips.iter().map(|(grid, values)| (*grid, values.as_slice())).collect();
    let tokens: Vec<usize> = rig.encode_in_company(EncoderKind::Audio, &items).iter().map(Vec::len).collect();
    assert!(tokens.is_sorted() && tokens[0] < tokens[6], "longer sounds have more tokens: {tokens:?}");
}

/// Spectrograms equal those of the published feature extractors, at 128 bands.
#[test]
fn spectrograms_are_the_published_extractors() {
    published_spectrogram(MODEL, &rule(MODEL));
    published_spectrogram(CHUNKS, &rule(CHUNKS));
    published_spectrogram(CONFORMER, &AudioRule::gemma4(&ProcessorFiles::default().audio, 30).unwrap());
}

fn published_spectrogram(model: &str, rule: &AudioRule) {
    let value = &reference(model)["mel"];
    let found = spectrogram(rule, &played(value["seed"].as_i64().unwrap(), number(&value["samples"])), 128);
    let expected = numbers(&value["values"]);
    assert_eq!(found.len().div_ceil(MEL_STEP), expected.len());
    let off = found.iter().step_by(MEL_STEP).zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    println!("off by {off:.1e}");
    assert!(off < MEL_TOLERANCE, "{off}");
}

/// The planned workspace is used to the byte and never shrinks for a longer clip. Several clips take no more than their sum.
#[test]
fn the_plan_is_what_is_taken() {
    planned_is_taken(MODEL);
    planned_is_taken(CHUNKS);
    planned_is_taken(CONFORMER);
    planned_is_taken(UNIFIED);
    planned_is_taken(WHISPER);
    TWINS.iter().for_each(|(model, _)| planned_is_taken(model));
}

fn planned_is_taken(model: &str) {
    let checkpoint = checkpoint(model);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::F32);
    let built = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    let table = declare.finish();
    let (encoder, kv) = (built.audio().unwrap(), built.shape(KvDtype::F32).kv);
    let planned = |grids: &[Grid]| {
        let mut plan = PlanDevice::new(&table, &kv);
        encoder.encode(&mut plan, &EncoderInput { grids, patches: &[] }).unwrap();
        plan.high_water()
    };
    let lengths = [3, 99, 100, 101, 250, 401];
    for frames in lengths {
        let mut rig = Rig::new(model, false);
        rig.encode(EncoderKind::Audio, &[Grid::audio(frames)], &vec![0.5; frames * encoder.patch_width()]);
        let scratch = plimsoll_device::cpu::scratch_bytes(&rig.shape, 2);
        let own = planned(&[Grid::audio(frames)]);
        assert!(rig.workspace_peak().abs_diff(own + scratch.next_multiple_of(64)) < 64, "{frames} frames");
    }
    let all: Vec<usize> = (1..700).map(|frames| planned(&[Grid::audio(frames)])).collect();
    assert!(all.is_sorted(), "a longer sound never takes less");
    let grids = lengths.map(Grid::audio);
    assert!(planned(&grids) <= grids.iter().map(|grid| planned(&[*grid])).sum(), "not additive");
}
