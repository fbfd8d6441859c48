//! Random walks over random schemas: an independent validator accepts every document that an exact grammar allows.

use jsonschema::Validator;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
use llguidance::{Matcher, ParserFactory};
use plimsoll_schema::{Options, compile};
use serde_json::{Map, Value, json};

const SCHEMAS: usize = 2_000;
const WALKS_PER_SCHEMA: usize = 3;

/// A walk stops after this many bytes. After half of them it prefers to end.
const WALK_BYTES_MAX: usize = 240;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

const NAMES: [&str; 5] = ["a", "b", "a/b", "~", "ä"];
const PATTERNS: [&str; 5] = ["^a*$", "b", "^[a-c]{1,3}$", "^\\d", "^(ab|c)+$"];
const NUMBERS: [i64; 6] = [-3, 0, 1, 2, 7, 9_007_199_254_740_993];

/// A schema of at most `levels` levels. Its keywords sometimes contradict each other.
fn schema(random: &mut Random, levels: usize) -> Value {
    let kind = random.pick(&["object", "array", "string", "integer", "number", "boolean", "null"]);
    let mut all = Map::new();
    all.insert("type".into(), kind.into());
    if levels == 0 {
        return Value::Object(all);
    }
    for _ in 0..=random.below(3) {
        let inner = |random: &mut Random| schema(random, levels - 1);
        let several = |random: &mut Random| -> Value { (0..=random.below(2)).map(|_| inner(random)).collect() };
        let count = |random: &mut Random| Value::from(random.below(4));
        let (key, value) = match kind {
            "object" => match random.below(8) {
                0 | 1 => {
                    let named = (0..=random.below(2)).map(|_| (random.pick(&NAMES).to_owned(), inner(random)));
                    ("properties", named.collect::<Map<_, _>>().into())
                }
                2 => ("required", json!([random.pick(&NAMES)])),
                3 => ("additionalProperties", random.pick(&[json!(false), json!({"type": "null"})])),
                4 => ("patternProperties", json!({random.pick(&PATTERNS): inner(random)})),
                5 => ("maxProperties", count(random)),
                6 => ("dependentRequired", json!({random.pick(&NAMES): [random.pick(&NAMES)]})),
                _ => ("propertyNames", json!({"maxLength": random.below(3)})),
            },
            "array" => match random.below(5) {
                0 => ("items", inner(random)),
                1 => ("prefixItems", several(random)),
                2 => ("contains", inner(random)),
                3 => ("minItems", count(random)),
                _ => ("maxItems", count(random)),
            },
            "string" => match random.below(3) {
                0 => ("pattern", random.pick(&PATTERNS).into()),
                1 => ("minLength", count(random)),
                _ => ("maxLength", count(random)),
            },
            "integer" | "number" => match random.below(4) {
                0 => ("minimum", random.pick(&NUMBERS).into()),
                1 => ("maximum", random.pick(&NUMBERS).into()),
                2 => ("exclusiveMinimum", random.pick(&NUMBERS).into()),
                _ => ("multipleOf", random.pick(&[2, 3, 5]).into()),
            },
            _ => ("not", inner(random)),
        };
        all.insert(key.into(), value);
        match random.below(12) {
            0 => drop(all.insert("anyOf".into(), several(random))),
            1 => drop(all.insert("oneOf".into(), several(random))),
            2 => drop(all.insert("not".into(), inner(random))),
            3 => drop(all.insert("enum".into(), json!([null, 3, "a", "abc", [], [1], {"a": 1}, {"b": [true]}]))),
            4 => drop(all.insert("if".into(), inner(random)).or(all.insert("then".into(), inner(random)))),
            _ => {}
        }
    }
    Value::Object(all)
}

/// Writes one random document. `None` if it does not end in time.
fn walk(factory: &ParserFactory, lark: &str, random: &mut Random) -> Option<String> {
    let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned())));
    let mut text = Vec::new();
    while text.len() < WALK_BYTES_MAX {
        let mask = matcher.compute_mask().ok()?;
        let allowed: Vec<u32> = (0..256).filter(|byte| mask.is_allowed(*byte)).collect();
        let whole = matcher.is_accepting().ok()?;
        if allowed.is_empty() || (whole && (text.len() * 2 > WALK_BYTES_MAX || random.below(3) == 0)) {
            return whole.then(|| String::from_utf8(text).expect("grammars write UTF-8"));
        }
        let closing: Vec<u32> = allowed.iter().copied().filter(|byte| b"\"]}".contains(&(*byte as u8))).collect();
        let hurry = !closing.is_empty() && (text.len() * 2 > WALK_BYTES_MAX || random.below(3) == 0);
        let byte = random.pick(if hurry { &closing } else { &allowed });
        matcher.consume_token(byte).ok()?;
        text.push(byte as u8);
    }
    None
}

fn validator(schema: &Value) -> Validator {
    jsonschema::draft202012::options().should_validate_formats(false).build(schema).expect("a schema of ours")
}

#[test]
fn every_document_that_an_exact_grammar_writes_is_valid() {
    let env = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]).unwrap();
    factory.quiet();
    let mut random = Random(39);
    let (mut exact, mut refused, mut written, mut unfinished) = (0, 0, 0, 0);
    for _ in 0..SCHEMAS {
        let schema = schema(&mut random, 3);
        let compiled = match compile(&schema.to_string(), "body", false, &Options::default()) {
            Ok(compiled) if compiled.validated.is_empty() => compiled,
            Ok(_) => continue,
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        exact += 1;
        let lark = format!("start: body\n{}", compiled.rules);
        let validator = validator(&schema);
        for _ in 0..WALKS_PER_SCHEMA {
            match walk(&factory, &lark, &mut random) {
                None => unfinished += 1,
                Some(text) => {
                    written += 1;
                    let document: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
                        panic!("{schema} writes {text}, which is not JSON: {error}");
                    });
                    let valid = validator.validate(&document);
                    assert!(valid.is_ok(), "{schema} writes {text}: {}", valid.unwrap_err());
                }
            }
        }
    }
    println!("{exact} exact grammars, {refused} refused; {written} documents, {unfinished} walks without an end");
    assert!(exact > SCHEMAS / 3 && written > SCHEMAS / 5, "{exact} grammars, {written} documents");
}
