//! `doctor`: its findings match the behaviour of a server, and its exit code tells whether there is a problem.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::product::{Finished, Server, cache, default_model, fixture, plimsoll, run};

/// The doctor's findings, and its exit code.
fn findings(mut command: Command) -> (Vec<Value>, Option<i32>) {
    let finished = Finished::of(command.output().unwrap());
    let page: Value = serde_json::from_str(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {finished:?}"));
    let findings = page["checks"].as_array().unwrap().clone();
    let problems = findings.iter().filter(|finding| finding["level"] == "problem").count();
    assert_eq!(page["problems"], problems);
    assert_eq!(finished.code, Some(i32::from(problems > 0)), "the exit code says it: {finished:?}");
    for finding in &findings {
        assert_eq!(finding["level"] == "ok", finding["next"].is_null(), "what is not well has a next step: {finding}");
    }
    (findings, finished.code)
}

fn doctor(args: &[&str]) -> (Vec<Value>, Option<i32>) {
    findings(plimsoll([&["doctor", "--json", "--port", "0"], args].concat()))
}

/// The findings of one check.
fn about<'a>(findings: &'a [Value], check: &str) -> Vec<&'a Value> {
    let all: Vec<_> = findings.iter().filter(|finding| finding["check"] == check).collect();
    assert!(!all.is_empty(), "nothing about {check}: {findings:?}");
    all
}

/// The only problem of a check: the finding, and the next step.
fn problem(findings: &[Value], check: &str) -> (String, String) {
    let all = about(findings, check);
    let problems: Vec<_> = all.iter().filter(|finding| finding["level"] == "problem").collect();
    let [one] = &problems[..] else { panic!("not one problem about {check}: {findings:?}") };
    (one["found"].as_str().unwrap().to_owned(), one["next"].as_str().unwrap().to_owned())
}

/// A separate model cache, removed when it is dropped.
struct OwnCache(PathBuf);

impl OwnCache {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn doctor(&self, args: &[&str]) -> (Vec<Value>, Option<i32>) {
        let mut command = plimsoll([&["doctor", "--json", "--port", "0"], args].concat());
        command.env("PLIMSOLL_CACHE", &self.0);
        findings(command)
    }
}

impl Drop for OwnCache {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
#[ignore = "models"]
fn a_machine_that_can_serve_is_told_so_with_the_plan_that_serve_makes() {
    default_model();
    let (all, code) = doctor(&["smollm2", "--max-total-token-num", "4096"]);
    assert_eq!(code, Some(0), "{all:?}");
    for check in [
        "clock",
        "files",
        "threads",
        "port",
        "cache",
        "cores",
        "instructions",
        "memory",
        "memory limit",
        "swap",
        "neighbours",
    ] {
        about(&all, check);
    }
    let model = about(&all, "model")[0]["found"].as_str().unwrap();
    assert!(model.contains("every sum is right"), "a model that is named is read: {model}");
    let words = run(&["plan", "smollm2", "--max-total-token-num", "4096"]).good();
    let total = words.lines().find_map(|line| line.trim_start().strip_prefix("total")).unwrap().trim();
    let plan = about(&all, "plan")[0]["found"].as_str().unwrap();
    assert!(plan.starts_with(&format!("{total} of ")) && plan.contains("4096 tokens in the pool"), "{plan}; {total}");
    // As text: a line for each finding, which begins with its level.
    let words = run(&["doctor", "--port", "0"]).good();
    assert!(words.lines().any(|line| line.starts_with("ok ") && line.contains(" plan ")), "{words}");
    assert!(words.contains("--deep reads them"), "who names no model has nothing read: {words}");
}

#[test]
#[ignore = "models"]
fn short_address_space_is_found_with_the_value_that_works() {
    default_model();
    let under = |kib: u64| {
        let inner = plimsoll(["doctor", "smollm2", "--json", "--port", "0"]);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {kib}; exec \"$0\" \"$@\"")]);
        command.arg(inner.get_program()).args(inner.get_args());
        command.env("PLIMSOLL_CACHE", cache()).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
        findings(command).0
    };
    let all = under(400_000);
    assert_eq!(about(&all, "memory limit")[0]["level"], "note");
    let (found, next) = problem(&all, "plan");
    assert!(found.contains("it does not fit") && found.contains("RLIMIT_AS"), "{found}");
    let advised = next.split_once("(ulimit -v ").and_then(|(_, rest)| rest.split_once(')')).unwrap().0;
    let all = under(advised.parse().unwrap());
    assert_eq!(about(&all, "plan")[0]["level"], "ok", "{all:?}");
}

