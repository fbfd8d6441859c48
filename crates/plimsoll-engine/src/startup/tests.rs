//! Start-up in every mode on a real model: planned, probed and rebuilt, pinned. Each results in the same server.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_memory::sizing::Mode;
use plimsoll_text::Tokenizer;

use super::*;
use crate::api::output::{Delta, TokenOut};
use crate::request::Request;
use crate::sampling::SamplingParams;

pub(super) fn fixture(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model)
}

/// Starts `model` under 300 MiB, sized in the given mode.
fn started(model: &str, pinned: Option<u64>, mode: Option<Mode>) -> EngineHandle {
    let options = Options { max_total_token_num: pinned, ..Options::default() };
    start_sized(&fixture(model), &options, |config| ProfileConfig { mode: mode.unwrap_or(config.mode), ..config })
}

/// Starts the model at `path` under 300 MiB.
pub(super) fn start_with(path: &Path, options: &Options) -> EngineHandle {
    start_sized(path, options, |config| config)
}

fn start_sized(path: &Path, options: &Options, adjust: impl FnOnce(ProfileConfig) -> ProfileConfig) -> EngineHandle {
    let options = Options {
        memory_budget: Some("300MiB".parse().unwrap()),
        batch_max_tokens: 64,
        graph_max_batch_size: 16,
        running_max_req_size: 16,
        max_waiting: 64,
        threads: Some(2),
        ..options.clone()
    };
    let mut host = Host::read(&options).unwrap();
    host.limit.bytes = 300 << 20;
    let model = path.file_name().unwrap().display();
    host.lease_dir = Some(std::env::temp_dir().join(format!("plimsoll-startup-{}-{model}", std::process::id())));
    let checkpoint = Checkpoint::open(path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&path.join("tokenizer.json")).unwrap());
    start_as((&checkpoint, tokenizer), &options, &host, |_| {}, &Cancel::default(), adjust).unwrap()
}

/// Returns a different request for each number.
fn request(i: u32) -> Request {
    Request {
        received: None,
        prompt: (0..20 + 7 * i).map(|n| (n * n * 31 + i * 17) % 300).collect(),
        sampling: SamplingParams::greedy(),
        max_tokens: 40,
        min_tokens: 0,
        stop: Vec::new(),
        keep_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: Some(5),
        prompt_logprobs: None,
        skip_special_tokens: true,
        speculate: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        cache_salt: 0,
        embed: None,
        media: Vec::new(),
        pins: Default::default(),
    }
}

/// Returns the error that a request ends with, if it fails.
pub(super) fn first_error(engine: &EngineHandle) -> Option<String> {
    let mut reader = engine.submit(request(0)).unwrap();
    std::iter::from_fn(|| pollster::block_on(reader.next())).find_map(|delta| delta.error)
}

/// Greedy answers of a handful of requests that run side by side, with every log-probability.
pub(super) fn answers(engine: &EngineHandle) -> Vec<Vec<TokenOut>> {
    let readers: Vec<_> = (0..12).map(|i| engine.submit(request(i)).unwrap()).collect();
    let read = |mut reader: crate::request::outbox::Reader| {
        let deltas = std::iter::from_fn(|| pollster::block_on(reader.next()));
        deltas.inspect(|delta: &Delta| assert_eq!(delta.error, None)).flat_map(|delta| delta.tokens).collect()
    };
    readers.into_iter().map(read).collect()
}

/// Held while a test starts engines: the process has one emergency reserve, and the engine that started last holds it.
pub(super) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn stop(engine: EngineHandle) {
    engine.stop();
    while !engine.stopped() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The lease ends with the thread, a moment later.
    std::thread::sleep(std::time::Duration::from_millis(50));
}

/// A start that is cancelled leaves nothing behind: before any tensor, between any two, and between any two steps of the self-test.
#[test]
fn abandoned_start_stops_at_its_next_checkpoint() {
    let _alone = alone();
    let options = Options {
        memory_budget: Some("300MiB".parse().unwrap()),
        batch_max_tokens: 64,
        running_max_req_size: 8,
        graph_max_batch_size: 8,
        threads: Some(2),
        ..Options::default()
    };
    let mut host = Host::read(&options).unwrap();
    host.limit.bytes = 300 << 20;
    host.lease_dir = Some(std::env::temp_dir().join(format!("plimsoll-startup-{}-cancelled", std::process::id())));
    let checkpoint = Checkpoint::open(&fixture("llama")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&fixture("llama").join("tokenizer.json")).unwrap());
    let start_until = |last: usize| {
        let (cancel, mut tensors) = (Cancel::new(), 0);
        if last == 0 {
            cancel.cancel();
        }
        let counted = |_| {
            tensors += 1;
            if tensors == last {
                cancel.cancel();
            }
        };
        (start_unless(&checkpoint, Arc::clone(&tokenizer), &options, &host, counted, &cancel), tensors)
    };
    let (whole, tensors) = start_until(usize::MAX);
    stop(whole.unwrap());
    assert!(tensors > 4);
    for last in [0, 1, tensors - 1, tensors] {
        let (started, done) = start_until(last);
        assert!(matches!(started, Err(StartError::Cancelled)), "{last}");
        assert_eq!(done, last, "no tensor is packed after the word");
    }
    stop(start_until(usize::MAX).0.unwrap());
}

/// The model's file is truncated while it is loaded: the start fails, and the process survives.
#[cfg(unix)]
#[test]
fn a_model_whose_file_is_cut_while_it_is_loaded_is_an_error() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture("llama").join(name), folder.path().join(name)).unwrap();
    }
    let options = Options { memory_budget: Some("300MiB".parse().unwrap()), threads: Some(2), ..Options::default() };
    let mut host = Host::read(&options).unwrap();
    host.limit.bytes = 300 << 20;
    host.lease_dir = Some(folder.path().join("leases"));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&folder.path().join("tokenizer.json")).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("model.safetensors")).unwrap();
    let cut = |_| file.set_len(16 << 10).unwrap();
    let error = start_unless(&checkpoint, tokenizer, &options, &host, cut, &Cancel::default()).err().unwrap();
    let said = error.to_string();
    assert!(said.contains("changed while it was read: 494944 bytes when it was opened, now 16384"), "{said}");
}

#[test]
fn a19_a20_rebuilt_planned_and_pinned_servers_are_one_server() {
    let _alone = alone();
    for model in ["llama", "gemma3"] {
        let rebuilt = started(model, None, Some(Mode::Auto));
        let tokens = rebuilt.limits().max_total_token_num;
        // Weights, two generations of keys, values and workspace, one emergency reserve.
        assert_eq!(rebuilt.ledger().allocations(), (6, 0), "{model} was built, torn down and built again");
        // A19: the ledger holds one generation; nothing of the probe's generation is left.
        for component in
            [Component::KvPages, Component::StepWorkspace, Component::PrefixIndex, Component::EmergencyReserve]
        {
            let row = rebuilt.ledger().row(component);
            assert_eq!(row.committed, row.planned, "{model}: {row:?}");
        }
        let expected = answers(&rebuilt);
        let limits = *rebuilt.limits();
        stop(rebuilt);
        for (what, pinned, allocations) in [("planned", None, 4), ("pinned", Some(tokens), 4)] {
            let engine = started(model, pinned, None);
            assert_eq!(engine.ledger().allocations(), (allocations, 0), "{model} {what}: built once");
            assert_eq!(engine.limits(), &limits, "{model} {what}");
            assert!(answers(&engine) == expected, "A20: {model} {what} does not give the same bits");
            stop(engine);
        }
    }
}
