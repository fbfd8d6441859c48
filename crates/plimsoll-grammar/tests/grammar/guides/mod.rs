//! Sampled outputs follow their grammar, and the budget holds.

mod calls;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CompileLimits, GrammarError, Grammars, Guide, ReasoningRules, Settings, Source};
use plimsoll_text::Tokenizer;
use serde_json::{Value, json};

fn tokenizer() -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama/tokenizer.json");
    Arc::new(Tokenizer::from_file(&path).unwrap())
}

fn grammars(bytes: u64) -> Arc<Grammars> {
    grammars_of(tokenizer().vocab_size() + 7, bytes)
}

/// Grammars for a model with this many logits.
fn grammars_of(vocab: usize, bytes: u64) -> Arc<Grammars> {
    let tokenizer = tokenizer();
    let ends = tokenizer.eos().to_vec();
    assert!(!ends.is_empty());
    Grammars::new(Settings { tokenizer, vocab, ends, spelled: Vec::new(), bytes, sandbox: None })
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Samples allowed tokens until the output ends.
fn sample(guide: &Guide, tokenizer: &Tokenizer, seed: u64, most: usize) -> Option<(Vec<u32>, String)> {
    let mut constraint = guide.begin().unwrap();
    let (mut ids, mut random) = (Vec::new(), Random(seed));
    while ids.len() < most {
        let mask = constraint.allowed().unwrap().map(<[u32]>::to_vec);
        let allowed: Vec<u32> = (0..tokenizer.vocab_size() as u32)
            .filter(|id| mask.as_ref().is_none_or(|mask| mask[*id as usize / 32] >> (id % 32) & 1 == 1))
            .collect();
        assert!(!allowed.is_empty(), "the mask is empty");
        let end = allowed.iter().find(|id| tokenizer.eos().contains(id));
        if let Some(end) = end.filter(|_| random.below(3) == 0) {
            ids.push(*end);
            return Some((ids.clone(), tokenizer.decode(&ids, true)));
        }
        let text: Vec<u32> = allowed.into_iter().filter(|id| !tokenizer.eos().contains(id)).collect();
        let Some(id) = (!text.is_empty()).then(|| text[random.below(text.len())]) else { continue };
        constraint.accept(id).unwrap();
        ids.push(id);
        if constraint.complete() {
            return Some((ids.clone(), tokenizer.decode(&ids, true)));
        }
    }
    None
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["a", "b"]}, "sub": {"$ref": "#/$defs/sub"},
            "either": {"oneOf": [{"type": "null"}, {"type": "boolean"}]}
        },
        "required": ["name", "n", "kind", "sub", "either"], "additionalProperties": false,
        "$defs": {"sub": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}}
    })
}

#[test]
fn sampled_json_matches_its_schema() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let guide =
        Guide::new(&grammars, Some(&Source::JsonSchema(schema().to_string())), "", None, &CompileLimits::default())
            .unwrap();
    let mut ended = 0;
    for seed in 0..40 {
        let Some((_, text)) = sample(&guide, &tokenizer, seed, 400) else { continue };
        ended += 1;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["name", "n", "kind", "sub", "either"], "{text}");
        assert!(value["name"].as_str().unwrap().chars().count() <= 6 && value["n"].as_u64().unwrap() <= 99, "{text}");
        assert!(value["kind"] == "a" || value["kind"] == "b");
        assert!((1..=2).contains(&value["sub"].as_array().unwrap().len()));
    }
    assert!(ended >= 30, "{ended} of 40 ended");
}

#[test]
fn outputs_follow_choices_patterns_and_grammars() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let guide = |source: Source| Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap();
    for seed in 0..10 {
        let (_, text) = sample(&guide(Source::Choice(vec!["yes".into(), "no".into()])), &tokenizer, seed, 50).unwrap();
        assert!(text == "yes" || text == "no", "{text}");
        let (_, text) = sample(&guide(Source::Regex("[0-9]{2}/[a-c]+x".into())), &tokenizer, seed, 200).unwrap();
        assert!(text.ends_with('x') && text.as_bytes()[2] == b'/', "{text}");
        let (_, text) = sample(&guide(Source::Lark("start: \"ab\"+ \"c\"".into())), &tokenizer, seed, 200).unwrap();
        assert!(text.starts_with("ab") && text.ends_with("bc"), "{text}");
        if let Some((_, text)) = sample(&guide(Source::JsonObject), &tokenizer, seed, 100) {
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => assert!(value.is_object(), "{text}"),
                // JSON numbers have no range; Rust's do.
                Err(error) => assert!(error.to_string().starts_with("number out of range"), "{error}: {text}"),
            }
        }
    }
    assert_eq!(grammars.usage().compiled, 4);
    assert_eq!(grammars.usage().hits, 36);
}

