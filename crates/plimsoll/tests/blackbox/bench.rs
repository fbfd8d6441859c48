//! `bench` against a real server: a round's report, with and without an intruder.

use std::path::Path;

use serde_json::Value;

use crate::product::{Server, run};

#[test]
fn bench_says_what_a_long_prompt_does_to_running_streams() {
    let server = Server::start_model(Path::new("demo"), &[]);
    let url = format!("http://{}", server.address);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}.json", std::process::id()));
    let report = path.to_str().unwrap();
    let load = ["bench", "--url", &url, "--concurrency", "2", "--requests", "2", "--prompt-tokens", "20"];
    let rest = ["--output-tokens", "300", "--intruder-tokens", "200", "--rounds", "2", "--json", report];
    let table = run(&[&load[..], &rest[..]].concat()).good();
    assert!(table.contains("intruder: TTFT ms") && table.contains("meanwhile p99 ms"), "{table}");
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let rounds = written["servers"][0]["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 2);
    for round in rounds {
        let number =
            |path: &str| round.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}: {round}"));
        assert_eq!((number("/errors"), number("/output_tokens")), (0.0, 600.0), "{round}");
        assert!((150.0..250.0).contains(&number("/intruder/prompt_tokens")), "{round}");
        assert!(number("/intruder/ttft_s") > 0.0 && number("/intruder/quiet_gap_p50_s") > 0.0, "{round}");
        assert!(number("/intruder/gap_p50_s") <= number("/intruder/gap_p99_s"), "{round}");
        assert!(number("/intruder/gap_p99_s") <= number("/intruder/gap_max_s"), "{round}");
    }
    // Without an intruder, the table does not mention one.
    let table = run(&[&load[..], &["--output-tokens", "4", "--rounds", "1"]].concat()).good();
    assert!(table.contains("output tok/s") && !table.contains("intruder"), "{table}");
}

#[test]
fn a_process_that_is_not_there_is_refused_not_measured() {
    // A process ID above the largest possible one.
    let words = run(&["bench", "--url", "http://127.0.0.1:9", "--pid", "4194305"]).refused();
    assert!(words.contains("--pid 4194305: no such process"), "{words}");
}
