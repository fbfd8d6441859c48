//! Faults of the host side: processors that spin, broken bodies, names that collide.

use std::time::Duration;

use serde_json::{Value, json};

use crate::http::request;
use crate::product::Server;
use crate::visitor::{count, greedy, prompt, refused, rests, says, tiny, with};

/// Processor time of a server, in seconds.
fn cpu_seconds(server: &Server) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).expect("it lives");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    // After the name: state is the first, utime the twelfth, stime the thirteenth; Linux counts in hundredths.
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}

// vllm-mlx 552: an idle loop asked every millisecond whether there was work.
#[test]
fn v_65_an_idle_server_costs_nothing() {
    let server = tiny(&[]);
    says(&server, &greedy(&prompt(1, 30), 10));
    std::thread::sleep(Duration::from_secs(1));
    let before = cpu_seconds(&server);
    std::thread::sleep(Duration::from_secs(4));
    let used = cpu_seconds(&server) - before;
    assert!(used <= 0.2, "{used:.2} s of processor time in four seconds without a request");
}

// vllm-mlx 526, 415: all output was copied for every token, and structured output was parsed from its beginning; long answers crawled.
#[test]
fn v_53_v_55_the_last_thousand_tokens_cost_what_the_first_did() {
    let server = tiny(&[]);
    let list = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "array", "items": {"type": "integer"}, "minItems": 1900}}});
    let costs = |fields: &Value| {
        let body = with(with(greedy(&prompt(1, 10), 4000), json!({"stream": true})), fields.clone());
        let mut stream = server.post("/v1/completions", &body);
        let mut tokens_until = |most: u64| {
            let (mut tokens, before) = (0, cpu_seconds(&server));
            while tokens < most {
                let Some(event) = stream.event() else { break };
                let event: serde_json::Value = serde_json::from_str(&event).unwrap_or_default();
                tokens += event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len) as u64;
            }
            (cpu_seconds(&server) - before) / tokens as f64
        };
        tokens_until(200);
        let first = tokens_until(1000);
        tokens_until(1600);
        (first, tokens_until(1000))
    };
    for fields in [json!({"stop": ["never said", "nor this"]}), json!({"response_format": list})] {
        // Attention reads four times the keys. Copying or parsing the whole prompt would cost far more, at every try. At one
        // try, other machines on the host may take the processor for a while.
        let mut tries = Vec::new();
        let held = (0..3).any(|_| {
            let (first, last) = costs(&fields);
            tries.push((first, last));
            last <= 4.0 * first
        });
        assert!(held, "{fields}: {tries:?} s a token at first and at last");
    }
}

// vllm-mlx 588d206, server: an error was a 200 with a finish reason, or no end at all.
#[test]
fn v_69_v_v_what_fails_before_it_starts_is_no_200() {
    let server = tiny(&[]);
    for body in [
        json!({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "regex"}, "stream": true}),
        json!({"messages": [{"role": 7, "content": "x"}], "stream": true}),
        json!({"messages": [], "stream": true}),
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1, "stream": true}),
    ] {
        refused(server.post("/v1/chat/completions", &body), 400);
    }
    rests(&server);
}

// vllm 41969: bytes that are no JSON, no UTF-8, no HTTP; each cost a worker.
#[test]
fn v_32_v_31_rubbish_is_answered_and_the_next_request_is_served() {
    let server = tiny(&[]);
    let expected = says(&server, &greedy(&prompt(1, 20), 5));
    let deep = [vec![b'['; 50_000], vec![b']'; 50_000]].concat();
    for body in [&b"{"[..], b"\xff\xfe\x00", b"null", b"[]", b"{\"prompt\": \"\\ud800\"}", &deep] {
        for path in ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"] {
            let answer = request(server.address, "POST", path, body).expect("an answer");
            let status = answer.status;
            assert!((400..500).contains(&status), "{path}: {status} {}", answer.text());
        }
        assert_eq!(says(&server, &greedy(&prompt(1, 20), 5)), expected);
    }
    assert_eq!(count(&server, "failed"), 0);
    let log = server.log();
    assert!(!log.contains("panicked"), "{log}");
}
