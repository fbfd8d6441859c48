//! A runner that remembers: its "keys and values" are the token ids themselves. Its logits are a hash of the whole history as read through
//! the page table. A wrong, stale, shared or unwritten page changes the next token. The right answer is known without running anything.
//!
//! With a sliding window it also stores the last positions as hashes in window pages, and every row reads them there.
//!
//! With state slots it is a hybrid: the history is also stored as a hash in slots, which stay right only if the device's rules hold. This
//! hash enters the logits too. A draft head guesses right at a known share of positions. It reads its own layer of the pages and the hidden
//! state it is given. A wrong slot changes the answer; a wrong row for the head changes the number of accepted drafts.

mod run;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_device::{DeviceError, NO_STATE, PAGE_TOKENS, SeqSpan, StepInput};
use plimsoll_engine::runner::Runner;
use plimsoll_engine::scheduler::StepLimits;
use plimsoll_engine::testing::{Bench, Speculation, over_runner};
use plimsoll_engine::{EngineHandle, Limits};
use plimsoll_models::{EncoderInput, EncoderKind};
use plimsoll_text::Tokenizer;

use super::media_encoder::{self, MediaEncoder};

/// Ids of the fixture tokenizer.
pub const VOCAB: u32 = 384;
/// The model never generates an id from here on, so that tests can give these ids a meaning.
pub const NEVER_SAID: u32 = 300;
/// A step that computes this token fails.
pub const FAILS: u32 = 371;
/// A step that computes this token panics.
pub const PANICS: u32 = 372;
/// The logits after this token are NaN.
pub const NAN: u32 = 373;
/// The logits after this token are a row of the wrong length.
pub const SHORT_ROW: u32 = 374;

/// Sizes of an engine over [`Recall`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub pages: usize,
    pub rows: usize,
    pub logit_rows: usize,
    pub running: usize,
    pub waiting: usize,
    pub context: usize,
    pub prefix_cache: bool,
    /// Duration of a step.
    pub step_time: Duration,
    /// Duration of a pass of the draft head.
    pub pass_time: Duration,
    /// Slots of recurrent state; 0: a model without state.
    pub state_slots: usize,
    /// Positions that a sliding-window layer sees; 0: a model without windows. There are `state_slots` window pages.
    pub window: usize,
    /// Drafts at once; 0: no speculation.
    pub drafts: usize,
    /// Whether a draft head makes the drafts; otherwise they are looked up in the prompt and answer.
    pub head: bool,
    /// After this many of 256 histories the model repeats the token that followed the last token where it stood before.
    pub echo: u64,
    /// At this many of 256 positions the draft head is right.
    pub right: u64,
    pub speculation: Speculation,
    /// Sizes of the media encoder; None: the model takes no images.
    pub encoder: Option<MediaEncoder>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            pages: 128,
            rows: 32,
            logit_rows: 8,
            running: 8,
            waiting: 64,
            context: 256,
            prefix_cache: true,
            step_time: Duration::ZERO,
            pass_time: Duration::ZERO,
            state_slots: 0,
            window: 0,
            drafts: 0,
            head: true,
            echo: 0,
            right: 256,
            speculation: Speculation { adaptive: false, ..Speculation::default() },
            encoder: None,
        }
    }
}

impl Shape {
    /// A hybrid with `drafts` drafts a step (0: no head), of which `right` of 256 are right. `spare` slots are for checkpoints.
    pub fn hybrid(drafts: usize, right: u64, spare: usize) -> Self {
        let plain = Self::default();
        Self { state_slots: plain.running * (1 + drafts) + spare, drafts, right, rows: 128, ..plain }
    }

    /// The same shape with optimistic drafts: they are not verified, and a sequence owns one slot.
    pub fn optimistic(self) -> Self {
        Self { speculation: Speculation { optimistic: true, ..self.speculation }, ..self }
    }

    /// Returns the state slots that a sequence owns.
    fn ring(&self) -> usize {
        match (self.state_slots, self.speculation.optimistic) {
            (0, _) => 0,
            _ if self.window > 0 => 0,
            (_, true) => 1,
            (_, false) => 1 + self.drafts,
        }
    }
}

/// Layers of a step that is computed layer by layer.
const LAYERS: usize = 4;

/// Counters of the runner that tests read.
#[derive(Debug, Default)]
pub struct Seen {
    /// Steps carried out.
    pub steps: AtomicU64,
    /// Layers of steps that were computed layer by layer.
    pub layers: AtomicU64,
    /// Rows with computed logits.
    pub logit_rows: AtomicU64,
    /// The most sequences in one step.
    pub seqs_max: AtomicU64,
    /// Draft passes.
    pub draft_passes: AtomicU64,
    /// State slots written.
    pub states_written: AtomicU64,
    /// Batches that the encoder has computed, and the most images of one batch.
    pub batches: AtomicU64,
    pub batch_max: AtomicU64,
    /// Batches that the encoder has computed while a step stood between two layers.
    pub batches_between: AtomicU64,
    /// Images that the encoder has computed.
    pub images: AtomicU64,
    /// Rows of encoder outputs in steps.
    pub media_rows: AtomicU64,
}

