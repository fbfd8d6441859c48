//! Every component of every fixture model and of SmolLM2 takes no more than planned, and not much less. Each is driven to its worst case.
//!
//! Each component is measured where it is taken: requests by the heap's peak while every place runs and no client
//! reads, tables by the heap as they are built, the KV cache by the pages in use when the pool is full, the workspace
//! by its high-water mark. Host heap and process baseline belong to the server's process and are measured there
//! (`plimsoll/tests/blackbox/slack.rs`).

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use common::recall::mix;
use common::{alone, collect, fixtures, greedy, is_another_form, settle};
use plimsoll_engine::cache::{PagePool, PrefixIndex};
use plimsoll_engine::sampling::Sampler;
use plimsoll_engine::{Blueprint, DiskCache, EngineHandle, Host, LoadedModel, Options, Reader, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, heap};
use plimsoll_text::Tokenizer;

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

/// Largest share of the plan that may stay unused.
const SLACK: f64 = 0.05;
/// Slack of up to this many bytes is allowed whatever its share. A heap block, a page of the system and a planning step of a tokenizer are
/// of this size. No plan is exact to less than its units.
const FLOOR_BYTES: u64 = 64 << 10;
/// A token with the most text bytes that admission reserves without asking for more.
const LONG_TOKEN: &str = "<|sixteen_byte|>";
/// Id of [`LONG_TOKEN`] in the fixtures' tokenizer.
const LONG_ID: u32 = 382;

/// Bytes that the watching thread holds for a moment while it reads limits, pressure and process: the text of some files. The list of
/// mappings is the longest.
const BESIDE_BYTES: u64 = 64 << 10;

struct Row {
    component: &'static str,
    planned: u64,
    measured: u64,
}

/// Prints the table and asserts that no row exceeds its plan or leaves too much of it unused.
fn judge(model: &str, rows: &[Row]) {
    for Row { component, planned, measured } in rows {
        let slack = 100.0 * (*planned as f64 - *measured as f64) / *planned as f64;
        println!("{model:<24} {component:<22} {planned:>12} {measured:>12} {slack:>7.2} %");
    }
    for Row { component, planned, measured } in rows {
        // Growth of the whole heap includes the bytes that the watching thread reads from the machine.
        let beside =
            if component.starts_with("request") || component.starts_with("  of it") { BESIDE_BYTES } else { 0 };
        assert!(*measured <= planned + beside, "{model}: {component} took {measured} bytes, {planned} were planned");
        let slack = planned.saturating_sub(*measured);
        let allowed = FLOOR_BYTES.max((*planned as f64 * SLACK) as u64);
        assert!(slack <= allowed, "{model}: {component}: {slack} of {planned} bytes were never used");
    }
}

/// Returns the heap bytes that the value of `make` holds.
fn heap_of<T>(make: impl FnOnce() -> T) -> u64 {
    let before = heap::in_use();
    let made = make();
    let bytes = heap::in_use() - before;
    drop(made);
    bytes
}

