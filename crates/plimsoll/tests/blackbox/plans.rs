//! `plan`: plans of every fixture, as text and as JSON, with the same numbers as a running server (I8).

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::product::{Server, default_model, eventually, fixture, repository, run};

/// Tokens of a page.
const PAGE_TOKENS: u64 = 16;

/// The plan as JSON. The exit code must be 2 if a load does not fit, else 0.
fn plan(model: &str, flags: &[&str]) -> Value {
    let done = run(&[&["plan", model, "--json"], flags].concat());
    let answer: Value = serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{model}: {error}: {done:?}"));
    assert_eq!(done.code, Some(if answer["fits"] == false { 2 } else { 0 }), "{done:?}");
    answer
}

fn sum(plan: &Value) -> u64 {
    plan["plan"]["lines"].as_array().unwrap().iter().map(|line| line["bytes"].as_u64().unwrap()).sum()
}

/// Checks a model's plan. The text must name every component, the total and the memory limit.
fn check(model: &str) {
    let plan = plan(model, &[]);
    let total = plan["total"].as_u64().unwrap();
    assert_eq!(sum(&plan), total, "{model}: the total is the sum");
    assert!(total <= plan["plan"]["limit"].as_u64().unwrap(), "{model}: the plan fits (I1)");
    let limit = |name: &str| plan["limits"][name].as_u64().unwrap_or_else(|| panic!("{model}: {name}: {plan}"));
    let encoder = plan["limits"]["encoder"] == true;
    let most = limit(if encoder { "batch_max_tokens" } else { "max_total_token_num" });
    assert!(limit("max_req_total_len") <= most, "{model}: the longest request fits the pool, or a step");
    let lines = plan["plan"]["lines"].as_array().unwrap();
    let bytes = |name: &str| lines.iter().find(|line| line["component"] == name).unwrap()["bytes"].as_u64().unwrap();
    assert!(bytes("weights") > 0, "{model}");
    let per_token = plan["kv_bytes_per_token"].as_u64().unwrap();
    let window = |name: &str| plan["kv_window"][name].as_u64().unwrap_or(0);
    let pool = limit("max_total_token_num") * per_token + window("pages") * window("page_bytes");
    assert_eq!(bytes("kv_pages"), pool, "{model}: the pools are tokens and window pages times bytes");
    let words = run(&["plan", model]).good();
    for line in lines {
        let name = line["component"].as_str().unwrap();
        assert!(words.lines().any(|row| row.trim_start().starts_with(name)), "{model}: {name} is missing: {words}");
    }
    let of_kind =
        if encoder { ["computed whole", "an input of"] } else { ["tokens in the pool", "a decoded token reads"] };
    for word in ["total", "memory limit"].into_iter().chain(of_kind) {
        assert!(words.contains(word), "{model}: {word}: {words}");
    }
}

#[test]
fn a_flag_that_changes_nothing_is_named_by_plan_doctor_and_start() {
    let (model, flags) = (fixture("llama"), ["--state-ratio", "0.5"]);
    let (model, words) = (model.to_str().unwrap(), "--state-ratio changes nothing: this model has no recurrent state");
    assert_eq!(plan(model, &flags)["idle_flags"], json!([words]));
    assert_eq!(plan(model, &[])["idle_flags"], json!([]));
    assert!(run(&[&["plan", model][..], &flags].concat()).good().contains(words));
    // The doctor may find more on this machine, so its exit code is not checked.
    assert!(run(&[&["doctor", model, "--port", "0"][..], &flags].concat()).stdout.contains(words));
    let server = Server::start_model(model.as_ref(), &flags);
    assert!(server.log().contains(words), "{}", server.log());
}

#[test]
#[ignore = "models"]
fn the_default_model_is_planned() {
    default_model();
    check("smollm2");
}

#[test]
#[ignore = "soak"]
fn every_fixture_is_planned() {
    let mut planned = 0;
    for directory in fs::read_dir(repository().join("tests/fixtures/models")).unwrap() {
        let name = directory.unwrap().file_name().into_string().unwrap();
        check(fixture(&name).to_str().unwrap());
        planned += 1;
    }
    assert!(planned >= 40, "only {planned} fixtures were found");
}

