//! Vision models, against transformers: the processor's patches, token positions, the encoder's output for images, and
//! answers. An image's embeddings do not depend on the other images of the batch.

use crate::common::{Part, Rig, argmax, checkpoint, folder, ids, image, logprob, reference};
use plimsoll_device::{Declare, DtypePolicy, KvDtype, PlanDevice};
use plimsoll_formats::{Gemma4, Vision as Config, VisionKind};
use plimsoll_media::Size;
use plimsoll_media::geometry::{Canvases, ImageRule, Longest, Patches, Pieces, ProcessorFiles, Squares, Tiles};
use plimsoll_media::image::{Normalize, Rgb, patchify, patchify_len, pieces, resize, squares, tiles};
use plimsoll_models::{EncoderInput, EncoderKind, Grid, PlacedItem, Vision};
use serde_json::Value;

/// Largest difference allowed between a log-probability and its reference.
const LOGPROB_TOLERANCE: f64 = 2e-3;
/// Largest difference allowed between a number of an encoder's output and its reference, as a share of the row's largest.
const TOWER_TOLERANCE: f64 = 1e-4;
/// The reference has every 131st value of the patches.
const PATCH_STEP: usize = 131;

/// A case of a reference: its items' grids, whether each is a video, and their patches.
struct Case {
    grids: Vec<Grid>,
    videos: Vec<bool>,
    patches: Vec<Vec<f32>>,
    ids: Vec<u32>,
}

impl Case {
    fn new(model: &str, case: &Value) -> Self {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let grids = case["grids"].as_array().unwrap().iter().map(|grid| {
            let [frames, height, width] = [0, 1, 2].map(|i| number(&grid[i]));
            Grid { frames, height, width }
        });
        let (mut videos, mut patches) = (Vec::new(), Vec::new());
        for item in case["pictures"].as_array().unwrap() {
            let size = Size::new(number(&item["height"]) as u32, number(&item["width"]) as u32);
            let (seed, frames) = (number(&item["seed"]), number(&item["frames"]));
            let shots: Vec<Rgb> = (0..frames.max(1)).map(|frame| image(seed, frame, size)).collect();
            for values in processed(model, shots, frames > 0) {
                videos.push(frames > 0);
                patches.push(values);
            }
        }
        Self { grids: grids.collect(), videos, patches, ids: ids(&case["ids"]) }
    }

    /// Returns the encoder's output for each item; all items are one batch.
    fn encode(&self, rig: &mut Rig) -> Vec<Vec<f32>> {
        rig.encode(EncoderKind::Vision, &self.grids, &self.patches.concat())
    }

    fn is_media(&self, config: &Config, token: usize) -> bool {
        self.ids.get(token).is_some_and(|id| [config.tokens.image, config.tokens.video].contains(id))
    }

    /// Returns the position after the last that a token sees, if an image's tokens see each other.
    fn end(&self, config: &Config, token: usize) -> u32 {
        let behind = (token..).find(|at| !self.is_media(config, *at)).unwrap();
        behind.max(token + 1) as u32
    }
}

