//! Vision encoders in the engine: start-up tests them, answers are the reference's, and no other request changes them.

use plimsoll_engine::{DiskCache, EngineHandle, Host, LoadedModel, Options, Request, start};
use plimsoll_media::image::Rgb;
use serde_json::Value;

use crate::common::seen::{cases, item, request, small};
use crate::common::senses::{
    all_is_back, as_the_reference, encoders_kept_to_their_plan, outputs_come_back, stop_on_disk, told_apart,
};
use crate::common::{collect, exact, fixtures, quiet, two_turns, with_drafts};

fn engine(model: &str, options: &Options) -> EngineHandle {
    let loaded = LoadedModel::open(&fixtures().join("models").join(model)).unwrap();
    // An image of 70 tokens that is computed in one step needs rows beside those of all requests.
    let least = if ["vl-gemma4", "vl-gguf-gemma4", "vl-gemma4-unified"].contains(&model) {
        70 + options.running_max_req_size
    } else {
        0
    };
    let options = &Options { batch_max_tokens: options.batch_max_tokens.max(least), ..options.clone() };
    let host = Host::read(options).unwrap();
    start(&loaded.checkpoint, loaded.tokenizer, options, &host, |_| {})
        .unwrap_or_else(|error| panic!("{model}: {error}"))
}

fn right(model: &str) {
    let engine = engine(model, &small(exact()));
    for case in cases(model) {
        let answer = collect(engine.submit(request(&engine, &case, 12)).unwrap());
        as_the_reference(model, &case, &answer);
    }
    encoders_kept_to_their_plan(&engine);
    all_is_back(&engine);
    engine.stop();
}

