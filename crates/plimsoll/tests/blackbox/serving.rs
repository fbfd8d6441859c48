//! The default command as a user types it: from the start of the process to the first token, and every page it serves.

use std::thread;

use serde_json::{Value, json};

use crate::http::request;
use crate::product::{Server, fixture, plimsoll};

/// Most seconds from exec to the first token of a stream, with the model's file in the page cache and a core for each thread.
/// This is for the build that tests run; release builds take far less.
const FIRST_TOKEN_SECONDS: f64 = 10.0;

/// How many threads compete for one core on this machine right now, at least 1.
fn competition() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").expect("Linux tells its load");
    let fields: Vec<&str> = text.split_whitespace().collect();
    let (average, runnable) = (fields[0].parse::<f64>(), fields[3].split('/').next().map(str::parse::<f64>));
    let cores = thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
    (average.unwrap().max(runnable.unwrap().unwrap()) / cores).max(1.0)
}

#[test]
#[ignore = "models"]
fn from_start_to_the_first_token() {
    // The second start finds everything warm.
    drop(Server::start(&[]));
    let server = Server::start(&[]);
    let ready = server.started.elapsed().as_secs_f64();
    let body = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true});
    let mut answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200);
    let first = loop {
        let event: Value = serde_json::from_str(&answer.event().expect("a token before the end")).unwrap();
        if event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
            break server.started.elapsed().as_secs_f64();
        }
    };
    let competition = competition();
    println!(
        "from start, warm: ready after {ready:.2} s, first token after {first:.2} s, {competition:.1} threads a core: {}",
        server.ready.trim()
    );
    assert!(
        first < FIRST_TOKEN_SECONDS * competition,
        "first token after {first:.2} s, {competition:.1} threads a core"
    );
}

#[test]
#[ignore = "models"]
fn the_ready_line_names_model_address_and_plan() {
    let server =
        Server::start(&["--max-total-token-num", "4096", "--served-model-name", "a", "--served-model-name", "b"]);
    let at = format!(": a at http://{}/v1 (", server.address);
    assert!(server.ready.contains(&at) && server.ready.contains(" planned of "), "{}", server.ready);
    let models = server.get("/v1/models").json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    for name in ["a", "b", "default"] {
        server.ask("/v1/completions", &json!({"model": name, "prompt": "x", "max_tokens": 1}));
    }
    assert_eq!(server.post("/v1/completions", &json!({"model": "smollm2", "prompt": "x"})).status, 404);
}

