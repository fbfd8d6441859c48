//! The program with a GPU, from outside: the answers of the CPU over HTTP, alone and in company, two memory limits, and a clean end.
//!
//! Where no GPU is, Mesa's lavapipe stands for one: `tests/gpu/install.sh` installs it. The fixture is ready within a second on it.

#[path = "common/http.rs"]
mod http;
#[path = "common/product.rs"]
mod product;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use product::{Finished, Server, eventually, fixture, run};
use serde_json::{Value, json};

/// Largest difference allowed between the log-probabilities of two devices.
const TOLERANCE: f64 = 2e-3;

const GPU: [&str; 3] = ["--device", "gpu", "--allow-software-gpu"];

/// Memory of the GPU's own: 384 MiB for its driver, 16 MiB that are left free, and the model.
const OWN_MEMORY: [&str; 2] = ["--gpu-memory-budget", "480MiB"];
const OWN_BYTES: u64 = 480 << 20;

/// Small steps, so that a prompt takes several and software is quick. A cache of f32 and no bfloat16, so that devices differ least.
const SMALL: &str = "--max-total-token-num 1024 --max-req-total-len 256 --batch-max-tokens 32 --running-max-req-size 4 \
    --graph-max-batch-size 4 --threads 2 --kv-dtype f32 --compute-dtype f32";

fn small() -> Vec<&'static str> {
    SMALL.split_whitespace().collect()
}

/// Lets one test run at a time: servers of one user share the GPU's memory budget through leases.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn server(device: &[&str]) -> Server {
    Server::start_model(&fixture("qwen3"), &[&small(), device].concat())
}

fn on_gpu() -> Server {
    let server = server(&[&GPU[..], &OWN_MEMORY].concat());
    assert_eq!(metric(&server, "plimsoll_memory_device_line_bytes"), OWN_BYTES, "the server does not use a GPU");
    server
}

/// A command about the fixture, run to its end.
fn about(command: &str, flags: &[&str]) -> Finished {
    let model = fixture("qwen3");
    run(&[&[command, model.to_str().unwrap()], &small()[..], flags].concat())
}

/// Prompts of 6 to 112 tokens; the last two take several steps.
fn prompts() -> Vec<String> {
    let long = |words: usize| (0..words).map(|i| (i * i % 97).to_string()).collect::<Vec<_>>().join(" ");
    vec!["The sea is".into(), "Once upon a time".into(), "A ship with too much cargo".into(), long(20), long(40)]
}

fn body(prompt: &str) -> Value {
    json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 1})
}

fn messages() -> Value {
    json!([{"role": "user", "content": "Where is the harbour?"}])
}

