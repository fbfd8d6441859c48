//! The routes beside the model APIs: models, health, metrics, memory, tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use plimsoll_engine::testing::letters;
use serde_json::{Value, json};

use crate::common::{self, PATIENCE, Server};

#[test]
fn models_are_listed_by_every_name() {
    let server = Server::start(letters);
    let list = server.get("/v1/models").ok();
    assert_eq!(list["object"], "list");
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(ids, ["tiny", "org/tiny-alias"]);
    assert_eq!(list["data"][0]["max_model_len"], 512);
    assert_eq!(list["data"][0]["created"], 1_700_000_000);
    let kinds = ["input_modalities", "output_modalities"].map(|field| list["data"][0][field].clone());
    assert_eq!(kinds, [json!(["text"]), json!(["text"])]);
    let sampling = json!({
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "source": "off"
    });
    assert_eq!(list["data"][0]["default_sampling"], sampling);
    // Fields of the list that Anthropic's clients read.
    assert_eq!(
        (&list["first_id"], &list["last_id"], &list["has_more"]),
        (&json!("tiny"), &json!("org/tiny-alias"), &json!(false))
    );
    let known = ["type", "display_name", "created_at"].map(|field| list["data"][1][field].clone());
    assert_eq!(known, ["model", "org/tiny-alias", "2023-11-14T22:13:20Z"].map(Value::from));
    assert_eq!(server.get("/v1/models/org/tiny-alias").ok()["root"], "tiny");
    assert_eq!(server.get("/v1/models/other").error(404)["code"], "model_not_found");
    assert_eq!(server.get("/v1/models/%ff").error(400)["code"], "invalid_path");
}

#[test]
fn tokens_there_and_back() {
    let server = Server::start(letters);
    let answer = server.post("/tokenize", &json!({"prompt": "aé<|im_end|>", "return_token_strs": true})).ok();
    assert_eq!(answer["tokens"], json!([97, 195, 169, 257]));
    assert_eq!(answer["count"], 4);
    assert_eq!(answer["max_model_len"], 512);
    assert_eq!(answer["token_strs"][0], "a");
    assert_eq!(answer["token_strs"][3], "<|im_end|>");
    let messages = json!([{"role": "user", "content": "x"}]);
    let chat = server.post("/tokenize", &json!({"messages": messages, "model": "tiny"})).ok();
    assert_eq!(chat["token_strs"], Value::Null);
    let back = server.post("/detokenize", &json!({"tokens": chat["tokens"]})).ok();
    assert_eq!(back["prompt"], "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");
    server.post("/tokenize", &json!({"prompt": "x", "colour": 1})).error(400);
    server.post("/tokenize", &json!({})).error(400);
    server.post("/detokenize", &json!({"tokens": [258]})).error(400);
    server.post("/detokenize", &json!({"tokens": vec![1; 513]})).error(400);
    server.post("/detokenize", &json!({"tokens": "x"})).error(400);
    server.post("/detokenize", &json!({"model": "no", "tokens": []})).error(404);
    server.assert_idle();
}

#[test]
fn health_follows_the_engines_progress() {
    let server = Server::start(letters);
    common::eventually("healthy", || server.get("/health").status == 200);
    assert_eq!(server.get("/ready").ok()["status"], "ready");
    server.engine.set_stall_limit(Duration::from_millis(400));
    server.observed.frozen.store(true, Ordering::Release);
    common::eventually("unhealthy", || server.get("/health").status == 503);
    let error = server.get("/health").error(503);
    assert!(error["message"].as_str().unwrap().contains("no progress for 0.4 s"), "{error}");
    server.get("/ready").error(503);
    server.observed.frozen.store(false, Ordering::Release);
    server.engine.set_stall_limit(PATIENCE);
    common::eventually("healthy again", || server.get("/health").status == 200);
    server.engine.drain();
    server.get("/ready").error(503);
    assert_eq!(server.get("/health").status, 200);
    let error = server.post("/v1/completions", &json!({"prompt": "x"})).error(503);
    assert_eq!(error["type"], "service_unavailable_error");
}

