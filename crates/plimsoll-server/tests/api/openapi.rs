//! The OpenAPI document and the server agree: every listed field is accepted, other fields are refused, and every answer fits its schema.

use plimsoll_engine::Limits;
use plimsoll_engine::testing::{Step, letters, limits};
use serde_json::{Map, Value, json};

use crate::common::{Answer, Server, config, eventually, post};
use crate::infill::filling;

/// Returns why `value` does not fit `schema`; it knows the part of JSON Schema that the document uses.
fn misfit(document: &Value, schema: &Value, value: &Value, at: &str) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(reference.strip_prefix('#').unwrap()).unwrap_or_else(|| panic!("{reference}"));
        return misfit(document, target, value, at);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        let fits = any.iter().any(|schema| misfit(document, schema, value, at).is_none());
        if !fits {
            return Some(format!("{at}: {value} fits none of {any:?}"));
        }
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let is = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{at}: no such type: {other}"),
    };
    if !kinds.is_empty() && !kinds.iter().any(is) {
        return Some(format!("{at}: {value} is not {kinds:?}"));
    }
    if let Some(allowed) = schema["enum"].as_array().filter(|allowed| !allowed.contains(value)) {
        return Some(format!("{at}: {value} is not in {allowed:?}"));
    }
    if let Some(items) = value.as_array() {
        let misfits = |(i, item)| misfit(document, schema.get("items")?, item, &format!("{at}[{i}]"));
        return items.iter().enumerate().find_map(misfits);
    }
    let object = value.as_object()?;
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let mut required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(missing) = required.find(|name| !object.contains_key(*name)) {
        return Some(format!("{at}: {missing} is missing"));
    }
    object.iter().find_map(|(name, value)| match properties.get(name) {
        Some(schema) => misfit(document, schema, value, &format!("{at}.{name}")),
        None if schema["additionalProperties"] == false => Some(format!("{at}: {name} is not in the schema")),
        None => None,
    })
}

/// Two servers: one generates letters, the other makes embeddings.
struct Pair {
    letters: Server,
    pooled: Server,
}

impl Pair {
    fn start() -> Self {
        let encoder = Limits { encoder: true, ..limits() };
        let pooled = Server::with(config(), encoder, |_| Box::new([Step::Pooled(vec![0.5; 8])].into_iter()));
        Self { letters: filling(&[], letters), pooled }
    }

    /// Returns the server that a route is for.
    fn of(&self, path: &str) -> &Server {
        let pooled = ["/v1/embeddings", "/v2/embed", "/api/embed", "/api/embeddings"];
        if pooled.contains(&path) || path.ends_with("/score") || path.ends_with("/rerank") {
            &self.pooled
        } else {
            &self.letters
        }
    }

    fn reached(&self) -> usize {
        [&self.letters, &self.pooled].map(|server| server.observed.requests.lock().unwrap().len()).iter().sum()
    }
}

/// Returns the OpenAPI document of this server.
fn document(server: &Server) -> Value {
    server.get("/openapi.json").ok()
}

fn answered(document: &Value, path: &str, method: &str, answer: &Answer) -> Option<String> {
    let responses = &document["paths"][path][method]["responses"];
    let response = responses.get(answer.status.to_string()).unwrap_or(&responses["default"]);
    misfit(document, &response["content"]["application/json"]["schema"], &answer.json(), path)
}

/// Returns the routes that take a body, with its schema.
fn bodies(document: &Value) -> Vec<(String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let body = |path: &Value| path["post"]["requestBody"]["content"]["application/json"]["schema"].clone();
    paths.iter().map(|(path, item)| (path.clone(), body(item))).filter(|(_, schema)| !schema.is_null()).collect()
}

/// Whether a route's events have names and no common terminator.
fn named_events(path: &str) -> bool {
    path.starts_with("/v1/messages") || path.starts_with("/v1/responses")
}

/// Whether a route takes a text or a conversation.
fn takes_either(path: &str) -> bool {
    ["/tokenize", "/v1/cache/save"].contains(&path)
}

/// Returns the smallest body that a route takes.
fn least(path: &str, schema: &Value) -> Value {
    let mut body = json!({});
    for name in schema["required"].as_array().unwrap() {
        body[name.as_str().unwrap()] = schema["properties"][name.as_str().unwrap()]["examples"][0].clone();
    }
    if path.ends_with("completions") {
        body["max_tokens"] = json!(4);
    }
    if path.ends_with("responses") {
        body["max_output_tokens"] = json!(4);
    }
    if ["/api/chat", "/api/generate", "/api/pull"].contains(&path) {
        body["stream"] = json!(false);
    }
    body
}

