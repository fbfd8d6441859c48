//! Shared by the tests of real encoders: images drawn as the references' were, and checks of answers and memory that hold for all media.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use plimsoll_engine::{DiskCache, EngineHandle, Options, Request};
use plimsoll_media::Size;
use plimsoll_media::image::Rgb;
use plimsoll_memory::Component;
use plimsoll_tier::Store;
use serde_json::Value;

use super::{Answer, collect, ids, quiet, within_plan};

/// The image or frame that `tools/fixturelib/vision.py` draws by the same formula.
pub fn drawn(seed: usize, frame: usize, size: Size) -> Rgb {
    let (height, width) = (size.height as usize, size.width as usize);
    let colour = |y: usize, x: usize, c: usize| {
        (((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255) as u8
    };
    let pixels = (0..height).flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| colour(y, x, c))));
    Rgb { size, data: pixels.collect() }
}

/// Asserts that an answer has the reference's greedy tokens, with log-probabilities within 0.002.
pub fn as_the_reference(model: &str, case: &Value, answer: &Answer) {
    let name = &case["name"];
    assert_eq!(answer.error, None, "{model}: {name}");
    let expected = case["greedy_logprobs"].as_array().unwrap();
    for (i, (found, token)) in answer.ids.iter().zip(ids(&case["greedy"])).enumerate() {
        let (own, theirs) = (answer.logprobs[i].as_ref().unwrap().own.unwrap(), expected[i].as_f64().unwrap());
        assert!((f64::from(own) - theirs).abs() < 2e-3, "{model}: {name}, token {i}: {own} instead of {theirs}");
        assert_eq!(*found, token, "{model}: {name}, token {i}");
    }
}

/// Asserts that an encoder was at work and took no more memory than planned.
pub fn encoders_kept_to_their_plan(engine: &EngineHandle) {
    let ledger = engine.ledger();
    for component in [Component::EncoderOutputs, Component::StepWorkspace] {
        let row = ledger.row(component);
        assert!(row.committed > 0 && row.peak <= row.planned, "{row:?}");
    }
}

/// Waits until everything that requests held is released, including encoder outputs and pixels.
pub fn all_is_back(engine: &EngineHandle) {
    quiet(engine);
    let spec = engine.media().unwrap();
    let stats = spec.outputs.stats();
    assert_eq!((stats.pages_free + stats.pages_idle, spec.staging.used()), (stats.pages, 0));
}