/// The rules of `promtool check metrics`, and those of OpenMetrics.
#[test]
fn metrics_keep_to_the_conventions_of_prometheus_in_both_formats() {
    let server = Server::start(letters);
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
    let asked = |accept: &str| {
        server.send(format!("GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\n\r\n")).answer()
    };
    let (text, open) = (asked("text/plain;version=0.0.4"), asked("application/openmetrics-text;version=1.0.0"));
    assert_eq!(text.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert_eq!(open.header("content-type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert_eq!(asked("image/png").header("content-type"), text.header("content-type"));
    assert!(open.body.ends_with("\n# EOF\n") && !text.body.contains("# EOF"));
    for (page, older) in [(&text.body, true), (&open.body, false)] {
        families_are_well_formed(page, older);
    }
}

fn families_are_well_formed(page: &str, older: bool) {
    let (mut helps, mut kinds, mut series) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
    for line in page.lines().filter(|line| *line != "# EOF") {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => assert!(helps.insert(name) && !help.is_empty(), "{line}"),
            ["#", "TYPE", name, kind] => assert!(kinds.insert(name, kind).is_none(), "{line}"),
            [sample, value] => {
                assert!(series.insert(sample), "twice: {line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let name = sample.split('{').next().unwrap();
                let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
                let counter = name.strip_suffix("_total").filter(|_| !older);
                let family =
                    [Some(name), counter, histogram].into_iter().flatten().find(|name| kinds.contains_key(name));
                assert!(family.is_some_and(|family| helps.contains(family)), "no HELP or TYPE: {line}");
                assert!(histogram.is_none() || kinds[family.unwrap()] == "histogram", "{line}");
            }
            _ => panic!("{line}"),
        }
    }
    assert_eq!(helps, kinds.keys().copied().collect());
    assert!(kinds.len() > 80);
    for (name, kind) in kinds {
        assert!(name.starts_with("plimsoll_") && !name.contains(kind), "{name}");
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        match kind {
            "counter" => assert_eq!(name.ends_with("_total"), older, "{name}"),
            "gauge" | "histogram" => assert!(!name.ends_with("_total"), "{name}"),
            // Old names of this release, which have no type.
            _ => assert!(["plimsoll_kv_pages_total", "plimsoll_state_slots_total"].contains(&name), "{name}"),
        }
        assert!(kind != "histogram" || name.ends_with("_seconds"), "base units: {name}");
        let odd = [
            "ms",
            "us",
            "milliseconds",
            "minutes",
            "hours",
            "kb",
            "mb",
            "gb",
            "kilobytes",
            "megabytes",
            "mib",
            "percent",
        ];
        assert!(name.split('_').all(|word| !odd.contains(&word)), "base units: {name}");
    }
}

#[test]
fn metrics_and_memory_tell_the_same_numbers() {
    let server = Server::start(letters);
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
    server.get("/nowhere").error(404);
    server.assert_idle();
    let page = server.get("/metrics");
    assert_eq!(page.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let value = |name: &str| -> f64 {
        let line = page.body.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("{name} is missing in {}", page.body))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(value("plimsoll_requests_running"), 0.0);
    assert_eq!(value("plimsoll_requests_in_system"), 0.0);
    assert_eq!(value("plimsoll_http_answers_total{path=\"/v1/completions\",code=\"200\"}"), 1.0);
    assert_eq!(value("plimsoll_http_answers_total{path=\"other\",code=\"404\"}"), 1.0);
    assert_eq!(value("plimsoll_memory_planned_bytes{component=\"kv_pages\"}"), 0.0);
    assert_eq!(value("plimsoll_memory_line_bytes"), f64::from(1 << 30));
    assert_eq!(value("plimsoll_device_allocations_after_ready_total"), 0.0);
    assert!(value("plimsoll_process_anonymous_bytes") > 0.0);
    assert!(value("plimsoll_ttft_seconds_count") >= 0.0);
    assert!(!page.body.contains("# EOF"));
    let memory = server.get("/v1/memory").ok();
    assert_eq!(memory["line_bytes"], 1 << 30);
    assert_eq!(memory["components"].as_array().unwrap().len(), plimsoll_memory::Component::ALL.len());
    assert_eq!(memory["pools"]["requests"]["running_max"], 8);
    assert_eq!(memory["pools"]["state_slots"]["total"], 0);
    assert_eq!(memory["pools"]["host_bytes"]["total"], 16 << 20);
    assert!(memory["unaccounted_bytes"].as_i64().unwrap() > 0);
    assert!(memory["process"]["threads"].as_u64().unwrap() > 1);
    assert!(server.get("/version").ok()["version"].as_str().unwrap().contains('.'));
}

#[test]
fn the_base_of_the_api_answers_with_what_is_here() {
    let server = Server::start(letters);
    let index = server.get("/v1").ok();
    assert_eq!(server.get("/v1/").ok(), index);
    let models = server.get("/v1/models").ok();
    assert_eq!((&index["server"], &index["models"][0]), (&json!("plimsoll"), &models["data"][0]["id"]));
    let listed: std::collections::BTreeSet<_> =
        index["routes"].as_array().unwrap().iter().map(|route| route["path"].as_str().unwrap().to_owned()).collect();
    let document = server.get("/openapi.json").ok();
    assert_eq!(listed, document["paths"].as_object().unwrap().keys().cloned().collect());
    for link in ["page", "openapi"] {
        assert_eq!(server.get(index[link].as_str().unwrap()).status, 200, "{link}");
    }
    let page = index["documentation"].as_str().unwrap().rsplit_once("/docs/").unwrap().1;
    assert!(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page).is_file(), "{page}");
}

/// The names of metrics that dashboards depend on.
#[test]
fn every_promised_metric_is_there() {
    let server = Server::start(letters);
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut left = server.send(common::post("/v1/completions", &body));
    left.until("data: ");
    drop(left);
    assert_eq!(server.send("GET /v1/models HTTP/1.1\r\nhost: example.com\r\n\r\n").answer().status, 421);
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
    server.assert_idle();
    let page = server.get("/metrics").ok_text().to_owned();
    let described =
        |name: &str| [" ", "_total "].iter().any(|end| page.contains(&format!("# TYPE plimsoll_{name}{end}")));
    for name in [
        "queue_seconds",
        "ttft_seconds",
        "inter_token_seconds",
        "step_seconds",
        "encode_seconds",
        "prompt_tokens",
        "generated_tokens",
        "prompt_cached_tokens",
        "encoder_hits",
        "requests_finished",
        "requests_aborted",
        "requests_failed",
        "requests_refused_invalid",
        "requests_refused_full",
        "requests_refused_memory",
        "generations_ended",
        "governor_evict_prefix",
        "governor_small_chunks",
        "governor_speculation_off",
        "governor_stop_admitting",
        "governor_preempt",
        "governor_fail",
        "memory_planned_bytes",
        "memory_committed_bytes",
        "memory_peak_bytes",
        "speculation_drafted_tokens",
        "speculation_accepted_tokens",
        "media_fetching",
        "media_fetches_waiting",
        "http_turned_away",
    ] {
        assert!(described(name), "{name}: {page}");
    }
    assert!(page.contains("plimsoll_generations_ended_total{api=\"completions\",reason=\"finished\"} "), "{page}");
}

#[test]
#[ignore = "soak"]
fn an_idle_server_costs_nothing() {
    let server = Server::start(letters);
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
    let ticks = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let wakes = || -> u64 {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let status = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok());
        let count = |status: String| {
            status.split("\nvoluntary_ctxt_switches:").nth(1)?.lines().next()?.trim().parse::<u64>().ok()
        };
        status.filter_map(count).sum()
    };
    // A spinning thread takes a hundred ticks a second, a polling one wakes up a thousand times. Tests in the same process run servers too:
    // one quiet second is enough.
    let second = |_| {
        let (worked, woken) = (ticks(), wakes());
        std::thread::sleep(Duration::from_secs(1));
        (ticks() - worked, wakes().saturating_sub(woken))
    };
    let mut seconds = (0..30).map(second).inspect(|second| println!("{second:?}"));
    assert!(seconds.any(|(worked, woken)| worked <= 50 && woken <= 100), "no second was idle");
}

/// Edge case 43: reading the status of a full server takes no place.
#[test]
fn health_and_memory_need_no_slot_of_a_full_engine() {
    let server = Server::start(|_| Box::new(std::iter::empty()));
    let body = json!({"prompt": "x", "max_tokens": 4, "stream": true}).to_string();
    let clients: Vec<_> = (0..16).map(|_| server.send(common::post("/v1/completions", &body))).collect();
    common::eventually("the engine is full", || server.engine.reserved().1 == 16);
    server.post_text("/v1/completions", &body).error(429);
    for _ in 0..50 {
        server.get("/health").ok();
        server.get("/ready").ok();
    }
    let page = server.get("/v1/memory").ok();
    assert_eq!(page["pools"]["requests"]["in_system"], 16);
    assert_eq!(page["requests"]["refused_full"], 1);
    assert_eq!(page["degradation"]["level"], "calm");
    drop(clients);
    server.assert_idle();
}