/// Returns the patches of an image or of a video's frames, as the fixture's processor makes them. Pieces that are encoded one by one are
/// separate. A GGUF model, and InternVL in its original form, have no processor's files: each uses those of the transformers form.
fn processed(model: &str, shots: Vec<Rgb>, video: bool) -> Vec<Vec<f32>> {
    let source = model.replace("vl-gguf-", "vl-").replace("-chat", "");
    let text = |name: &str| std::fs::read_to_string(folder(&source).join(name)).ok();
    let files = ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"].map(text);
    let files = ProcessorFiles::read(files[0].as_deref(), files[1].as_deref(), files[2].as_deref()).unwrap();
    let fields = if video { &files.video } else { &files.image };
    let encoder = config(model).encoder;
    let normalize = match encoder {
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => Normalize::unit_range(fields).unwrap(),
        VisionKind::Gemma4(_) => Normalize::centred(fields).unwrap(),
        VisionKind::Llama4(_) => Normalize::rounded(fields, Normalize::HALVES).unwrap(),
        _ => Normalize::new(fields, Normalize::CLIP).unwrap(),
    };
    let (rule, shots) = match encoder {
        VisionKind::Pixtral(_) => {
            let rule = Longest::new(&files, 4, config(model).merge as u64).unwrap();
            let shots = shots.iter().map(|shot| resize(shot, rule.fit(shot.size).unwrap().size, rule.patches.filter));
            let shots: Vec<Rgb> = shots.collect();
            (rule.patches, shots)
        }
        VisionKind::Llama4(_) => {
            let rule = Canvases::new(&files, 4, 2).unwrap();
            let [shot] = shots.try_into().expect("one image");
            let fit = rule.fit(shot.size).unwrap();
            let made = squares(shot, fit.steps.unwrap(), fit.canvas, fit.size, fit.filter);
            return made.iter().map(|piece| patched(std::slice::from_ref(piece), &rule.patches, &normalize)).collect();
        }
        VisionKind::Idefics3 => {
            let rule = Squares::new(&files, 4, 2).unwrap();
            let [shot] = shots.try_into().expect("one image");
            let fit = rule.fit(shot.size).unwrap();
            let made = squares(shot, fit.steps.unwrap(), fit.canvas, fit.size, fit.filter);
            return made.iter().map(|piece| patched(std::slice::from_ref(piece), &rule.patches, &normalize)).collect();
        }
        VisionKind::Siglip2(_) => {
            let rule = Pieces::new(&files).unwrap();
            let fit = ImageRule::Pieces(rule.clone()).fit(shots[0].size).unwrap();
            let made = match fit.cut {
                Some(cut) => pieces(&shots[0], fit.canvas, fit.size, cut.whole, fit.filter),
                None => vec![resize(&shots[0], fit.size, fit.filter)],
            };
            return made.iter().map(|piece| patched(std::slice::from_ref(piece), &rule.patches, &normalize)).collect();
        }
        VisionKind::Gemma4(own) => {
            let rule = Patches::filling(fields, 280).unwrap();
            let rule = if own.unified { rule.of_whole_tokens() } else { rule };
            let shots = shots.iter().map(|shot| resize(shot, rule.resize(shot.size).unwrap(), rule.filter)).collect();
            (rule, shots)
        }
        VisionKind::Siglip => {
            let cut = Tiles::one(&files, 4, 2, 9).unwrap();
            let shots = shots.iter().map(|shot| resize(shot, cut.tile, cut.patches.filter)).collect();
            (cut.patches, shots)
        }
        VisionKind::Intern(_) if video => {
            let cut = Tiles::new(&files, 4, 2).unwrap();
            let shots = shots.iter().map(|shot| resize(shot, cut.tile, cut.patches.filter)).collect();
            (cut.patches, shots)
        }
        VisionKind::Intern(_) => {
            let cut = Tiles::new(&files, 4, 2).unwrap();
            let canvas = ImageRule::Tiles(cut.clone()).fit(shots[0].size).unwrap().canvas;
            let shots = tiles(&shots[0], canvas, cut.tile, cut.patches.filter);
            (cut.patches, shots)
        }
        _ => (Patches::image(fields, None).unwrap(), shots),
    };
    vec![patched(&shots, &rule, &normalize)]
}

fn patched(shots: &[Rgb], rule: &Patches, normalize: &Normalize) -> Vec<f32> {
    let mut values = vec![0.0; patchify_len(rule, shots.len(), shots[0].size)];
    patchify(shots, rule, normalize, &mut values);
    values
}

fn cases(model: &str) -> Vec<Value> {
    reference(model)["cases"].as_array().unwrap().clone()
}

