//! The parts of the engine thread's state, beside the scheduler, the cache and the runner.

use std::time::Instant;

use plimsoll_device::MediaRows;
use plimsoll_memory::heap::GivenUp;

use crate::memory::governor::Governor;
use crate::memory::trim::Trim;
use crate::request::state::SharedTokenizer;
use crate::runner::step_buffers::{DraftRows, StepBuffers};
use crate::sampling::Sampler;
use crate::schedule::scheduler::{StepEntry, StepLimits};
use crate::speculation::pace::{Pace, Speculation};
use crate::worker::speculate::{DraftedSeq, Tally};

/// The step that is planned or runs.
pub(super) struct CurrentStep {
    pub buffers: StepBuffers,
    /// Pieces of encoder outputs in it; empty between steps.
    pub media_rows: Vec<MediaRows<'static>>,
    pub entries: Vec<StepEntry>,
    /// Rows of each entry that were accepted: all but drafts that were rejected.
    pub accepted: Vec<usize>,
    /// Sequences that decode in it.
    pub decodes: usize,
}

/// Sampler and tokenizer.
pub(super) struct TokenOutput {
    pub sampler: Sampler,
    /// A copy of the row being sampled, kept while its log-probabilities are still to be reported.
    pub raw: Vec<f32>,
    pub tokenizer: SharedTokenizer,
    /// The model's own end-of-sequence tokens.
    pub eos: Vec<u32>,
}

/// Drafts of next tokens.
pub(super) struct Drafts {
    /// Drafts are accepted without verification.
    pub optimistic: bool,
    /// The most drafts of one sequence.
    pub per_seq_max: usize,
    pub pace: Pace,
    pub tally: Tally,
    /// The next pass of the draft head, and the sequences that get drafts from it.
    pub passes: Vec<DraftRows>,
    pub drafted: Vec<DraftedSeq>,
}

impl Drafts {
    pub fn new(speculation: Speculation, limits: &StepLimits) -> Self {
        Self {
            optimistic: speculation.optimistic,
            per_seq_max: limits.drafts,
            pace: Pace::new(speculation.adaptive, speculation.cost),
            tally: Tally::default(),
            passes: Vec::with_capacity(limits.running),
            drafted: Vec::with_capacity(limits.running),
        }
    }
}

/// The state of memory relief: the governor's actions, and memory to return to the system.
pub(super) struct MemoryRelief {
    pub governor: Governor,
    /// The emergency reserve, if it was released and not restored yet.
    pub given_up: Option<GivenUp>,
    /// The last memory reading that was handled.
    pub readings: u64,
    /// Pages to return to the system, reused.
    pub evicted: Vec<u32>,
    pub evicted_windows: Vec<u32>,
    /// Pages are resident only while they are used.
    pub elastic: bool,
    pub trim: Trim,
}

impl MemoryRelief {
    /// Reserves capacity for the ids of all `pages` and window pages.
    pub fn new(elastic: bool, pages: usize, windows: usize) -> Self {
        Self {
            governor: Governor::default(),
            given_up: None,
            readings: 0,
            evicted: Vec::with_capacity(pages),
            evicted_windows: Vec::with_capacity(windows),
            elastic,
            trim: Trim::new(),
        }
    }
}

/// Progress, for the decision whether to recover, and the damage of a step.
pub(super) struct Recovery {
    /// Step entries delivered since start, a measure of progress.
    pub delivered: u64,
    /// Delivered entries, ended requests and encoded items at the last check, and when the sum last changed.
    pub progress: (u64, Instant),
    /// `delivered` and ended requests at the last recovery.
    pub recovered_at: Option<u64>,
    /// A device was lost and could not be opened again.
    pub device_gone: bool,
    /// The last step had non-finite logits: the prefix cache must be cleared.
    pub non_finite: bool,
}

impl Default for Recovery {
    fn default() -> Self {
        Self { delivered: 0, progress: (0, Instant::now()), recovered_at: None, device_gone: false, non_finite: false }
    }
}
