//! A runner that remembers: its "keys and values" are the token ids themselves, and its logits are a hash of the whole
//! history as read back through the page table. A wrong, stale, shared or unwritten page changes the next token, and the
//! right answer is known without running anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_device::{DeviceError, PAGE_TOKENS, StepInput};
use plimsoll_engine::runner::Runner;
use plimsoll_engine::scheduler::StepLimits;
use plimsoll_engine::testing::{Bench, over_runner};
use plimsoll_engine::{EngineHandle, Limits};
use plimsoll_text::Tokenizer;

/// Ids of the fixture tokenizer.
pub const VOCAB: u32 = 384;
/// The model never says an id from here on, so that tests can give them a meaning.
pub const NEVER_SAID: u32 = 300;
/// A step that computes this token fails.
pub const FAILS: u32 = 371;
/// A step that computes this token panics.
pub const PANICS: u32 = 372;
/// The logits after this token are not numbers.
pub const NAN: u32 = 373;
/// The sampler is given a row of the wrong length after this token.
pub const SHORT_ROW: u32 = 374;

/// Sizes of an engine over [`Recall`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub pages: usize,
    pub rows: usize,
    pub logit_rows: usize,
    pub running: usize,
    pub waiting: usize,
    pub beside_decode: usize,
    pub context: usize,
    pub prefix_cache: bool,
    /// How long a step takes.
    pub step_time: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            pages: 128,
            rows: 32,
            logit_rows: 8,
            running: 8,
            waiting: 64,
            beside_decode: 32,
            context: 256,
            prefix_cache: true,
            step_time: Duration::ZERO,
        }
    }
}

/// What a test can see of the runner.
#[derive(Debug, Default)]
pub struct Seen {
    /// Steps carried out.
    pub steps: AtomicU64,
    /// Rows whose logits were computed.
    pub logit_rows: AtomicU64,
    /// The most sequences in one step.
    pub seqs_max: AtomicU64,
}

/// The runner.
pub struct Recall {
    shape: Shape,
    /// Token at every position of every page.
    cache: Vec<u32>,
    /// The step that last wrote a position, so that two sequences writing the same place in one step are noticed.
    written: Vec<u64>,
    step: u64,
    logits: Vec<f32>,
    /// Length of each row of logits.
    row_len: Vec<usize>,
    seen: Arc<Seen>,
}

/// What an engine over a remembering runner is built from.
pub fn recall_bench(shape: Shape) -> (Bench<Recall>, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let runner = Recall {
        shape,
        cache: vec![u32::MAX; shape.pages * PAGE_TOKENS],
        written: vec![0; shape.pages * PAGE_TOKENS],
        step: 0,
        logits: vec![0.0; shape.logit_rows * VOCAB as usize],
        row_len: Vec::new(),
        seen: Arc::clone(&seen),
    };
    let limits = Limits {
        max_req_total_len: shape.context.min(shape.pages * PAGE_TOKENS) as u32,
        max_total_token_num: (shape.pages * PAGE_TOKENS) as u64,
        running_max_req_size: shape.running as u32,
        max_waiting: shape.waiting as u32,
        batch_max_tokens: shape.rows as u32,
        vocab_size: VOCAB,
        max_logprobs: 20,
        max_stop_strings: 16,
        max_stop_bytes: 256,
        host_bytes: 16 << 20,
    };
    let step = StepLimits {
        rows: shape.rows,
        logit_rows: shape.logit_rows,
        running: shape.running,
        prefill_rows_beside_decode: shape.beside_decode,
    };
    let tokenizer = super::fixtures().join("models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&tokenizer).unwrap());
    let prefix_cache = shape.prefix_cache;
    let bench = Bench { runner, limits, step, prefix_cache, tokenizer, eos: vec![VOCAB - 1], elastic: false };
    (bench, seen)
}

/// An engine over a remembering runner.
pub fn recall_engine(shape: Shape) -> (EngineHandle, Arc<Seen>) {
    let (bench, seen) = recall_bench(shape);
    (over_runner(bench), seen)
}

/// What the model says after `prompt`, greedily.
pub fn says(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..tokens {
        let mut row = vec![0.0; VOCAB as usize];
        logits(history.iter().copied(), &mut row);
        let best = (0..VOCAB).max_by(|a, b| row[*a as usize].total_cmp(&row[*b as usize]));
        history.push(best.unwrap());
    }
    history.split_off(prompt.len())
}

/// The logits after a history: distinct pseudo-random numbers.
fn logits(history: impl Iterator<Item = u32>, row: &mut [f32]) {
    let seed = history.fold(1, |h: u64, id| mix(h ^ u64::from(id)));
    for (id, logit) in row.iter_mut().enumerate() {
        *logit = (mix(seed + id as u64) >> 40) as f32 / (1 << 21) as f32;
        if id as u32 >= NEVER_SAID {
            *logit = -20.0;
        }
    }
}

/// SplitMix64's finalizer.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Recall {
    /// Writes every row's token to its place, checking that the step is well formed.
    fn store(&mut self, step: &StepInput<'_>) {
        let mut next_row = 0;
        for seq in step.seqs {
            assert_eq!(seq.first_row, next_row, "rows follow one another");
            assert!(seq.rows > 0, "a share has rows");
            next_row += seq.rows;
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                let position = seq.start + i;
                assert_eq!(step.positions[seq.first_row + i] as usize, position);
                let at = place(pages, position);
                assert_ne!(self.written[at], self.step, "two sequences write one place");
                self.written[at] = self.step;
                // Garbage first: a step that fails half way leaves it behind.
                self.cache[at] = u32::MAX;
            }
        }
        assert_eq!(step.tokens.len(), next_row);
        assert!(next_row <= self.shape.rows && next_row > 0, "{next_row} rows");
        assert!(step.logit_rows.len() <= self.shape.logit_rows, "{} logit rows", step.logit_rows.len());
        assert!(step.seqs.len() <= self.shape.running);
        if step.tokens.contains(&PANICS) {
            panic!("token {PANICS} was computed");
        }
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                self.cache[place(pages, seq.start + i)] = step.tokens[seq.first_row + i];
            }
        }
    }

    fn read(&mut self, step: &StepInput<'_>) {
        self.row_len.clear();
        let rows = self.logits.chunks_exact_mut(VOCAB as usize);
        for (logit_row, row) in step.logit_rows.iter().zip(rows) {
            let logit_row = *logit_row as usize;
            let of = |s: &&plimsoll_device::SeqSpan| (s.first_row..s.first_row + s.rows).contains(&logit_row);
            let seq = step.seqs.iter().find(of).unwrap();
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            let end = seq.start + logit_row - seq.first_row;
            logits((0..=end).map(|position| self.cache[place(pages, position)]), row);
            let token = step.tokens[logit_row];
            if token == NAN {
                row.fill(f32::NAN);
            }
            self.row_len.push(if token == SHORT_ROW { 7 } else { VOCAB as usize });
        }
    }
}

fn place(pages: &[u32], position: usize) -> usize {
    pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
}

impl Runner for Recall {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.step += 1;
        self.seen.steps.fetch_add(1, Ordering::Relaxed);
        self.seen.logit_rows.fetch_add(step.logit_rows.len() as u64, Ordering::Relaxed);
        self.seen.seqs_max.fetch_max(step.seqs.len() as u64, Ordering::Relaxed);
        self.store(step);
        if step.tokens.contains(&FAILS) {
            return Err(DeviceError::Injected("the token that fails"));
        }
        self.read(step);
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        Ok(())
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let len = self.row_len[row];
        &mut self.logits[row * VOCAB as usize..][..len]
    }
}
