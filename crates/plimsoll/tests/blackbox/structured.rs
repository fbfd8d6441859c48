//! Structured output from outside: hostile schemas, the official suite, the processes that compile and validate.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::limit::say;
use crate::product::{Server, eventually, repository};

/// A request with any schema must be refused within this time. It includes the start of a process on a busy machine.
const REFUSED_WITHIN: Duration = Duration::from_secs(8);

/// Most resident bytes of a sandbox process, the pages of its program included.
const SANDBOX_RSS_MAX: u64 = 64 << 20;

fn demo(flags: &[&str]) -> Server {
    Server::start_model(&PathBuf::from("demo"), flags)
}

fn completion(schema: &Value) -> Value {
    json!({"prompt": "a", "max_tokens": 60, "temperature": 0, "guided_json": schema})
}

/// The sandbox processes of a server.
fn sandboxes(server: &Server) -> Vec<u32> {
    let of = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent: u32 = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()?;
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        (parent == server.pid() && command.contains("grammar-sandbox")).then_some(pid)
    };
    fs::read_dir("/proc").expect("Linux").flatten().filter_map(of).collect()
}

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// Schemas that once ended the process or took a gigabyte, and their kind.
fn hostile() -> Vec<Value> {
    let deep = (0..120).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let chain = (0..1500).map(|i| (i.to_string(), json!({"$ref": format!("#/$defs/{}", i + 1)})));
    let bomb = (0..40).map(|i| {
        let next = format!("#/$defs/{}", i + 1);
        (i.to_string(), json!({"allOf": [{"$ref": next}, {"anyOf": [{"$ref": next}, {"$ref": next}]}]}))
    });
    vec![
        json!({"const": i64::MIN}),
        json!({"type": "integer", "multipleOf": 999_983}),
        json!({"type": "integer", "multipleOf": 4_000_000_007_u64}),
        json!({"type": "number", "multipleOf": 1e-300}),
        json!({"type": "string", "pattern": "^(a?){400}a{400}$"}),
        json!({"type": "string", "pattern": "(a|b){1,900}c(a|b){900}"}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 4_000_000_000_u64}),
        json!({"type": "string", "minLength": 4_000_000_000_u64}),
        deep,
        json!({"$ref": "#/$defs/0", "$defs": chain.collect::<serde_json::Map<_, _>>()}),
        json!({"$ref": "#/$defs/0", "$defs": bomb.collect::<serde_json::Map<_, _>>()}),
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    ]
}

#[test]
fn a_hostile_schema_is_answered_or_refused_in_time_and_in_bounds() {
    let server = demo(&[]);
    let mut most = 0;
    for schema in hostile() {
        let before = Instant::now();
        let answer = server.post("/v1/completions", &completion(&schema));
        let (status, took) = (answer.status, before.elapsed());
        let shown: String = schema.to_string().chars().take(80).collect();
        assert!(matches!(status, 200 | 400), "{status} for {shown}: {}", answer.text());
        assert!(took < REFUSED_WITHIN, "{took:?} for {shown}");
        most = sandboxes(&server).into_iter().map(resident).fold(most, u64::max);
    }
    assert!(most < SANDBOX_RSS_MAX, "a sandbox takes {most} bytes");
    let page = server.memory();
    let heap = page["components"].as_array().unwrap().iter().find(|row| row["component"] == "host_heap").unwrap();
    assert!(heap["peak_bytes"].as_u64() < heap["planned_bytes"].as_u64(), "{heap}");
    let answer = server.ask("/v1/completions", &completion(&json!({"const": "still here"})));
    assert_eq!(answer["choices"][0]["text"], "\"still here\"");
    eventually("every pool is full again", || server.at_rest());
}