#[test]
#[ignore = "models"]
fn a_model_that_is_missing_mistyped_or_damaged() {
    let cache = OwnCache::new("models");
    let (found, next) = problem(&cache.doctor(&["smollm2"]).0, "model");
    assert!(found.contains("not in the cache"), "{found}");
    assert_eq!(next, "plimsoll pull smollm2");
    // The command line names no model: serve would fetch the default.
    let (all, code) = cache.doctor(&[]);
    assert_eq!((code, &about(&all, "model")[0]["level"]), (Some(0), &Value::from("note")), "{all:?}");
    assert!(fs::read_dir(&cache.0).unwrap().next().is_none(), "the doctor fetches and makes nothing");
    let (found, _) = problem(&cache.doctor(&["smolm2"]).0, "model");
    assert!(found.contains("did you mean `smollm2`?"), "{found}");

    let source = default_model().parent().unwrap();
    let folder = cache.0.join("catalogue/smollm2");
    fs::create_dir_all(&folder).unwrap();
    for file in fs::read_dir(source).unwrap().map(Result::unwrap).filter(|file| file.file_type().unwrap().is_file()) {
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let file = folder.join(default_model().file_name().unwrap());
    let written = fs::metadata(default_model()).unwrap().modified().unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).unwrap();
    fs::File::options().write(true).open(&file).unwrap().set_modified(written).unwrap();
    // Size and time are right, so only reading the file shows the damage.
    let (all, code) = cache.doctor(&[]);
    assert_eq!((code, &about(&all, "model")[0]["level"]), (Some(0), &Value::from("ok")), "{all:?}");
    for args in [&["smollm2"][..], &["--deep"]] {
        let (found, next) = problem(&cache.doctor(args).0, "model");
        assert!(found.contains(file.to_str().unwrap()), "{args:?}: {found}");
        assert_eq!(next, "plimsoll rm smollm2; plimsoll pull smollm2");
    }
    fs::write(&file, &bytes[..last]).unwrap();
    problem(&cache.doctor(&[]).0, "model");
}

#[test]
fn what_a_server_could_not_open_or_would_not_take() {
    let llama = fixture("llama");
    let llama = llama.to_str().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (found, _) = problem(&findings(plimsoll(["doctor", llama, "--json", "--port", &port])).0, "port");
    assert!(found.contains(&port), "{found}");
    // The server reports it, too, before it loads a model.
    let refused = run(&["serve", "./absent.gguf", "--port", &port]).refused();
    assert!(refused.contains(&port) && refused.matches("in use").count() == 1, "{refused}");
    let (found, next) = problem(&doctor(&[llama, "--max-connections", "1000000000"]).0, "files");
    assert!(found.contains("1000000000 connections") && next.contains("--max-connections "), "{found} {next}");
    let (found, _) = problem(&doctor(&[llama, "--memory-budget", "1MiB"]).0, "plan");
    assert!(found.contains("it does not fit"), "{found}");
    let (found, _) = problem(&doctor(&[llama, "--media-root", "/not/there"]).0, "settings");
    assert!(found.contains("/not/there"), "{found}");
    // The server also reports it before it loads a model.
    for (flag, value) in [("--max-inputs", "0"), ("--max-connections", "0"), ("--max-body-bytes", "100000000")] {
        let (found, _) = problem(&doctor(&[llama, flag, value]).0, "settings");
        let refused = run(&["serve", "./absent.gguf", flag, value]).refused();
        assert!(found.contains(flag) && refused.contains(flag), "{flag}: {found}; {refused}");
    }
    let refused = run(&["serve", "./absent.gguf", "--record", "/not/there/trace"]).refused();
    assert!(refused.contains("--record /not/there/trace") && refused.contains("no directory"), "{refused}");
    let (found, _) = problem(&doctor(&[llama, "--record", "/not/there/trace"]).0, "record");
    assert!(found.contains("no directory"), "{found}");
    // If the trace cannot be written, no model is loaded, and no file is left that would prevent the next start.
    let full = OwnCache::new("full");
    let trace = full.0.join("trace");
    let serve = plimsoll(["serve", "./absent.gguf", "--port", "0", "--record", trace.to_str().unwrap()]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 0; exec \"$0\" \"$@\""]);
    shell.arg(serve.get_program()).args(serve.get_args());
    let refused = Finished::of(shell.output().unwrap()).refused();
    assert!(refused.contains("--record") && refused.contains("too large") && !trace.exists(), "{refused}");
}

