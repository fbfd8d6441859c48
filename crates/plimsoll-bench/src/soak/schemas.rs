//! Clients that send schemas: generated odd and hostile ones, and ones from files, in every request field that takes a schema.
//!
//! The right answer is a finished document that its schema allows, or a 400. The check uses a validator in this process, independent of
//! the server's own validation.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::ask::refusal;
use super::endpoint::Endpoint;
use super::outcome::Outcome;
use crate::prompts::Random;

/// One request of a `schemas` client.
#[derive(Clone, Debug)]
pub enum Case {
    /// A schema for the answer.
    Schema(Value),
    /// A whole request: its path and body.
    Request(String, Value),
}

/// Reads cases from a JSON file: a list of objects with `schema`, or with `path` and `body`.
///
/// # Errors
/// When the file cannot be read or has none of these.
pub fn read(path: &Path) -> Result<Vec<Case>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("--schemas {shown}"))?;
    let list: Vec<Value> =
        serde_json::from_str(&text).with_context(|| format!("--schemas {shown} is not a JSON list"))?;
    let case = |item: Value| match (item.get("schema"), item["path"].as_str(), item.get("body")) {
        (Some(schema), ..) => Some(Case::Schema(schema.clone())),
        (None, Some(path), Some(body)) => Some(Case::Request(path.to_owned(), body.clone())),
        _ => None,
    };
    let cases: Vec<Case> = list.into_iter().filter_map(case).collect();
    if cases.is_empty() {
        bail!("--schemas {shown}: no item has 'schema', or 'path' and 'body'");
    }
    Ok(cases)
}

/// Sends one of `cases`, the cases of the files, or a generated one.
pub async fn act(endpoint: &Endpoint, cases: &[Case], random: &mut Random) -> Result<Outcome> {
    let given = cases.get(random.below(2 * cases.len().max(1) as u64) as usize);
    let (path, mut body, schema) = match given.cloned().unwrap_or_else(|| Case::Schema(schema(random, 4))) {
        Case::Request(path, body) => (path, body, None),
        Case::Schema(schema) => {
            let (path, body) = request(&schema, random);
            (path.to_owned(), body, Some(schema))
        }
    };
    body["model"] = endpoint.model.clone().into();
    let answer = endpoint.target.post(&path, &body, endpoint.patience).await?;
    match answer.status() {
        200 => {
            let said = timeout(endpoint.patience, answer.json()).await??;
            Ok(schema.and_then(|schema| broken(&schema, &said)).map_or(Outcome::Good, Outcome::Bad))
        }
        400..=499 => Ok(Outcome::Good),
        _ => Ok(refusal(answer).await),
    }
}

/// Returns a request for an answer that fits the schema, by a random one of four methods: `guided_json`, `response_format`, a strict
/// tool, or a grammar.
fn request(schema: &Value, random: &mut Random) -> (&'static str, Value) {
    let messages = json!([{"role": "user", "content": "a"}]);
    let (path, mut body) = match random.below(4) {
        0 => ("/v1/completions", json!({"prompt": "a", "guided_json": guided(schema)})),
        1 => {
            let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
            ("/v1/chat/completions", json!({"messages": messages, "response_format": format}))
        }
        2 => {
            let function = json!({"name": "f", "strict": true, "parameters": schema});
            let tools = json!([{"type": "function", "function": function}]);
            ("/v1/chat/completions", json!({"messages": messages, "tools": tools, "tool_choice": "required"}))
        }
        _ => ("/v1/completions", json!({"prompt": "a", "guided_grammar": format!("start: a\na: %json {schema}")})),
    };
    body["max_tokens"] = 120.into();
    body["temperature"] = random.below(2).into();
    body["seed"] = random.below(1 << 30).into();
    (path, body)
}

/// Returns a schema as `guided_json` takes it: an object unchanged, any other value as text.
fn guided(schema: &Value) -> Value {
    if schema.is_object() { schema.clone() } else { schema.to_string().into() }
}

/// Describes how a finished answer breaks its schema. An answer cut by a limit is not a whole document and is not checked.
fn broken(schema: &Value, said: &Value) -> Option<String> {
    let choice = &said["choices"][0];
    let (end, message) = (choice["finish_reason"].as_str()?, &choice["message"]);
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str();
    let text = arguments.or(message["content"].as_str()).or(choice["text"].as_str())?;
    if !matches!(end, "stop" | "tool_calls") {
        return None;
    }
    // The server accepted this schema. If this validator cannot read it, the answer stays unchecked.
    let validator = jsonschema::options().should_validate_formats(false).build(schema).ok()?;
    let told = || format!("{} answers {}", cut(&schema.to_string()), cut(text));
    match serde_json::from_str(text) {
        Err(_) => Some(format!("no JSON: {}", told())),
        Ok(document) => validator.validate(&document).err().map(|error| format!("{error}: {}", told())),
    }
}

fn cut(text: &str) -> String {
    text.chars().take(300).collect()
}

/// Numbers at and beyond the limits of fixed-width arithmetic, and a few ordinary ones.
const NUMBERS: [&str; 16] = [
    "0",
    "-1",
    "3",
    "10",
    "999983",
    "0.1",
    "1e-7",
    "9007199254740993",
    "-9223372036854775808",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "-123456789012345678901234567890",
    "1e308",
    "2147483648",
    "1.0",
];

/// Patterns that match much, little or nothing, or take many states.
const PATTERNS: [&str; 12] = [
    "^a*$",
    "b",
    "^[a-z]{2,5}$",
    "(a|b){1,300}c",
    "^(a?){200}a{200}$",
    "[^\\x00-\\x7f]+",
    "^\\d{4}-\\d\\d$",
    "(?=a)b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "\\p{L}{3}",
    "(",
    "^$",
];