/// A request for structured output. A separate process compiles its grammar.
fn structured() -> Value {
    let side = json!({"enum": ["port", "starboard"]});
    let schema = json!({
        "type": "object", "properties": {"side": side}, "required": ["side"], "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    json!({"messages": messages(), "max_tokens": 64, "temperature": 0, "response_format": format})
}

/// The text, tokens and log-probabilities of a completion.
fn told(answer: &Value) -> (String, Vec<String>, Vec<f64>) {
    let (choice, logprobs) = (&answer["choices"][0], &answer["choices"][0]["logprobs"]);
    let list = |name: &str| logprobs[name].as_array().unwrap_or_else(|| panic!("{name}: {answer}")).clone();
    let tokens = list("tokens").iter().map(|token| token.as_str().unwrap().to_owned()).collect();
    let numbers = list("token_logprobs").iter().map(|number| number.as_f64().unwrap()).collect();
    (choice["text"].as_str().unwrap().to_owned(), tokens, numbers)
}

/// The joined pieces of a stream. `piece` finds the piece in a choice.
fn streamed(server: &Server, path: &str, body: &Value, piece: impl Fn(&Value) -> Option<&str>) -> String {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut answer = server.post(path, &body);
    assert_eq!(answer.status, 200);
    let mut text = String::new();
    let mut last = String::new();
    while let Some(event) = answer.event() {
        if let Ok(event) = serde_json::from_str::<Value>(&event) {
            assert!(event["error"].is_null(), "{event}");
            text += event["choices"].get(0).and_then(&piece).unwrap_or("");
        }
        last = event;
    }
    assert_eq!(last, "[DONE]");
    text
}

/// The value of a row of `/metrics` without labels.
fn metric(server: &Server, name: &str) -> u64 {
    let page = server.get("/metrics").text();
    let row = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    row.unwrap_or_else(|| panic!("{name}: {page}")).parse().unwrap()
}

/// Checks that every pool is full again, no device memory was taken after ready, and no component exceeded its plan.
fn assert_kept_to_plan(server: &Server) {
    eventually("every pool is full again", || server.at_rest());
    assert!(metric(server, "plimsoll_device_allocations_total") > 0);
    assert_eq!(metric(server, "plimsoll_device_allocations_after_ready_total"), 0);
    let page = server.memory();
    for row in page["components"].as_array().unwrap() {
        assert!(row["peak_bytes"].as_u64() <= row["planned_bytes"].as_u64(), "{row}");
    }
}

#[test]
#[ignore = "external"]
fn a_gpu_gives_the_answers_of_the_cpu() {
    let _alone = alone();
    let (gpu, cpu) = (on_gpu(), server(&["--device", "cpu"]));
    let mut largest: f64 = 0.0;
    for prompt in prompts() {
        let body = body(&prompt);
        let [(text, tokens, numbers), expected] =
            [&gpu, &cpu].map(|server| told(&server.ask("/v1/completions", &body)));
        assert_eq!((&text, &tokens), (&expected.0, &expected.1), "{prompt}");
        assert_eq!(numbers.len(), 24, "{prompt}");
        for (position, (found, expected)) in numbers.iter().zip(&expected.2).enumerate() {
            let off = (found - expected).abs();
            assert!(off <= TOLERANCE, "{prompt}: token {position} is off by {off}");
            largest = largest.max(off);
        }
        assert_eq!(streamed(&gpu, "/v1/completions", &body, |choice| choice["text"].as_str()), text, "{prompt}");
    }
    let chat = json!({"messages": messages(), "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    println!("largest difference of a log-probability {largest:.2e}");
    for body in [chat, structured()] {
        let [found, expected] = [&gpu, &cpu].map(|server| server.ask("/v1/chat/completions", &body));
        let content = found["choices"][0]["message"]["content"].as_str().expect("content");
        assert_eq!(found["choices"][0]["message"], expected["choices"][0]["message"], "{body}");
        let pieces = streamed(&gpu, "/v1/chat/completions", &body, |choice| choice["delta"]["content"].as_str());
        assert_eq!(pieces, content, "{body}");
        let of_schema = serde_json::from_str(content).is_ok_and(|value: Value| value["side"].is_string());
        assert_eq!(of_schema, body["response_format"].is_object(), "{content}");
    }
    let fetched = [&gpu, &cpu].map(|server| metric(server, "plimsoll_device_fetched_bytes_total"));
    assert!(fetched[0] > 0 && fetched[1] == 0, "the GPU and the CPU fetched {fetched:?} bytes");
    assert_kept_to_plan(&gpu);
}

#[test]
#[ignore = "external"]
fn concurrent_requests_get_the_answers_they_get_alone() {
    let _alone = alone();
    let server = on_gpu();
    let bodies: Vec<Value> = prompts().iter().map(|prompt| body(prompt)).collect();
    let expected: Vec<_> = bodies.iter().map(|body| told(&server.ask("/v1/completions", body))).collect();
    // Three times as many as run at once, in two orders. Later ones find prefixes of earlier ones cached.
    for round in 0..2 {
        let mut order: Vec<usize> = (0..12).map(|i| i % bodies.len()).collect();
        if round == 1 {
            order.reverse();
        }
        thread::scope(|scope| {
            for i in order {
                let (server, bodies, expected) = (&server, &bodies, &expected);
                scope.spawn(move || {
                    let found = told(&server.ask("/v1/completions", &bodies[i]));
                    assert_eq!(found, expected[i], "round {round}, prompt {i}");
                });
            }
        });
    }
    assert_kept_to_plan(&server);
}

#[test]
#[ignore = "external"]
fn metrics_and_memory_page_show_the_gpu() {
    let _alone = alone();
    let server = on_gpu();
    let fetched = || metric(&server, "plimsoll_device_fetched_bytes_total");
    let before = fetched();
    let greedy = json!({"prompt": "The sea is", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    server.ask("/v1/completions", &greedy);
    eventually("the step has ended", || server.at_rest());
    assert_eq!(fetched() - before, 24 * 8, "a greedy token takes 8 bytes");
    let page = server.memory();
    let (device, number) = (&page["device"], |value: &Value| value.as_u64().expect("a number"));
    assert_eq!(number(&device["line_bytes"]), OWN_BYTES, "{device}");
    assert!(number(&device["committed_bytes"]) > 0, "{device}");
    let plan = about("plan", &[&["--json"], &GPU[..], &OWN_MEMORY].concat()).good();
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["device_total"], device["planned_bytes"], "{plan}");
    assert_eq!(plan["total"], page["planned_bytes"], "{plan}");
    for name in ["weights", "kv_pages", "step_workspace", "device_reserve"] {
        let row = page["components"].as_array().unwrap().iter().find(|row| row["component"] == name).expect(name);
        assert_eq!(row["on_device"], true, "{row}");
        assert!(number(&row["planned_bytes"]) > 0, "{row}");
    }
    assert_kept_to_plan(&server);
}

#[test]
#[ignore = "external"]
fn plan_and_serve_refuse_what_is_over_either_memory_limit() {
    let _alone = alone();
    let words = about("plan", &[&GPU[..], &OWN_MEMORY].concat()).good();
    for (name, value) in [("total on the GPU", "MiB"), ("GPU memory limit", "480.0 MiB   --gpu-memory-budget")] {
        let row = words.lines().find_map(|line| line.trim_start().strip_prefix(name));
        assert!(row.is_some_and(|row| row.contains(value)), "{name}: {words}");
    }
    let host = [&OWN_MEMORY[..], &["--memory-budget", "300MiB"]].concat();
    for (flags, limit) in [(&["--gpu-memory-budget", "300MiB"][..], "--gpu-memory-budget"), (&host, "--memory-budget")]
    {
        let flags = [&GPU[..], flags].concat();
        for (command, code) in [("serve", 1), ("plan", 2)] {
            let done = about(command, &flags);
            assert_eq!(done.code, Some(code), "{command}: {done:#?}");
            let error = done.refused();
            assert!(error.contains("it does not fit: ") && error.contains(" are needed"), "{command}: {error}");
            assert!(error.contains(&format!("there are 300.0 MiB ({limit}")), "{command}: {error}");
            assert!(error.contains("bytes) short\nTry "), "{command}: {error}");
        }
    }
}

/// Processes that a process has started and that still run.
fn children(pid: u32) -> BTreeSet<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

#[test]
#[ignore = "external"]
fn sigterm_lets_a_stream_finish_and_leaves_no_process() {
    let _alone = alone();
    let mut server = on_gpu();
    server.ask("/v1/chat/completions", &structured());
    let body = json!({"prompt": "The sea is", "max_tokens": 240, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut stream = server.post("/v1/completions", &body);
    assert_eq!(stream.status, 200);
    stream.event().expect("a first event");
    let mut processes = children(server.pid());
    assert!(!processes.is_empty(), "no process compiles grammars");
    processes.insert(server.pid());
    server.signal("TERM");
    let events: Vec<String> = std::iter::from_fn(|| stream.event()).collect();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{events:?}");
    assert!(events.iter().any(|event| event.contains("\"finish_reason\":\"length\"")), "{events:?}");
    let status = server.ended();
    assert_eq!(status.code(), Some(0), "{status}:\n{}", server.log());
    assert!(!server.log().contains("panicked"), "{}", server.log());
    for pid in processes {
        eventually("the process is gone", || !Path::new(&format!("/proc/{pid}")).exists());
    }
    assert!(TcpStream::connect(server.address).is_err(), "the port is still open");
}