#[test]
fn every_way_to_a_schema_refuses_what_breaks_a_limit_and_names_the_field() {
    let server = demo(&[]);
    let schema = json!({"type": "integer", "multipleOf": 999_983});
    let object = json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    let messages = json!([{"role": "user", "content": "a"}]);
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": object}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": object}});
    let lark = format!("start: a\na: %json {schema}");
    let ways = [
        ("/v1/completions", json!({"prompt": "a", "guided_json": schema}), "guided_json"),
        ("/v1/completions", json!({"prompt": "a", "structured_outputs": {"json": schema}}), "structured_outputs"),
        ("/v1/completions", json!({"prompt": "a", "guided_grammar": lark}), "guided_grammar"),
        ("/v1/chat/completions", json!({"messages": messages, "response_format": format}), "response_format"),
        ("/v1/chat/completions", json!({"messages": messages, "tools": [tool], "tool_choice": "required"}), "tools"),
        (
            "/v1/responses",
            json!({"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": object}}}),
            "text.format",
        ),
        (
            "/v1/messages",
            json!({"model": "demo", "max_tokens": 9, "messages": messages,
                   "output_config": {"format": {"type": "json_schema", "schema": object}}}),
            "output_config",
        ),
    ];
    for (path, body, field) in ways {
        let answer = server.post(path, &body);
        let (status, text) = (answer.status, answer.text());
        assert!(status == 400 && text.contains(field), "{path} {field}: {status} {text}");
    }
}

#[test]
fn a_refusal_names_the_smallest_part_that_breaks_a_limit_and_its_tool() {
    let server = demo(&[]);
    let remainders = (0..8).map(|i| json!({"type": "integer", "multipleOf": 7919 + i}));
    let heavy = json!({"type": "array", "prefixItems": remainders.collect::<Vec<_>>()});
    let schema = json!({"type": "object", "required": ["deep"], "properties": {
        "x": {"type": "string"},
        "deep": {"type": "array", "items": {"anyOf": [{"type": "null"}, heavy]}},
    }});
    let answer = server.post("/v1/completions", &completion(&schema));
    let (status, said) = (answer.status, answer.text());
    assert_eq!(status, 400, "{said}");
    // The search for the smallest part has a time limit. On a busy machine it may end one part above, or the time may run out before
    // the memory.
    let limited = said.contains("12 MiB of memory") || said.contains("it takes longer than");
    assert!(said.contains("at /properties/deep") && limited, "{said}");
    let tool = |name: &str, schema: &Value| json!({"type": "function", "function": {"name": name, "strict": true, "parameters": schema}});
    let tools = json!([tool("light", &json!({"type": "object"})), tool("heavy", &schema)]);
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "tools": tools, "tool_choice": "required"});
    let answer = server.post("/v1/chat/completions", &body);
    let (status, said) = (answer.status, answer.text());
    assert_eq!(status, 400, "{said}");
    assert!(said.contains("tool 'heavy'") && said.contains("at /properties/deep"), "{said}");
}

#[test]
fn a_sandbox_that_is_killed_is_replaced_and_none_outlives_its_server() {
    let mut server = demo(&[]);
    let ask = |server: &Server, text: &str| server.ask("/v1/completions", &completion(&json!({"const": text})));
    ask(&server, "a");
    let first = sandboxes(&server);
    assert_eq!(first.len(), 2, "one compiles, one validates");
    for pid in &first {
        let killed = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
        assert!(killed.expect("kill runs").success());
    }
    // A job may get an error if its process was killed; the next job gets none.
    eventually("the sandboxes are replaced", || {
        server.post("/v1/completions", &completion(&json!({"const": "b"}))).status == 200
    });
    let second = sandboxes(&server);
    assert!(second.len() == 2 && second.iter().all(|pid| !first.contains(pid)), "{first:?} {second:?}");
    server.signal("TERM");
    server.ended();
    let alive =
        |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("grammar"));
    eventually("no sandbox is left", || !second.iter().any(alive));
}