#[test]
fn a_configuration_alone_is_planned_like_the_model_with_its_weights() {
    let directory = fixture("llama");
    let (model, config) =
        (plan(directory.to_str().unwrap(), &[]), plan(directory.join("config.json").to_str().unwrap(), &[]));
    let lines = |plan: &Value| plan["plan"]["lines"].as_array().unwrap().clone();
    for (measured, formula) in lines(&model).iter().zip(lines(&config)) {
        assert_eq!(measured["component"], formula["component"]);
        let (measured_bytes, formula_bytes) = (measured["bytes"].as_u64().unwrap(), formula["bytes"].as_u64().unwrap());
        if measured["component"] == "tokenizer" {
            // A lone configuration has no tokenizer to measure, so a formula is used. It must not give too few bytes.
            assert!(formula_bytes >= measured_bytes, "{measured} {formula}");
        } else {
            assert_eq!(measured_bytes, formula_bytes, "{measured} {formula}");
        }
    }
}

#[test]
#[ignore = "models"]
fn the_pool_and_its_bytes_follow_the_flags() {
    default_model();
    let kv = |plan: &Value| {
        let lines = plan["plan"]["lines"].as_array().unwrap();
        lines.iter().find(|line| line["component"] == "kv_pages").unwrap()["bytes"].as_u64().unwrap()
    };
    let (small, large) =
        (plan("smollm2", &["--max-total-token-num", "4096"]), plan("smollm2", &["--max_total_token_num", "8192"]));
    assert_eq!(small["limits"]["max_total_token_num"], 4096);
    assert_eq!(2 * kv(&small), kv(&large), "twice the tokens, twice the bytes; underscores are accepted");
    let f32s = plan("smollm2", &["--max-total-token-num", "4096", "--kv-dtype", "f32"]);
    assert_eq!(kv(&f32s), 2 * kv(&small), "the default takes two bytes a value");
    let budget = plan("smollm2", &["--memory-budget", "800MiB"]);
    assert_eq!(budget["plan"]["limit"], 800u64 << 20);
    assert!(sum(&budget) <= 800 << 20, "{budget}");
    let tight = plan("smollm2", &["--memory-budget", "600MiB"]);
    assert!(kv(&tight) < kv(&budget), "less room, fewer pages");
}

#[test]
#[ignore = "models"]
fn the_server_holds_what_the_plan_says() {
    default_model();
    for flags in [&["--max-total-token-num", "4096"][..], &[]] {
        let server = Server::start(flags);
        let (page, plan) = (server.memory(), plan("smollm2", flags));
        assert_eq!(page["planned_bytes"], plan["total"], "{flags:?}: {page}\n{plan}");
        for line in plan["plan"]["lines"].as_array().unwrap() {
            let rows = page["components"].as_array().unwrap();
            let row = rows.iter().find(|row| row["component"] == line["component"]);
            let row = row.unwrap_or_else(|| panic!("{} is not in the ledger", line["component"]));
            assert_eq!(row["planned_bytes"], line["bytes"], "{flags:?}: {}", line["component"]);
            let held = row["committed_bytes"].as_u64().unwrap();
            assert!(held <= line["bytes"].as_u64().unwrap(), "{flags:?}: committed is within planned (I2): {row}");
        }
        // The engine publishes its pool at the end of a step, a moment after that step's tokens.
        server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
        let tokens = plan["limits"]["max_total_token_num"].as_u64().unwrap();
        eventually("the page shows the pool", || server.memory()["pools"]["kv_pages"]["total"] == tokens / PAGE_TOKENS);
    }
}