/// The fixtures' tokenizer with one token of sixteen bytes.
fn long_tokenizer() -> Tokenizer {
    let text = std::fs::read_to_string(fixtures().join("models/llama/tokenizer.json")).unwrap();
    assert!(text.contains("<|im_start|>"));
    let file = std::env::temp_dir().join(format!("plimsoll-slack-{}.json", std::process::id()));
    std::fs::write(&file, text.replace("<|im_start|>", LONG_TOKEN)).unwrap();
    let tokenizer = Tokenizer::from_file(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(tokenizer.token_bytes(LONG_ID), LONG_TOKEN.as_bytes());
    tokenizer
}

/// The `i`-th of the dearest requests of their kind: its prompt is unlike the others', its `output` tokens have sixteen bytes each.
fn dearest(i: usize, prompt: usize, output: u32, long_id: u32) -> Request {
    let ids: Vec<u32> = (0..prompt as u64).map(|n| (mix(i as u64 * 1000 + n) % 256) as u32).collect();
    let mut request = greedy(&ids, output);
    request.sampling.logit_bias = vec![(long_id, 100.0)];
    request.skip_special_tokens = false;
    request
}

/// State of heap and metrics when the last attempt to submit requests together began.
struct Before {
    heap: u64,
    finished: u64,
}

/// Submits `requests` at once. If this thread is kept from the processor, the engine may answer many before the last one is in. Then they
/// would not run side by side: the attempt is dropped and repeated.
fn submit_together(engine: &EngineHandle, requests: &[Request]) -> (Vec<Reader>, Before) {
    /// Upper limit of the tokens generated while the requests are submitted. The first requests end at most this many tokens before the
    /// others. These are fewer pages than the allowed slack.
    const AHEAD: u64 = 24;
    let metrics = engine.metrics();
    for _ in 0..100 {
        let before = Before { heap: heap::in_use(), finished: metrics.finished.get() };
        let generated = metrics.generated_tokens.get();
        heap::restart_peak();
        let readers = requests.iter().map(|r| engine.submit(r.clone()).unwrap_or_else(|e| panic!("{e}"))).collect();
        if metrics.generated_tokens.get() < generated + AHEAD {
            return (readers, before);
        }
        drop(readers);
        common::quiet(engine);
    }
    panic!("{} requests cannot be submitted at once on a machine so busy", requests.len());
}

/// Runs `requests` side by side while no client reads, and then drops them. Returns the heap's growth to its peak, the most bytes held by
/// requests in the ledger, and the most pages in use.
fn crowd(engine: &EngineHandle, requests: Vec<Request>) -> (u64, u64, u64) {
    let count = requests.len() as u64;
    let bytes = requests.iter().map(Request::host_bytes).max().unwrap();
    let (readers, before) = submit_together(engine, &requests);
    assert_eq!(engine.reserved(), (count * bytes, count), "all of one price");
    let mut held = 0;
    let deadline = Instant::now() + Duration::from_secs(300);
    while engine.metrics().finished.get() < before.finished + count {
        held = held.max(engine.held());
        assert_eq!(engine.metrics().failed.get(), 0);
        assert!(Instant::now() < deadline, "the crowd is not served");
        std::thread::sleep(Duration::from_micros(300));
    }
    let peak = heap::peak() - before.heap;
    drop(readers);
    common::quiet(engine);
    (peak, held, engine.status().pages_peak.load(Acquire))
}

struct Case {
    name: String,
    path: PathBuf,
    prompt: usize,
    output: u32,
    running: usize,
    /// An id with a text of sixteen bytes or more; None: the tokenizer is [`long_tokenizer`], which has one.
    long_id: Option<u32>,
}

fn check(case: &Case) {
    settle();
    let Case { prompt, output, running, .. } = *case;
    let loaded = LoadedModel::open(&case.path).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let tokenizer_measured = loaded.text_bytes.expect("the heap is counted here");
    let price = dearest(0, prompt, output, 0).host_bytes();
    let pages = running * (prompt + output as usize).div_ceil(16);
    let options = Options {
        batch_max_tokens: 64,
        graph_max_batch_size: running,
        running_max_req_size: running,
        max_waiting: 64,
        max_total_token_num: Some(pages as u64 * 16),
        max_req_total_len: Some(prompt + output as usize),
        // The other one of two cores is for the thread that submits.
        threads: Some(1),
        request_bytes: running as u64 * price,
        tokenizer_bytes: Some(tokenizer_measured),
        ..Options::default()
    };
    let blueprint = Blueprint::new(&loaded.checkpoint, &options).unwrap();
    let loaded_linears = blueprint.weights.linears.iter().filter(|linear| linear.in_file.is_none());
    let linears = loaded_linears.map(|linear| linear.packing.bytes() as u64);
    let weights = linears.sum::<u64>() + blueprint.weights.vectors.iter().map(|v| 4 * v.len as u64).sum::<u64>();
    let vocab = blueprint.model.vocab_size();
    drop(blueprint);
    let (tokenizer, long_id) = match case.long_id {
        Some(id) => (Arc::clone(&loaded.tokenizer), id),
        None => (Arc::new(long_tokenizer()), LONG_ID),
    };
    let index = heap_of(|| (PagePool::new(pages).unwrap(), PrefixIndex::new(pages).unwrap()))
        + heap_of(|| Vec::<u32>::with_capacity(pages));
    let sampler = heap_of(|| (Sampler::new(vocab).unwrap(), Vec::<f32>::with_capacity(vocab)));
    let mut host = Host::read(&options).unwrap();
    host.lease_dir = Some(std::env::temp_dir().join(format!("plimsoll-slack-{}", std::process::id())));
    settle();
    let before = heap::in_use();
    let engine =
        start(&loaded.checkpoint, tokenizer, &options, &host, |_| {}).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let tables = heap::in_use() - before - index - sampler;
    let requests = (0..running).map(|i| dearest(i, prompt, output, long_id)).collect();
    let (peak, held, pages_used) = crowd(&engine, requests);
    let planned = |component| engine.ledger().row(component).planned;
    let committed = |component| engine.ledger().row(component).committed;
    let fixed = planned(Component::RequestTable) - options.request_bytes;
    let page_bytes = planned(Component::KvPages) / pages as u64;
    let row =
        |component: Component, measured| Row { component: component.name(), planned: planned(component), measured };
    judge(
        &case.name,
        &[
            row(Component::Weights, weights),
            row(Component::KvPages, pages_used * page_bytes),
            row(Component::StepWorkspace, engine.measured_workspace_bytes().expect("a self-test ran")),
            row(Component::RequestTable, peak + tables),
            Row { component: "  of it: requests", planned: options.request_bytes, measured: peak },
            Row { component: "  as the ledger saw it", planned: options.request_bytes, measured: held },
            Row { component: "  of it: tables", planned: fixed, measured: tables },
            row(Component::PrefixIndex, index),
            row(Component::Tokenizer, tokenizer_measured + sampler),
            row(Component::EmergencyReserve, committed(Component::EmergencyReserve)),
        ],
    );
    let row = engine.ledger().row(Component::RequestTable);
    assert!(row.peak <= row.planned, "I2: {row:?}");
    engine.stop();
    while !engine.stopped() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "soak"]
fn every_component_of_every_fixture_takes_what_was_planned() {
    every_component_of_fixtures(false, 256);
}

/// Every stored format of the fixtures. Prompt and output fill the context, up to 1,024 tokens.
#[test]
#[ignore = "soak"]
fn every_component_of_every_form_takes_what_was_planned() {
    every_component_of_fixtures(true, 1024);
}

fn every_component_of_fixtures(all_forms: bool, context_max: u32) {
    let _alone = alone();
    let mut models: Vec<String> = std::fs::read_dir(fixtures().join("models"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        // Encoders generate nothing; `embeddings` compares their plan with the bytes they take. The tables of models with media encoders
        // include patches, a separate component: `media::plan` checks it.
        .filter(|name| {
            !name.starts_with("bert")
                && !name.starts_with("embedding")
                && !name.starts_with("vl-")
                && !name.starts_with("omni")
                && !["asr", "gguf-asr", "whisper"].contains(&name.as_str())
        })
        .filter(|name| all_forms || !is_another_form(name))
        .filter(|name| !["qwen3-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe"].contains(&name.as_str()))
        .collect();
    models.sort();
    println!("{:<24} {:<22} {:>12} {:>12} {:>9}", "model", "component", "planned", "measured", "slack");
    assert!(models.len() >= 40, "{}", models.len());
    for name in models {
        let dir = fixtures().join("models").join(&name);
        let gguf = dir.join("model.gguf");
        let path = if gguf.is_file() { gguf } else { dir };
        let context = Checkpoint::open(&path).expect("a fixture").config.max_context as u32;
        check(&Case { name, path, prompt: 64, output: context.min(context_max) - 64, running: 8, long_id: None });
    }
}

#[test]
#[ignore = "models"]
fn every_component_of_smollm2_takes_what_was_planned() {
    let _alone = alone();
    let cache = plimsoll_hub::Cache::default_location().unwrap();
    let path = plimsoll_hub::resolve("smollm2", &cache, &mut plimsoll_hub::Quiet).unwrap_or_else(|e| panic!("{e}"));
    let tokenizer = LoadedModel::open(&path).unwrap().tokenizer;
    let long_id = (0..tokenizer.vocab_size() as u32).find(|id| tokenizer.token_bytes(*id).len() == 16);
    let long_id = long_id.expect("a token of sixteen bytes");
    drop(tokenizer);
    check(&Case { name: "smollm2".into(), path, prompt: 48, output: 336, running: 8, long_id: Some(long_id) });
}

#[test]
fn a_request_of_any_kind_takes_what_it_reserved() {
    let _alone = alone();
    const CROWD: usize = 8;
    let options = Options {
        // No prompt takes more than one step. A longer prompt would be computed beside requests that already generate, and these would end
        // before all run.
        batch_max_tokens: 2048,
        graph_max_batch_size: CROWD,
        running_max_req_size: CROWD,
        max_total_token_num: Some(CROWD as u64 * 2048),
        threads: Some(2),
        request_bytes: 1 << 30,
        ..Options::default()
    };
    let host = Host::read(&options).unwrap();
    let checkpoint = plimsoll_formats::Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    settle();
    let engine = start(&checkpoint, Arc::new(long_tokenizer()), &options, &host, |_| {}).unwrap();
    type Edit = fn(&mut Request);
    let kinds: [(&str, Edit); 8] = [
        ("plain", |_| {}),
        ("own log-probability", |r| r.logprobs = Some(0)),
        ("one alternative", |r| r.logprobs = Some(1)),
        ("twenty alternatives", |r| r.logprobs = Some(20)),
        ("prompt reports", |r| (r.prompt_logprobs, r.max_tokens) = (Some(20), 100)),
        ("penalties", |r| r.sampling.frequency_penalty = 0.01),
        ("stop strings", |r| r.stop = (0..16).map(|i| format!("never said {i:0>200}")).collect()),
        ("a long prompt", |r| {
            r.prompt = (0..1500).map(|n| (mix(n + u64::from(r.prompt[0]) * 7) % 256) as u32).collect();
            r.max_tokens = 500;
        }),
    ];
    println!("{:<24} {:<22} {:>12} {:>12} {:>9}", "kind", "", "reserved", "measured", "slack");
    for (kind, edit) in kinds {
        let request = |i| {
            let mut request = dearest(i, 200, 1500, LONG_ID);
            edit(&mut request);
            request
        };
        let reserved = CROWD as u64 * request(0).host_bytes();
        let (peak, held, _) = crowd(&engine, (0..CROWD).map(request).collect());
        let of = |component, measured| Row { component, planned: reserved, measured };
        judge(kind, &[of("requests", peak), of("as the ledger saw it", held)]);
    }
}

#[test]
fn text_beyond_what_was_reserved_is_reserved_as_it_comes_or_ends_its_request_alone() {
    let _alone = alone();
    let tokens = 400;
    // Each token is as long as the text reserved for sixteen.
    let text = "x".repeat(256);
    let file = std::env::temp_dir().join(format!("plimsoll-long-{}.json", std::process::id()));
    let plain = std::fs::read_to_string(fixtures().join("models/llama/tokenizer.json")).unwrap();
    std::fs::write(&file, plain.replace("<|im_start|>", &text)).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
    std::fs::remove_file(&file).unwrap();
    let price = dearest(0, 20, tokens, LONG_ID).host_bytes();
    let launch = |request_bytes| {
        let options = Options {
            graph_max_batch_size: 4,
            running_max_req_size: 4,
            max_total_token_num: Some(4096),
            threads: Some(1),
            request_bytes,
            ..Options::default()
        };
        let host = Host::read(&options).unwrap();
        let checkpoint = plimsoll_formats::Checkpoint::open(&fixtures().join("models/llama")).unwrap();
        start(&checkpoint, Arc::clone(&tokenizer), &options, &host, |_| {}).unwrap()
    };
    let roomy = launch(price + u64::from(tokens) * 256 + 4096);
    let answer = collect(roomy.submit(dearest(0, 20, tokens, LONG_ID)).unwrap());
    assert_eq!((answer.error, answer.text.len()), (None, tokens as usize * 256));
    common::quiet(&roomy);
    let unread = roomy.submit(dearest(1, 20, tokens, LONG_ID)).unwrap();
    while roomy.metrics().finished.get() < 2 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(roomy.held() <= roomy.reserved().0 && roomy.reserved().0 <= roomy.limits().host_bytes);
    }
    assert!(roomy.held() >= u64::from(tokens) * 256, "unread text is in the ledger");
    drop(unread);
    common::quiet(&roomy);
    assert_eq!(roomy.held(), 0);
    // Without room for the text the request ends with an error that names the flag. The other request is not affected.
    let tight = launch(2 * price + 2048);
    let plain = Request { max_tokens: 300, ..dearest(1, 20, tokens, 7) };
    let neighbour = tight.submit(plain).unwrap();
    let long = tight.submit(dearest(0, 20, tokens, LONG_ID)).unwrap();
    let neighbour = collect(neighbour);
    assert_eq!((neighbour.error, neighbour.ids.len()), (None, 300));
    let error = collect(long).error.expect("there was no room");
    assert!(error.contains("--request-bytes"), "{error}");
    common::quiet(&tight);
    assert_eq!((tight.held(), tight.metrics().failed.get()), (0, 1));
}

/// An engine with a cache on disk takes more heap than one without. The difference is the planned disk cache and the larger prefix index.
#[test]
fn a_cache_on_disk_takes_what_was_planned() {
    let _alone = alone();
    for model in ["llama", "vl-qwen3"] {
        let loaded = LoadedModel::open(&fixtures().join("models").join(model)).unwrap();
        let launch = |options: &Options| {
            settle();
            let host = Host::read(options).unwrap();
            let before = heap::in_use();
            let engine = start(&loaded.checkpoint, Arc::clone(&loaded.tokenizer), options, &host, |_| {}).unwrap();
            let taken = heap::in_use() - before;
            let planned = |component| engine.ledger().row(component).planned;
            let lines = [Component::DiskCache, Component::PrefixIndex].map(planned);
            engine.stop();
            while !engine.stopped() {
                std::thread::sleep(Duration::from_millis(5));
            }
            (taken, lines)
        };
        let plain = Options {
            batch_max_tokens: 64,
            running_max_req_size: 4,
            graph_max_batch_size: 4,
            max_total_token_num: Some(4096),
            max_image_pixels: Some(8192),
            max_video_frames: Some(8),
            threads: Some(1),
            ..Options::default()
        };
        let temp = tempfile::tempdir().unwrap();
        let disk_cache = Some(DiskCache { bytes: 64 << 20, ..DiskCache::at(temp.path().join("cache")) });
        let ((without, [none, index]), (with, [disk, more])) =
            (launch(&plain), launch(&Options { disk_cache, ..plain.clone() }));
        assert_eq!(none, 0);
        let (planned, measured) = (disk + more - index, with - without);
        println!("{model:<24} {:<22} {planned:>12} {measured:>12}", "disk_cache");
        assert!(planned > 1 << 20 && planned.abs_diff(measured) <= FLOOR_BYTES + BESIDE_BYTES, "{model}");
    }
}