fn config(model: &str) -> Config {
    checkpoint(model).config.vision.clone().expect("an encoder in the configuration")
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Returns a prompt with its places and media rows, and `tokens` after it.
fn part(case: &Case, config: &Config, rows: &[Vec<f32>], places: &[[f32; 3]], next: f32, tokens: &[u32]) -> Part {
    let all = [case.ids.as_slice(), tokens].concat();
    let mut part = Part::new(&all, 0, None, 0);
    part.places = places.to_vec();
    if !places.is_empty() {
        part.places.extend((0..tokens.len()).map(|i| [next + i as f32; 3]));
    }
    let mut rows = rows.iter();
    for token in (0..case.ids.len()).filter(|token| case.is_media(config, *token)) {
        // One block for each row: an item may be given in any pieces.
        part.media.push((token, rows.next().expect("a row for every placeholder").clone()));
    }
    if matches!(config.encoder, VisionKind::Siglip | VisionKind::Gemma4(Gemma4 { sees_ahead: true, .. })) {
        part.ends = (0..all.len()).map(|token| case.end(config, token)).collect();
    }
    assert!(rows.next().is_none(), "a placeholder for every row");
    part
}

fn check_patches(case: &Case, value: &Value) {
    let mut expected = numbers(&value["patches"]).into_iter();
    for values in &case.patches {
        for found in values.iter().step_by(PATCH_STEP) {
            let expected = expected.next().expect("as many values");
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} instead of {expected}");
        }
    }
    assert!(expected.next().is_none());
}

fn check_encoder(model: &str, rows: &[Vec<f32>], value: &Value) -> f64 {
    let mut worst: f64 = 0.0;
    for pair in value["rows"].as_array().unwrap() {
        let (row, expected) = (&rows[pair[0].as_u64().unwrap() as usize], numbers(&pair[1]));
        assert_eq!(row.len(), expected.len(), "{model}: the width of the output");
        let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        for (i, (found, expected)) in row.iter().zip(&expected).enumerate() {
            let difference = (f64::from(*found) - expected).abs() / largest;
            assert!(difference <= TOWER_TOLERANCE, "{model}: column {i} is {found} instead of {expected}");
            worst = worst.max(difference);
        }
    }
    worst
}

/// Checks the places of a prompt's tokens. Returns them and the first place after the prompt.
fn check_places(rig: &Rig, model: &str, case: &Case, value: &Value) -> (Vec<[f32; 3]>, f32) {
    let (config, mut places) = (config(model), vec![[0.0; 3]; case.ids.len()]);
    let seconds = value["seconds"].as_f64().unwrap() as f32;
    let items = case.grids.iter().zip(&case.videos);
    let items: Vec<PlacedItem> =
        items.map(|(grid, video)| PlacedItem { grid: *grid, seconds: video.then_some(seconds), track: 0 }).collect();
    let rule = rig.model.vision().unwrap().place_rule().unwrap();
    let next = rule.places(|token| case.is_media(&config, token), &items, &mut places).text.at(0);
    for (token, (found, expected)) in places.iter().zip(value["places"].as_array().unwrap()).enumerate() {
        assert_eq!(found.map(f64::from)[..], numbers(expected)[..], "{model}, {}: token {token}", value["name"]);
    }
    assert_eq!(f64::from(next), value["next"].as_f64().unwrap());
    (places, next)
}