/// Accepts a text. Returns whether the output may end after it, or which token was not allowed.
fn accept(guide: &Guide, tokenizer: &Tokenizer, text: &str) -> Result<bool, String> {
    let mut constraint = guide.begin().unwrap();
    for id in tokenizer.encode(text, false, false).unwrap() {
        let mask = constraint.allowed().map_err(|error| format!("before {id}: {error}"))?.map(<[u32]>::to_vec);
        let allowed = mask.is_none_or(|mask| mask[id as usize / 32] >> (id % 32) & 1 == 1);
        if !allowed {
            return Err(format!("{:?} is not allowed", tokenizer.decode(&[id], false)));
        }
        constraint.accept(id).map_err(|unfit| unfit.to_string())?;
    }
    // The output is complete, or may end here.
    if constraint.complete() {
        return Ok(true);
    }
    let end = tokenizer.eos()[0];
    let mask = constraint.allowed().map_err(|unfit| unfit.to_string())?;
    Ok(mask.is_none_or(|mask| mask[end as usize / 32] >> (end % 32) & 1 == 1))
}

#[test]
fn reasoning_ends_within_its_budget() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let source = Source::Choice(vec!["yes".into(), "no".into()]);
    for budget in [0, 1, 5, 17] {
        let thinking = ReasoningRules { opened: true, open: "<think>", close: "</think>", budget: Some(budget) };
        let guide =
            Guide::new(&grammars, Some(&source), "", Some(thinking.clone()), &CompileLimits::default()).unwrap();
        let (ids, text) = sample(&guide, &tokenizer, 3, 200).unwrap();
        let (_, answer) = text.split_once("</think>").unwrap();
        assert!(answer == "yes" || answer == "no", "{text}");
        let close = tokenizer.encode("</think>", false, true).unwrap();
        let reasoning = ids.windows(close.len()).position(|window| window == close).unwrap();
        assert!(reasoning <= budget as usize, "{reasoning} reasoning tokens; the budget is {budget}");
        // Without a grammar only the reasoning is limited.
        let guide = Guide::new(&grammars, None, "", Some(thinking), &CompileLimits::default()).unwrap();
        let mut constraint = guide.begin().unwrap();
        for _ in 0..budget {
            let first =
                (0..).find(|id| constraint.allowed().unwrap().unwrap()[*id as usize / 32] >> (id % 32) & 1 == 1);
            constraint.accept(first.unwrap()).unwrap();
        }
        for id in close {
            let mask = constraint.allowed().unwrap().unwrap();
            assert_eq!(mask.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
            assert_eq!(mask[id as usize / 32] >> (id % 32) & 1, 1);
            constraint.accept(id).unwrap();
        }
        assert!(constraint.allowed().unwrap().is_none(), "all tokens are allowed afterwards");
    }
}

/// Regression, found by the soak: if the vocabulary is a multiple of 32, masks have one more word than ours. Requests
/// with reasoning before a grammar got status 500.
#[test]
fn reasoning_before_structured_output_works_for_any_vocabulary_size() {
    let tokenizer = tokenizer();
    let source = Source::Choice(vec!["yes".into(), "no".into()]);
    let opens = tokenizer.encode("a", false, true).unwrap();
    assert_eq!(opens.len(), 1, "the opening marker is one token");
    let even = tokenizer.vocab_size().next_multiple_of(32);
    for vocab in [even, even + 1, even + 31] {
        let thinking = ReasoningRules { opened: false, open: "a", close: "</think>", budget: Some(4) };
        let guide =
            Guide::new(&grammars_of(vocab, 64 << 20), Some(&source), "", Some(thinking), &CompileLimits::default())
                .unwrap();
        let mut constraint = guide.begin().unwrap();
        let mask = constraint.allowed().unwrap().unwrap();
        assert_eq!(mask[opens[0] as usize / 32] >> (opens[0] % 32) & 1, 1, "{vocab}: reasoning may start");
        let ended = (0..8).filter_map(|seed| sample(&guide, &tokenizer, seed, 200)).map(|(_, text)| text);
        let right = |text: &String| text.ends_with("yes") || text.ends_with("no");
        assert!(ended.into_iter().all(|text| right(&text)), "{vocab}");
    }
}

