//! The ledger of the real process: in the log, in the report at the end, and compared with the kernel's figures at full load.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::product::{Server, eventually};

/// Most bytes that the planned process baseline may exceed the measured one by. The baseline (loader, system libraries, touched
/// stacks, the allocator's own memory) has no formula. Components with a formula are held to 5 % in `plimsoll-engine/tests/slack.rs`.
const BASELINE_FLOOR_BYTES: i64 = 2 << 20;

fn component<'a>(page: &'a Value, name: &str) -> &'a Value {
    let rows = page["components"].as_array().expect("rows");
    rows.iter().find(|row| row["component"] == name).unwrap_or_else(|| panic!("{name}: {page}"))
}

#[test]
#[ignore = "models"]
fn the_ledger_is_logged_as_steps_go_by_and_whole_at_the_end() {
    let mut server = Server::start(&["--log-ledger-every", "5", "--max-total-token-num", "4096"]);
    assert!(!server.log().contains("ledger at step"), "nothing has been done yet: {}", server.log());
    server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 24, "ignore_eos": true}));
    eventually("a line of the ledger", || server.log().contains("ledger at step"));
    // The engine counts a request as finished a moment after its last token.
    eventually("the request is counted", || server.memory()["requests"]["finished"] == 1);
    let page = server.memory();
    let log = server.log();
    let line = log.lines().find(|line| line.contains("ledger at step")).expect("just seen");
    for row in page["components"].as_array().unwrap() {
        assert!(line.contains(row["component"].as_str().unwrap()), "{row}: {line}");
    }
    // An idle engine takes no steps and logs nothing more.
    let lines = || server.log().matches("ledger at step").count();
    thread::sleep(Duration::from_millis(1200));
    let before = lines();
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(lines(), before);
    assert_eq!(page["degradation"]["level"], "calm");
    server.signal("TERM");
    assert!(server.ended().success());
    let log = server.log();
    let (_, end) = log.split_once("the ledger at the end").unwrap_or_else(|| panic!("{log}"));
    for row in page["components"].as_array().unwrap() {
        assert!(end.contains(row["component"].as_str().unwrap()), "{row}: {end}");
    }
    for words in ["planned", "committed", "peak", "unaccounted", "requests: 1 finished", "degradation: calm"] {
        assert!(end.contains(words), "{words}: {end}");
    }
}

#[test]
#[ignore = "models"]
fn zero_logs_no_ledger() {
    let server = Server::start(&["--log-ledger-every", "0", "--max-total-token-num", "4096"]);
    server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 40, "ignore_eos": true}));
    thread::sleep(Duration::from_millis(1200));
    assert!(!server.log().contains("ledger at step"), "{}", server.log());
}

#[test]
#[ignore = "models"]
fn of_an_elastic_pool_the_ledger_has_what_is_there() {
    let server = Server::start(&["--elastic", "--max-total-token-num", "16384"]);
    // Committed and planned bytes of the KV pages. The ledger's sum is first compared with the process: I3.
    let held = || {
        let page = server.memory();
        let number = |name: &str| page[name].as_i64().unwrap();
        let (committed, unaccounted) = (number("committed_bytes"), number("unaccounted_bytes"));
        assert!(
            unaccounted.abs() <= (committed / 100).max(1 << 20),
            "{unaccounted} unaccounted, {committed} committed"
        );
        let row = component(&page, "kv_pages");
        let [planned, committed] = ["planned_bytes", "committed_bytes"].map(|name| row[name].as_i64().unwrap());
        assert!(committed <= planned, "{row}");
        (committed, planned)
    };
    let (before, planned) = held();
    assert!(before < planned / 10, "nobody has asked: {before} of {planned}");
    server.ask("/v1/completions", &json!({"prompt": "word ".repeat(3000), "max_tokens": 4, "ignore_eos": true}));
    let (at_height, _) = held();
    // 3000 tokens of 16384.
    assert!((planned / 8..planned / 2).contains(&at_height), "{at_height} of {planned}");
    eventually("the pages go back", || held().0 < planned / 10);
}

/// Anonymous bytes of the process that are neither in a mapped region nor in the heap.
fn baseline(page: &Value) -> i64 {
    let number = |value: &Value| value.as_i64().unwrap_or_else(|| panic!("{page}"));
    let regions = ["weights", "kv_pages", "step_workspace", "emergency_reserve"];
    let mapped: i64 = regions.iter().map(|name| number(&component(page, name)["committed_bytes"])).sum();
    let process = &page["process"];
    number(&process["rss_anon"]) + number(&process["vm_swap"]) - mapped - number(&page["heap"]["resident_bytes"])
}

#[test]
#[ignore = "models"]
fn the_process_baseline_holds_at_full_load() {
    let server = Server::start(&[]);
    let planned = component(&server.memory(), "process_baseline")["planned_bytes"].as_i64().unwrap();
    let (mut most, mut running) = (i64::MIN, 0);
    thread::scope(|scope| {
        let load = |client: usize| {
            let server = &server;
            move || {
                let prompt = format!("{client} {}", "winds and harbours ".repeat(2 + client % 8));
                let body = json!({"prompt": prompt, "max_tokens": 24, "ignore_eos": true, "seed": client,
                                  "temperature": 0.9, "logprobs": client % 5, "frequency_penalty": 0.1});
                server.ask("/v1/completions", &body);
            }
        };
        let clients: Vec<_> = (0..64).map(|client| scope.spawn(load(client))).collect();
        while clients.iter().any(|client| !client.is_finished()) {
            let page = server.memory();
            most = most.max(baseline(&page));
            running = running.max(page["pools"]["requests"]["running"].as_u64().unwrap());
            thread::sleep(Duration::from_millis(100));
        }
    });
    println!("process baseline: {planned} bytes planned, {most} measured with {running} running requests");
    assert!(running > 8, "only {running} requests ran at once");
    assert!(most <= planned, "{most} bytes, {planned} planned");
    assert!(planned - most <= BASELINE_FLOOR_BYTES, "{most} bytes of {planned} planned");
    let page = server.memory();
    for row in page["components"].as_array().unwrap() {
        assert!(row["peak_bytes"].as_u64() <= row["planned_bytes"].as_u64(), "I2: {row}");
    }
    let unaccounted = page["unaccounted_bytes"].as_i64().unwrap();
    let committed = page["committed_bytes"].as_i64().unwrap();
    println!("unaccounted: {unaccounted} of {committed}");
    assert!(unaccounted.abs() <= committed / 100, "I3: {unaccounted} of {committed} committed");
}
