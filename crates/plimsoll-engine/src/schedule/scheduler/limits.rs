//! What bounds a step, and what a step is made of.

use plimsoll_device::Rounded;

/// Rows of answers that a step computes again, beside those that its streams need, where [`StepLimits::apart`].
const RECOMPUTED_ROWS: usize = 64;

/// The bounds of a step and of the running set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of one step.
    pub rows: usize,
    /// Rows of one step with logits.
    pub logit_rows: usize,
    /// Sequences that run at once.
    pub running: usize,
    /// State slots that a running sequence owns; 0 for models without recurrent state.
    pub slots: usize,
    /// Drafts that a sequence may have at once; 0 without speculation.
    pub drafts: usize,
    /// They are a draft head's, which is run behind every step; otherwise they cost nothing to make.
    pub draft_head: bool,
    /// Sequences are computed whole, each in one step, and keep nothing: an encoder's.
    pub encoder_batch: bool,
    /// A prompt may take more than a step: a chunk of it, as large as a step at most, is computed layer by layer, between steps.
    pub layered: bool,
    /// Rows have places in three axes, and some of them outputs of a tower in place of embeddings.
    pub media: bool,
    /// Which rows are computed in bfloat16.
    pub rounded: Rounded,
}

impl StepLimits {
    /// Whether rows of prompts use an arithmetic of their own. Then they come last in a step, and a prompt never reuses
    /// what an answer has computed.
    pub fn apart(&self) -> bool {
        self.rounded == Rounded::Prompts
    }

    /// How many of `rows` rows, of which the last `of_prompts` are of prompts, are computed in bfloat16: the last ones.
    pub fn rounded_rows(&self, rows: usize, of_prompts: usize) -> usize {
        match self.rounded {
            Rounded::None => 0,
            Rounded::Prompts => of_prompts,
            Rounded::All => rows,
        }
    }

    /// Whether logits are.
    pub fn rounded_logits(&self) -> bool {
        self.rounded == Rounded::All
    }

    /// The same for a chunk that is computed layer by layer: of one sequence, or of none where there are no such chunks.
    pub fn of_layers(&self) -> Self {
        Self { rows: if self.layered { self.rows } else { 0 }, running: usize::from(self.layered), ..*self }
    }

    /// Rows of a step that are no prompt's, at most: newest tokens, drafts, and what answers that were preempted compute again. Where
    /// prompts have a faster arithmetic these are the slow ones, so that a step has no more of them than serve its streams and let every
    /// answer come back some time.
    pub fn answer_rows(&self) -> usize {
        if self.apart() { self.rows.min(self.logit_rows + RECOMPUTED_ROWS) } else { self.rows }
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

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
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

impl Share {
    /// Whether the state after each row goes to a slot of its own, since any of them may be the last that counts.
    pub fn keeps_each(&self, slots: usize) -> bool {
        self.drafts > 0 && slots > 1
    }
}

/// Counts of what scheduling a step did besides filling it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Sequences preempted.
    pub preempted: u64,
    /// Sequences that left the queue for the running set.
    pub admitted: u64,
}