fn check(model: &str) {
    let mut rig = Rig::new(model, false);
    let config = config(model);
    let (mut encoder, mut answers) = (0.0f64, 0.0f64);
    for value in cases(model) {
        let case = Case::new(model, &value);
        check_patches(&case, &value);
        let (places, next) = match value["places"].is_null() {
            true => (Vec::new(), 0.0),
            false => check_places(&rig, model, &case, &value),
        };

        let rows = case.encode(&mut rig);
        encoder = encoder.max(check_encoder(model, &rows, &value));
        let greedy = ids(&value["greedy"]);
        let part = part(&case, &config, &rows, &places, next, &greedy);
        let logits = rig.step(std::slice::from_ref(&part));
        let first = case.ids.len() - 1;
        let mut compare = |row: usize, id: u32, expected: &Value| {
            let difference = (logprob(&logits[row], id) - expected.as_f64().unwrap()).abs();
            assert!(difference <= LOGPROB_TOLERANCE, "{model}, {}: row {row} off by {difference}", value["name"]);
            answers = answers.max(difference);
        };
        value["top5"].as_array().unwrap().iter().for_each(|p| compare(first, p[0].as_u64().unwrap() as u32, &p[1]));
        for (i, (id, expected)) in greedy.iter().zip(value["greedy_logprobs"].as_array().unwrap()).enumerate() {
            assert_eq!(argmax(&logits[first + i]), *id, "{model}, {}: greedy token {i}", value["name"]);
            compare(first + i, *id, expected);
        }
        in_chunks(&mut rig, model, &part, &logits);
    }
    println!("{model}: encoder off by {encoder:.1e} of a row's largest, log-probabilities by {answers:.1e}");
}

/// The same prompt in chunks that cut through images, beside a sequence without images: the same bits.
fn in_chunks(rig: &mut Rig, model: &str, whole: &Part, logits: &[Vec<f32>]) {
    let mut start = 0;
    for length in [5, 9, 1, 14, 7].into_iter().cycle() {
        let mut end = (start + length).min(whole.tokens.len());
        if let Some(seen) = whole.ends.get(end - 1) {
            // An image with tokens that attend to each other is not cut.
            end = *seen as usize;
        }
        if start == end {
            break;
        }
        let mut chunk = Part::new(&whole.tokens[start..end], start, (start > 0).then_some(0), 0);
        chunk.ends = whole.ends.get(start..end).unwrap_or_default().to_vec();
        chunk.places = whole.places.get(start..end).unwrap_or_default().to_vec();
        let inside = whole.media.iter().filter(|(row, _)| (start..end).contains(row));
        chunk.media = inside.map(|(row, values)| (row - start, values.clone())).collect();
        let other = Part { sequence: 1, ..Part::new(&[7, 8, 9], 0, None, 1) };
        assert_eq!(rig.step(&[other, chunk])[3..], logits[start..end], "{model}: tokens {start}..{end}");
        start = end;
    }
}

/// The draft head beside images: each row takes the embedding of the token after it, at its own place.
fn check_head(model: &str) {
    let mut rig = Rig::new(model, true);
    let config = config(model);
    let value = cases(model).into_iter().find(|case| !case["mtp"].is_null()).expect("a case with drafts");
    let case = Case::new(model, &value);
    let mut places = vec![[0.0; 3]; case.ids.len()];
    let items: Vec<PlacedItem> = case.grids.iter().map(|grid| PlacedItem::image(*grid)).collect();
    let rule = rig.model.vision().unwrap().place_rule().unwrap();
    let next = rule.places(|token| case.is_media(&config, token), &items, &mut places).text.at(0);
    let rows = case.encode(&mut rig);
    let prompt = part(&case, &config, &rows, &places, next, &[]);
    let following = [&case.ids[1..], &ids(&value["greedy"])[..1]].concat();
    let media = prompt.media.iter().map(|(row, values)| (row - 1, values.clone())).collect();
    let ahead = Part { tokens: following, media, ..prompt.clone() };
    let all: Vec<u32> = (0..case.ids.len() as u32).collect();
    let output = rig.forward(&[prompt]);
    let output = rig.draft(output.hidden, &all, &[ahead]);
    let logits = rig.rows(output.logits);
    let mut clear = 0;
    for (row, best) in logits.iter().zip(value["mtp"]["argmax"].as_array().unwrap()) {
        if let Some(best) = best.as_u64() {
            assert_eq!(u64::from(argmax(row)), best, "{model}");
            clear += 1;
        }
    }
    assert!(clear * 10 > 9 * logits.len(), "{clear} of {} choices are clear", logits.len());
    for pair in value["mtp"]["top5"].as_array().unwrap() {
        let own = logprob(logits.last().unwrap(), pair[0].as_u64().unwrap() as u32);
        assert!((own - pair[1].as_f64().unwrap()).abs() <= LOGPROB_TOLERANCE, "{model}: {own} for {pair}");
    }
}

