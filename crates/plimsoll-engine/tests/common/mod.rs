//! Shared by the engine's tests: fixtures on disk, an engine over one of them, collected answers.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod heard;
pub mod media_encoder;
pub mod recall;
pub mod seen;
pub mod senses;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use plimsoll_device::{ComputeDtype, DtypePolicy, Isa, KvDtype};
use plimsoll_engine::runner::Runner;
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::testing::ByHand;
use plimsoll_engine::{Delta, EngineHandle, FinishReason, Host, Options, Reader, Request, TokenLogprobs, start};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;
use plimsoll_text::Tokenizer;
use serde_json::Value;

/// All arithmetic in bfloat16 if this machine has a matrix unit; elsewhere that is refused.
pub fn all_bf16() -> Option<ComputeDtype> {
    (Isa::detect() == Isa::Amx).then_some(ComputeDtype::Bf16)
}

/// The repository's fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Whether a fixture has the weights of another one, stored in another format.
pub fn is_another_form(name: &str) -> bool {
    ["gguf-", "mlx-", "awq-", "ct-", "fp8-", "gptq-", "autoround-"].iter().any(|form| name.starts_with(form))
}

/// The reference of a fixture model.
pub fn reference(model: &str) -> Value {
    let file = fixtures().join("models").join(model).join("reference.json");
    serde_json::from_slice(&std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))).unwrap()
}

/// Options for exact comparison with the f32 reference, small enough for a test.
pub fn exact() -> Options {
    Options {
        dtype: DtypePolicy::F32,
        kv_dtype: KvDtype::F32,
        batch_max_tokens: 64,
        graph_max_batch_size: 16,
        running_max_req_size: 16,
        max_waiting: 64,
        max_total_token_num: Some(2048),
        threads: Some(2),
        ..Options::default()
    }
}

/// Runs a conversation of two turns; the first answer is part of the second prompt. `cached` finds pages again, `plain` keeps none. Both
/// must generate the same tokens and log-probabilities, bit for bit (I9). Returns the number of cached tokens and that of the first prompt.
pub fn two_turns(cached: &EngineHandle, plain: &EngineHandle, first: &Request, more: &[u32]) -> (usize, usize) {
    let said = collect(cached.submit(first.clone()).unwrap());
    assert_eq!(said.error, None);
    let prompt = [first.prompt.as_slice(), &said.ids, more].concat();
    let second = Request { prompt, max_tokens: 24, ..first.clone() };
    let [found, anew] = [cached, plain].map(|engine| collect(engine.submit(second.clone()).unwrap()));
    let bits = |answer: &Answer| {
        assert_eq!(answer.error, None);
        let own = |report: &Option<TokenLogprobs>| report.as_ref().unwrap().own.unwrap().to_bits();
        answer.logprobs.iter().map(own).collect::<Vec<_>>()
    };
    assert_eq!((&found.ids, bits(&found)), (&anew.ids, bits(&anew)), "{} tokens were cached", found.cached_tokens);
    assert_eq!(anew.cached_tokens, 0);
    (found.cached_tokens as usize, first.prompt.len())
}

/// [`exact`] with a hybrid's draft head, which makes `drafts` drafts at once; 0: without it.
pub fn with_drafts(drafts: usize) -> Options {
    Options { enable_mtp: drafts > 0, mtp_num_draft_tokens: drafts.max(1), mtp_adaptive: false, ..exact() }
}

