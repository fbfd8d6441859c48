//! Several servers: the events and metrics that routers read, and replicas behind a gateway under load. Meanwhile one replica is
//! killed and one is drained (`tests/clients/replicas.py`).

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use serde_yaml_ng::Deserializer;

use crate::http::{Answer, request};
use crate::product::{Server, binary, fixture, repository, run};
use crate::python;

/// A reader of `/v1/kv_events`.
struct Follower {
    answer: Answer,
    epoch: u64,
    seq: u64,
}

impl Follower {
    fn of(server: &Server, headers: &str) -> Self {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let head = format!("GET /v1/kv_events HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        Self { answer: Answer::read(stream).unwrap(), epoch: 0, seq: 0 }
    }

    /// The next event; none at the end of the stream.
    fn next(&mut self) -> Option<Value> {
        let event: Value = serde_json::from_str(&self.answer.event()?).unwrap();
        self.epoch = event["epoch"].as_u64().unwrap_or(self.epoch);
        self.seq = event["seq"].as_u64().unwrap_or(self.seq);
        Some(event)
    }

    fn stored(&mut self) -> (u64, Option<u64>, Vec<u64>) {
        let event = self.next().unwrap();
        assert_eq!(event["type"], "stored", "{event}");
        let tokens = event["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        (event["hash"].as_u64().unwrap(), event["parent"].as_u64(), tokens)
    }
}

fn prompt(tokens: u64) -> Value {
    json!({"prompt": (0..tokens).map(|i| 10 + i * i % 97).collect::<Vec<_>>(), "max_tokens": 1})
}

#[test]
fn routers_follow_the_cache() {
    let mut server = Server::start_model(&fixture("llama"), &["--max-total-token-num", "1024", "--kv-events"]);
    let mut follower = Follower::of(&server, "");
    let reset = follower.next().unwrap();
    assert_eq!((&reset["type"], &reset["block_size"]), (&json!("reset"), &json!(16)));
    server.ask("/v1/completions", &prompt(40));
    let (first, none, tokens) = follower.stored();
    let told: Vec<u64> = prompt(40)["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!((none, &tokens[..]), (None, &told[..16]));
    let (second, parent, tokens) = follower.stored();
    assert_eq!((parent, &tokens[..]), (Some(first), &told[16..32]));
    // No event reports a salted prompt: the next event is about the next prompt.
    let mut salted = prompt(60);
    salted["cache_salt"] = json!("secret");
    server.ask("/v1/completions", &salted);
    server.ask("/v1/completions", &prompt(64));
    let (third, parent, _) = follower.stored();
    assert_eq!((parent, follower.stored().1), (Some(second), Some(third)));
    // A reader that reconnects with its last event id continues there. An id of another server gets a reset.
    let mut back = Follower::of(&server, &format!("last-event-id: {}-{}\r\n", follower.epoch, follower.seq));
    let mut stranger = Follower::of(&server, "last-event-id: 1-2\r\n");
    server.ask("/v1/completions", &prompt(96));
    assert_eq!((follower.stored().2, back.stored().2), (back_tokens(64), back_tokens(64)));
    assert_eq!(stranger.next().unwrap()["type"], "reset");
    assert_eq!(stranger.stored().0, first);
    let page = server.get("/metrics").text();
    assert!(page.contains("plimsoll_kv_events_readers 3\n"), "{page}");
    // The counter has the number of the last event.
    follower.stored();
    assert!(page.contains("# TYPE plimsoll_kv_changes_total counter\n"), "{page}");
    assert!(page.contains(&format!("\nplimsoll_kv_changes_total {}\n", follower.seq)), "{page}");
    let cleared = request(server.address, "DELETE", "/v1/cache", b"").expect("an answer");
    assert_eq!(cleared.status, 200);
    while follower.next().unwrap()["type"] != "reset" {}
    // Readers do not keep a server from ending.
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
    assert_eq!(follower.next(), None);
}

/// The tokens of the KV page that begins at this token of the prompt.
fn back_tokens(from: usize) -> Vec<u64> {
    prompt(96)["prompt"].as_array().unwrap()[from..from + 16].iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn events_are_off_by_default_and_their_bytes_are_planned() {
    let llama = fixture("llama");
    let planned = |flags: &[&str]| {
        let plan = run(&[&["plan", llama.to_str().unwrap(), "--json"], flags].concat()).good();
        let plan: Value = serde_json::from_str(&plan).unwrap();
        let lines = plan["plan"]["lines"].as_array().or(plan["lines"].as_array()).unwrap();
        lines.iter().find(|line| line["component"] == "prefix_index").unwrap()["bytes"].as_u64().unwrap()
    };
    let size = ["--max-total-token-num", "4096"];
    let more = planned(&[&size[..], &["--kv-events"]].concat()) - planned(&size);
    assert!((256 * 112..256 * 114).contains(&more), "256 pages: {more}");
    let server = Server::start_model(&llama, &size);
    let refused = server.get("/v1/kv_events");
    assert_eq!(refused.status, 404);
    assert!(refused.text().contains("--kv-events"));
    for (model, flag, why) in
        [("llama", "--disable-prefix-cache", "leaves nothing to tell"), ("bert", "--elastic", "is an encoder")]
    {
        let model = fixture(model);
        let error = run(&["plan", model.to_str().unwrap(), "--kv-events", flag]).refused();
        assert!(error.contains("--kv-events") && error.contains(why), "{error}");
    }
}

#[test]
fn the_endpoint_picker_finds_its_metrics() {
    let text = fs::read_to_string(repository().join("deploy/kubernetes/inference-pool.yaml")).unwrap();
    let documents: Vec<Value> = Deserializer::from_str(&text).map(|one| Value::deserialize(one).unwrap()).collect();
    let [pool, map] = &documents[..] else { panic!("two documents") };
    let llama = fixture("llama");
    let manifest = run(&["plan", llama.to_str().unwrap(), "--k8s"]).good();
    let deployment = Value::deserialize(Deserializer::from_str(&manifest).next().unwrap()).unwrap();
    let labels = deployment["spec"]["template"]["metadata"]["labels"].as_object().unwrap();
    let selected = pool["spec"]["selector"]["matchLabels"].as_object().unwrap();
    assert!(selected.keys().eq(labels.keys()), "the pool selects what the manifest has");
    assert_eq!(map["metadata"]["name"], pool["spec"]["endpointPickerRef"]["name"]);
    let config: Value = serde_yaml_ng::from_str(map["data"]["config.yaml"].as_str().unwrap()).unwrap();
    let plugins = config["plugins"].as_array().unwrap();
    let extractor = plugins.iter().find(|plugin| plugin["type"] == "core-metrics-extractor").unwrap();
    let engine = &extractor["parameters"]["engineConfigs"][0];
    let server = Server::start_model(&llama, &["--max-total-token-num", "1024"]);
    let page = server.get("/metrics").text();
    for spec in ["queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec"] {
        let name = engine[spec].as_str().unwrap();
        assert!(page.contains(&format!("# TYPE {name} gauge\n")), "{spec}: {name}");
    }
    assert!(page.contains("plimsoll_cache_config_info{block_size=\"16\",num_gpu_blocks=\"64\"} 1\n"), "{page}");
    assert!(page.contains("plimsoll_kv_usage_ratio 0.0\n"), "{page}");
    for plugin in config["schedulingProfiles"][0]["plugins"].as_array().unwrap() {
        assert!(plugins.iter().any(|known| known["type"] == plugin["pluginRef"]), "{plugin}");
    }
}

const ROUTERS: &[&str] = &["-r", "deploy/router/requirements.txt"];
/// The file lists all packages, so pip installs no other dependencies.
const DYNAMO: &[&str] = &["--no-deps", "-r", "deploy/dynamo/requirements.txt"];

fn behind(gateway: &str, replicas: &str) {
    let mut command = match gateway {
        "dynamo" => python::among("dynamo-1.6.1", DYNAMO, "python3"),
        _ => python::among("routers", ROUTERS, "python3"),
    };
    command.arg(repository().join("tests/clients/replicas.py")).arg("--model").arg(fixture("llama"));
    command.arg("--plimsoll").arg(binary()).args(["--gateway", gateway, "--replicas", replicas]);
    let output = command.output().expect("python3 runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{stdout}");
    assert!(output.status.success() && stdout.trim_end().ends_with("all good"), "{stdout}\n{stderr}");
}

#[test]
#[ignore = "external"]
fn two_behind_smg() {
    behind("smg", "2");
}

#[test]
#[ignore = "external"]
fn four_behind_vllm_router() {
    behind("vllm-router", "4");
}

#[test]
#[ignore = "external"]
fn two_behind_dynamo() {
    behind("dynamo", "2");
}
