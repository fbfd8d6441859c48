//! Servers inside a memory cgroup: a limit that is set from outside and that the kernel enforces.
//!
//! `tools/cage.sh` makes the cgroups. Where it cannot (no root, no writable cgroup), the soak runs under an rlimit
//! instead. Tests that need a limit around several processes then print in capitals that they did not run.

use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::limit::{Cage, say, text, tool};
use crate::product::{Server, binary, cache, default_model, plimsoll, repository, run};

/// Time limit of `/health` in milliseconds. It is long, because other tests share the cores; the time is checked elsewhere.
const HEALTH_MS: &str = "30000";

/// Runs `tools/soak_cgroup.sh` with this build's binary.
fn soak(args: &[&str]) -> Output {
    default_model();
    let mut command = Command::new(tool("soak_cgroup.sh"));
    command.args(args).env("PLIMSOLL", binary()).env("PLIMSOLL_CACHE", cache());
    let output = command.env("HEALTH_MS", HEALTH_MS).env_remove("RUST_LOG").output().expect("the script starts");
    let said = text(&output.stdout);
    if said.contains("NO MEMORY CGROUP") {
        say(&said);
    }
    println!("{said}{}", text(&output.stderr));
    output
}

#[test]
#[ignore = "soak"]
fn sixty_four_clients_in_a_cage_of_the_plan_and_three_percent() {
    let output = soak(&["--budget", "520MiB", "--seconds", "20"]);
    assert!(output.status.success(), "see above");
    assert!(text(&output.stdout).contains("\nPASS\n"), "a verdict was printed");
}

#[test]
#[ignore = "soak"]
fn hostile_and_odd_schemas_in_a_cage_of_the_plan_and_three_percent() {
    let mut flags = vec!["--budget", "760MiB", "--seconds", "25", "--clients", "16", "--mix", "schemas"];
    let shared =
        ["faults/faults.json", "json-schema/suite-2020-12.json"].map(|name| repository().join("../shared").join(name));
    for file in &shared {
        match file.is_file() {
            true => flags.extend(["--schemas", file.to_str().expect("paths here are UTF-8")]),
            false => say(&format!("\n*** WITHOUT {}: ONLY MADE-UP SCHEMAS ARE SENT ***\n", file.display())),
        }
    }
    let output = soak(&[&flags[..], &["--", "demo"]].concat());
    assert!(output.status.success(), "see above");
    assert!(text(&output.stdout).contains("\nPASS\n"), "a verdict was printed");
}

/// The planned bytes of a server with these flags.
fn planned(flags: &[&str]) -> u64 {
    let plan = run(&[&["plan", "smollm2", "--json"], flags].concat()).good();
    serde_json::from_str::<Value>(&plan).unwrap()["total"].as_u64().unwrap()
}

/// Starts two servers at once. Each is ready, or has failed with this output.
fn start_two(cage: &Cage, flags: &[&str]) -> [Result<Server, String>; 2] {
    let start = || Server::try_start(cage.plimsoll(&[&["serve", "smollm2", "--port", "0"], flags].concat()));
    thread::scope(|scope| {
        let (one, two) = (scope.spawn(start), scope.spawn(start));
        [one.join().unwrap(), two.join().unwrap()]
    })
}

#[test]
#[ignore = "soak"]
fn two_servers_that_start_at_once_stay_inside_a_limit_that_holds_one_and_a_half() {
    default_model();
    let pinned = ["--max-total-token-num", "4096"];
    let one = planned(&pinned);
    let Some(cage) = Cage::open("two", one + one / 2) else { return };
    let started = start_two(&cage, &pinned);
    let (ready, refused): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    assert_eq!((ready.len(), refused.len()), (1, 1), "one sails, one stays in port");
    let (server, words) =
        (ready.into_iter().next().unwrap().unwrap(), refused.into_iter().next().unwrap().err().unwrap());
    println!("{words}");
    assert!(words.contains("bytes are free in") || words.contains("it does not fit"), "numbers: {words}");
    // The running server still serves.
    let answer = server.ask("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 8, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer}");
    let [limit, peak, kills] = cage.report();
    assert!(peak <= limit && kills == 0, "{peak} of {limit} bytes, {kills} kills");
    // Its memory is free again as soon as it has ended.
    drop(server);
    let again = Server::try_start(cage.plimsoll(&[&["serve", "smollm2", "--port", "0"], &pinned[..]].concat()));
    assert!(again.is_ok(), "{}", again.err().unwrap_or_default());
}

#[test]
#[ignore = "soak"]
fn two_servers_with_budgets_of_three_quarters_each_do_not_share_the_same_bytes() {
    default_model();
    let Some(cage) = Cage::open("shares", 900 << 20) else { return };
    let started = start_two(&cage, &["--memory-budget", "75%"]);
    let together: u64 = started.iter().flatten().map(|server| server.memory()["planned_bytes"].as_u64().unwrap()).sum();
    let [limit, peak, kills] = cage.report();
    println!("{together} bytes planned together, peak {peak} of {limit}");
    assert!(started.iter().any(Result::is_ok), "at least one sails");
    assert!(together <= limit && peak <= limit && kills == 0, "{together} planned, {peak} of {limit}, {kills} kills");
    for words in started.iter().filter_map(|server| server.as_ref().err()) {
        assert!(words.contains("bytes are free in") || words.contains("it does not fit"), "numbers: {words}");
    }
}