#[test]
fn repeated_keys_and_items_are_not_written() {
    let server = demo(&[]);
    let unique =
        json!({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": true, "minItems": 3, "maxItems": 3});
    let open = json!({"type": "object", "minProperties": 3, "maxProperties": 3,
                      "additionalProperties": {"type": "boolean"}, "propertyNames": {"pattern": "^[ab]{1,2}$"}});
    for seed in 0..12 {
        for schema in [&unique, &open] {
            let mut body = completion(schema);
            (body["temperature"], body["seed"], body["max_tokens"]) = (1.into(), seed.into(), 200.into());
            let answer = server.post("/v1/completions", &body);
            let (status, answer) = (answer.status, answer.json());
            assert_eq!(status, 200, "{answer}");
            let choice = &answer["choices"][0];
            if choice["finish_reason"] == "stop" {
                let text = choice["text"].as_str().unwrap();
                let value: Value = serde_json::from_str(text).unwrap();
                let length = value.as_array().map(Vec::len).or(value.as_object().map(serde_json::Map::len));
                assert_eq!(length, Some(3), "{text}");
                assert!(jsonschema::is_valid(schema, &value), "{text}");
            }
        }
    }
}

/// The official suite, if it is beside the checkout: it is not part of this repository.
fn suite() -> Option<Vec<Value>> {
    let file = repository().join("../shared/json-schema/suite-2020-12.json");
    let Ok(text) = fs::read_to_string(&file) else {
        assert!(std::env::var_os("CI").is_none(), "CI must have {}", file.display());
        say("\n*** NOT RUN: THE OFFICIAL JSON SCHEMA SUITE. PUT IT AT ../shared/json-schema/suite-2020-12.json ***\n");
        return None;
    };
    Some(serde_json::from_str(&text).unwrap())
}

/// Schemas with a valid instance that may be refused: most refer to documents elsewhere.
const REFUSED_MAX: usize = 60;

#[test]
#[ignore = "soak"]
fn the_official_suite_gives_no_invalid_answer_and_few_refusals() {
    let Some(suite) = suite() else { return };
    let server = demo(&[]);
    let (mut valid, mut cut, mut refused, mut bad) = (0, 0, Vec::new(), Vec::new());
    for (group, temperature) in suite.iter().flat_map(|group| [(group, 0), (group, 1)]) {
        let schema = &group["schema"];
        // A schema that is no object is sent as text.
        let given = if schema.is_object() { schema.clone() } else { schema.to_string().into() };
        let mut body = completion(&given);
        (body["temperature"], body["max_tokens"]) = (temperature.into(), 200.into());
        let answer = server.post("/v1/completions", &body);
        let (status, answer) = (answer.status, answer.json());
        let name = format!("{}: {}", group["file"].as_str().unwrap(), group["group"].as_str().unwrap());
        let (text, end) = (answer["choices"][0]["text"].as_str(), answer["choices"][0]["finish_reason"].as_str());
        match (status, text, end) {
            (200, Some(text), Some("stop")) => {
                let value = serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
                let validator = jsonschema::validator_for(schema).expect("it was served, so it can be read");
                match value.and_then(|value| validator.validate(&value).map_err(|error| error.to_string())) {
                    Ok(()) => valid += 1,
                    Err(error) => bad.push(format!("{name}: {text}: {error}")),
                }
            }
            (200, _, Some("length")) => cut += 1,
            (400, ..) => {
                let satisfiable = group["tests"].as_array().unwrap().iter().any(|test| test["valid"] == true);
                if satisfiable && temperature == 0 {
                    refused.push(format!("{name}: {}", answer["error"]["message"]));
                }
            }
            _ => bad.push(format!("{name}: {status} {answer}")),
        }
    }
    println!("{valid} valid, {cut} cut by max_tokens, {} refused:\n{}", refused.len(), refused.join("\n"));
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(refused.len() <= REFUSED_MAX, "{} refused", refused.len());
    assert!(valid > suite.len(), "{valid} valid answers");
}