#[test]
#[ignore = "models"]
fn every_page_answers() {
    let server = Server::start(&["--max-total-token-num", "8192"]);
    assert_eq!(server.get("/health").json()["status"], "healthy");
    assert_eq!(server.get("/ready").json()["status"], "ready");
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    let model = &server.get("/v1/models").json()["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!("smollm2"), &json!("model")));
    assert_eq!(model["max_model_len"], 8192);
    let metrics = server.get("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    let metrics = metrics.text();
    for name in ["plimsoll_requests_running 0", "plimsoll_memory_planned_bytes{component=\"weights\"}"] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    let text = "Hello, wörld! 🚢";
    let tokens = server.ask("/tokenize", &json!({"prompt": text}));
    assert_eq!(tokens["count"].as_u64().unwrap(), tokens["tokens"].as_array().unwrap().len() as u64);
    let back = server.ask("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(back["prompt"], text);
    let completion = server
        .ask("/v1/completions", &json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}));
    assert!(completion["choices"][0]["text"].as_str().unwrap().contains("Paris"), "{completion}");
    assert_eq!(completion["usage"]["completion_tokens"], 4);
}

#[test]
#[ignore = "models"]
fn errors_have_openais_shape_and_name_the_limit() {
    let flags = ["--max-total-token-num", "4096", "--max-body-bytes", "65536", "--unknown-fields", "refuse"];
    let server = Server::start(&flags);
    let error = |path: &str, body: &Value, status: u16, words: &[&str]| {
        let answer = server.post(path, body);
        assert_eq!(answer.status, status, "{body}");
        let error = answer.json()["error"].take();
        let message = error["message"].as_str().unwrap_or_default();
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {error}");
        assert!(error["type"].is_string(), "{error}");
    };
    let long = "word ".repeat(6000);
    error("/v1/completions", &json!({"prompt": long}), 400, &["4096"]);
    error("/v1/completions", &json!({"prompt": "x", "max_tokens": 5000}), 400, &["4096"]);
    error("/v1/completions", &json!({"prompt": "x", "temperature": -1}), 400, &["temperature", "-1"]);
    error("/v1/completions", &json!({"prompt": [49152]}), 400, &["49152"]);
    error("/v1/completions", &json!({"prompt": "x", "n": 129}), 400, &["128"]);
    error("/v1/completions", &json!({"prompt": "x", "no_such_field": 1}), 400, &["no_such_field"]);
    error("/v1/completions", &json!({"prompt": "x", "model": "gpt-4"}), 404, &["gpt-4", "smollm2"]);
    error("/v1/chat/completions", &json!({"messages": []}), 400, &["messages"]);
    error("/v1/nothing", &json!({}), 404, &["/v1/nothing"]);
    // A schema that allows no token at some point is also an error of the client.
    let schema = json!({"type": "array", "items": {"enum": [1]}, "uniqueItems": true, "minItems": 2});
    error("/v1/completions", &json!({"prompt": "x", "guided_json": schema}), 400, &["the schema allows no token here"]);
    let documents = json!({"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "y"}]});
    error("/v1/chat/completions", &documents, 400, &["documents has no effect"]);
    let huge = request(server.address, "POST", "/v1/completions", &vec![b' '; 65_537]).unwrap();
    assert_eq!(huge.status, 413);
    let message = huge.json()["error"]["message"].take();
    assert!(message.as_str().unwrap().contains("65536"), "{message}");
    assert_eq!(server.get("/ready").status, 200, "none of it hurt");
}

#[test]
fn a_checkpoint_directory_and_a_gguf_file_are_served_by_their_names() {
    for (model, name) in [("mlx-llama-4bit-g64", "mlx-llama-4bit-g64"), ("gguf-qwen2-q8_0", "model")] {
        let server = Server::start_model(&fixture(model), &["--max-total-token-num", "4096"]);
        assert!(server.ready.contains(&format!(": {name} at ")), "{}", server.ready);
        let body =
            json!({"model": name, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": true, "return_token_ids": true});
        let answer = server.ask("/v1/completions", &body);
        assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 5, "{answer}");
    }
}

#[test]
#[ignore = "models"]
fn two_ports_cannot_be_one() {
    let server = Server::start(&["--max-total-token-num", "2048"]);
    let port = server.address.port().to_string();
    let error = crate::product::run(&["serve", "--port", &port, "--max-total-token-num", "2048"]).refused();
    assert!(error.contains(&format!("cannot listen on 127.0.0.1:{port}")) && error.contains("--port"), "{error}");
}

#[test]
#[ignore = "models"]
fn answers_do_not_depend_on_the_neighbours() {
    let server = Server::start(&["--max-total-token-num", "8192"]);
    let ask = |i: usize| {
        let prompt = format!("{} A story about number {i}:", "Listen. ".repeat(i * 7));
        let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
        server.ask("/v1/completions", &body)["choices"][0]["text"].take()
    };
    let alone: Vec<_> = (0..8).map(ask).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let ask = &ask;
        let running: Vec<_> = (0..8).map(|i| scope.spawn(move || ask(i))).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

/// glibc's per-thread caches are turned off. Tunables that the user has set in the environment stay.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn threads_keep_no_freed_memory_unless_they_are_told_to() {
    for (set, expected) in [
        (None, "glibc.malloc.tcache_count=0"),
        (Some("glibc.malloc.mxfast=64"), "glibc.malloc.mxfast=64:glibc.malloc.tcache_count=0"),
        (
            Some("glibc.malloc.mxfast=64:glibc.malloc.tcache_count=3"),
            "glibc.malloc.mxfast=64:glibc.malloc.tcache_count=3",
        ),
    ] {
        let model = fixture("llama");
        let mut command = plimsoll(["serve", model.to_str().unwrap(), "--port", "0"]);
        command.env_remove("GLIBC_TUNABLES").envs(set.map(|set| ("GLIBC_TUNABLES", set)));
        let server = Server::try_start(command).unwrap();
        let seen = std::fs::read(format!("/proc/{}/environ", server.pid())).unwrap();
        // Older versions of glibc have put zeros where the colons were.
        let seen = String::from_utf8_lossy(&seen).replace("\0glibc.", ":glibc.");
        let found = seen.split('\0').find_map(|entry| entry.strip_prefix("GLIBC_TUNABLES="));
        assert_eq!(found, Some(expected), "{set:?}");
    }
    // If the setting is removed again, the process re-executes itself once and not in a loop.
    let mut command = plimsoll(["serve", fixture("llama").to_str().unwrap(), "--port", "0"]);
    command.env_remove("GLIBC_TUNABLES").env("_PLIMSOLL_STARTED_ANEW", "1");
    assert_eq!(Server::try_start(command).unwrap().get("/health").status, 200);
}