/// Tests encoder outputs on disk over restarts: media that were encoded before a restart are not encoded again. `ask` makes the requests
/// for an engine; if its flag is set, another text precedes the media.
pub fn outputs_come_back(
    what: &str,
    options: &Options,
    start: impl Fn(&Options) -> EngineHandle,
    ask: impl Fn(&EngineHandle, bool) -> Vec<Request>,
) {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let disk = DiskCache { bytes: 64 << 20, read_always: true, ..DiskCache::at(dir.clone()) };
    let kept = Options { disk_cache: Some(disk), ..options.clone() };
    let answers = |engine: &EngineHandle, other: bool| -> Vec<Answer> {
        ask(engine, other).into_iter().map(|request| collect(engine.submit(request).unwrap())).collect()
    };
    let cold = start(options);
    let expected = [false, true].map(|other| answers(&cold, other));
    stop_on_disk(cold, None);
    let first = start(&kept);
    answers(&first, false).iter().zip(&expected[0]).for_each(|(a, b)| a.is_the_same_as(b, what));
    let encoded = first.metrics().encoded_media.get();
    assert!(encoded > 0);
    stop_on_disk(first, Some(&dir));
    let files = blobs(&dir, OUTPUT_KIND);
    // First the same text, then another one: no pages of its prefix are on disk.
    for other in [false, true] {
        let again = start(&kept);
        for (found, expected) in answers(&again, other).iter().zip(&expected[usize::from(other)]) {
            found.is_the_same_as(expected, what);
        }
        let (metrics, disk) = (again.metrics(), again.cache_report().disk.unwrap());
        println!("{what}: {encoded} media, {} read back: {:?}", disk.hit_media, disk.kinds.encoder_output);
        assert_eq!(metrics.encoded_media.get(), 0, "{what}: {disk:?}");
        assert_eq!(disk.hit_tokens > 0, !other, "{what}: pages of the prefix");
        if other {
            assert_eq!((disk.hit_media, disk.kinds.encoder_output.hits), (encoded, files.len() as u64), "{what}");
            assert_eq!(disk.kinds.encoder_output.files, files.len() as u64);
            // Requests with a salt neither read encoder outputs from the disk nor write them.
            let salted = ask(&again, true).into_iter().map(|request| Request { cache_salt: 7, ..request });
            for (request, expected) in salted.zip(&expected[1]) {
                collect(again.submit(request).unwrap()).is_the_same_as(expected, what);
            }
            assert_eq!(metrics.encoded_media.get(), encoded, "{what}");
            assert_eq!(again.cache_report().disk.unwrap().hit_media, encoded);
        }
        stop_on_disk(again, Some(&dir));
        assert_eq!(blobs(&dir, OUTPUT_KIND).len(), files.len(), "{what}");
    }
    // Every file has a flipped bit: all media are encoded and written again.
    for kind in 0..=OUTPUT_KIND {
        for file in blobs(&dir, kind) {
            let mut bytes = std::fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(&file, bytes).unwrap();
        }
    }
    let damaged = start(&kept);
    answers(&damaged, false).iter().zip(&expected[0]).for_each(|(a, b)| a.is_the_same_as(b, what));
    let disk = damaged.cache_report().disk.unwrap();
    assert_eq!((damaged.metrics().encoded_media.get(), disk.hit_media), (encoded, 0), "{what}: {disk:?}");
    assert!(disk.kinds.encoder_output.misses > 0, "{what}: {disk:?}");
    stop_on_disk(damaged, Some(&dir));
    let healed = start(&kept);
    answers(&healed, true).iter().zip(&expected[1]).for_each(|(a, b)| a.is_the_same_as(b, what));
    assert_eq!(healed.metrics().encoded_media.get(), 0, "{what}");
    stop_on_disk(healed, Some(&dir));
}

/// The kind of encoder outputs, by the last two digits of a file's name.
const OUTPUT_KIND: u8 = 3;

/// The files of a kind.
fn blobs(dir: &Path, kind: u8) -> Vec<PathBuf> {
    let shards = std::fs::read_dir(dir.join("blobs")).unwrap();
    let files = shards.flat_map(|shard| std::fs::read_dir(shard.unwrap().path()).unwrap());
    let suffix = format!("{kind:02x}");
    files.map(|file| file.unwrap().path()).filter(|file| file.to_str().unwrap().ends_with(&suffix)).collect()
}

/// Stops an engine when it has released everything within its plan. Returns when its directory is free.
pub fn stop_on_disk(engine: EngineHandle, dir: Option<&Path>) {
    all_is_back(&engine);
    within_plan(&engine);
    drop(engine);
    let deadline = Instant::now() + Duration::from_secs(30);
    while dir.is_some_and(|dir| !Store::is_free(dir)) {
        assert!(Instant::now() < deadline, "the engine does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Asserts that two requests with the same ids and different media get different answers, and that each is found again in the cache.
pub fn told_apart(engine: &EngineHandle, mine: &Request, theirs: &Request) {
    assert_eq!(mine.prompt, theirs.prompt);
    let logprobs = |request: &Request| {
        let answer = collect(engine.submit(request.clone()).unwrap());
        assert_eq!(answer.error, None);
        answer.logprobs.into_iter().map(|report| report.unwrap().own.unwrap().to_bits()).collect::<Vec<_>>()
    };
    let (first, second) = (logprobs(mine), logprobs(theirs));
    assert_ne!(first, second, "the same ids, another sight or sound");
    assert_eq!((logprobs(mine), logprobs(theirs)), (first, second), "and again, from the cache");
}
