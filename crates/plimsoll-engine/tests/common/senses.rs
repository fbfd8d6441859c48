//! What the tests of real towers share: pictures drawn as the references' were, and what holds of answers and memory whatever was shown.

use plimsoll_engine::{EngineHandle, Request};
use plimsoll_media::Size;
use plimsoll_media::image::Rgb;
use plimsoll_memory::Component;
use serde_json::Value;

use super::{Answer, collect, ids, quiet};

/// The picture or frame that `tools/fixturelib/vision.py` draws by the same formula.
pub fn drawn(seed: usize, frame: usize, size: Size) -> Rgb {
    let (height, width) = (size.height as usize, size.width as usize);
    let colour = |y: usize, x: usize, c: usize| {
        (((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255) as u8
    };
    let pixels = (0..height).flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| colour(y, x, c))));
    Rgb { size, data: pixels.collect() }
}

/// The reference's greedy tokens up to a near-tie, and their log-probabilities within what issue 6 allows without a resize.
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

/// A tower was at work, and took no more than was planned for it.
pub fn towers_kept_to_their_plan(engine: &EngineHandle) {
    let ledger = engine.ledger();
    for component in [Component::EncoderOutputs, Component::StepWorkspace] {
        let row = ledger.row(component);
        assert!(row.committed > 0 && row.peak <= row.planned, "{row:?}");
    }
}

/// Waits until everything that requests held is back, outputs of towers and pixels too.
pub fn all_is_back(engine: &EngineHandle) {
    quiet(engine);
    let spec = engine.media().unwrap();
    let stats = spec.outputs.stats();
    assert_eq!((stats.pages_free + stats.pages_idle, spec.staging.used()), (stats.pages, 0));
}

/// Two requests with the same ids and other media are told apart, and each is found again.
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
