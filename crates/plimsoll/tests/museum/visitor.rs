//! Shared helpers of the tests: a server with a fixture model, prompts, answers, and checks afterwards.

use std::io::Read;
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::http::Answer;
use crate::product::{PATIENCE, Server, eventually, fixture, run};

/// The two-layer Llama, with a pool of 8,192 tokens and a context of 4,096.
pub fn tiny(flags: &[&str]) -> Server {
    serve("llama", flags)
}

/// Default flags of the servers: small limits, so that several servers fit beside each other.
const SMALL: [[&str; 2]; 5] = [
    ["--max-total-token-num", "8192"],
    ["--request-bytes", "16777216"],
    ["--grammar-bytes", "8388608"],
    ["--max-body-bytes", "2097152"],
    ["--media-bytes", "33554432"],
];

fn small<'a>(model: &str, flags: &[&'a str]) -> Vec<&'a str> {
    let mut all = flags.to_vec();
    for [flag, value] in SMALL {
        // A budget sizes the pool, and an encoder has none.
        let no_pool = flags.contains(&"--memory-budget") || model == "bert";
        if !(flags.contains(&flag) || no_pool && flag == "--max-total-token-num") {
            all.extend([flag, value]);
        }
    }
    all
}

/// The arguments of the command that serves a fixture model, for tests that start it elsewhere.
pub fn served<'a>(model: &str, flags: &[&'a str]) -> Vec<&'a str> {
    // A test leaks only a few paths.
    let path: &'static str = fixture(model).to_str().expect("UTF-8").to_owned().leak();
    [&["serve", path, "--port", "0"], &small(model, flags)[..]].concat()
}

/// Serves a fixture model with `flags`, and with the limits of [`SMALL`] that they do not set.
pub fn serve(model: &str, flags: &[&str]) -> Server {
    Server::start_model(&fixture(model), &small(model, flags))
}

/// The plan of the server that [`serve`] starts.
pub fn plan(model: &str, flags: &[&str]) -> Value {
    let path = fixture(model);
    let words = run(&[&["plan", path.to_str().expect("UTF-8"), "--json"], &small(model, flags)[..]].concat()).good();
    serde_json::from_str(&words).unwrap_or_else(|error| panic!("{error}: {words}"))
}

/// The planned bytes of a component.
pub fn planned(plan: &Value, component: &str) -> u64 {
    let lines = plan["plan"]["lines"].as_array().expect("lines");
    number(&lines.iter().find(|line| line["component"] == component).expect(component)["bytes"])
}

/// The value, which must be a number.
pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Pseudo-random ids of ordinary tokens, which depend on the seed.
pub fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % 370
    };
    (0..tokens).map(|_| next()).collect()
}

/// A greedy completion of ids, of exactly `tokens` tokens.
pub fn greedy(prompt: &[u32], tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
}

/// The body with these fields added or replaced.
pub fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("fields").clone();
    body.as_object_mut().expect("a body").extend(fields);
    body
}

/// The token ids of a completion.
pub fn ids(answer: &Value) -> Vec<u64> {
    let ids = answer["choices"][0]["token_ids"].as_array();
    ids.unwrap_or_else(|| panic!("no ids: {answer}")).iter().map(number).collect()
}

/// Asks for a completion and returns its token ids.
pub fn says(server: &Server, body: &Value) -> Vec<u64> {
    ids(&server.ask("/v1/completions", body))
}

/// Prompt tokens that an answer found in the cache.
pub fn cached(answer: &Value) -> u64 {
    number(&answer["usage"]["prompt_tokens_details"]["cached_tokens"])
}

/// Waits until no request runs or waits and every pool is full again.
pub fn rests(server: &Server) {
    eventually("every pool is full again", || server.at_rest());
}

/// A count of `/v1/memory`'s `requests`.
pub fn count(server: &Server, what: &str) -> u64 {
    number(&server.memory()["requests"][what])
}

/// Checks that no component exceeded its plan, and that no device memory was allocated after ready (I2).
pub fn keeps_its_plan(server: &Server) {
    let page = server.memory();
    for row in page["components"].as_array().expect("rows") {
        assert!(number(&row["peak_bytes"]) <= number(&row["planned_bytes"]), "{row}");
    }
    assert_eq!(page["device_allocations"]["after_ready"], 0, "{page}");
}

/// Anonymous memory in bytes, resident or swapped. It grows with a leak.
pub fn anonymous(server: &Server) -> i64 {
    let process = server.memory()["process"].take();
    (number(&process["rss_anon"]) + number(&process["vm_swap"])) as i64
}

/// Bytes of the heap in use.
pub fn heap(server: &Server) -> i64 {
    number(&server.memory()["heap"]["in_use_bytes"]) as i64
}

/// The value of a metric without labels.
pub fn metric(server: &Server, name: &str) -> u64 {
    let page = server.get("/metrics").text();
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {page}"))
}

/// The message of an error, which must have this status.
pub fn refused(answer: Answer, status: u16) -> String {
    let found = answer.status;
    let text = answer.text();
    assert_eq!(found, status, "{text}");
    let error: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    error["error"]["message"].as_str().unwrap_or_else(|| panic!("{error}")).to_owned()
}

/// All events of a stream. It must end with its terminator, and with nothing after it.
pub fn events(mut answer: Answer) -> Vec<Value> {
    if answer.status != 200 {
        panic!("no stream: {}", answer.text());
    }
    let mut events = Vec::new();
    while let Some(data) = answer.event() {
        events.push(data);
    }
    assert_eq!(events.pop().as_deref(), Some("[DONE]"), "the terminator comes last: {events:?}");
    events.iter().map(|data| serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"))).collect()
}

/// Reads until `marker` has arrived.
pub fn until(stream: &mut TcpStream, marker: &str) -> String {
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&said).contains(marker) {
        let n = stream.read(&mut piece).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&said)));
        assert!(n > 0, "ended before {marker}: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&piece[..n]);
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Asks for `count` answers from four clients at once, each with its own body.
pub fn crowd(server: &Server, count: u64, body: impl Fn(u64) -> (&'static str, Value) + Sync) {
    let (next, body) = (std::sync::atomic::AtomicU64::new(0), &body);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    let (path, body) = body(i);
                    server.ask(path, &body);
                }
            });
        }
    });
}

/// A completion, for [`crowd`].
pub fn completion(body: Value) -> (&'static str, Value) {
    ("/v1/completions", body)
}
