//! `serve --record` and `replay`: a trace has times and lengths, but no text. It can be replayed and simulated.

use std::io::Read;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::product::{Server, eventually, fixture, run};

/// The path of a new file, which is removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("plimsoll-{name}-{}", std::process::id()));
        // The file may be left from a run that was killed.
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.0).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The file may not exist.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn serve(flags: &[&str]) -> Server {
    Server::start_model(&fixture("llama"), flags)
}

/// Starts a stream, reads the first piece and disconnects.
fn leaves(server: &Server) {
    let body = json!({"prompt": "one two three", "max_tokens": 300, "ignore_eos": true, "stream": true});
    let mut stream = server.send("/v1/completions", &body);
    let mut piece = [0; 512];
    assert!(stream.read(&mut piece).unwrap() > 0);
}

#[test]
fn what_is_recorded_says_when_and_how_much_and_can_be_replayed_and_simulated() {
    let trace = Scratch::new("record.jsonl");
    let server = serve(&["--record", trace.name()]);
    let shared = "alpha beta gamma delta epsilon ".repeat(12);
    for i in 0..3 {
        let prompt = format!("{shared} confidential {i}");
        server.ask(
            "/v1/completions",
            &json!({"prompt": prompt, "max_tokens": 6, "ignore_eos": true, "temperature": 0.5}),
        );
    }
    server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "n": 2, "logprobs": 1, "ignore_eos": true}));
    leaves(&server);
    eventually("five lines", || trace.lines().len() == 6);
    let lines = trace.lines();
    assert_eq!(lines[0]["plimsoll_trace"], 1);
    let text = std::fs::read_to_string(&trace.0).unwrap();
    assert!(!text.contains("confidential") && !text.contains("\"ids\""), "no content: {text}");
    let blocks = |i: usize| lines[i]["prompts"][0]["blocks"].as_array().unwrap().clone();
    assert!(blocks(1).len() > 2 && blocks(1)[0] == blocks(2)[0] && blocks(1).last() != blocks(2).last(), "{text}");
    assert_eq!(
        (&lines[1]["output"], &lines[1]["end"], &lines[1]["temperature"]),
        (&json!(6), &json!("finished"), &json!(0.5))
    );
    assert_eq!((&lines[4]["n"], &lines[4]["output"], &lines[4]["logprobs"]), (&json!(2), &json!(4), &json!(1)));
    assert_eq!(lines[5]["end"], "aborted", "{text}");
    eventually("they are counted", || server.get("/metrics").text().contains("plimsoll_trace_lines_total 5"));

    let model = fixture("llama");
    let simulate = || run(&["replay", trace.name(), "--simulate", "--model", model.to_str().unwrap()]).good();
    let out = simulate();
    assert!(out.contains("6 sequences: 5 finished, 1 left") && out.contains("schedule "), "{out}");
    assert_eq!(simulate(), out, "the same schedule");
    // The replay comes last, because the server records it, too.
    let url = format!("http://{}", server.address);
    let out = run(&["replay", trace.name(), "--url", &url, "--speed", "0", "--vocab", "200"]).good();
    assert!(out.contains("4 answered, 1 left") && out.contains("0 failed"), "{out}");
}

#[test]
fn a_trace_has_a_limit_and_the_one_before_is_kept() {
    let trace = Scratch::new("short.jsonl");
    let mut server = serve(&["--record", trace.name(), "--record-content", "--record-bytes", "700"]);
    for _ in 0..4 {
        server.ask("/v1/completions", &json!({"prompt": "one two", "max_tokens": 2, "ignore_eos": true}));
    }
    eventually("the loss is counted", || !server.get("/metrics").text().contains("plimsoll_trace_lines_lost_total 0"));
    eventually("the log says so", || server.log().contains("--record-bytes is reached"));
    let written = || std::fs::read_to_string(&trace.0).unwrap().matches('\n').count();
    eventually("what fitted is written", || written() > 1);
    assert!(std::fs::metadata(&trace.0).unwrap().len() <= 700);
    assert!(trace.lines()[1]["prompts"][0]["ids"].is_array(), "asked for content");
    server.signal("TERM");
    assert!(server.ended().success());
    let model = fixture("llama");
    // After a restart there are both traces.
    let lines = trace.lines().len();
    let again = Server::start_model(&model, &["--record", trace.name()]);
    assert_eq!(again.get("/health").status, 200);
    let earlier = std::fs::read_to_string(format!("{}.1", trace.name())).unwrap();
    assert_eq!((earlier.lines().count(), trace.lines().len()), (lines, 1));
    // Two servers cannot record in one file.
    let words = run(&["serve", model.to_str().unwrap(), "--port", "0", "--record", trace.name()]);
    assert!(words.stderr.contains("another server records there"), "{words:#?}");
    drop(again);
    // A trace without requests does not push an older one out.
    let third = Server::start_model(&model, &["--record", trace.name()]);
    assert_eq!(third.get("/health").status, 200);
    assert_eq!(std::fs::read_to_string(format!("{}.1", trace.name())).unwrap(), earlier);
    drop(third);
    std::fs::remove_file(format!("{}.1", trace.name())).unwrap();
    let words = run(&["serve", model.to_str().unwrap(), "--port", "0", "--record", "/dev/full"]).refused();
    assert!(words.contains("--record /dev/full: a directory or a device is there"), "{words}");
}

#[test]
fn public_traces_are_read_and_what_is_none_is_said() {
    let write = |name: &str, text: &str| {
        let file = Scratch::new(name);
        std::fs::write(&file.0, text).unwrap();
        file
    };
    let mooncake = write(
        "mooncake.jsonl",
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\
        {\"timestamp\": 900, \"input_length\": 520, \"output_length\": 5, \"hash_ids\": [1, 3]}\n",
    );
    let burst = write(
        "burst.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,47,18,65,API log\n",
    );
    let model = fixture("llama");
    let simulate = |file: &Scratch| {
        run(&["replay", file.name(), "--simulate", "--model", model.to_str().unwrap(), "--max-total-token-num", "4096"])
    };
    let out = simulate(&mooncake).good();
    assert!(
        out.contains("2 sequences: ") && out.contains("1120 prompt tokens, 512 of them from the prefix cache"),
        "{out}"
    );
    assert!(simulate(&burst).good().contains("1 sequences: 1 finished"));
    let words = simulate(&write("empty", "")).refused();
    assert!(words.contains("no requests"), "{words}");
    assert!(simulate(&write("nonsense", "{\"plimsoll_trace\":1}\n")).refused().contains("line 1: "));
    let words = simulate(&write("strange", "{\"messages\": []}\n")).refused();
    assert!(words.contains("of no format that is read here") && words.contains("--format"), "{words}");
    // A trace of a later version is refused, even with unknown fields in its first line.
    let words = simulate(&write("later", "{\"plimsoll_trace\": 9, \"pages\": 1}\n")).refused();
    assert!(words.contains("line 1: the trace has version 9; this plimsoll reads version 1"), "{words}");
    // The recording stopped in the middle of a line: complete lines are replayed.
    let torn = write(
        "torn.jsonl",
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n{\"timestamp\": 900, \"inp",
    );
    let out = simulate(&torn).good();
    assert!(out.contains("line 2, the last of the trace, is incomplete and left out"), "{out}");
    assert!(out.contains("1 sequences: 1 finished"), "{out}");
}