#[test]
#[ignore = "models"]
fn a39_a_probe_beside_a_server_reports_and_changes_nothing() {
    default_model();
    let probe = |flags: &[&str]| plan("smollm2", &[&["--probe"], flags].concat());
    let server = Server::start(&["--max-total-token-num", "4096"]);
    let before = server.memory();
    let found = probe(&[]);
    let planned = plan("smollm2", &[])["limits"]["max_total_token_num"].clone();
    assert_eq!((&found["planned_tokens"], &found["report"]["chosen_tokens"]), (&planned, &planned), "{found}");
    assert_eq!((found["delta_tokens"].as_i64(), &found["report"]["refusal"]), (Some(0), &Value::Null), "{found}");
    assert_eq!(found["workspace_measured_bytes"], found["workspace_planned_bytes"], "{found}");
    assert!(found["fixed_measured_bytes"].as_u64() <= found["fixed_planned_bytes"].as_u64(), "{found}");
    // Compared with the size of the running server.
    let against = probe(&["--max-total-token-num", "4096"]);
    assert_eq!(against["report"]["running_tokens"], 4096);
    assert_eq!(against["delta_tokens"].as_i64(), planned.as_i64().map(|tokens| tokens - 4096), "{against}");
    let words = run(&["plan", "smollm2", "--probe", "--max-total-token-num", "4096"]).good();
    assert!(words.contains("running with 4096 tokens; auto would choose"), "{words}");
    let after = server.memory();
    for part in ["components", "pools", "device_allocations", "requests"] {
        let strip = |page: &Value| match part {
            // The request for the page itself changes the heap, so only planned bytes are compared.
            "components" => {
                json!(page[part].as_array().unwrap().iter().map(|row| &row["planned_bytes"]).collect::<Vec<_>>())
            }
            _ => page[part].clone(),
        };
        assert_eq!(strip(&before), strip(&after), "{part}");
    }
    server.ask("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
}

#[test]
fn a_configuration_of_123_billion_weights_is_answered_within_a_second() {
    let config = repository().join("tools/configs/mistral-large-123b.json");
    let flags = ["--users", "16", "--context", "32768", "--memory-budget", "400GiB"];
    let ask = |_| {
        let since = std::time::Instant::now();
        let answer = plan(config.to_str().unwrap(), &flags);
        (since.elapsed(), answer)
    };
    // The fastest of five tries counts, because a machine may stand still for a while.
    let (took, answer) = (0..5).map(ask).min_by_key(|(took, _)| *took).unwrap();
    println!("answered in {took:?}: {answer}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    // 122.6 billion weights in bfloat16, and 352 KiB of keys and values a token.
    let needed = answer["needed_bytes"].as_u64().unwrap();
    assert!((228 << 30..232 << 30).contains(&(needed - 16 * 32768 * 352 * 1024)), "{answer}");
    assert_eq!(answer["fits"], needed <= 400 << 30);
    assert!(answer["users_max"].as_u64().unwrap() > 0 && !answer["knobs"].as_array().unwrap().is_empty());
}

/// The budget that a refusal suggests.
fn suggested(words: &str) -> u64 {
    let suggested = words.split("--memory-budget ").last().and_then(|rest| rest.split_whitespace().next());
    suggested.and_then(|bytes| bytes.parse().ok()).unwrap_or_else(|| panic!("{words}"))
}

#[test]
#[ignore = "models"]
fn every_flag_that_a_refusal_advises_saves_what_it_says() {
    default_model();
    let refuse = |flags: &[&str]| run(&[&["plan", "smollm2", "--memory-budget", "200MiB"], flags].concat()).refused();
    let words = refuse(&[]);
    let tries: Vec<_> =
        words.split_once("flags that make it less: ").unwrap().1.lines().next().unwrap().split(", ").collect();
    let named = |flag| tries.iter().any(|advice| advice.starts_with(flag));
    assert!(named("--max-connections") && named("--batch-max-tokens") && named("--kv-dtype"), "{words}");
    for advice in tries {
        let mut parts = advice.split([' ', '(']).filter(|part| !part.is_empty());
        let [flag, value, less, unit] = [(); 4].map(|()| parts.next().unwrap());
        let saved = suggested(&words) - suggested(&refuse(&[flag, value]));
        let mib = if unit == "KiB" { 1024.0 } else { 1.0 };
        let less = less.parse::<f64>().unwrap() / mib;
        let saved = saved as f64 / f64::from(1 << 20);
        assert!(["KiB", "MiB"].contains(&unit) && (saved - less).abs() < 0.1, "{advice}: {saved:.2} MiB");
    }
}

#[test]
#[ignore = "models"]
fn the_budget_that_a_refusal_suggests_is_the_smallest_that_works() {
    default_model();
    let refuse = |budget: &str| run(&["plan", "smollm2", "--memory-budget", budget]).refused();
    let words = refuse("200MiB");
    let suggested = suggested(&words);
    assert!(words.contains(&format!("({} bytes) short", suggested - (200 << 20))), "{words}");
    assert!(sum(&plan("smollm2", &["--memory-budget", &suggested.to_string()])) <= suggested);
    let words = refuse(&(suggested - 1).to_string());
    assert!(words.contains("(1 bytes) short"), "{words}");
    // A pool of an explicit size also fits a limit of exactly its plan.
    let named =
        |budget: u64| ["--max-total-token-num", "512", "--memory-budget", &budget.to_string()].map(str::to_owned);
    let fits = sum(&plan("smollm2", &["--max-total-token-num", "512"]));
    assert_eq!(sum(&plan("smollm2", &named(fits).each_ref().map(String::as_str))), fits);
    let less = named(fits - 1);
    let words = run(&[&["plan", "smollm2"], &less.each_ref().map(String::as_str)[..]].concat()).refused();
    assert!(words.contains("(1 bytes) short"), "{words}");
}

/// The command, run by a shell under this `ulimit`.
fn under(ulimit: &str, args: &[&str]) -> std::process::Command {
    let inner = crate::product::plimsoll(args);
    let script = format!("ulimit {ulimit}; exec \"$0\" \"$@\"");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).arg(inner.get_program()).args(inner.get_args());
    command.env("PLIMSOLL_CACHE", crate::product::cache()).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
    command
}

/// Runs `plan` under this `ulimit`. Returns whether it succeeded, and its output.
fn plan_under(ulimit: &str) -> (bool, String) {
    let output = under(ulimit, &["plan", "smollm2"]).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Starts a server under this `ulimit`, which must answer a request. Returns its ready line.
fn serve_under(ulimit: &str, flags: &[&str]) -> String {
    let server = Server::try_start(under(ulimit, &[&["serve", "smollm2", "--port", "0"], flags].concat()));
    let server = server.unwrap_or_else(|words| panic!("ulimit {ulimit}: {words}"));
    let asked = json!({"model": "smollm2", "prompt": "Once", "max_tokens": 4});
    let answer = server.post("/v1/completions", &asked);
    let (status, words) = (answer.status, answer.text());
    assert_eq!(status, 200, "{words}");
    server.ready.clone()
}

#[test]
#[ignore = "models"]
fn rlimit_is_named_when_memory_is_short_and_the_advice_works() {
    default_model();
    for (flag, name) in [("-v", "RLIMIT_AS"), ("-d", "RLIMIT_DATA")] {
        let (good, words) = plan_under(&format!("{flag} 400000"));
        assert!(!good && words.contains("it does not fit") && words.contains(&format!("{name} of ")), "{words}");
        assert!(!words.contains("--memory-budget"), "no budget can help: {words}");
        let advice =
            words.split_once(&format!("(ulimit {flag} ")).and_then(|(_, rest)| rest.split_once(')')).unwrap().0;
        let (good, words) = plan_under(&format!("{flag} {advice}"));
        assert!(good, "{words}");
        serve_under(&format!("{flag} {advice}"), &[]);
    }
}

#[test]
#[ignore = "models"]
fn i8_under_an_rlimit_serve_is_what_plan_says() {
    default_model();
    // Thread stacks, and the allocator's reservations for them, are mapped after the memory limit was read.
    let elastic: &[&str] = &["--elastic"];
    for (ulimit, flags) in [("-v 800000", &[][..]), ("-v 1100000", &[]), ("-v 900000", elastic), ("-d 700000", &[])] {
        let (good, words) = plan_under(ulimit);
        assert!(good, "{words}");
        let of = |name| words.lines().find_map(|line| line.trim_start().strip_prefix(name)).unwrap().trim();
        let ready = serve_under(ulimit, flags);
        // Both are equal up to one step: other mapped bytes are counted in steps of 4 MiB, and differ by some hundred KiB.
        let mib = |text: &str| -> f64 { text.split_once(" MiB").unwrap().0.trim().parse().unwrap() };
        let served = mib(ready.split_once('(').unwrap().1);
        assert!((mib(of("total")) - served).abs() <= 4.1, "{ready}\n{words}");
    }
}