#[test]
fn every_field_of_the_document_is_taken_and_every_answer_fits() {
    let servers = Pair::start();
    let document = document(&servers.letters);
    let mut fields = 0;
    for (path, schema) in bodies(&document) {
        for (name, field) in schema["properties"].as_object().unwrap() {
            for example in field["examples"].as_array().into_iter().flatten() {
                let mut body = least(&path, &schema);
                if takes_either(&path) && name != "prompt" {
                    body["messages"] = schema["properties"]["messages"]["examples"][0].clone();
                }
                // An infill without a token limit fills the context.
                if path == "/infill"
                    && !["max_completion_tokens", "max_tokens", "n_predict", "num_predict"].contains(&name.as_str())
                {
                    body["n_predict"] = json!(4);
                }
                body[name] = example.clone();
                match name.as_str() {
                    "stream_options" => body["stream"] = json!(true),
                    "tool_choice" => body["tools"] = schema["properties"]["tools"]["examples"][0].clone(),
                    "max_completion_tokens" => drop(body.as_object_mut().unwrap().remove("max_tokens")),
                    _ => {}
                }
                assert_eq!(misfit(&document, &schema, &body, &path), None, "the example fits its own schema");
                let answer = servers.of(&path).post(&path, &body);
                // A scripted engine has no disk.
                let without = path.starts_with("/v1/cache/") && answer.body.contains("--cache-dir");
                let status = if without { 400 } else { 200 };
                assert_eq!(answer.status, status, "{path} {name}: {}", answer.body);
                if body["stream"] == true && named_events(&path) {
                    assert!(answer.body.matches("event: ").count() > 3, "{}", answer.body);
                } else if body["stream"] == true {
                    assert!(answer.events().len() > 1);
                } else {
                    assert_eq!(answered(&document, &path, "post", &answer), None, "{body}");
                }
                fields += 1;
            }
        }
    }
    assert!(fields > 120, "{fields}");
    servers.letters.assert_idle();
    servers.pooled.assert_idle();
}

#[test]
fn what_the_document_does_not_list_is_refused() {
    let servers = Pair::start();
    let document = document(&servers.letters);
    for (path, schema) in bodies(&document) {
        let mut body = least(&path, &schema);
        if takes_either(&path) {
            body["prompt"] = json!("x");
        }
        body["colour"] = json!(1);
        assert!(misfit(&document, &schema, &body, &path).is_some());
        let refused = servers.of(&path).post(&path, &body);
        if path.starts_with("/api/") {
            assert_eq!(refused.status, 400, "{}", refused.body);
            assert!(refused.json()["error"].as_str().unwrap().contains("`colour`"), "{}", refused.body);
        } else if path.starts_with("/v1/messages") {
            assert_eq!(refused.status, 400, "{}", refused.body);
            assert!(refused.json()["error"]["message"].as_str().unwrap().contains("`colour`"), "{}", refused.body);
        } else {
            assert_eq!(refused.error(400)["param"], "colour", "{path}");
        }
        assert_eq!(answered(&document, &path, "post", &refused), None);
    }
    assert_eq!(servers.reached(), 0);
}

