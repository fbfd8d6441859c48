//! Embeddings, reranking and scores over a scripted engine: shapes, limits named in errors, order, and clients that disconnect.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use plimsoll_engine::testing::{Script, Step, limits};
use plimsoll_engine::{Limits, Request};
use plimsoll_server::ServerConfig;
use serde_json::{Value, json};

use crate::common::{self, PATIENCE, Server, config, eventually, post};

/// A scripted embedding that depends only on the ids: how often each of eight residues occurs.
fn counts(request: &Request) -> Script {
    let mut values = vec![0.0; 8];
    request.prompt.iter().for_each(|id| values[(id % 8) as usize] += 1.0);
    Box::new([Step::Pooled(values)].into_iter())
}

fn encoder() -> Limits {
    Limits { encoder: true, ..limits() }
}

fn server() -> Server {
    Server::with(config(), encoder(), counts)
}

fn unit(mut values: Vec<f64>) -> Vec<f64> {
    let length = values.iter().map(|x| x * x).sum::<f64>().sqrt();
    values.iter_mut().for_each(|x| *x /= length);
    values
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|x| x.as_f64().unwrap()).collect()
}

fn near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} instead of {expected:?}");
}

#[test]
fn an_encoder_is_listed_with_what_it_makes() {
    let model = &server().get("/v1/models").ok()["data"][0];
    let kinds = ["input_modalities", "output_modalities"].map(|field| model[field].clone());
    assert_eq!(kinds, [json!(["text"]), json!(["embeddings"])]);
    assert_eq!(model.get("default_sampling"), None, "{model}");
}

#[test]
fn the_four_inputs_in_order_with_usage() {
    let server = server();
    // "ab" is the bytes 97 and 98, so residues 1 and 2 of eight.
    let ab = unit(vec![0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let one = server.post("/v1/embeddings", &json!({"model": "tiny", "input": "ab"})).json();
    assert_eq!((&one["object"], &one["model"], &one["data"][0]["index"]), (&json!("list"), &json!("tiny"), &json!(0)));
    assert_eq!(one["usage"], json!({"prompt_tokens": 2, "total_tokens": 2}));
    near(&floats(&one["data"][0]["embedding"]), &ab);
    let ids = server.post("/v1/embeddings", &json!({"input": [97, 98], "user": "somebody"})).json();
    assert_eq!(ids["data"], one["data"]);
    let many: Vec<String> = (0..40).map(|i| "a".repeat(i % 7) + "b").collect();
    let answer = server.post("/v1/embeddings", &json!({"input": many})).json();
    for (i, item) in answer["data"].as_array().unwrap().iter().enumerate() {
        let expected = unit(vec![0.0, (i % 7) as f64, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(item["index"], json!(i));
        near(&floats(&item["embedding"]), &expected);
    }
    let lists = server.post("/v1/embeddings", &json!({"input": [[97], [98, 98]]})).json();
    assert_eq!(lists["usage"]["prompt_tokens"], json!(3));
    server.assert_idle();
}

#[test]
fn base64_and_fewer_dimensions() {
    let server = server();
    let whole = json!({"input": "abc", "encoding_format": "base64"});
    let answer = server.post("/v1/embeddings", &whole).json();
    let text = answer["data"][0]["embedding"].as_str().unwrap();
    // Eight floats of four bytes.
    assert_eq!(text.len(), 44);
    let two = server.post("/v1/embeddings", &json!({"input": "abc", "dimensions": 2})).json();
    near(&floats(&two["data"][0]["embedding"]), &[0.0, 1.0]);
    for (dimensions, words) in [(9, "1 to 8"), (0, "1 to 8")] {
        let refused = server.post("/v1/embeddings", &json!({"input": "a", "dimensions": dimensions}));
        assert_eq!(refused.status, 400);
        assert!(refused.body.contains(words), "{}", refused.body);
    }
}

fn refused(server: &Server, path: &str, body: &Value, words: &[&str]) {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 400, "{body}: {}", answer.body);
    for word in words {
        assert!(answer.body.contains(word), "{body}: {word}: {}", answer.body);
    }
}

#[test]
fn what_cannot_be_is_refused_and_says_why() {
    let config = ServerConfig { max_inputs: 3, ..config() };
    let server = Server::with(config, encoder(), counts);
    let embed = |body: Value, words: &[&str]| refused(&server, "/v1/embeddings", &body, words);
    embed(json!({}), &["input is missing"]);
    embed(json!({"input": []}), &["input", "empty"]);
    embed(json!({"input": ""}), &["empty"]);
    embed(json!({"input": ["a", "b", "c", "d"]}), &["4 inputs", "limit of 3", "--max-inputs"]);
    embed(json!({"input": ["a", "x".repeat(513)]}), &["input[1]", "513 tokens", "limit of 512", "--batch-max-tokens"]);
    embed(json!({"input": [258]}), &["258", "vocabulary"]);
    embed(json!({"input": "a", "encoding_format": "int8"}), &["float or base64"]);
    embed(json!({"input": "a", "max_tokens_per_doc": 4}), &["unknown field"]);
    for odd in [-2, 0, 513] {
        embed(json!({"input": "a", "truncate_prompt_tokens": odd}), &["truncate_prompt_tokens", "1 to 512"]);
    }
    let rerank = |body: Value, words: &[&str]| refused(&server, "/v1/rerank", &body, words);
    rerank(json!({"documents": ["a"]}), &["query is missing"]);
    rerank(json!({"query": "a", "documents": []}), &["documents is empty"]);
    rerank(json!({"query": "a", "documents": ["b", "c", "d", "e"]}), &["limit of 3", "--max-inputs"]);
    rerank(json!({"query": "a", "documents": [{"image": "c"}]}), &["documents", "text"]);
    rerank(json!({"query": "a", "documents": ["b"], "top_n": 0}), &["top_n"]);
    rerank(json!({"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}), &["max_tokens_per_doc"]);
    let score = |body: Value, words: &[&str]| refused(&server, "/v1/score", &body, words);
    score(json!({"text_1": "a"}), &["text_2 is missing"]);
    score(json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}), &["2 texts", "and 3"]);
    score(json!({"text_1": [1, 2], "text_2": "a"}), &["a text or a list of texts"]);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}]});
        refused(&server, path, &body, &["makes embeddings only", "/v1/embeddings"]);
    }
    // A generating model makes embeddings if `--pooling` says how.
    let plain = Server::start(counts);
    refused(&plain, "/v1/embeddings", &json!({"input": "a"}), &["--pooling"]);
    let labels = Limits { labels: 1, ..encoder() };
    let classifier = Server::with(common::config(), labels, counts);
    refused(&classifier, "/v1/embeddings", &json!({"input": "a"}), &["/v1/rerank"]);
    refused(&classifier, "/v1/score", &json!({"text_1": "a", "text_2": "b"}), &["tokenizer does not say"]);
    server.assert_idle();
}