#[test]
fn invalid_grammars_say_why() {
    let grammars = grammars(64 << 20);
    for source in [
        Source::JsonSchema(json!({"type": "colour"}).to_string()),
        Source::JsonSchema(json!("x").to_string()),
        Source::Regex("(".into()),
        Source::Lark("start: nothing".into()),
        Source::Choice(vec![]),
        Source::Regex("x".repeat(300_000)),
    ] {
        let error = Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap_err();
        assert!(matches!(&error, GrammarError::Invalid(message) if message.len() > 10), "{error:?}");
    }
    assert_eq!(grammars.usage().grammars, 0);
    // The message has no names of llguidance's errors.
    let contradiction = json!({"type": "string", "minLength": 5, "maxLength": 2});
    for source in [Source::JsonSchema(contradiction.to_string()), Source::Lark("start: A\nA: /a/ & /b/".into())] {
        let Err(GrammarError::Invalid(message)) =
            Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default())
        else {
            panic!("{source:?}")
        };
        assert!(message.contains(' ') && !message.contains("NoExtension"), "{message}");
        println!("{message}");
    }
    let Err(GrammarError::Invalid(message)) =
        Guide::new(&grammars, Some(&Source::Regex("(?=a)b".into())), "", None, &CompileLimits::default())
    else {
        panic!("a look-ahead is refused")
    };
    assert!(message.contains("look-around") && message.contains("not supported"), "{message}");
}

/// A grammar with ever more ways to read the same text becomes slow. Its outputs accept tokens while no mask of it is
/// computed, so accepting is always fast.
#[test]
fn slow_grammar_signals_when_its_mask_is_ready() {
    let (grammars, tokenizer) = (grammars(64 << 20), tokenizer());
    let source = Source::Lark("start: e\ne: e e | /[a-z]/".into());
    let guide = Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default()).unwrap();
    let letter = tokenizer.encode("e", false, false).unwrap()[0];
    let mut outputs = [guide.begin().unwrap(), guide.begin().unwrap()];
    let (mut waited, mut rounds, mut quickest) = (0, 0, [Duration::MAX; 2]);
    while waited == 0 || rounds < 3 {
        rounds = if waited == 0 { 0 } else { rounds + 1 };
        for (constraint, quickest) in outputs.iter_mut().zip(&mut quickest) {
            while !constraint.mask_ready(Duration::from_millis(1)) {
                waited += 1;
            }
            let began = Instant::now();
            constraint.allowed().unwrap();
            constraint.accept(letter).unwrap();
            if rounds > 0 {
                *quickest = began.elapsed().min(*quickest);
            }
        }
    }
    // A slow mask takes more than 20 ms.
    assert!(quickest.iter().all(|took| *took < Duration::from_millis(15)), "{quickest:?}");
}

#[test]
fn ten_thousand_schemas_stay_within_the_budget() {
    let grammars = grammars(8 << 20);
    let schema = |i: usize| {
        Source::JsonSchema(json!({"type": "object", "properties": {format!("p{i}"): {"type": "string"}}}).to_string())
    };
    let held: Vec<Guide> =
        (0..3).map(|i| Guide::new(&grammars, Some(&schema(i)), "", None, &CompileLimits::default()).unwrap()).collect();
    let turns = if cfg!(debug_assertions) { 400 } else { 10_000 };
    for i in 3..turns {
        Guide::new(&grammars, Some(&schema(i)), "", None, &CompileLimits::default()).unwrap();
        let usage = grammars.usage();
        assert!(usage.used <= usage.limit, "{usage:?}");
    }
    let usage = grammars.usage();
    assert!(usage.evicted > 0 && usage.grammars < 200, "{usage:?}");
    assert!(held.iter().all(|guide| guide.begin().is_ok()), "a grammar in use was evicted");
    // When no grammar is idle, the next one is refused.
    let mut all = held;
    let full = (turns..turns + 1000).find_map(|i| {
        match Guide::new(&grammars, Some(&schema(i)), "", None, &CompileLimits::default()) {
            Ok(guide) => {
                all.push(guide);
                None
            }
            Err(error) => Some(error),
        }
    });
    assert_eq!(full, Some(GrammarError::Full(8 << 20)));
    drop(all);
    assert!(Guide::new(&grammars, Some(&schema(0)), "", None, &CompileLimits::default()).is_ok());
}

#[test]
fn a_budget_too_small_for_the_vocabulary_names_the_flag() {
    let error =
        Guide::new(&grammars(1000), Some(&Source::JsonObject), "", None, &CompileLimits::default()).unwrap_err();
    assert!(error.to_string().contains("--grammar-bytes is 1000"), "{error}");
}
