//! Errors of schemas name the part, the value or limit, and the next step.

use plimsoll_schema::{Options, SchemaError, compile};

fn refused(schema: &str) -> SchemaError {
    compile(schema, "body", false, &Options::default()).expect_err(schema)
}

#[test]
fn a_refusal_names_the_part_and_the_reason() {
    for (schema, words) in [
        (r#"{"properties": {"a": {"type": "integer", "multipleOf": 999983}}}"#, "at /properties/a: 999983 cannot"),
        (r#"{"properties": {"a": {"pattern": "(?=x)y"}}}"#, "pattern is not supported here at /properties/a/pattern"),
        (r#"{"items": {"$ref": "http://x/y"}}"#, "$ref is not supported here at /items/$ref: 'http://x/y' is not in"),
        (r#"{"type": "thing"}"#, "type 'thing' is unknown: use null, boolean"),
        (r#"{"type": "object", "required": ["a"], "properties": {"a": false}}"#, "no document can satisfy the schema"),
        (r#"{"properties": {"a": {"minLength": -1}}}"#, "at /properties/a/minLength: -1 is given where a count"),
        (r##"{"$ref": "#"}"##, "refers to itself without end"),
        ("{", "not JSON"),
        ("5", "5 is not a schema"),
    ] {
        let said = refused(schema).to_string();
        assert!(said.contains(words), "{schema}: {said}");
    }
}

#[test]
fn schemas_over_a_limit_are_refused_in_time() {
    let since = std::time::Instant::now();
    // Two to the fortieth alternatives.
    let each = |i: usize| format!(r#"{{"anyOf": [{{"required": ["a{i}"]}}, {{"required": ["b{i}"]}}]}}"#);
    let all: Vec<String> = (0..40).map(each).collect();
    let said = refused(&format!(r#"{{"type": "object", "allOf": [{}]}}"#, all.join(","))).to_string();
    assert!(said.contains("more than 600 alternatives") && said.contains("/allOf"), "{said}");
    // More parts than a grammar may have.
    let names: Vec<String> = (0..9_000).map(|i| format!(r#""p{i}": {{"minLength": {i}}}"#)).collect();
    let said = refused(&format!(r#"{{"properties": {{{}}}}}"#, names.join(","))).to_string();
    assert!(said.contains("more than"), "{said}");
    assert!(since.elapsed().as_secs() < 20, "{:?}", since.elapsed());
}