#[test]
#[ignore = "soak"]
fn a_cage_that_is_too_small_is_seen_before_anything_is_loaded() {
    default_model();
    let Some(cage) = Cage::open("small", 200 << 20) else { return };
    let words = Server::try_start(cage.plimsoll(&["serve", "smollm2", "--port", "0"])).err().expect("it cannot start");
    assert!(words.contains("it does not fit") && words.contains("cgroup") && words.contains("short"), "{words}");
    assert!(words.contains("largest component") && words.contains("Try --"), "what to do: {words}");
    let [limit, peak, kills] = cage.report();
    assert!(peak < limit / 2 && kills == 0, "{peak} of {limit} bytes were touched, {kills} kills");
}

/// A process that takes the free memory of a server's cgroup, until it is dropped.
struct Balloon(Child);

impl Balloon {
    fn blow(beside: u32, leave: u64) -> Self {
        let (beside, leave) = (beside.to_string(), leave.to_string());
        let mut command = plimsoll(["balloon", "--beside", &beside, "--leave", &leave, "--hold", "600"]);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Ends the process, which frees its memory.
    fn burst(mut self) {
        assert!(self.0.try_wait().unwrap().is_none(), "the balloon ended by itself: somebody killed it");
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits as long as a busy machine may need, and no longer than it takes on another.
#[test]
#[ignore = "soak"]
fn degradation_levels_rise_and_fall_with_the_memory_of_a_neighbour() {
    default_model();
    let flags = ["--memory-budget", "510MiB"];
    let planned = planned(&flags);
    let Some(cage) = Cage::open("balloon", planned + planned * 3 / 100 + (192 << 20)) else { return };
    let server =
        Server::try_start(cage.plimsoll(&[&["serve", "smollm2", "--port", "0"], &flags[..]].concat())).unwrap();
    let page = server.memory();
    let (line, plan) = (page["line_bytes"].as_u64().unwrap(), page["planned_bytes"].as_u64().unwrap());
    assert!(line - plan < 4 << 20, "a line so close around the plan once kept the governor from coming back: {line}");
    let prompts = ["The sea is", "Once upon a time", "One, two, three,", "A ship may be loaded"];
    let body = |prompt: &str| json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    let alone: Vec<String> = prompts.iter().map(|prompt| text(&server.ask("/v1/completions", &body(prompt)))).collect();
    let level = || server.memory()["degradation"]["level"].as_str().unwrap().to_owned();
    // Asks everything once: the same answers, or an announced 503.
    let (mut same, mut refused) = (0, 0);
    let mut ask_all = || {
        for (prompt, alone) in prompts.iter().zip(&alone) {
            let answer = server.post("/v1/completions", &body(prompt));
            match answer.status {
                200 => same += u32::from(text(&answer.json()) == *alone),
                503 if answer.header("retry-after").is_some() => refused += 1,
                status => panic!("{status}: {}", answer.text()),
            }
        }
    };
    let mut rounds = 0;
    for leave in [24 << 20, 8 << 20] {
        let balloon = Balloon::blow(server.pid(), leave);
        crate::product::eventually_within("the governor gives way", Duration::from_secs(120), || {
            ask_all();
            rounds += 1;
            level() != "calm"
        });
        ask_all();
        balloon.burst();
        rounds += 1;
        crate::product::eventually_within("the governor comes back", Duration::from_secs(120), || {
            std::thread::sleep(Duration::from_millis(200));
            level() == "calm"
        });
    }
    ask_all();
    println!("{same} answers were the same, {refused} were refused for now, {}", server.memory()["degradation"]);
    assert_eq!(same + refused, (rounds + 1) * prompts.len() as u32, "an answer has changed");
    assert!(same >= prompts.len() as u32);
    let entered = server.memory()["degradation"]["entered"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["times"].as_u64().unwrap())
        .sum::<u64>();
    assert!(entered >= 2, "each balloon was noticed");
    assert_eq!(cage.report()[2], 0, "nobody was killed");
}

#[test]
#[ignore = "soak"]
fn a_limit_that_shrinks_under_a_running_server_is_noticed() {
    default_model();
    let flags = ["--max-total-token-num", "2048"];
    let Some(cage) = Cage::open("shrinks", 2 * planned(&flags)) else { return };
    let server =
        Server::try_start(cage.plimsoll(&[&["serve", "smollm2", "--port", "0"], &flags[..]].concat())).unwrap();
    let page = server.memory();
    assert_eq!(page["degradation"]["level"], "calm", "{page}");
    // A limit just above the resident memory: the untouched part of the plan no longer fits.
    let touched = page["process"]["rss_anon"].as_u64().unwrap();
    cage.limit(touched + (24 << 20));
    let stands = |level: &str| server.memory()["degradation"]["level"] == level;
    crate::product::eventually("the governor gives way", || !stands("calm"));
    cage.limit(2 * planned(&flags));
    crate::product::eventually_within("the governor comes back", Duration::from_secs(60), || stands("calm"));
    let answer = server.ask("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 4, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
    assert_eq!(cage.report()[2], 0, "nobody was killed");
}
