//! A real kernel that panics on the pool's threads, under a real model.

use std::sync::Arc;

use plimsoll_device::{CpuDevice, CpuMemory, CpuWeights, DeviceError, Isa, StepInput, ThreadPool};
use plimsoll_engine::cpu::CpuRunner;
use plimsoll_engine::runner::Runner;
use plimsoll_engine::scheduler::StepLimits;
use plimsoll_engine::testing::{Bench, Speculation, over_runner};
use plimsoll_engine::{Blueprint, Embed, EngineHandle, Limits, Options, Pooling, Request};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, Ledger};
use plimsoll_text::Tokenizer;

use super::hide_injected_panics;
use crate::common::{collect, exact, fixtures, greedy, quiet};
use crate::process::own_process;

/// A step that computes this id gives the kernels an id that the model does not have.
const POISON: u32 = 3;

struct Poisoned {
    inner: CpuRunner,
    tokens: Vec<u32>,
}

impl Poisoned {
    fn poison(&mut self, tokens: &[u32]) {
        self.tokens.clear();
        self.tokens.extend(tokens.iter().map(|id| if *id == POISON { u32::MAX } else { *id }));
    }
}

impl Runner for Poisoned {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.poison(step.tokens);
        self.inner.forward(&StepInput { tokens: &self.tokens, ..*step })
    }

    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.poison(step.tokens);
        self.inner.begin(&StepInput { tokens: &self.tokens, ..*step })
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        self.inner.advance(step)
    }

    fn forget(&mut self) {
        self.inner.forget();
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        self.inner.logits(row)
    }

    fn hidden(&mut self, row: usize) -> &[f32] {
        self.inner.hidden(row)
    }
}

const PAGES: usize = 64;

fn engine(model: &str) -> EngineHandle {
    let options = Options { threads: Some(2), ..exact() };
    let checkpoint = Checkpoint::open(&fixtures().join("models").join(model)).unwrap();
    let Blueprint { model, weights, max_context, encoder, .. } = Blueprint::new(&checkpoint, &options).unwrap();
    let (ledger, workspace) = (Arc::new(Ledger::new()), 64 << 20);
    let shape = model.shape(options.kv_dtype);
    for component in Component::ALL {
        ledger.plan(component, 1 << 30);
    }
    let mut pool = ThreadPool::new(2).unwrap();
    let weights = CpuWeights::load(weights, &checkpoint, &ledger, &mut pool, |_| {}).unwrap();
    let pages = if encoder.is_some() { 0 } else { PAGES };
    let window_pages = if shape.kv.window().is_some() { PAGES } else { 0 };
    let memory = CpuMemory::map(&ledger, &shape, pages, window_pages, workspace, 2, true).unwrap();
    let vocab = model.vocab_size();
    let inner = CpuRunner::new(Arc::from(model), CpuDevice::new(weights, pool, Isa::detect(), memory));
    let limits = Limits {
        max_req_total_len: max_context.min(PAGES * 16) as u32,
        max_total_token_num: (pages * 16) as u64,
        running_max_req_size: 8,
        max_waiting: 8,
        batch_max_tokens: 64,
        vocab_size: vocab as u32,
        max_logprobs: 20,
        max_stop_strings: 16,
        max_stop_bytes: 256,
        host_bytes: 16 << 20,
        encoder: encoder.is_some(),
        embedding_size: shape.hidden as u32,
        labels: 0,
        dense: false,
        token_types: 0,
    };
    let whole = encoder.is_some();
    let step = StepLimits {
        rows: 64,
        logit_rows: 8,
        running: 8,
        encoder_batch: whole,
        layered: !whole,
        window: shape.kv.window().unwrap_or(0),
        ..StepLimits::default()
    };
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    let runner = Poisoned { inner, tokens: Vec::with_capacity(64) };
    over_runner(Bench {
        runner,
        limits,
        step,
        prefix_cache: !whole,
        state_slots: window_pages,
        speculation: Speculation::default(),
        tokenizer,
        eos: Vec::new(),
        elastic: false,
        media: None,
    })
}

