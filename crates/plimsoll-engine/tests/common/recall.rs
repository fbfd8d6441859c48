//! A runner that remembers: its "keys and values" are the token ids themselves, and its logits are a hash of the whole
//! history as read back through the page table. A wrong, stale, shared or unwritten page changes the next token, and the
//! right answer is known without running anything.
//!
//! With state slots it is a hybrid: the history is remembered a second time, as a hash in slots that only the device's rules keep
//! true, and enters the logits too. With a draft head it guesses: right about a known share of positions, from what it reads back
//! of its own layer of the pages and of the hidden state it is handed. A wrong slot changes the answer; a wrong row for the head
//! changes what it accepts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plimsoll_device::{DeviceError, NO_STATE, PAGE_TOKENS, SeqSpan, StepInput};
use plimsoll_engine::runner::Runner;
use plimsoll_engine::scheduler::StepLimits;
use plimsoll_engine::testing::{Bench, Speculation, over_runner};
use plimsoll_engine::{EngineHandle, Limits};
use plimsoll_models::{Pictures, Sense};
use plimsoll_text::Tokenizer;

use super::tower::{self, Tower};

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
    pub context: usize,
    pub prefix_cache: bool,
    /// How long a step takes.
    pub step_time: Duration,
    /// How long a pass of the draft head takes.
    pub pass_time: Duration,
    /// Slots of recurrent state; 0: a model without.
    pub state_slots: usize,
    /// Drafts at once; 0: no speculation.
    pub drafts: usize,
    /// A head makes them; otherwise they are looked up in the text.
    pub head: bool,
    /// After so many of 256 histories the model says what followed the last token where it stood before.
    pub echo: u64,
    /// Of 256 positions the head is right about so many.
    pub right: u64,
    pub speculation: Speculation,
    /// It takes pictures.
    pub tower: Option<Tower>,
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
            drafts: 0,
            head: true,
            echo: 0,
            right: 256,
            speculation: Speculation { adaptive: false, ..Speculation::default() },
            tower: None,
        }
    }
}

impl Shape {
    /// A hybrid with `drafts` drafts (0: no head) of which `right` of 256 are right, and `spare` slots for checkpoints.
    pub fn hybrid(drafts: usize, right: u64, spare: usize) -> Self {
        let plain = Self::default();
        Self { state_slots: plain.running * (1 + drafts) + spare, drafts, right, rows: 128, ..plain }
    }

    /// Drafts are taken unchecked, in one slot a sequence.
    pub fn optimistic(self) -> Self {
        Self { speculation: Speculation { optimistic: true, ..self.speculation }, ..self }
    }

    /// Slots a sequence owns.
    fn ring(&self) -> usize {
        match (self.state_slots, self.speculation.optimistic) {
            (0, _) => 0,
            (_, true) => 1,
            (_, false) => 1 + self.drafts,
        }
    }
}

/// Layers of a step that is computed layer by layer.
const LAYERS: usize = 4;

/// What a test can see of the runner.
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
    /// Batches that went through the tower, and the most pictures of one.
    pub batches: AtomicU64,
    pub batch_max: AtomicU64,
    /// Batches that did while a step stood between two layers.
    pub batches_between: AtomicU64,
    /// Pictures that did.
    pub pictures: AtomicU64,
    /// Rows of encoder outputs in steps.
    pub media_rows: AtomicU64,
}

/// The runner.
pub struct Recall {
    shape: Shape,
    /// What stands at every position of every page.
    cache: Vec<u32>,
    /// The tokens there.
    ids: Vec<u32>,
    /// What stands in each row of the step.
    codes: Vec<u32>,
    /// What the tower has made.
    encoded: Vec<[f32; tower::WIDTH]>,
    /// The step that last wrote a position, so that two sequences writing the same place in one step are noticed.
    written: Vec<u64>,
    step: u64,
    /// Layers that are through of the step that was begun, if one was, and its tokens.
    begun: Option<(usize, Vec<u32>)>,
    /// The history each state slot stands after; garbage where a step failed.
    states: Vec<u64>,
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

/// What an engine over a remembering runner is built from.
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
        token_types: 0,
    };
    let step = StepLimits {
        rows: shape.rows,
        logit_rows: shape.logit_rows * (1 + shape.drafts),
        running: shape.running,
        slots: shape.ring(),
        drafts: shape.drafts,
        draft_head: shape.head && shape.drafts > 0,
        encoder_batch: false,
        layered: limits.max_req_total_len as usize > shape.rows,
        media: shape.tower.is_some(),
        rounded: plimsoll_device::Rounded::None,
    };
    let tokenizer = super::fixtures().join("models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&tokenizer).unwrap());
    let Shape { prefix_cache, state_slots, speculation, .. } = shape;
    let (eos, elastic) = (vec![VOCAB - 1], false);
    let media = shape.tower.map(|tower| tower.spec());
    let bench = Bench { runner, limits, step, prefix_cache, state_slots, speculation, tokenizer, eos, elastic, media };
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
        history.push(best(hash(history.iter().copied())));
    }
    history.split_off(prompt.len())
}