/// Encodes every item alone, all together, and all in another order: the same bits.
fn check_company(model: &str) {
    let mut rig = Rig::new(model, false);
    let all: Vec<Case> = cases(model).iter().map(|value| Case::new(model, value)).collect();
    let patches = all.iter().flat_map(|case| &case.patches).map(Vec::as_slice);
    let items: Vec<(Grid, &[f32])> = all.iter().flat_map(|case| case.grids.iter().copied()).zip(patches).collect();
    let tokens: usize = rig.encode_in_company(EncoderKind::Vision, &items).iter().map(Vec::len).sum();
    assert!(tokens >= 20, "{model}: {tokens}");
}

/// Returns the planned workspace of an encoder's step.
fn planned(
    vision: &dyn Vision,
    table: &plimsoll_device::WeightTable,
    kv: &plimsoll_device::KvShape,
    grids: &[Grid],
) -> usize {
    let mut plan = PlanDevice::new(table, kv);
    vision.encode(&mut plan, &EncoderInput { grids, patches: &[] }).unwrap();
    plan.high_water()
}

/// The planned workspace is used to the byte, and images together take no more than their sum.
fn check_plan(model: &str) {
    let checkpoint = checkpoint(model);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::F32);
    let built = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    let table = declare.finish();
    let (vision, kv) = (built.vision().unwrap(), built.shape(KvDtype::F32).kv);
    let one = Grid { frames: 1, height: 4, width: 4 };
    let grids = match config(model).encoder {
        VisionKind::Siglip => [Grid { height: 6, width: 6, ..one }; 3],
        VisionKind::Idefics3 | VisionKind::Llama4(_) => [one; 3],
        VisionKind::Gemma4(_) => {
            [(1, 21, 30), (1, 3, 210), (3, 12, 6)].map(|(frames, height, width)| Grid { frames, height, width })
        }
        VisionKind::Intern(_) => [one, Grid { frames: 5, ..one }, Grid { frames: 2, ..one }],
        _ => [Grid { height: 10, width: 6, ..one }, Grid { frames: 3, ..one }, Grid { height: 2, width: 2, ..one }],
    };
    let mut sum = 0;
    for grid in grids {
        let mut rig = Rig::new(model, false);
        rig.encode(EncoderKind::Vision, &[grid], &vec![0.5; grid.patches() * vision.patch_width()]);
        let planned = planned(vision, &table, &kv, &[grid]);
        let scratch = plimsoll_device::cpu::scratch_bytes(&rig.shape, 2);
        assert!(rig.workspace_peak().abs_diff(planned + scratch.next_multiple_of(64)) < 64, "{model}: {grid:?}");
        sum += planned;
    }
    assert!(planned(vision, &table, &kv, &grids) <= sum, "{model}: not additive");
}