#[test]
fn a_kernel_that_panics_on_a_pool_thread_ends_its_request_alone() {
    own_process!();
    hide_injected_panics();
    let engine = engine("llama");
    let prompt = |seed: u32| (0..50).map(|i| 4 + (seed * 31 + i * 7) % 200).collect::<Vec<u32>>();
    let alone: Vec<_> = (0..5).map(|i| collect(engine.submit(greedy(&prompt(i), 20)).unwrap())).collect();
    assert!(alone.iter().all(|answer| answer.error.is_none() && !answer.ids.contains(&POISON)), "pick another poison");
    for at in [0, 25, 49] {
        let mut bad = prompt(77);
        bad[at] = POISON;
        let panics = engine.metrics().panics.get();
        let mut readers: Vec<_> = (0..5).map(|i| engine.submit(greedy(&prompt(i), 20)).unwrap()).collect();
        readers.insert(2, engine.submit(greedy(&bad, 20)).unwrap());
        let mut answers: Vec<_> = readers.into_iter().map(collect).collect();
        let failed = answers.remove(2);
        assert!(failed.error.is_some() && failed.ids.is_empty(), "{failed:?}");
        for (answer, alone) in answers.iter().zip(&alone) {
            assert_eq!((&answer.ids, &answer.error), (&alone.ids, &None), "poison at {at}");
        }
        assert!(engine.metrics().panics.get() > panics);
        quiet(&engine);
    }
    assert_eq!(engine.metrics().failed.get(), 3);
}

/// Steps of streams run before every layer of a long prompt, in one workspace. Real kernels give the same bits.
#[test]
fn steps_between_the_layers_of_a_long_prompt_change_no_bit() {
    own_process!();
    hide_injected_panics();
    for model in ["llama", "gemma3"] {
        let engine = engine(model);
        let request = |seed: u32, len: u32| {
            let prompt: Vec<u32> = (0..len).map(|i| 4 + (seed * 31 + i * 7) % 200).collect();
            Request { logprobs: Some(2), ..greedy(&prompt, if len > 64 { 8 } else { 70 }) }
        };
        let requests: Vec<_> = (0..3).map(|i| request(i, 20)).chain((3..6).map(|i| request(i, 110))).collect();
        let mut poisoned = request(9, 110);
        poisoned.prompt[100] = POISON;
        let alone: Vec<_> = requests.iter().map(|r| collect(engine.submit(r.clone()).unwrap())).collect();
        assert_eq!(engine.metrics().layered_chunks.get(), 0, "nobody else was there");
        let mut readers: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        readers.insert(4, engine.submit(poisoned).unwrap());
        let mut answers: Vec<_> = readers.into_iter().map(collect).collect();
        assert!(answers.remove(4).error.is_some());
        for (answer, alone) in answers.iter().zip(&alone) {
            assert_eq!((&answer.error, &answer.ids), (&None, &alone.ids), "{model}");
            assert!(answer.logprobs == alone.logprobs, "{model}: the same tokens, other log-probabilities");
        }
        assert!(engine.metrics().layered_chunks.get() > 0, "{model}");
        quiet(&engine);
    }
}

#[test]
fn a_kernel_that_panics_under_an_encoder_ends_its_input_alone() {
    own_process!();
    hide_injected_panics();
    let engine = engine("bert");
    let request = |prompt: &[u32]| {
        let embed = Some(Embed::new(Pooling::Mean));
        engine.submit(Request { embed, max_tokens: 0, ..greedy(prompt, 1) }).unwrap()
    };
    let prompt = |seed: u32, len: u32| (0..len).map(|i| 4 + (seed * 31 + i * 7) % 200).collect::<Vec<u32>>();
    let healthy: Vec<Vec<u32>> = (0..6).map(|i| prompt(i, 3 + 5 * i)).collect();
    let alone: Vec<_> = healthy.iter().map(|prompt| collect(request(prompt)).pooled.unwrap()).collect();
    for at in [0, 11] {
        let mut bad = prompt(77, 12);
        bad[at] = POISON;
        let panics = engine.metrics().panics.get();
        let mut readers: Vec<_> = healthy.iter().map(|prompt| request(prompt)).collect();
        readers.insert(2, request(&bad));
        let mut answers: Vec<_> = readers.into_iter().map(collect).collect();
        let failed = answers.remove(2);
        assert!(failed.error.is_some() && failed.pooled.is_none(), "{failed:?}");
        for (answer, alone) in answers.iter().zip(&alone) {
            assert_eq!((answer.pooled.as_ref(), &answer.error), (Some(alone), &None), "poison at {at}");
        }
        assert!(engine.metrics().panics.get() > panics);
        quiet(&engine);
    }
}