/// The greedy token after a history.
pub fn best(history: u64) -> u32 {
    let mut row = vec![0.0; VOCAB as usize];
    logits(history, &mut row);
    (0..VOCAB).max_by(|a, b| row[*a as usize].total_cmp(&row[*b as usize])).unwrap()
}

/// A history after one more token.
pub fn after(history: u64, id: u32) -> u64 {
    mix(history ^ u64::from(id))
}

/// The content of a row, for a model that gives each row a place in three axes.
pub fn code(own: u32, place: [f32; 3]) -> u32 {
    place.iter().fold(u64::from(own), |hash, axis| mix(hash ^ u64::from(axis.to_bits()))) as u32
}

fn hash(history: impl Iterator<Item = u32>) -> u64 {
    history.fold(1, after)
}

/// The logits after a history: distinct pseudo-random numbers.
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

/// How many of `drafts` drafts a step are right when `prompt` is continued by `tokens` tokens, counted as the engine does: drafted
/// and accepted.
pub fn expected_drafts(prompt: &[u32], tokens: usize, drafts: usize, right: u64) -> (u32, u32) {
    let said = says(prompt, tokens);
    let mut history = hash(prompt.iter().copied());
    let mut rights = Vec::new();
    for id in &said {
        history = after(history, *id);
        rights.push(is_right(history, right));
    }
    let (mut drafted, mut accepted) = (0, 0);
    // The first token comes with the prompt; `at` tokens are there, and drafts end one before the last.
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

/// A prompt of `len` ordinary tokens; those of one seed begin alike.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (mix(seed * 1000 + i) % 256) as u32).collect()
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
        let logit_rows = self.shape.logit_rows * (1 + self.shape.drafts);
        assert!(step.logit_rows.len() <= logit_rows, "{} logit rows", step.logit_rows.len());
        assert!(step.seqs.len() <= self.shape.running);
        if step.tokens.contains(&PANICS) {
            panic!("token {PANICS} was computed");
        }
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                let at = place(pages, seq.start + i);
                self.cache[at] = self.codes[seq.first_row + i];
                self.ids[at] = step.tokens[seq.first_row + i];
            }
        }
    }

    /// What stands in each row: its token, or what the tower has made for it, at its place.
    fn read_rows(&mut self, step: &StepInput<'_>) {
        self.codes.clear();
        self.codes.extend_from_slice(step.tokens);
        if self.shape.tower.is_none() {
            assert!(step.places.is_empty() && step.media.is_empty());
            return;
        }
        let mut next = 0;
        for piece in step.media {
            assert!(piece.first_row >= next && !piece.values.is_empty(), "pieces in order");
            for (row, values) in (piece.first_row..).zip(piece.values.chunks_exact(tower::WIDTH)) {
                assert!([tower::IMAGE, tower::VIDEO].contains(&step.tokens[row]), "row {row} is no placeholder");
                self.codes[row] = tower::code_of_row(values);
                next = row + 1;
                self.seen.media_rows.fetch_add(1, Ordering::Relaxed);
            }
        }
        let bare = |(own, token): (&u32, &u32)| own == token && [tower::IMAGE, tower::VIDEO].contains(token);
        assert!(!self.codes.iter().zip(step.tokens).any(bare), "a placeholder without outputs");
        assert_eq!(step.places.len(), step.tokens.len());
        self.codes.iter_mut().zip(step.places).for_each(|(own, place)| *own = code(*own, *place));
    }

    /// Moves every sequence's state on, into the slots that the step names. Returns the history after each row as the state has it.
    fn advance(&mut self, step: &StepInput<'_>) -> Vec<u64> {
        let mut written = Vec::new();
        let mut after_row = Vec::with_capacity(step.tokens.len());
        let sources: Vec<u32> = step.seqs.iter().filter_map(|seq| seq.state).collect();
        for seq in step.seqs {
            assert_eq!(seq.state.is_some(), seq.start > 0, "who has computed something has a state");
            let mut state = seq.state.map_or(1, |slot| self.states[slot as usize]);
            for row in seq.first_row..seq.first_row + seq.rows {
                state = after(state, self.codes[row]);
                after_row.push(state);
                let slot = step.state_out[row];
                if slot == NO_STATE {
                    continue;
                }
                let last = row + 1 == seq.first_row + seq.rows;
                assert!(!written.contains(&slot), "slot {slot} is written twice in one step");
                assert!(!sources.contains(&slot) || (last && seq.state == Some(slot)), "slot {slot} is being read");
                written.push(slot);
                self.states[slot as usize] = state;
            }
            assert_ne!(step.state_out[seq.first_row + seq.rows - 1], NO_STATE, "the last state is kept");
        }
        self.seen.states_written.fetch_add(written.len() as u64, Ordering::Relaxed);
        after_row
    }

    fn read(&mut self, step: &StepInput<'_>, states: &[u64]) {
        self.row_len.clear();
        self.hidden.clear();
        let span = |row: usize| {
            let of = |s: &&SeqSpan| (s.first_row..s.first_row + s.rows).contains(&row);
            step.seqs.iter().find(of).unwrap()
        };
        if self.shape.head && self.shape.drafts > 0 {
            for row in 0..step.tokens.len() {
                self.hidden.push((self.history(step, span(row), row), step.positions[row] as usize));
            }
        }
        for (i, logit_row) in step.logit_rows.iter().enumerate() {
            let logit_row = *logit_row as usize;
            let history = self.history(step, span(logit_row), logit_row);
            // Both memories agree, or the answer is another one.
            let history =
                states.get(logit_row).map_or(history, |state| if *state == history { history } else { !history });
            let echoed = self.echoed(step, span(logit_row), logit_row, history);
            let row = &mut self.logits[i * VOCAB as usize..][..VOCAB as usize];
            logits(history, row);
            echoed.into_iter().for_each(|id| row[id as usize] += 12.0);
            let token = step.tokens[logit_row];
            if token == NAN {
                row.fill(f32::NAN);
            }
            self.row_len.push(if token == SHORT_ROW { 7 } else { VOCAB as usize });
        }
    }

    /// The history up to a row, as the pages have it.
    fn history(&self, step: &StepInput<'_>, seq: &SeqSpan, row: usize) -> u64 {
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        let end = seq.start + row - seq.first_row;
        hash((0..=end).map(|position| self.cache[place(pages, position)]))
    }

    /// What followed a row's token where it last stood before, as the pages have it, if that is to be said again.
    fn echoed(&self, step: &StepInput<'_>, seq: &SeqSpan, row: usize, history: u64) -> Option<u32> {
        if mix(history ^ 0xec40) % 256 >= self.shape.echo {
            return None;
        }
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        let id = |position: usize| self.ids[place(pages, position)];
        let last = seq.start + row - seq.first_row;
        (0..last).rev().find(|position| id(*position) == id(last)).map(|position| id(position + 1))
    }

    /// One row of the draft head: its entry is written, the entries it may see are checked, and the token it names moves the hidden
    /// state on.
    fn draft_row(&mut self, step: &StepInput<'_>, seq: &SeqSpan, row: usize, from: (u64, usize)) {
        let position = step.positions[row] as usize;
        let further = self.passes > 0;
        assert_eq!(position, from.1 + usize::from(further), "the hidden state is of another position");
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        self.following[place(pages, position)] = step.tokens[row];
        let mut broken = false;
        for seen in seq.seen_from..position {
            // What follows a position is what the main layers have at the next, as far as they have come; the entry before a
            // page that others share may be of another continuation.
            let shared = (seen + 1).is_multiple_of(PAGE_TOKENS);
            let next = self.ids[place(pages, seen + 1)];
            let drafted = further && seen + self.passes >= seq.start;
            broken |= !shared && !drafted && self.following[place(pages, seen)] != next;
        }
        assert!(!broken, "the draft head sees an entry it has not made for this history");
        let next = match step.places.get(row) {
            Some(place) => code(step.tokens[row], place.map(|axis| axis + 1.0)),
            None => step.tokens[row],
        };
        self.hidden.push((after(from.0, next), position));
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
        self.read_rows(step);
        self.store(step);
        self.passes = 0;
        if step.tokens.contains(&FAILS) {
            // Half of it has been written.
            step.state_out.iter().filter(|slot| **slot != NO_STATE).for_each(|slot| self.states[*slot as usize] = 0);
            return Err(DeviceError::Injected("the token that fails"));
        }
        let states = if self.shape.state_slots > 0 { self.advance(step) } else { Vec::new() };
        self.read(step, &states);
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        Ok(())
    }

    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.begun = Some((0, step.tokens.to_vec()));
        Ok(())
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        let (layer, tokens) = self.begun.take().expect("a step was begun");
        assert_eq!(tokens, step.tokens, "it is the one that was begun");
        self.seen.layers.fetch_add(1, Ordering::Relaxed);
        // Every layer writes: if the pages are another's by now, that one will not say what it should.
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            (seq.start..seq.start + seq.rows).for_each(|position| self.cache[place(pages, position)] = u32::MAX);
        }
        if layer + 1 == LAYERS {
            return self.forward(step).map(|()| true);
        }
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        self.begun = Some((layer + 1, tokens));
        Ok(false)
    }

    fn forget(&mut self) {
        self.begun = None;
    }

    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.seen.draft_passes.fetch_add(1, Ordering::Relaxed);
        assert_eq!(from.len(), step.tokens.len());
        assert!(step.logit_rows.len() <= self.shape.running && step.state_out.is_empty());
        if !self.shape.pass_time.is_zero() {
            std::thread::sleep(self.shape.pass_time);
        }
        let before = std::mem::take(&mut self.hidden);
        for seq in step.seqs {
            assert!(seq.state.is_none() && seq.seen_from <= seq.start);
            for row in seq.first_row..seq.first_row + seq.rows {
                self.draft_row(step, seq, row, before[from[row] as usize]);
            }
        }
        self.row_len.clear();
        let mut carried = Vec::new();
        for (i, wanted) in step.logit_rows.iter().enumerate() {
            let (history, position) = self.hidden[*wanted as usize];
            carried.push((history, position));
            let row = &mut self.logits[i * VOCAB as usize..][..VOCAB as usize];
            logits(history, row);
            if !is_right(history, self.shape.right) {
                // The same numbers for other tokens: wrong whether drawn or greedy, as a rule.
                row[..NEVER_SAID as usize].rotate_right(1);
            }
            self.row_len.push(VOCAB as usize);
        }
        self.hidden = carried;
        self.passes += 1;
        Ok(())
    }

    fn encode(&mut self, _: Sense, pictures: &Pictures<'_>) -> Result<(), DeviceError> {
        self.seen.batches_between.fetch_add(u64::from(self.begun.is_some()), Ordering::Relaxed);
        // As on a device, it takes the place of what the last step left.
        self.row_len.clear();
        self.encoded.clear();
        let count = pictures.grids.len() as u64;
        self.seen.batches.fetch_add(1, Ordering::Relaxed);
        self.seen.batch_max.fetch_max(count, Ordering::Relaxed);
        self.seen.pictures.fetch_add(count, Ordering::Relaxed);
        assert!(count as usize <= self.shape.tower.unwrap().batch, "A28: {count} at once");
        let mut patches = pictures.patches;
        for grid in pictures.grids {
            let rows = grid.frames * grid.height * grid.width;
            let (own, rest) = patches.split_at(rows * 3 * 2 * 2 * 2);
            patches = rest;
            let all = |colour: u8| own.iter().all(|value| (value - f32::from(colour) / 255.0).abs() < 1e-6);
            assert!(!all(tower::PANICS), "a picture that panics");
            if all(tower::FAILS) {
                return Err(DeviceError::Injected("the picture that fails"));
            }
            self.encoded.extend(tower::outputs(own, rows / 4));
        }
        assert!(patches.is_empty());
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        Ok(())
    }

    fn embedding(&mut self, row: usize) -> &[f32] {
        &self.encoded[row]
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let len = self.row_len[row];
        &mut self.logits[row * VOCAB as usize..][..len]
    }
}