const NAMES: [&str; 8] = ["a", "b", "a/b", "~", "ä", "\"", "", "$ref"];
const TYPES: [&str; 8] = ["object", "array", "string", "integer", "number", "boolean", "null", "thing"];

fn pick<'a>(random: &mut Random, from: &[&'a str]) -> &'a str {
    from[random.below(from.len() as u64) as usize]
}

fn number(random: &mut Random) -> Value {
    serde_json::from_str(pick(random, &NUMBERS)).unwrap_or_default()
}

fn count(random: &mut Random) -> Value {
    [0, 1, 2, 3, 5, 40, 3_000, 4_000_000_000_u64][random.below(8) as usize].into()
}

/// Generates a schema nested at most this many levels deep.
fn schema(random: &mut Random, levels: u64) -> Value {
    if levels == 0 || random.below(12) == 0 {
        return if random.below(5) == 0 { (random.below(3) > 0).into() } else { json!({"type": pick(random, &TYPES)}) };
    }
    let mut all = Map::new();
    for _ in 0..random.between(1, 4) {
        let (key, value) = keyword(random, levels - 1);
        all.insert(key.into(), value);
    }
    if random.below(3) > 0 {
        all.insert("type".into(), pick(random, &TYPES).into());
    }
    Value::Object(all)
}

fn keyword(random: &mut Random, levels: u64) -> (&'static str, Value) {
    let several = |random: &mut Random| (0..random.between(1, 3)).map(|_| schema(random, levels)).collect::<Value>();
    let named = |random: &mut Random| {
        let one = |random: &mut Random| (pick(random, &NAMES).to_owned(), schema(random, levels));
        (0..random.between(1, 3)).map(|_| one(random)).collect::<Map<_, _>>()
    };
    match random.below(34) {
        0 | 1 => ("properties", named(random).into()),
        2 => ("required", (0..random.between(1, 2)).map(|_| pick(random, &NAMES)).collect::<Value>()),
        3 => ("additionalProperties", schema(random, levels)),
        4 => ("patternProperties", json!({pick(random, &PATTERNS): schema(random, levels)})),
        5 => ("items", schema(random, levels)),
        6 => ("prefixItems", several(random)),
        7 => ("contains", schema(random, levels)),
        8 => ("uniqueItems", true.into()),
        9 => ("anyOf", several(random)),
        10 => ("oneOf", several(random)),
        11 => ("allOf", several(random)),
        12 => ("not", schema(random, levels)),
        13 => ("if", schema(random, levels)),
        14 => ("then", schema(random, levels)),
        15 => ("else", schema(random, levels)),
        16 => ("const", value(random, 2)),
        17 => ("enum", (0..random.between(1, 3)).map(|_| value(random, 1)).collect()),
        18 => ("minimum", number(random)),
        19 => ("maximum", number(random)),
        20 => ("exclusiveMinimum", number(random)),
        21 => ("multipleOf", number(random)),
        22 => ("pattern", pick(random, &PATTERNS).into()),
        23 => ("minLength", count(random)),
        24 => ("maxLength", count(random)),
        25 => ("minItems", count(random)),
        26 => ("maxItems", count(random)),
        27 => ("minProperties", count(random)),
        28 => ("propertyNames", schema(random, levels)),
        29 => ("$ref", pick(random, &["#", "#/properties/a", "#/nowhere", "#/properties/a~1b", "http://a/b"]).into()),
        30 => ("unevaluatedProperties", schema(random, levels)),
        31 => ("unevaluatedItems", schema(random, levels)),
        32 => ("dependentRequired", json!({"a": ["b"]})),
        _ => ("format", pick(random, &["date-time", "password", "email", "ipv4", "uuid"]).into()),
    }
}

fn value(random: &mut Random, levels: u64) -> Value {
    match random.below(if levels == 0 { 4 } else { 6 }) {
        0 => number(random),
        1 => pick(random, &NAMES).into(),
        2 => Value::Null,
        3 => true.into(),
        4 => (0..random.below(3)).map(|_| value(random, levels - 1)).collect(),
        _ => json!({pick(random, &NAMES): value(random, levels - 1)}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_breaks_its_schema_is_found() {
        let said = |text: &str, end: &str| json!({"choices": [{"text": text, "finish_reason": end}]});
        let schema = json!({"type": "array", "uniqueItems": true});
        assert_eq!(broken(&schema, &said("[1, 2]", "stop")), None);
        assert!(broken(&schema, &said("[1, 1]", "stop")).is_some_and(|words| words.contains("[1, 1]")));
        assert!(broken(&schema, &said("[1, ", "stop")).is_some_and(|words| words.contains("no JSON")));
        assert_eq!(broken(&schema, &said("[1, 1", "length")), None);
    }

    #[test]
    fn made_up_schemas_have_every_keyword_and_all_ways_are_used() {
        let mut random = Random::new(5);
        let all: Vec<Value> = (0..2000).map(|_| schema(&mut random, 4)).collect();
        let text = Value::from(all.clone()).to_string();
        for word in ["oneOf", "not", "uniqueItems", "multipleOf", "-9223372036854775808", "$ref", "propertyNames"] {
            assert!(text.contains(word), "{word}");
        }
        let ways: Vec<String> = all.iter().map(|schema| request(schema, &mut random).1.to_string()).collect();
        for word in ["guided_json", "json_schema", "tool_choice", "%json"] {
            assert!(ways.iter().any(|way| way.contains(word)), "{word}");
        }
    }
}
