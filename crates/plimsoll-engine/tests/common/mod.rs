//! What the engine's tests share: fixtures on disk, an engine over one of them, answers collected.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod recall;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{DtypePolicy, KvDtype};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{EngineHandle, FinishReason, Host, Options, Reader, Request, TokenLogprobs, start};
use plimsoll_formats::Checkpoint;
use plimsoll_text::Tokenizer;
use serde_json::Value;

/// The repository's fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
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

/// An engine over a fixture model.
pub fn engine(model: &str, options: &Options) -> EngineHandle {
    let dir = fixtures().join("models").join(model);
    let gguf = dir.join("model.gguf");
    let path = if gguf.is_file() { gguf } else { dir };
    let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tokenizer = fixtures().join("models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&tokenizer).unwrap());
    let host = Host::read(options).unwrap();
    start(&checkpoint, tokenizer, options, &host, |_| {}).unwrap_or_else(|e| panic!("{model}: {e}"))
}

/// A greedy request for `max_tokens` tokens, whatever they are.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> Request {
    Request {
        id: "test".into(),
        prompt: prompt.to_vec(),
        sampling: SamplingParams::greedy(),
        max_tokens,
        min_tokens: 0,
        stop: Vec::new(),
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        speculate: true,
        cache_salt: 0,
    }
}

/// Everything a request produced.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<Option<TokenLogprobs>>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub cached_tokens: u32,
    /// Drafted and accepted tokens.
    pub drafts: (u32, u32),
    pub finish: Option<FinishReason>,
    pub error: Option<String>,
}

/// Reads a request to its end.
pub fn collect(mut reader: Reader) -> Answer {
    let mut answer = Answer::default();
    while let Some(delta) = pollster::block_on(reader.next()) {
        answer.text.push_str(&delta.text);
        for token in delta.tokens {
            answer.ids.push(token.id);
            answer.logprobs.push(token.logprobs);
        }
        answer.prompt_logprobs.extend(delta.prompt_logprobs);
        answer.cached_tokens = delta.cached_tokens;
        answer.drafts = (delta.drafted_tokens, delta.accepted_tokens);
        answer.finish = delta.finish;
        answer.error = delta.error;
    }
    answer
}

/// Submits and reads to the end.
pub fn ask(engine: &EngineHandle, request: Request) -> Answer {
    collect(engine.submit(request).unwrap_or_else(|e| panic!("{e}")))
}

/// A JSON list of numbers as ids.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Waits until nothing runs and everything that requests held is back.
pub fn quiet(engine: &EngineHandle) {
    use std::sync::atomic::Ordering::Acquire;
    use std::time::{Duration, Instant};
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let status = engine.status();
        let held =
            status.pages_used.load(Acquire) - status.pages_cached.load(Acquire).min(status.pages_used.load(Acquire));
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
