//! The soak of five minutes with faults and hostile clients, as any user can run it, and regressions that it found.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::limit::{say, text};
use crate::product::{Server, eventually, plimsoll, repository, run};

#[test]
#[ignore = "soak"]
fn everything_that_breaks_servers_for_five_minutes() {
    let scratch = std::env::temp_dir().join(format!("plimsoll-scenario-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let (json, svg) = (scratch.join("report.json"), scratch.join("report.svg"));
    let scenario = repository().join("soak/five-minutes.toml");
    let mut command = plimsoll(["soak", "--scenario"]);
    command.arg(scenario).arg("--json").arg(&json).arg("--svg").arg(&svg);
    let output = command.output().unwrap();
    let (said, log) = (text(&output.stdout), text(&output.stderr));
    println!("{said}\n{log}");
    if log.contains("***") {
        // Without root there is no cgroup; the rest has run.
        say(&log);
    }
    assert!(output.status.success() && said.ends_with("PASS\n"), "see above");
    let written = std::fs::read_to_string(&json).unwrap();
    let report: Value = serde_json::from_str(&written).unwrap();
    let image = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_dir_all(&scratch).unwrap();
    assert!(written.len() < 150_000 && image.len() < 150_000, "{} and {} bytes", written.len(), image.len());
    assert!(image.starts_with("<svg") && image.contains("memory limit: planned"), "a picture under its line");
    // Every client profile and every fault occurred.
    let tally = &report["evidence"]["tally"]["by_profile"];
    for manner in ["image", "tools", "structured", "fixed", "leaves_early", "slow", "half_open", "malformed"] {
        let counts = &tally[manner];
        assert!(counts["good"].as_u64().is_some_and(|good| good > 0), "{manner}: {counts}");
    }
    let spells = report["evidence"]["faults"].as_array().unwrap();
    for kind in ["busy", "stop", "flood"] {
        assert!(spells.iter().any(|spell| spell["kind"] == kind && spell["seen"]["Ok"].is_string()), "{kind}");
    }
}

/// A cache directory that is always at its limit, on a disk that is full at times.
#[test]
#[ignore = "soak"]
fn the_cache_on_disk_keeps_its_bound_in_a_crowd() {
    let mut command = plimsoll(["soak", "--duration", "3m", "--scenario"]);
    let output = command.arg(repository().join("soak/disk-cache.toml")).output().unwrap();
    let (said, log) = (text(&output.stdout), text(&output.stderr));
    println!("{said}\n{log}");
    assert!(output.status.success() && said.ends_with("PASS\n"), "see above");
    assert!(said.contains("kept    the cache on disk stays under its bound"), "see above");
}

/// Regression from the soak: a log that could not be written ended every thread that logged, also the engine's.
#[test]
fn a_server_whose_log_cannot_be_written_serves_on() {
    let inner = plimsoll(["serve", "demo", "--port", "0", "--log-ledger-every", "1"]);
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" 2>/dev/full", "sh"]).arg(inner.get_program()).args(inner.get_args());
    let mut server = Server::try_start(command).unwrap();
    for i in 0..4 {
        let body = json!({"prompt": format!("What is 12 + {i}?"), "max_tokens": 4, "ignore_eos": true});
        let answer = server.ask("/v1/completions", &body);
        assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
    }
    eventually("it is idle", || server.at_rest());
    assert!(server.get("/metrics").text().contains("plimsoll_panics_total 0"), "nobody stumbles over the log");
    server.signal("TERM");
    assert!(server.ended_within(Duration::from_secs(60)).success());
}

/// A server with clocks that have run for ten years, in a time namespace. A clock jump would touch the whole machine,
/// so no test makes one. SIGSTOP covers time that passes while nothing runs. The time of day decides nothing (see
/// below).
#[test]
fn a_server_on_a_machine_that_has_been_up_for_ten_years() {
    const YEARS: &str = "315360000";
    let inner = plimsoll(["serve", "demo", "--port", "0"]);
    let mut command = Command::new("unshare");
    command.args(["--time", "--fork", "--kill-child", "--monotonic", YEARS, "--boottime", YEARS]);
    let allowed = Command::new("unshare").args(["--time", "--fork", "true"]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        return say("\n*** NOT RUN: NO TIME NAMESPACE CAN BE MADE HERE (ROOT IS NEEDED). ***\n");
    }
    command.arg(inner.get_program()).args(inner.get_args());
    let server = Server::try_start(command).unwrap();
    let body = json!({"prompt": "What is 12 + 30?", "max_tokens": 4, "ignore_eos": true});
    assert_eq!(server.ask("/v1/completions", &body)["usage"]["completion_tokens"], 4);
    let page = server.status();
    assert!(page["uptime_seconds"].as_f64().unwrap() < 600.0 && page["healthy"] == true, "{page}");
}

/// Waits, timeouts, rates and pauses use monotonic clocks. The time of day may jump, and decides nothing about a request. It is only
/// displayed (`created`, dates in chat templates, times of loads and of a log of pages, spans, the doctor's clock check). File times
/// are compared with each other and with the time of opening. The disk cache uses the time of day to count a day's bytes and to
/// order files over restarts: a jump costs hits.
#[test]
fn the_time_of_day_decides_nothing() {
    let allowed = [
        "plimsoll-engine/src/cache/kv_event_log.rs",
        "plimsoll-formats/src/mapping.rs",
        "plimsoll-server/src/conversation/clock.rs",
        "plimsoll-server/src/http/ids.rs",
        "plimsoll-server/src/models/pages.rs",
        "plimsoll-server/src/ollama/catalog.rs",
        "plimsoll-server/src/ops/gateway.rs",
        "plimsoll-server/src/otlp/span.rs",
        "plimsoll-text/src/chat/time.rs",
        "plimsoll-tier/src/budget.rs",
        "plimsoll-tier/src/files.rs",
        "plimsoll-tier/src/large.rs",
        "plimsoll-tier/src/store.rs",
        "plimsoll-tier/src/upkeep.rs",
        "plimsoll/src/commands/cache.rs",
        "plimsoll/src/commands/doctor/machine.rs",
        "plimsoll/src/commands/serving.rs",
    ];
    let crates = repository().join("crates");
    let mut found = Vec::new();
    let mut folders = vec![crates.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name());
            if path.is_dir() && name != "tests" && name != "target" {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs")
                && std::fs::read_to_string(&path).unwrap().contains("SystemTime")
            {
                found.push(path.strip_prefix(&crates).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort();
    assert_eq!(found, allowed, "a file that reads the time of day is listed here");
}

#[test]
fn a_scenario_that_cannot_be_is_refused_before_anything_starts() {
    let path = std::env::temp_dir().join(format!("plimsoll-scenario-{}.toml", std::process::id()));
    let refused = |text: &str| {
        std::fs::write(&path, text).unwrap();
        run(&["soak", "--scenario", path.to_str().unwrap()]).refused()
    };
    assert!(refused("[crowd]\ncustomers = 3\n").contains("customers"));
    assert!(refused("[crowd]\nmix = { steam = 1 }\n").contains("steam"));
    assert!(refused("[crowd]\nclients = 0\n").contains("1 to 4096"));
    assert!(refused("").contains("neither --url nor a [server]"));
    let flood = "[[chaos]]\nkind = \"flood\"\nfirst = \"1s\"\nhold = \"1s\"\npause = \"1s\"\n";
    assert!(refused(flood).contains("`count` is missing"));
    std::fs::remove_file(&path).unwrap();
}
