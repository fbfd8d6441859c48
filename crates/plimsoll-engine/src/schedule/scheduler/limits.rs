//! What bounds a step, and what a step is made of.

use plimsoll_device::Bf16Rows;

/// Rows of answers that a step computes again, beside those that its streams need, where [`StepLimits::split_numerics`].
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
    /// Positions that sliding-window layers see, where these have pages of their own; 0 for models without.
    pub window: usize,
    /// Drafts that a sequence may have at once; 0 without speculation.
    pub drafts: usize,
    /// Drafts come from a draft head, which runs after every step, and not from prompt lookup.
    pub draft_head: bool,
    /// The draft head is a separate model: it continues from tokens, not from hidden states.
    pub draft_model: bool,
    /// Sequences are computed whole, each in one step, and keep nothing: an encoder's.
    pub encoder_batch: bool,
    /// A prompt may take more than a step: a chunk of it, as large as a step at most, is computed layer by layer, between steps.
    pub layered: bool,
    /// Rows have places in three axes, and some of them outputs of an encoder in place of embeddings.
    pub media: bool,
    /// Rows of the largest image, where the rows of an image attend to each other and are computed in one step; 0 where an image may be cut.
    pub image_rows: usize,
    /// Which rows are computed in bfloat16.
    pub bf16: Bf16Rows,
    /// The device finds the most likely tokens of rows that need no more ([`StepInput::candidates`](plimsoll_device::StepInput)).
    pub candidates: bool,
}

impl StepLimits {
    /// Whether rows of prompts use an arithmetic of their own. Then they come last in a step, and a prompt never reuses
    /// what an answer has computed.
    pub fn split_numerics(&self) -> bool {
        self.bf16 == Bf16Rows::Prompts
    }

    /// How many of `rows` rows, of which the last `of_prompts` are of prompts, are computed in bfloat16: the last ones.
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

    /// The same for a chunk that is computed layer by layer: of one sequence, or of none where there are no such chunks.
    pub fn of_layers(&self) -> Self {
        Self { rows: if self.layered { self.rows } else { 0 }, running: usize::from(self.layered), ..*self }
    }

    /// Rows of a step that are no prompt's, at most: newest tokens, drafts, and rows of preempted answers that are computed again. Where
    /// prompts have a faster arithmetic these rows are the slow ones, so a step has one for each stream and draft, and some for preempted
    /// answers.
    pub fn answer_rows(&self) -> usize {
        if self.split_numerics() { self.rows.min(self.logit_rows + RECOMPUTED_ROWS) } else { self.rows }
    }
}

/// Rows of prompts beside decoding sequences, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillBudget {
    /// In a step, of all prompts together.
    pub prompts: usize,
    /// In a chunk that is computed layer by layer.
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
    /// How many of its last rows produce logits.
    pub logit_rows: usize,
    /// How many of its last rows are drafts.
    pub drafts: usize,
}

impl StepEntry {
    /// Whether the state after each row goes to a slot of its own, since any of them may be the last that counts.
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