/// Waits until `what` returns true.
pub fn until(engine: &EngineHandle, mut what: impl FnMut(&EngineHandle) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !what(engine) {
        assert!(Instant::now() < deadline, "it never came to that");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits for all other tests: the counted heap, mappings and injected faults belong to the process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Asserts that no component of an engine took more than planned. The process's own components are left out: all tests of a program share
/// them.
pub fn within_plan(engine: &EngineHandle) {
    let own = [Component::ProcessBaseline, Component::HostHeap].map(|component| component.name());
    for row in engine.report().components.iter().filter(|row| !own.contains(&row.component)) {
        assert!(row.peak_bytes <= row.planned_bytes, "I2: {row:?}");
    }
}

/// Waits until the heap stands still: an engine's thread frees its memory after its last message.
pub fn settle() {
    let mut last = plimsoll_memory::heap::in_use();
    let mut still = 0;
    while still < 10 {
        std::thread::sleep(Duration::from_millis(10));
        let now = plimsoll_memory::heap::in_use();
        still = if now == last { still + 1 } else { 0 };
        last = now;
    }
}

/// A fixture model's checkpoint.
pub fn checkpoint(model: &str) -> Checkpoint {
    let dir = fixtures().join("models").join(model);
    let gguf = dir.join("model.gguf");
    let path = if gguf.is_file() { gguf } else { dir };
    Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// An engine over a fixture model, with the draft model that the options name.
pub fn engine(model: &str, options: &Options) -> EngineHandle {
    let mut checkpoint = checkpoint(model);
    if let Some(draft) = &options.draft_model {
        checkpoint = checkpoint.with_draft(self::checkpoint(draft)).unwrap_or_else(|e| panic!("{draft}: {e}"));
    }
    let tokenizer = fixtures().join("models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&tokenizer).unwrap());
    let host = Host::read(options).unwrap();
    start(&checkpoint, tokenizer, options, &host, |_| {}).unwrap_or_else(|e| panic!("{model}: {e}"))
}

/// A greedy request for exactly `max_tokens` tokens: the end of the text does not end it.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> Request {
    Request {
        received: None,
        prompt: prompt.to_vec(),
        sampling: SamplingParams::greedy(),
        max_tokens,
        min_tokens: 0,
        stop: Vec::new(),
        keep_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        speculate: true,
        cache_salt: 0,
        embed: None,
        media: Vec::new(),
        pins: Default::default(),
    }
}

/// Everything a request produced.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub ids: Vec<u32>,
    /// Where each token's text begins, in bytes and characters.
    pub begins: Vec<(u32, u32)>,
    pub text: String,
    pub logprobs: Vec<Option<TokenLogprobs>>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub pooled: Option<Vec<f32>>,
    pub cached_tokens: u32,
    /// Drafted and accepted tokens.
    pub drafts: (u32, u32),
    pub finish: Option<FinishReason>,
    pub error: Option<String>,
}

impl Answer {
    /// Asserts that this answer equals `alone` in everything that must not depend on other requests.
    pub fn is_the_same_as(&self, alone: &Self, what: &str) {
        assert_eq!(self.error, None, "{what}");
        assert_eq!(self.ids, alone.ids, "{what}");
        assert_eq!(self.begins, alone.begins, "{what}");
        assert_eq!(self.text, alone.text, "{what}");
        assert_eq!(self.finish, alone.finish, "{what}");
        assert!(self.logprobs == alone.logprobs, "{what}: the tokens agree, their log-probabilities do not");
        assert!(self.prompt_logprobs == alone.prompt_logprobs, "{what}: log-probabilities of the prompt");
    }

    fn add(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        for token in delta.tokens {
            self.ids.push(token.id);
            self.begins.push((token.text_offset, token.text_chars));
            self.logprobs.push(token.logprobs);
        }
        self.prompt_logprobs.extend(delta.prompt_logprobs);
        self.pooled = delta.pooled.or(self.pooled.take());
        self.cached_tokens = delta.cached_tokens;
        self.drafts = (delta.drafted_tokens, delta.accepted_tokens);
        self.finish = delta.finish;
        self.error = delta.error;
    }
}

/// Reads a request to its end.
pub fn collect(mut reader: Reader) -> Answer {
    let mut answer = Answer::default();
    while let Some(delta) = pollster::block_on(reader.next()) {
        answer.add(delta);
    }
    answer
}

/// Runs rounds of an engine that a test moves by hand until all `readers` have ended. Calls `after` with the number of each round.
pub fn drive<R: Runner>(hand: &mut ByHand<R>, mut readers: Vec<Reader>, mut after: impl FnMut(usize)) -> Vec<Answer> {
    let mut answers: Vec<Answer> = readers.iter().map(|_| Answer::default()).collect();
    let mut round = 0;
    while answers.iter().any(|answer| answer.finish.is_none() && answer.error.is_none()) {
        hand.run_iteration();
        for (answer, reader) in answers.iter_mut().zip(&mut readers) {
            reader.take().into_iter().for_each(|delta| answer.add(delta));
        }
        after(round);
        round += 1;
        assert!(round < 5000, "it never ends");
    }
    answers
}

/// Submits and reads to the end.
pub fn ask(engine: &EngineHandle, request: Request) -> Answer {
    collect(engine.submit(request).unwrap_or_else(|e| panic!("{e}")))
}

/// A JSON list of numbers as ids.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// At idle: every page is free or cached, every state slot free or a checkpoint.
pub fn full_pools(engine: &EngineHandle) {
    let status = engine.status();
    let read = |value: &std::sync::atomic::AtomicU64| value.load(std::sync::atomic::Ordering::Acquire);
    assert_eq!(read(&status.pages_used), read(&status.pages_cached), "only cached pages are used");
    assert_eq!(read(&status.slots_used), read(&status.slots_kept), "only checkpoints are in slots");
    assert_eq!(read(&status.windows_used), read(&status.windows_cached), "only cached window pages are used");
}

/// Waits until nothing runs and everything that requests held is released.
pub fn quiet(engine: &EngineHandle) {
    use std::sync::atomic::Ordering::Acquire;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let status = engine.status();
        let held =
            status.pages_used.load(Acquire) - status.pages_cached.load(Acquire).min(status.pages_used.load(Acquire));
        let windows = status.windows_used.load(Acquire);
        let held = held + windows - status.windows_cached.load(Acquire).min(windows);
        let sequences =
            status.slots_used.load(Acquire) - status.slots_kept.load(Acquire).min(status.slots_used.load(Acquire));
        let busy = sequences + status.running.load(Acquire) + status.waiting.load(Acquire);
        if engine.reserved() == (0, 0) && held == 0 && busy == 0 {
            return;
        }
        let reserved = engine.reserved();
        assert!(Instant::now() < deadline, "not given back: {reserved:?} reserved, {held} pages, {busy} requests");
        std::thread::sleep(Duration::from_millis(2));
    }
}