#[test]
fn qwen3_5_sees_what_transformers_sees() {
    right("vl-qwen3.5");
    right("vl-qwen3.5-moe");
    right("vl-qwen4-exp");
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
fn internvl_in_its_original_form_sees_what_transformers_sees() {
    right("vl-intern-chat");
    right("vl-intern-chat-rms");
}

#[test]
fn gemma3_sees_what_transformers_sees() {
    right("vl-gemma3");
}

#[test]
fn lfm2_vl_sees_what_transformers_sees() {
    right("vl-lfm2");
    right("vl-lfm2-bare");
}

#[test]
fn smolvlm_and_idefics3_see_what_transformers_sees() {
    right("vl-smolvlm");
    right("vl-idefics3");
}

#[test]
fn llama4_sees_what_transformers_sees() {
    right("vl-llama4");
}

#[test]
fn mistral3_sees_what_transformers_sees() {
    right("vl-mistral3");
    right("vl-mistral3-other");
}

#[test]
fn gemma4_sees_what_transformers_sees() {
    right("vl-gemma4");
    right("vl-gemma4-e2b");
    right("vl-gemma4-unified");
}

#[test]
fn gguf_model_sees_what_transformers_sees_by_the_same_weights() {
    right("vl-gguf-intern");
}

#[test]
#[ignore = "soak"]
fn gguf_models_see_what_transformers_sees_by_the_same_weights() {
    let qwen = ["qwen3.5", "qwen3.5-moe", "qwen3", "qwen3-moe", "qwen2.5", "qwen2"];
    let of_images_alone = ["gemma3", "gemma4", "gemma4-e2b", "idefics3", "mistral3", "lfm2", "lfm2-bare", "llama4"];
    for family in qwen.into_iter().chain(of_images_alone).chain(["intern-rms"]) {
        right(&format!("vl-gguf-{family}"));
    }
}

#[test]
fn i9_images_in_company() {
    beside("vl-qwen3.5");
}

#[test]
fn i9_whatever_runs_beside_tiles() {
    beside("vl-intern");
    beside("vl-intern-chat");
}

#[test]
fn i9_whatever_runs_beside_pieces() {
    beside("vl-lfm2");
}

#[test]
fn i9_whatever_runs_beside_squares() {
    beside("vl-idefics3");
}

#[test]
fn i9_whatever_runs_beside_tiles_with_class_rows() {
    beside("vl-llama4");
}

#[test]
fn i9_whatever_runs_beside_rows_of_tokens() {
    beside("vl-mistral3");
}

#[test]
fn i9_a_second_turn_goes_on_behind_the_pieces_of_an_image() {
    let model = "vl-lfm2";
    let [cached, plain] = [true, false].map(|prefix_cache| engine(model, &small(Options { prefix_cache, ..exact() })));
    for case in cases(model) {
        let (found, prompt) = two_turns(&cached, &plain, &request(&cached, &case, 40), &[5, 6, 7]);
        assert!(found > 0, "{}: nothing of {prompt} tokens is found", case["name"]);
    }
    [cached, plain].iter().for_each(EngineHandle::stop);
}

#[test]
fn i9_images_that_are_not_cut() {
    beside("vl-gemma3");
}

#[test]
fn i9_images_that_fill_a_budget() {
    beside("vl-gemma4");
    beside("vl-gemma4-e2b");
    beside("vl-gemma4-unified");
}

#[test]
fn a_step_that_has_no_room_for_an_uncut_image_is_refused_at_the_start() {
    let loaded = LoadedModel::open(&fixtures().join("models/vl-gemma3")).unwrap();
    let options = small(Options { batch_max_tokens: 16, graph_max_batch_size: 8, running_max_req_size: 8, ..exact() });
    let host = Host::read(&options).unwrap();
    let error = start(&loaded.checkpoint, loaded.tokenizer, &options, &host, |_| {}).err().unwrap().to_string();
    assert!(error.contains("--batch-max-tokens is 16") && error.contains("give 17 or more"), "{error}");
}

#[test]
fn i9_an_answer_that_goes_on_from_the_middle_of_a_cached_image() {
    goes_on_from_the_middle("vl-gemma3", 9);
    goes_on_from_the_middle("vl-gemma4", 70);
    goes_on_from_the_middle("vl-gemma4-e2b", 70);
    goes_on_from_the_middle("vl-gemma4-unified", 70);
}

/// Starts from a cached prefix that ends inside an image. `image`: tokens of the image in the model's first case.
fn goes_on_from_the_middle(model: &str, image: usize) {
    let [cached, plain] = [true, false].map(|prefix_cache| engine(model, &small(Options { prefix_cache, ..exact() })));
    let of = |engine: &EngineHandle| {
        let mut asked = request(engine, &cases(model)[0], 12);
        // The page ends within the image, and the prompt ends after the page.
        asked.prompt.insert(0, 5);
        asked.media[0].first += 1;
        asked.prompt.truncate(asked.media[0].first as usize + image + 2);
        let answer = collect(engine.submit(asked.clone()).unwrap());
        assert_eq!(answer.error, None);
        let bits: Vec<_> = answer.logprobs.iter().map(|own| own.as_ref().unwrap().own.unwrap().to_bits()).collect();
        (answer.ids, bits, answer.cached_tokens, asked.media[0].first as usize)
    };
    let (first, again, alone) = (of(&cached), of(&cached), of(&plain));
    assert_eq!((first.2, alone.2), (0, 0));
    let inside = first.3 + 1..first.3 + image;
    assert!(inside.contains(&(again.2 as usize)), "{model}: {} tokens are found, the image is {inside:?}", again.2);
    assert_eq!((&first.0, &first.1), (&again.0, &again.1));
    assert_eq!((first.0, first.1), (alone.0, alone.1));
    [cached, plain].iter().for_each(EngineHandle::stop);
}

#[test]
fn i9_turn_by_turn_behind_images() {
    for model in ["vl-gemma4", "vl-gemma4-e2b", "vl-gemma4-unified"] {
        let [cached, plain] =
            [true, false].map(|prefix_cache| engine(model, &small(Options { prefix_cache, ..exact() })));
        for case in cases(model) {
            let first = request(&cached, &case, 12);
            let (found, prompt) = two_turns(&cached, &plain, &first, &[5, 6, 7]);
            assert!(found + 16 > prompt, "{model}: {found} tokens found, {prompt} in the first prompt");
        }
        [cached, plain].iter().for_each(EngineHandle::stop);
    }
}

#[test]
fn log_probabilities_of_a_prompt_are_refused_beside_an_uncut_image() {
    let engine = engine("vl-gemma3", &small(exact()));
    let asked = Request { prompt_logprobs: Some(0), ..request(&engine, &cases("vl-gemma3")[0], 2) };
    let error = engine.submit(asked).err().unwrap().to_string();
    assert!(error.contains("prompt_logprobs are not available beside images"), "{error}");
    engine.stop();
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
    // An image of nine tokens that is computed in one step needs rows beside those of eight requests.
    let rows = if model == "vl-gemma3" { 17 } else { 16 };
    let pool = if model.starts_with("vl-gemma4") { 2 } else { 1 };
    let (tokens, longest) = (Some(256 * pool), Some(192 * pool as usize));
    let tight = Options { max_total_token_num: tokens, max_req_total_len: longest, ..exact() };
    for options in [
        // Chunks that end inside images, several images at once, room for few pages, drafts.
        Options { batch_max_tokens: rows, graph_max_batch_size: 8, running_max_req_size: 8, ..exact() },
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
fn two_images_of_one_size_are_told_apart() {
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

#[test]
fn images_are_not_encoded_again_after_a_restart() {
    for model in ["vl-qwen3", "vl-qwen2.5", "vl-intern", "vl-lfm2"] {
        let ask = |engine: &EngineHandle, other: bool| -> Vec<Request> {
            let with_another_text = |mut request: Request| {
                request.prompt[0] ^= u32::from(other);
                request
            };
            cases(model).iter().map(|case| with_another_text(request(engine, case, 6))).collect()
        };
        outputs_come_back(model, &small(exact()), |options| engine(model, options), ask);
    }
}

/// Requests that run at once in a pool that preempts, some of them dropped, over restarts of an encrypted cache.
#[test]
fn a_crowd_that_comes_back_sees_what_it_saw() {
    let (model, temp) = ("vl-qwen2.5", tempfile::tempdir().unwrap());
    let (dir, key) = (temp.path().join("cache"), temp.path().join("key"));
    std::fs::write(&key, [7; 32]).unwrap();
    #[cfg(unix)]
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let tight = Options { max_total_token_num: Some(256), max_req_total_len: Some(192), ..exact() };
    let options = small(Options { batch_max_tokens: 16, graph_max_batch_size: 8, running_max_req_size: 8, ..tight });
    let disk = DiskCache { bytes: 64 << 20, read_always: true, key_file: Some(key), ..DiskCache::at(dir.clone()) };
    let kept = Options { disk_cache: Some(disk), ..options.clone() };
    let cases = cases(model);
    // Each round has another text: encoder outputs are on disk, pages of its prefix are not.
    let ask = |engine: &EngineHandle, round: u32, i: usize| {
        let mut request = request(engine, &cases[i % cases.len()], 20);
        request.prompt[0] ^= round;
        request
    };
    let plain = engine(model, &options);
    let answer = |round, i| collect(plain.submit(ask(&plain, round, i)).unwrap());
    let expected: Vec<Vec<_>> = (0..3).map(|round| (0..cases.len()).map(|i| answer(round, i)).collect()).collect();
    plain.stop();
    let mut found = Vec::new();
    for round in 0..3 {
        let warm = engine(model, &kept);
        let readers: Vec<_> = (0..24).map(|i| warm.submit(ask(&warm, round, i)).unwrap()).collect();
        for (i, reader) in readers.into_iter().enumerate().filter(|(i, _)| i % 6 != 3) {
            collect(reader).is_the_same_as(&expected[round as usize][i % cases.len()], &format!("{round}, {i}"));
        }
        found.push((warm.cache_report().disk.unwrap().hit_media, warm.metrics().encoded_media.get()));
        stop_on_disk(warm, Some(&dir));
    }
    println!("media read back and encoded: {found:?}");
    assert!(found[0].0 == 0 && found[1..].iter().all(|(read, encoded)| *read > 0 && *encoded == 0), "{found:?}");
}