#[test]
fn an_answer_that_no_budget_could_hold_is_refused() {
    let limits = Limits { embedding_size: 4096, ..encoder() };
    let server = Server::with(config(), limits, counts);
    let input = vec!["a"; 1000];
    refused(&server, "/v1/embeddings", &json!({"input": input}), &["--max-bytes-in-flight", "fewer inputs"]);
}

#[test]
fn documents_in_the_order_of_their_nearness() {
    let server = server();
    let body = json!({"query": "aa", "documents": ["b", {"text": "ab"}, "a", "aab", "aa"]});
    let answer = server.post("/v1/rerank", &body).json();
    for path in ["/v2/rerank", "/rerank"] {
        assert_eq!(server.post(path, &body).json()["results"], answer["results"], "{path}");
    }
    let results = answer["results"].as_array().unwrap();
    let order: Vec<u64> = results.iter().map(|result| result["index"].as_u64().unwrap()).collect();
    // Of equal scores the earlier document comes first.
    assert_eq!(order, [2, 4, 3, 1, 0]);
    let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
    near(&scores, &[1.0, 1.0, 2.0 / 5f64.sqrt(), 0.5f64.sqrt(), 0.0]);
    assert_eq!(results[3]["document"], json!({"text": "ab"}));
    assert_eq!(answer["usage"]["total_tokens"], json!(11));
    let two = server.post(
        "/v1/rerank",
        &json!({"query": "a", "documents": ["b", "a", "ab"], "top_n": 2, "return_documents": false}),
    );
    assert_eq!(two.json()["results"].as_array().unwrap().len(), 2);
    assert!(two.json()["results"][0].get("document").is_none());
}

#[test]
fn scores_one_to_many_and_one_to_one() {
    let server = server();
    let scores = |body: Value| -> Vec<f64> {
        let answer = server.post("/v1/score", &body).json();
        let data = answer["data"].as_array().unwrap_or_else(|| panic!("{answer}")).clone();
        data.iter().enumerate().for_each(|(i, item)| assert_eq!(item["index"], json!(i)));
        data.iter().map(|item| item["score"].as_f64().unwrap()).collect()
    };
    near(&scores(json!({"text_1": "a", "text_2": ["a", "b"]})), &[1.0, 0.0]);
    near(&scores(json!({"text_1": ["a", "b"], "text_2": ["b", "b"]})), &[0.0, 1.0]);
    near(&scores(json!({"text_1": "a", "text_2": "ab"})), &[0.5f64.sqrt()]);
}

