//! The commands that end by themselves: `models`, `pull`, `rm`, `chat`, and their messages for typing errors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::product::{Finished, default_model, fixture, plimsoll, run, run_with_input};

/// A separate model cache, removed when it is dropped.
struct OwnCache(PathBuf);

impl OwnCache {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("own-cache-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Puts the default model into the cache as hard links, so that its bytes are not written again.
    fn with_default_model(self) -> Self {
        let source = default_model().parent().unwrap();
        let target = self.0.join("catalogue/smollm2");
        fs::create_dir_all(&target).unwrap();
        for file in fs::read_dir(source).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                fs::hard_link(file.path(), target.join(file.file_name())).unwrap();
            }
        }
        self
    }

    fn run(&self, args: &[&str]) -> Finished {
        let output = plimsoll(args).env("PLIMSOLL_CACHE", &self.0).output().unwrap();
        Finished::of(output)
    }
}

impl Drop for OwnCache {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
#[ignore = "models"]
fn models_lists_what_is_cached_and_what_could_be() {
    default_model();
    let list = run(&["models"]).good();
    let row = |name: &str| list.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {list}"));
    assert!(row("smollm2").contains("verified") && row("smollm2").ends_with(".gguf"), "{list}");
    let empty = OwnCache::new("models");
    let list = empty.run(&["models"]).good();
    assert!(list.lines().all(|line| line.contains("not cached")) && list.contains("smollm2"), "{list}");
}

#[test]
#[ignore = "models"]
fn pull_is_idempotent_and_says_where_the_file_is() {
    let first = default_model();
    let again = run(&["pull", "smollm2"]).good();
    assert_eq!(Path::new(again.trim()), first);
    assert!(first.is_file());
}

#[test]
#[ignore = "models"]
fn rm_removes_once_and_then_says_that_there_is_nothing() {
    let cache = OwnCache::new("rm").with_default_model();
    let removed = cache.run(&["rm", "smollm2"]).good();
    assert!(removed.contains("removed smollm2") && removed.contains("MiB freed"), "{removed}");
    assert!(cache.run(&["models"]).good().lines().all(|line| line.contains("not cached")));
    let error = cache.run(&["rm", "smollm2"]).refused();
    assert!(error.contains("smollm2 is not in the cache"), "{error}");
}

#[test]
fn mistyped_names_are_answered_with_help() {
    for command in ["serve", "chat", "plan", "pull", "rm"] {
        let error = run(&[command, "smolm2"]).refused();
        assert!(error.contains("no model is called `smolm2` (did you mean `smollm2`?)"), "{command}: {error}");
        assert!(error.contains("hf:org/repo"), "{command}: {error}");
    }
    let error = run(&["serve", "./absent.gguf", "--port", "0"]).refused();
    assert!(error.contains("./absent.gguf: no such file or directory"), "{error}");
    let error = run(&["serve", "hf:not-a-repo"]).refused();
    assert!(error.contains("hf:not-a-repo"), "{error}");
}

#[test]
fn bad_flags_are_answered_with_what_is_allowed() {
    for (flags, word) in [
        (["--mem-fraction", "1.5"], "at most 1"),
        (["--memory-budget", "lots"], "lots"),
        (["--kv-dtype", "int3"], "q8"),
        (["--batch-max-tokens", "0"], "batch-max-tokens"),
        (["--max-total-token-num", "99999999999999"], "it does not fit"),
        (["--memory-budget", "1MiB"], "it does not fit"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        // There is no such GPU, or the program was built without the feature.
        (["--device", "gpu:99"], "--device gpu: "),
    ] {
        let llama = fixture("llama");
        let error = run(&[&["plan", llama.to_str().unwrap()], &flags[..]].concat()).refused();
        assert!(error.contains(word), "{flags:?}: {error}");
    }
}

#[test]
fn what_the_command_line_gets_wrong_is_no_variables_fault() {
    let refused = |flags: &[&str], variable: &str| {
        let mut command = plimsoll([&["serve", "m"], flags].concat());
        Finished::of(command.env(variable, "1").output().unwrap()).refused()
    };
    for flags in [&["--models", "f"][..], &["--record-content"]] {
        let words = refused(flags, "PLIMSOLL_PORT");
        assert!(words.contains("--help") && !words.contains("set by"), "{words}");
    }
    let words = refused(&[], "PLIMSOLL_RECORD_CONTENT");
    assert!(words.contains("--record <FILE>") && words.contains("set by PLIMSOLL_RECORD_CONTENT"), "{words}");
}

#[test]
fn unknown_architectures_are_refused_by_name() {
    let cache = OwnCache::new("architecture");
    let config = fs::read_to_string(fixture("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["architectures"] = json!(["MambaForCausalLM"]);
    config["model_type"] = json!("mamba");
    for file in ["model.safetensors", "tokenizer.json"] {
        fs::copy(fixture("llama").join(file), cache.0.join(file)).unwrap();
    }
    fs::write(cache.0.join("config.json"), config.to_string()).unwrap();
    let path = cache.0.to_str().unwrap();
    for args in [vec!["plan", path], vec!["serve", path, "--port", "0"], vec!["chat", path]] {
        let error = run(&args).refused();
        assert!(error.contains("MambaForCausalLM") && error.contains("supported"), "{args:?}: {error}");
    }
}

#[test]
fn what_is_no_model_is_refused() {
    let cache = OwnCache::new("broken");
    let file = cache.0.join("broken.gguf");
    fs::write(&file, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x7f").unwrap();
    let error = run(&["serve", file.to_str().unwrap(), "--port", "0"]).refused();
    assert!(error.contains("broken.gguf"), "the file is named: {error}");
    let empty = cache.0.join("empty");
    fs::create_dir(&empty).unwrap();
    let error = run(&["plan", empty.to_str().unwrap()]).refused();
    assert!(error.contains("config.json"), "what is missing is named: {error}");
}

#[test]
#[ignore = "models"]
fn chat_answers_what_is_piped_into_it() {
    default_model();
    let chat = ["chat", "--temperature", "0", "--max-tokens", "24", "--max-total-token-num", "2048"];
    let answer = run_with_input(&chat, "What is the capital of France?\n").good();
    assert!(answer.contains("Paris"), "{answer}");
    let lines = run_with_input(&chat, "What is the capital\nof France?\n").good();
    assert!(lines.contains("Paris"), "several lines are one message: {lines}");
    assert_eq!(run_with_input(&chat, "").good(), "", "no question, no answer");
}

#[test]
fn client_may_leave_after_reading_enough() {
    let model = fixture("llama");
    for args in [&["plan"][..], &["plan", "--json"]] {
        let args = [args, &[model.to_str().unwrap()]].concat();
        let mut child = plimsoll(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Closes the pipe early, as `head` does.
        drop(child.stdout.take());
        let finished = Finished::of(child.wait_with_output().unwrap());
        assert_eq!((finished.code, finished.stderr.contains("panicked")), (Some(0), false), "{finished:?}");
    }
}
