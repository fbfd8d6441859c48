//! The memory limit from outside: the kernel's figures of the process, compared with the plan.

use std::fs;
use std::thread;

use serde_json::json;

use crate::product::{Server, eventually};

const REQUESTS: usize = 64;

/// A field of the process's status in bytes, which the kernel gives in kB.
fn status(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib: u64 =
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or_else(|| panic!("{key}"));
    kib * 1024
}

fn serve_all(server: &Server) {
    thread::scope(|scope| {
        for worker in 0..8 {
            scope.spawn(move || {
                for i in 0..REQUESTS / 8 {
                    let topic = ["rivers", "ships", "harbours", "winds"][(worker + i) % 4].repeat(1 + worker * i);
                    let prompt = format!("Request {worker}/{i} about {topic}:");
                    let body = json!({"prompt": prompt, "max_tokens": 24, "ignore_eos": true, "seed": i});
                    let answer = server.ask("/v1/completions", &body);
                    assert_eq!(answer["usage"]["completion_tokens"], 24, "{answer}");
                }
            });
        }
    });
}

#[test]
#[ignore = "models"]
fn sixty_four_requests_stay_under_the_plan_and_leave_nothing_behind() {
    let server = Server::start(&[]);
    let planned = server.memory()["planned_bytes"].as_u64().unwrap();
    let before = status(server.pid(), "RssAnon") + status(server.pid(), "VmSwap");
    assert!(before <= planned, "{before} bytes at ready, {planned} planned");
    serve_all(&server);
    let first = status(server.pid(), "RssAnon") + status(server.pid(), "VmSwap");
    serve_all(&server);
    let second = status(server.pid(), "RssAnon") + status(server.pid(), "VmSwap");
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "anonymous memory: {:.1} MiB at ready, {:.1} after {REQUESTS} requests, {:.1} after twice as many, {:.1} planned",
        mib(before),
        mib(first),
        mib(second),
        mib(planned)
    );
    assert!(first.max(second) <= planned, "{first} and {second} bytes, {planned} planned");
    assert!(second <= first + (8 << 20), "the second round grew by {} bytes", second - first);
    idle(&server);
}

/// Waits until all memory of requests is freed (I4). Checks that nothing was allocated on the device after ready.
fn idle(server: &Server) {
    eventually("all pools are full again", || {
        let pools = &server.memory()["pools"];
        let requests = &pools["requests"];
        let pages = &pools["kv_pages"];
        // Pages that only the prefix index holds count as free.
        requests["running"] == 0
            && requests["waiting"] == 0
            && requests["in_system"] == 0
            && pools["host_bytes"]["used"] == 0
            && pages["used"] == pages["cached"]
    });
    let page = server.memory();
    assert_eq!(page["device_allocations"]["after_ready"], 0, "{page}");
    for row in page["components"].as_array().unwrap() {
        assert!(row["peak_bytes"].as_u64() <= row["planned_bytes"].as_u64(), "peak within plan (I2): {row}");
    }
}