/// More inputs than the engine has places: they are computed in turn, also when other requests hold places.
#[test]
fn more_inputs_than_places() {
    let slow = |request: &Request| -> Script {
        let Some(Step::Pooled(values)) = counts(request).next() else { unreachable!("one step") };
        Box::new([Step::Wait(Duration::from_millis(2)), Step::Pooled(values)].into_iter())
    };
    let server = Server::with(config(), encoder(), slow);
    let places = u64::from(limits().running_max_req_size + limits().max_waiting);
    let most = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| server.post("/v1/embeddings", &json!({"input": vec!["ab"; 100]})).status))
            .collect();
        let others = scope.spawn(|| {
            (0..20).map(|_| server.post("/v1/embeddings", &json!({"input": "ab"})).status).collect::<Vec<u16>>()
        });
        let deadline = Instant::now() + PATIENCE;
        while clients.iter().any(|client| !client.is_finished()) {
            most.fetch_max(server.engine.reserved().1, Acquire);
            assert!(Instant::now() < deadline, "they never end");
            std::thread::sleep(Duration::from_millis(1));
        }
        // A request with many inputs leaves half of the queue to requests with one input.
        let mut statuses = others.join().unwrap();
        statuses.extend(clients.into_iter().map(|client| client.join().unwrap()));
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    });
    assert!(most.load(Acquire) <= places + 3, "{} in the system", most.load(Acquire));
    server.assert_idle();
}

/// A request whose first input was admitted is not refused when other requests take every place that it frees.
#[test]
fn inputs_wait_for_a_place_that_others_take_again_and_again() {
    let slow = |request: &Request| -> Script {
        let Some(Step::Pooled(values)) = counts(request).next() else { unreachable!("one step") };
        Box::new([Step::Wait(Duration::from_millis(1)), Step::Pooled(values)].into_iter())
    };
    let few = Limits { running_max_req_size: 1, max_waiting: 1, ..encoder() };
    let server = Server::with(config(), few, slow);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !over.load(Acquire) {
                    server.post("/v1/embeddings", &json!({"input": "ab"}));
                }
            });
        }
        let mut many = vec![0; 3];
        for status in &mut many {
            // The first input may find no place; the answer is then a 429.
            *status = 429;
            let deadline = Instant::now() + PATIENCE;
            while *status == 429 && Instant::now() < deadline {
                let asked = || server.post("/v1/embeddings", &json!({"input": vec!["ab"; 60]})).status;
                *status = catch_unwind(AssertUnwindSafe(asked)).unwrap_or_default();
            }
        }
        over.store(true, Release);
        assert_eq!(many, [200; 3]);
    });
    server.assert_idle();
}

#[test]
fn a_client_that_leaves_takes_its_inputs_along() {
    let server = Server::with(config(), encoder(), |_| Box::new(std::iter::empty()));
    for round in 1..=4 {
        let body = json!({"input": ["a", "b", "c"]}).to_string();
        let client = server.send(post("/v1/embeddings", &body));
        eventually("its inputs have arrived", || server.observed.active.load(Acquire) == 3);
        drop(client);
        eventually("they were aborted", || server.aborted() == 3 * round);
    }
    server.assert_idle();
}

#[test]
fn a_request_is_shown_while_it_runs_and_ends_when_it_is_cancelled() {
    let server = Server::with(config(), encoder(), |_| Box::new(std::iter::empty()));
    let body = json!({"input": ["a", "b"]}).to_string();
    let request = post("/v1/embeddings", &body).replacen("host: localhost", "host: localhost\r\nx-request-id: job", 1);
    let mut client = server.send(request);
    eventually("its inputs have arrived", || server.observed.active.load(Acquire) == 2);
    let page = server.get("/v1/status").ok();
    assert_eq!((&page["requests"][0]["request_id"], &page["requests"][0]["phase"]), (&json!("job"), &json!("prefill")));
    let cancel = server.send("DELETE /v1/requests/job HTTP/1.1\r\nhost: localhost\r\n\r\n").answer();
    assert_eq!(cancel.ok()["cancelled"], json!(1));
    assert_eq!(client.answer().error(499)["code"], json!("request_cancelled"));
    eventually("they were aborted", || server.aborted() == 2);
    server.assert_idle();
    assert_eq!(server.get("/v1/status").ok()["requests"], json!([]));
}

#[test]
fn one_input_that_fails_fails_the_request_and_the_others_go() {
    let fails = |request: &Request| -> Script {
        match request.prompt.len() {
            3 => Box::new([Step::Fail("on purpose".into())].into_iter()),
            _ => Box::new(std::iter::empty()),
        }
    };
    let server = Server::with(config(), encoder(), fails);
    let answer = server.post("/v1/embeddings", &json!({"input": ["a", "abc", "b"]}));
    assert_eq!(answer.status, 500);
    assert!(answer.body.contains("on purpose"));
    eventually("the others were aborted", || server.aborted() == 2);
    server.assert_idle();
}