/// The runner.
pub struct Recall {
    shape: Shape,
    /// The code of every position of every page.
    cache: Vec<u32>,
    /// The token id of every position of every page.
    ids: Vec<u32>,
    /// The code of each row of the step.
    codes: Vec<u32>,
    /// Output rows of the encoder.
    encoded: Vec<[f32; media_encoder::WIDTH]>,
    /// The step that last wrote a position. Two sequences that write one position in one step are noticed.
    written: Vec<u64>,
    step: u64,
    /// The unfinished step that is computed layer by layer: its number of computed layers and its tokens.
    begun: Option<(usize, Vec<u32>)>,
    /// Hash of the history that each state slot stands after; garbage where a step failed.
    states: Vec<u64>,
    /// The history at every position of every window page.
    windows: Vec<u64>,
    /// The draft head's layer: the token that follows each position.
    following: Vec<u32>,
    /// Hidden states of the last pass, one a row: history and position.
    hidden: Vec<(u64, usize)>,
    /// Draft passes since the last step.
    passes: usize,
    logits: Vec<f32>,
    /// Length of each row of logits.
    row_len: Vec<usize>,
    seen: Arc<Seen>,
}

/// The parts that an engine over a remembering runner is built from.
pub fn recall_bench(shape: Shape) -> (Bench<Recall>, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let runner = Recall {
        shape,
        cache: vec![u32::MAX; shape.pages * PAGE_TOKENS],
        ids: vec![u32::MAX; shape.pages * PAGE_TOKENS],
        codes: Vec::with_capacity(shape.rows),
        encoded: Vec::new(),
        written: vec![0; shape.pages * PAGE_TOKENS],
        step: 0,
        begun: None,
        states: vec![u64::MAX; shape.state_slots],
        windows: vec![u64::MAX; shape.state_slots * PAGE_TOKENS],
        following: vec![u32::MAX; shape.pages * PAGE_TOKENS],
        hidden: Vec::with_capacity(shape.rows),
        passes: 0,
        logits: vec![0.0; shape.logit_rows * (1 + shape.drafts) * VOCAB as usize],
        row_len: Vec::with_capacity(shape.logit_rows),
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
        encoder: false,
        embedding_size: 0,
        labels: 0,
        dense: false,
        token_types: 0,
    };
    let step = StepLimits {
        rows: shape.rows,
        logit_rows: shape.logit_rows * (1 + shape.drafts),
        running: shape.running,
        slots: shape.ring(),
        window: shape.window,
        drafts: shape.drafts,
        draft_head: shape.head && shape.drafts > 0,
        draft_model: false,
        encoder_batch: false,
        layered: limits.max_req_total_len as usize > shape.rows,
        media: shape.encoder.is_some(),
        image_rows: 0,
        bf16: plimsoll_device::Bf16Rows::None,
        candidates: false,
    };
    let tokenizer = super::fixtures().join("models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&tokenizer).unwrap());
    let Shape { prefix_cache, state_slots, speculation, .. } = shape;
    let (eos, elastic) = (vec![VOCAB - 1], false);
    let media = shape.encoder.map(|encoder| encoder.spec());
    let bench = Bench { runner, limits, step, prefix_cache, state_slots, speculation, tokenizer, eos, elastic, media };
    (bench, seen)
}

/// An engine over a remembering runner.
pub fn recall_engine(shape: Shape) -> (EngineHandle, Arc<Seen>) {
    let (bench, seen) = recall_bench(shape);
    (over_runner(bench), seen)
}

/// Returns the greedy continuation of `prompt`, `tokens` tokens long.
pub fn says(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..tokens {
        history.push(best(hash(history.iter().copied())));
    }
    history.split_off(prompt.len())
}

/// Returns the greedy token after a history.
pub fn best(history: u64) -> u32 {
    let mut row = vec![0.0; VOCAB as usize];
    logits(history, &mut row);
    (0..VOCAB).max_by(|a, b| row[*a as usize].total_cmp(&row[*b as usize])).unwrap()
}

/// Returns the hash of a history with one more token.
pub fn after(history: u64, id: u32) -> u64 {
    mix(history ^ u64::from(id))
}

/// The code of a row, for a model that gives each row a place in three axes.
pub fn code(own: u32, place: [f32; 3]) -> u32 {
    place.iter().fold(u64::from(own), |hash, axis| mix(hash ^ u64::from(axis.to_bits()))) as u32
}

fn hash(history: impl Iterator<Item = u32>) -> u64 {
    history.fold(1, after)
}

/// Writes the logits after a history: distinct pseudo-random numbers.
fn logits(history: u64, row: &mut [f32]) {
    for (id, logit) in row.iter_mut().enumerate() {
        *logit = (mix(history.wrapping_add(id as u64)) >> 40) as f32 / (1 << 21) as f32;
        if id as u32 >= NEVER_SAID {
            *logit = -20.0;
        }
    }
}

/// Whether a head that is right about `right` of 256 positions is right after this history.
pub fn is_right(history: u64, right: u64) -> bool {
    mix(history ^ 0x00d1_ce00) % 256 < right
}

/// Returns the drafted and the accepted tokens when `prompt` is continued by `tokens` tokens with `drafts` drafts a step. Both are counted
/// as the engine counts them.
pub fn expected_drafts(prompt: &[u32], tokens: usize, drafts: usize, right: u64) -> (u32, u32) {
    let said = says(prompt, tokens);
    let mut history = hash(prompt.iter().copied());
    let mut rights = Vec::new();
    for id in &said {
        history = after(history, *id);
        rights.push(is_right(history, right));
    }
    let (mut drafted, mut accepted) = (0, 0);
    // The first token comes with the prompt. `at` counts generated tokens; drafts end one before the last.
    let mut at = 1;
    while at < tokens {
        let n = drafts.min(tokens - at - 1);
        let hits = (0..n).take_while(|i| rights[at - 1 + i]).count();
        drafted += n as u32;
        accepted += hits as u32;
        at += hits + 1;
    }
    (drafted, accepted)
}

/// SplitMix64's finalizer.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A prompt of `len` ordinary tokens; prompts of one seed begin alike.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (mix(seed * 1000 + i) % 256) as u32).collect()
}
