//! The documents that grammars accept, byte by byte, with llguidance.

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
use llguidance::{Matcher, ParserFactory};
use plimsoll_schema::{Options, compile};
use serde_json::Value;

/// Whether a whole document is accepted. `None` if the schema is refused.
fn accepts(schema: &str, document: &str) -> Option<bool> {
    let compiled = compile(schema, "body", false, &Options::default()).ok()?;
    let factory = ParserFactory::new(&ApproximateTokEnv::single_byte_env(), InferenceCapabilities::default(), &[]);
    let mut factory = factory.unwrap();
    factory.quiet();
    let grammar = TopLevelGrammar::from_lark(format!("start: body\n{}", compiled.rules));
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    assert!(!matcher.is_error(), "{schema}: {:?}\n{}", matcher.get_error(), compiled.rules);
    let bytes: Vec<u32> = document.bytes().map(u32::from).collect();
    let taken = matcher.try_consume_tokens(&bytes).unwrap_or(0);
    Some(taken == bytes.len() && matcher.is_accepting().unwrap_or(false))
}

/// Schemas, documents that each allows, and documents that it does not.
const CASES: &[(&str, &[&str], &[&str])] = &[
    (r#"{"const": 9007199254740993}"#, &["9007199254740993"], &["9007199254740992"]),
    (
        r#"{"minimum": -9223372036854775808, "maximum": -9223372036854775807, "type": "integer"}"#,
        &["-9223372036854775808"],
        &["-9223372036854775809", "0"],
    ),
    (r#"{"type": "integer", "multipleOf": 7, "minimum": 0}"#, &["0", "14"], &["15", "-7"]),
    (r#"{"type": "integer", "multipleOf": 100}"#, &["0", "-300"], &["150", "10"]),
    (r#"{"multipleOf": 0.01, "type": "number"}"#, &["1.25", "3"], &["1.255"]),
    (r#"{"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}"#, &["\"a\"", "\"c\""], &["\"b\""]),
    (r#"{"not": {"type": ["string", "object"]}}"#, &["1", "[]", "null"], &["\"\"", "{}"]),
    (r#"{"type": "string", "pattern": "^a", "not": {"pattern": "b"}}"#, &["\"a\"", "\"acc\""], &["\"ab\"", "\"c\""]),
    (
        r#"{"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 3}}"#,
        &["\"ab\"", "3"],
        &["\"a\"", "2"],
    ),
    (
        r#"{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": false}"#,
        &[r#"{"a":1}"#],
        &["{}", r#"{"a":2}"#, r#"{"a":1,"b":1}"#],
    ),
    (
        r#"{"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "null"}}"#,
        &[r#"{"xa":1,"b":null}"#],
        &[r#"{"xa":null}"#, r#"{"b":1}"#],
    ),
    (
        r#"{"type": "object", "propertyNames": {"maxLength": 1}, "minProperties": 2, "maxProperties": 2}"#,
        &[r#"{"a":1,"b":2}"#],
        &[r#"{"a":1}"#, r#"{"ab":1,"c":2}"#],
    ),
    (
        r#"{"type": "object", "dependentRequired": {"a": ["b"]}}"#,
        &["{}", r#"{"a":1,"b":2}"#, r#"{"c":1}"#],
        &[r#"{"a":1}"#],
    ),
    (
        r#"{"type": "object", "allOf": [{"properties": {"a": {}}}], "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, true], "unevaluatedProperties": false}"#,
        &[r#"{"a":1}"#, "{}", r#"{"a":1,"b":1}"#],
        &[r#"{"c":1}"#],
    ),
    (
        r#"{"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 2}"#,
        &[r#"[1,"a"]"#, r#"[1, "a", "b"]"#],
        &["[1]", r#"["a",1]"#],
    ),
    (
        r#"{"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 2, "maxContains": 2}"#,
        &["[5,6]", "[1,5,2,7]"],
        &["[5]", "[5,6,7]", "[1,2]"],
    ),
    (r#"{"type": "array", "prefixItems": [true], "unevaluatedItems": false}"#, &["[]", "[1]"], &["[1,2]"]),
    (
        r##"{"$defs": {"a/b": {"const": 1}, "n": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": false}]}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/n"}]}"##,
        &["1", "null", r#"{"n":{"n":null}}"#],
        &["2", r#"{"n":1}"#],
    ),
    (
        r#"{"type": "string", "minLength": 2, "maxLength": 3}"#,
        &["\"ab\"", "\"\\n\\\"c\"", "\"äöü\""],
        &["\"a\"", "\"abcd\""],
    ),
    (r#"{"type": "string", "format": "password"}"#, &["\"x\""], &["1"]),
    (
        r#"{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}, "required": ["a"]}"#,
        &[r#"{"b":1,"a":2}"#, r#"{"a": 2}"#, r#"{"a":2,"c":[{}]}"#],
        &[r#"{"b":1}"#, r#"{"a":"x"}"#],
    ),
];

#[test]
fn each_keyword_allows_what_it_says_and_nothing_else() {
    for (schema, good, bad) in CASES {
        for document in *good {
            assert_eq!(accepts(schema, document), Some(true), "{schema} should allow {document}");
        }
        for document in *bad {
            assert_eq!(accepts(schema, document), Some(false), "{schema} should not allow {document}");
        }
    }
}

/// The official suite, if it is beside the checkout: it is not part of this repository.
#[test]
fn no_invalid_instance_of_the_official_suite_is_accepted_by_an_exact_grammar() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/json-schema/suite-2020-12.json");
    let Ok(text) = std::fs::read_to_string(file) else {
        assert!(std::env::var_os("CI").is_none(), "CI must have {file}");
        eprintln!("\n*** NOT RUN: THE OFFICIAL JSON SCHEMA SUITE IS NOT AT ../shared/json-schema ***\n");
        return;
    };
    let suite: Vec<Value> = serde_json::from_str(&text).unwrap();
    let (mut exact, mut left, mut refused, mut taken, mut valid) = (0, 0, 0, 0, 0);
    for group in &suite {
        let schema = group["schema"].to_string();
        let Ok(compiled) = compile(&schema, "body", false, &Options::default()) else {
            refused += 1;
            continue;
        };
        let holds = compiled.validated.is_empty();
        exact += usize::from(holds);
        left += usize::from(!holds);
        for test in group["tests"].as_array().unwrap() {
            let document = test["data"].to_string();
            let accepted = accepts(&schema, &document).unwrap();
            match test["valid"].as_bool().unwrap() {
                true => {
                    valid += 1;
                    taken += usize::from(accepted);
                }
                false => assert!(!(holds && accepted), "{} allows {document}", group["group"]),
            }
        }
    }
    println!(
        "{exact} exact, {left} validated, {refused} refused; {taken} of {valid} valid instances can be written as they are"
    );
    assert!(refused <= 60, "{refused} refused");
    assert!(taken * 10 > valid * 8, "{taken} of {valid}");
}