macro_rules! models {
    ($check:ident: $($test:ident $model:literal),* $(,)?) => { $(#[test] fn $test() { $check($model) })* };
}

models! { check:
    qwen3_5 "vl-qwen3.5",
    qwen3_5_moe "vl-qwen3.5-moe",
    qwen4_exp "vl-qwen4-exp",
    qwen3 "vl-qwen3",
    qwen3_moe "vl-qwen3-moe",
    qwen2_5 "vl-qwen2.5",
    qwen2 "vl-qwen2",
    intern "vl-intern",
    intern_rms "vl-intern-rms",
    intern_chat "vl-intern-chat",
    intern_chat_rms "vl-intern-chat-rms",
    gemma3 "vl-gemma3",
    lfm2 "vl-lfm2",
    lfm2_bare "vl-lfm2-bare",
    gemma4 "vl-gemma4",
    gemma4_e2b "vl-gemma4-e2b",
    gemma4_unified "vl-gemma4-unified",
    gguf_qwen3_5 "vl-gguf-qwen3.5",
    gguf_qwen3_5_moe "vl-gguf-qwen3.5-moe",
    gguf_qwen3 "vl-gguf-qwen3",
    gguf_qwen3_moe "vl-gguf-qwen3-moe",
    gguf_qwen2_5 "vl-gguf-qwen2.5",
    gguf_qwen2 "vl-gguf-qwen2",
    gguf_gemma3 "vl-gguf-gemma3",
    gguf_gemma4 "vl-gguf-gemma4",
    gguf_gemma4_e2b "vl-gguf-gemma4-e2b",
    mistral3 "vl-mistral3",
    mistral3_other "vl-mistral3-other",
    smolvlm "vl-smolvlm",
    idefics3 "vl-idefics3",
    llama4 "vl-llama4",
    gguf_idefics3 "vl-gguf-idefics3",
    gguf_mistral3 "vl-gguf-mistral3",
    gguf_llama4 "vl-gguf-llama4",
    gguf_intern "vl-gguf-intern",
    gguf_intern_rms "vl-gguf-intern-rms",
    gguf_lfm2 "vl-gguf-lfm2",
    gguf_lfm2_bare "vl-gguf-lfm2-bare",
}

models! { check_head:
    head_of_qwen3_5 "vl-qwen3.5",
    head_of_gguf_qwen3_5 "vl-gguf-qwen3.5",
}

models! { check_company:
    company_of_qwen3_5 "vl-qwen3.5",
    company_of_qwen3 "vl-qwen3",
    company_of_qwen2_5 "vl-qwen2.5",
    company_of_gguf_qwen3 "vl-gguf-qwen3",
    company_of_intern "vl-intern",
    company_of_intern_chat "vl-intern-chat",
    company_of_gemma3 "vl-gemma3",
    company_of_lfm2 "vl-lfm2",
    company_of_idefics3 "vl-idefics3",
    company_of_llama4 "vl-llama4",
    company_of_mistral3 "vl-mistral3",
    company_of_gemma4 "vl-gemma4",
    company_of_gemma4_e2b "vl-gemma4-e2b",
    company_of_gemma4_unified "vl-gemma4-unified",
    company_of_gguf_gemma4 "vl-gguf-gemma4",
}

models! { check_plan:
    plan_of_qwen3_5 "vl-qwen3.5",
    plan_of_qwen3 "vl-qwen3",
    plan_of_qwen2_5 "vl-qwen2.5",
    plan_of_qwen2 "vl-qwen2",
    plan_of_intern "vl-intern-rms",
    plan_of_intern_chat "vl-intern-chat",
    plan_of_gemma3 "vl-gemma3",
    plan_of_lfm2 "vl-lfm2",
    plan_of_smolvlm "vl-smolvlm",
    plan_of_llama4 "vl-llama4",
    plan_of_mistral3 "vl-mistral3",
    plan_of_gguf_mistral3 "vl-gguf-mistral3",
    plan_of_gguf_idefics3 "vl-gguf-idefics3",
    plan_of_lfm2_bare "vl-lfm2-bare",
    plan_of_gemma4 "vl-gemma4",
    plan_of_gemma4_e2b "vl-gemma4-e2b",
    plan_of_gguf_llama4 "vl-gguf-llama4",
    plan_of_gguf_intern "vl-gguf-intern",
    plan_of_gguf_gemma3 "vl-gguf-gemma3",
    plan_of_gguf_gemma4 "vl-gguf-gemma4",
    plan_of_gguf_lfm2 "vl-gguf-lfm2",
    plan_of_gguf_qwen3 "vl-gguf-qwen3",
    plan_of_gguf_qwen2_5 "vl-gguf-qwen2.5",
}
