//! The bounds of a step, and its entries.

use plimsoll_device::Bf16Rows;

/// Rows of preempted answers that a step computes again, beside its streams' rows, if [`StepLimits::split_numerics`].
const RECOMPUTED_ROWS: usize = 64;

/// The bounds of a step and of the running set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of one step. A row is one token position of one sequence.
    pub rows: usize,
    /// Rows of one step with logits.
    pub logit_rows: usize,
    /// Sequences that run at once.
    pub running: usize,
    /// State slots that a running sequence owns; 0 for models without recurrent state.
    pub slots: usize,
    /// Positions that sliding-window layers see, if these have pages of their own; 0 for models without.
    pub window: usize,
    /// Drafts that a sequence may have at once; 0 without speculation.
    pub drafts: usize,
    /// Drafts come from a draft head, which runs after every step, and not from prompt lookup.
    pub draft_head: bool,
    /// The draft head is a separate model: it continues from tokens, not from hidden states.
    pub draft_model: bool,
    /// Each sequence is computed whole in one step, and keeps no pages: an encoder model.
    pub encoder_batch: bool,
    /// A prompt may take more than a step. Its chunks, each as large as a step at most, are computed layer by layer between steps.
    pub layered: bool,
    /// Rows have positions in three axes, and some have encoder outputs in place of embeddings.
    pub media: bool,
    /// Rows of the largest image, if its rows attend to each other and must be computed in one step; 0 if an image may be cut.
    pub image_rows: usize,
    /// The rows that are computed in bfloat16.
    pub bf16: Bf16Rows,
    /// The device finds the most likely tokens of rows that need no other logits ([`StepInput::candidates`](plimsoll_device::StepInput)).
    pub candidates: bool,
}

impl StepLimits {
    /// Whether rows of prompts have numerics of their own. Then they come last in a step, and a prompt never reuses the pages of an answer.
    pub fn split_numerics(&self) -> bool {
        self.bf16 == Bf16Rows::Prompts
    }

    /// How many of `rows` rows are computed in bfloat16: the last ones. The last `of_prompts` are rows of prompts.
    pub fn bf16_rows(&self, rows: usize, of_prompts: usize) -> usize {
        match self.bf16 {
            Bf16Rows::None => 0,
            Bf16Rows::Prompts => of_prompts,
            Bf16Rows::All => rows,
        }
    }

    /// Whether logits are computed in bfloat16.
    pub fn bf16_logits(&self) -> bool {
        self.bf16 == Bf16Rows::All
    }

    /// The limits of a layered chunk: of one sequence, or of none if no chunk is layered.
    pub fn of_layers(&self) -> Self {
        Self { rows: if self.layered { self.rows } else { 0 }, running: usize::from(self.layered), ..*self }
    }

    /// The most rows of a step that are not a prompt's: newest tokens, drafts, and rows of preempted answers that are computed again. Where
    /// prompts have faster numerics these rows are slow, so a step has one for each stream and draft, and some for preempted answers.
    pub fn answer_rows(&self) -> usize {
        if self.split_numerics() { self.rows.min(self.logit_rows + RECOMPUTED_ROWS) } else { self.rows }
    }
}

/// The most rows of prompts beside decoding sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillBudget {
    /// Rows of all prompts in a step.
    pub prompts: usize,
    /// Rows of a layered chunk.
    pub long: usize,
}

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepEntry {
    /// Index in [`Scheduler::running`](super::Scheduler::running).
    pub seq: usize,
    /// Position of its first row.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// How many of its last rows have wanted logits.
    pub logit_rows: usize,
    /// How many of its last rows are drafts.
    pub drafts: usize,
}

impl StepEntry {
    /// Whether the state after each row is written to its own slot, since any of them may be the last accepted one.
    pub fn keeps_each(&self, slots: usize) -> bool {
        self.drafts > 0 && slots > 1
    }
}

/// Counts of the scheduler in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Sequences preempted.
    pub preempted: u64,
}