/// A model that can be planned but not served, and a list of models of which one is missing.
#[test]
fn models_without_a_tokenizer_and_lists_of_models() {
    let cache = OwnCache::new("lists");
    let bare = cache.0.join("bare");
    fs::create_dir_all(&bare).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("llama").join(file), bare.join(file)).unwrap();
    }
    let (found, _) = problem(&cache.doctor(&[bare.to_str().unwrap()]).0, "model");
    assert!(found.contains("no tokenizer"), "{found}");
    let (list, settings) = (cache.0.join("models.toml"), cache.0.join("plimsoll.toml"));
    let table = |name: &str, path: &Path| format!("[[models]]\nname = '{name}'\nmodel = '{}'\n", path.display());
    fs::write(&list, table("a", &fixture("llama"))).unwrap();
    fs::write(&settings, format!("models = '{}'\n", list.display())).unwrap();
    for args in [["--models", list.to_str().unwrap()], ["--config", settings.to_str().unwrap()]] {
        let (all, code) = cache.doctor(&args);
        assert_eq!((code, about(&all, "plan").len()), (Some(0), 2), "what all share, and one model: {all:?}");
    }
    // The plan is that of `plan --models`, and the memory limit is the operator's.
    let (all, _) =
        cache.doctor(&["--models", list.to_str().unwrap(), "--memory-budget", "400MiB", "--state-ratio", "0.5"]);
    let words: Vec<_> = about(&all, "plan").iter().map(|line| line["found"].as_str().unwrap().to_owned()).collect();
    let planned = run(&["plan", "--models", list.to_str().unwrap(), "--memory-budget", "400MiB"]).good();
    let shared = words[0].strip_prefix("what all models share takes ").unwrap().split(" of 400.0 MiB").next().unwrap();
    assert!(planned.contains(shared), "{words:?} {planned}");
    assert!(words[1].starts_with("`a`: --state-ratio changes nothing"), "{words:?}");
    let own = words[2].strip_prefix("`a`: ").unwrap().split(" of ").next().unwrap();
    assert!(planned.contains(own), "{words:?} {planned}");
    let (found, _) =
        problem(&cache.doctor(&["--models", list.to_str().unwrap(), "--memory-budget", "50MiB"]).0, "plan");
    assert!(found.contains("of 50.0 MiB"), "{found}");
    fs::write(&list, table("a", &fixture("llama")) + &table("b", &bare)).unwrap();
    problem(&cache.doctor(&["--models", list.to_str().unwrap()]).0, "model");
    fs::write(&list, "[[models]]\nname = 'a'\n").unwrap();
    let (found, _) = problem(&cache.doctor(&["--models", list.to_str().unwrap()]).0, "models");
    assert!(found.contains("line 1"), "{found}");
}

#[test]
fn a_server_of_this_user_is_seen_with_what_it_plans() {
    let server = Server::start_model(&fixture("llama"), &["--max-total-token-num", "1024"]);
    let (all, _) = doctor(&[fixture("llama").to_str().unwrap()]);
    let words = about(&all, "neighbours")[0]["found"].as_str().unwrap();
    assert!(words.contains(&format!("process {} plans ", server.pid())), "{words}");
}
