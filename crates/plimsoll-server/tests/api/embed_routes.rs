//! Embeddings in the shapes of Ollama's and Cohere's clients, and scores on the routes of older clients.

use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{Limits, Request};
use serde_json::{Value, json};

use crate::common::{Server, config};

/// A scripted embedding of two numbers: the number of tokens, and 1.
fn counts(request: &Request) -> Script {
    Box::new([Step::Pooled(vec![request.prompt.len() as f32, 1.0])].into_iter())
}

fn server() -> Server {
    Server::with(config(), Limits { encoder: true, embedding_size: 2, ..limits() }, counts)
}

/// Returns the embedding of a text of `tokens` tokens, normalised to length 1.
fn unit(tokens: f64) -> [f64; 2] {
    let length = (tokens * tokens + 1.0).sqrt();
    [tokens / length, 1.0 / length]
}

fn near(found: &Value, expected: &[f64]) {
    let found: Vec<f64> = found.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} instead of {expected:?}");
}

#[test]
fn ollamas_embeddings_have_length_one_and_come_in_order() {
    let server = server();
    let options = json!({"num_ctx": 64, "temperature": 0});
    let body = json!({"model": "tiny:latest", "input": ["a", "abc"], "options": options, "keep_alive": "5m"});
    let answer = server.post("/api/embed", &body).ok();
    assert_eq!((&answer["model"], &answer["prompt_eval_count"]), (&json!("tiny:latest"), &json!(4)));
    near(&answer["embeddings"][0], &unit(1.0));
    near(&answer["embeddings"][1], &unit(3.0));
    assert!(answer["total_duration"].as_u64().unwrap() >= answer["load_duration"].as_u64().unwrap());
    let one = server.post("/api/embed", &json!({"input": "ab", "dimensions": 1})).ok();
    assert_eq!(one["embeddings"], json!([[1.0]]));
    let older = server.post("/api/embeddings", &json!({"prompt": "ab"})).ok();
    near(&older["embedding"], &unit(2.0));
    server.assert_idle();
}

#[test]
fn long_texts_are_cut_unless_the_client_says_otherwise() {
    let server = server();
    let limit = limits().max_req_total_len as usize;
    let long = "x".repeat(limit + 10);
    for (path, body) in [
        ("/api/embed", json!({"input": long})),
        ("/api/embeddings", json!({"prompt": long})),
        ("/v2/embed", json!({"texts": [long]})),
    ] {
        server.post(path, &body).ok();
        assert_eq!(server.last_request().prompt.len(), limit, "{path}");
    }
    server.post("/v2/embed", &json!({"texts": [long], "max_tokens": 7})).ok();
    assert_eq!(server.last_request().prompt.len(), 7);
    let said = server.post("/api/embed", &json!({"input": long, "truncate": false}));
    assert!(said.status == 400 && said.json()["error"].as_str().unwrap().contains("input"), "{}", said.body);
    let error = server.post("/v2/embed", &json!({"texts": [long], "truncate": "NONE"})).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
}

#[test]
fn coheres_embeddings_by_type() {
    let server = server();
    let body = json!({"model": "tiny", "texts": ["a", "abc"], "input_type": "search_query"});
    let answer = server.post("/v2/embed", &body).ok();
    near(&answer["embeddings"]["float"][1], &unit(3.0));
    assert!(answer["embeddings"].get("base64").is_none());
    assert_eq!((&answer["texts"], &answer["response_type"]), (&json!(["a", "abc"]), &json!("embeddings_by_type")));
    assert_eq!(answer["meta"], json!({"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}}));
    let both = json!({"texts": ["a"], "embedding_types": ["float", "base64"], "output_dimension": 1});
    let answer = server.post("/v2/embed", &both).ok();
    assert_eq!(answer["embeddings"], json!({"float": [[1.0]], "base64": ["AACAPw=="]}));
    for (field, value) in [
        ("embedding_types", json!(["int8"])),
        ("input_type", json!("image")),
        ("truncate", json!("START")),
        ("images", json!(["x"])),
        ("max_tokens", json!(0)),
        ("output_dimension", json!(3)),
        ("texts", json!([])),
    ] {
        let mut body = json!({"texts": ["a"]});
        body[field] = value;
        assert_eq!(server.post("/v2/embed", &body).error(400)["param"], field);
    }
    server.assert_idle();
}

#[test]
fn scores_are_the_same_without_a_prefix() {
    let server = server();
    let body = json!({"text_1": "a", "text_2": ["a", "abc"]});
    assert_eq!(server.post("/score", &body).ok()["data"], server.post("/v1/score", &body).ok()["data"]);
}

#[test]
fn a_model_without_embeddings_says_so() {
    let server = Server::start(letters);
    for (path, body) in [("/api/embed", json!({"input": "x"})), ("/api/embeddings", json!({"prompt": "x"}))] {
        let answer = server.post(path, &body);
        assert!(
            answer.status == 400 && answer.json()["error"].as_str().unwrap().contains("--pooling"),
            "{}",
            answer.body
        );
    }
    assert_eq!(server.post("/v2/embed", &json!({"texts": ["x"]})).error(400)["param"], "model");
}