/// A value of a type that the document does not allow is refused, with the field's name.
#[test]
fn wrong_types_are_refused_by_every_field() {
    let servers = Pair::start();
    let document = document(&servers.letters);
    let (mut tried, mut taken) = (0, Vec::new());
    for (path, schema) in bodies(&document) {
        for (name, field) in schema["properties"].as_object().unwrap() {
            for wrong in [json!("text"), json!(7.25), json!(true), json!([{"a": 1}]), json!({"a": [1]})] {
                let mut body = least(&path, &schema);
                if takes_either(&path) && name != "prompt" {
                    body["messages"] = schema["properties"]["messages"]["examples"][0].clone();
                }
                body[name] = wrong.clone();
                let open = field.get("type").is_none() && field.get("anyOf").is_none();
                if open || misfit(&document, field, &wrong, name).is_none() {
                    continue;
                }
                let answer = servers.of(&path).post(&path, &body);
                let error = answer.json()["error"].clone();
                // Anthropic's and Ollama's errors name the field in their message.
                let named = match error["param"].as_str() {
                    Some(param) => param.split(['.', '[']).next() == Some(name),
                    None => error
                        .as_str()
                        .or(error["message"].as_str())
                        .is_some_and(|message| message.contains(name.as_str())),
                };
                if !(matches!(answer.status, 400 | 404) && named) {
                    taken.push(format!("{path} {name} {wrong}: {}", answer.body));
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 300 && taken.is_empty(), "{tried} tried, taken or not named: {taken:#?}");
    assert_eq!(servers.reached(), 0, "nothing of this reached the engine");
}

#[test]
fn every_other_route_answers_as_it_says() {
    let server = Server::start(letters);
    eventually("healthy", || server.get("/health").status == 200);
    let document = document(&server);
    let paths = document["paths"].as_object().unwrap();
    let mut kept = server.send(post("/v1/completions", r#"{"prompt": "x", "stream": true}"#));
    kept.until("data: ");
    for (path, item) in paths {
        for method in item.as_object().unwrap().keys().filter(|method| *method != "post") {
            let concrete = path.replace("{id}", if path.contains("models") { "tiny" } else { "nobody" });
            let concrete = concrete.replace("{name}", "nobody");
            let text = format!("{} {concrete} HTTP/1.1\r\nhost: localhost\r\n\r\n", method.to_uppercase());
            let answer = server.send(text).answer();
            if path == "/metrics" {
                assert!(answer.header("content-type").unwrap().starts_with("text/plain"));
                continue;
            }
            // A scripted engine does not have these.
            let missing = concrete.contains("nobody") || ["/v1/kv_events", "/api/delete"].contains(&path.as_str());
            assert!(answer.status == 200 || missing, "{path}: {}", answer.body);
            assert_eq!(answered(&document, path, method, &answer), None);
        }
    }
    // The status page fits its schema too.
    let status = server.get("/v1/status");
    assert_eq!(answered(&document, "/v1/status", "get", &status), None);
}

#[test]
fn the_validator_sees_what_is_wrong() {
    let server = Server::start(letters);
    let document = document(&server);
    let schema = json!({"$ref": "#/components/schemas/Usage"});
    let good = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(misfit(&document, &schema, &good, "usage"), None);
    for (pointer, value) in [("/prompt_tokens", json!("1")), ("/prompt_tokens_details", json!({}))] {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        assert!(misfit(&document, &schema, &bad, "usage").is_some(), "{bad}");
    }
    let mut more = good;
    more["colour"] = json!(1);
    assert!(misfit(&document, &schema, &more, "usage").unwrap().contains("colour"));
}

/// Every served route is in the document, except the page at `/`, and `/v1` with a slash behind it.
#[test]
fn every_route_is_in_the_document() {
    let document = document(&Server::start(letters));
    let routes = [include_str!("../../src/serve/router.rs"), include_str!("../../src/models/mod.rs")];
    let named = routes.iter().flat_map(|source| source.split(".route(\"").skip(1));
    let paths: Vec<String> = named
        .map(|rest| rest.split('"').next().unwrap().replace("{*", "{"))
        .filter(|path| !path.ends_with('/'))
        .collect();
    assert!(paths.len() > 30, "{paths:?}");
    let missing: Vec<_> = paths.iter().filter(|path| document["paths"][path.as_str()].is_null()).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The document's bounds of numeric fields are those of the server. Values just outside are refused with the field's name, the smallest and
/// largest values are accepted.
#[test]
fn bounds_of_the_document_are_those_of_the_server() {
    let servers = Pair::start();
    let document = document(&servers.letters);
    let (mut outside, mut inside, mut wrong) = (0, 0, Vec::new());
    for (path, schema) in bodies(&document) {
        for (name, field) in schema["properties"].as_object().unwrap() {
            let is_integer = field["type"].to_string().contains("\"integer\"");
            let step = |by: f64| if is_integer { by } else { by / 1000.0 };
            let bound = |key: &str| field[key].as_f64();
            let number = |value: f64| if is_integer { json!(value as i64) } else { json!(value) };
            let tries = [
                (bound("minimum"), -1.0, false),
                (bound("maximum"), 1.0, false),
                (bound("exclusiveMinimum"), 0.0, false),
                (bound("minimum"), 0.0, true),
                // The largest number of its type is only a bound of the type: the server's own limit is lower.
                (bound("maximum").filter(|most| *most < f64::from(u32::MAX)), 0.0, true),
            ];
            for (bound, by, taken) in tries {
                let Some(bound) = bound else { continue };
                let value = number(bound + step(by));
                let mut body = least(&path, &schema);
                body[name] = value.clone();
                match name.as_str() {
                    "n" => body["max_tokens"] = json!(1),
                    "best_of" => body["n"] = value.clone(),
                    // A limit of no tokens is accepted only if the prompt is echoed.
                    "max_tokens" if path == "/v1/completions" => body["echo"] = json!(true),
                    "max_completion_tokens" => {
                        drop(body.as_object_mut().unwrap().remove("max_tokens"));
                        if path == "/v1/completions" {
                            body["echo"] = json!(true);
                        }
                    }
                    "top_logprobs" if path.ends_with("responses") => {
                        body["include"] = json!(["message.output_text.logprobs"]);
                    }
                    "top_logprobs" => body["logprobs"] = json!(true),
                    _ => {}
                }
                let answer = servers.of(&path).post(&path, &body);
                let fits = if taken { answer.status == 200 } else { answer.status == 400 };
                if !fits {
                    wrong.push(format!("{path} {name} {value}: {} {}", answer.status, answer.body));
                }
                *(if taken { &mut inside } else { &mut outside }) += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(inside > 50 && outside > 50, "{inside} inside, {outside} outside");
}

#[test]
fn largest_n_of_the_document_is_the_largest_that_is_taken() {
    let few = Limits { running_max_req_size: 2, max_waiting: 3, ..limits() };
    let server = Server::with(config(), few, letters);
    let document = document(&server);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(schema["properties"]["n"]["maximum"], 5, "two run and three wait");
        let body = |n: u32| {
            let mut body = json!({"n": n, "max_tokens": 2});
            let (name, prompt) = match path {
                "/v1/completions" => ("prompt", json!("x")),
                _ => ("messages", json!([{"role": "user", "content": "x"}])),
            };
            body[name] = prompt;
            body
        };
        assert_eq!(server.post(path, &body(5)).ok()["choices"].as_array().map(Vec::len), Some(5));
        server.assert_idle();
        assert_eq!(server.post(path, &body(6)).status, 400);
    }
}
