//! One step's batch, the input of models and devices.

use crate::kv::KvGroup;

/// One sequence's rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpan {
    /// The sequence's first row in the step.
    pub first_row: usize,
    /// Consecutive rows: 1 while decoding, a chunk while prefilling.
    pub rows: usize,
    /// The position of the first row in the sequence.
    pub start: usize,
    /// Index of the first page id in [`StepInput::pages`].
    pub pages_at: usize,
    /// Number of page ids: enough for `start + rows` positions.
    pub pages: usize,
    /// Attention reads no position before this one: 0, except for a draft head that skipped the earlier ones.
    pub seen_from: usize,
    /// The state slot that recurrent layers start from; none: the sequence starts here, from zeros.
    pub state: Option<u32>,
}

/// In [`StepInput::state_out`]: the state after this row is not kept.
pub const NO_STATE: u32 = plimsoll_kernels::NO_SLOT;

/// Most candidates of a row.
pub const CANDIDATES_MAX: usize = 128;

/// Elements of a row in one block of the first pass of [`Device::candidates`](super::Device::candidates).
pub const CANDIDATE_BLOCK: usize = 64;

/// Consecutive rows of a step that take their embeddings from an encoder.
#[derive(Clone, Copy, Debug)]
pub struct MediaRows<'a> {
    /// The first of the rows.
    pub first_row: usize,
    /// Their embeddings, row after row, each as wide as the encoder's output. The planner has none: empty.
    pub values: &'a [f32],
}

/// One step's batch: rows of all sequences, one after another.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepInput<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// The sequences.
    pub seqs: &'a [SeqSpan],
    /// Page ids of all sequences, one after another. For [`Device::attend_within`](super::Device::attend_within), which stores nothing,
    /// they count from 0.
    pub pages: &'a [u32],
    /// Page ids of the window group, at the same indices as those of the whole context; empty for models without. Page ids before the
    /// window of a sequence's rows are not used, but must be pages of the pool (0, say).
    pub window_pages: &'a [u32],
    /// Token type of each row, for encoders that tell the texts of a pair apart; empty for all others.
    pub types: &'a [u32],
    /// The rows that need logits, ascending.
    pub logit_rows: &'a [u32],
    /// The sequences of the rows that need logits, as if they were all rows of the step ([`Self::wanted`]). May be empty.
    pub logit_seqs: &'a [SeqSpan],
    /// For each row that needs logits, the number of most likely tokens that sampling needs, at most [`CANDIDATES_MAX`]. 0: it needs all
    /// logits. Empty: all these rows need all logits.
    pub candidates: &'a [u32],
    /// For each row the slot that receives the recurrent state after it, or [`NO_STATE`]; empty for models without state.
    /// A sequence's last row always names one. It may be the slot that the sequence starts from; no slot is named twice.
    pub state_out: &'a [u32],
    /// The position of each row in time, height and width, for models that give images a position in all three. Empty:
    /// the row's position, three times. The numbers are whole, except after a video with frames that are not whole
    /// steps apart.
    pub places: &'a [[f32; 3]],
    /// For each row the position after the last that it attends to. Only models in which the rows of an image attend to each other
    /// have it; the rows of an image are then in one step. Empty: no row attends to a later one.
    pub ends: &'a [u32],
    /// Rows that do not take their embeddings from their tokens.
    pub media: &'a [MediaRows<'a>],
    /// Number of last rows that linear layers and attention compute in bfloat16, if they can ([`crate::Bf16Rows`]).
    pub bf16_rows: usize,
    /// Whether the logits of these rows are computed in bfloat16, too.
    pub bf16_logits: bool,
    /// Whether hidden states are used only to compute logits. The last layer then skips rows that need no logits.
    pub only_logits: bool,
    /// Whether the host reads hidden states, to pool them. A device with memory of its own copies them back.
    pub pooled: bool,
}

impl<'a> StepInput<'a> {
    /// Returns the step of only the rows that need logits, for layers after which the other rows are unused. None where hidden states of
    /// other rows are used, or their sequences are not given. Tokens and positions stay those of all rows. No row with logits attends to a
    /// later one: of an image only the last row may need logits.
    pub fn wanted(&self) -> Option<StepInput<'a>> {
        let given = self.logit_rows.is_empty() || !self.logit_seqs.is_empty();
        (self.only_logits && given).then(|| StepInput {
            seqs: self.logit_seqs,
            ends: &[],
            bf16_rows: self.bf16_logit_rows(),
            ..*self
        })
    }

    /// The page ids of a group.
    pub fn pages_of(&self, group: KvGroup) -> &[u32] {
        match group {
            KvGroup::Whole => self.pages,
            KvGroup::Window => self.window_pages,
        }
    }

    /// Returns how many of the rows that need logits are computed in bfloat16. These are the last ones.
    pub fn bf16_logit_rows(&self) -> usize {
        let exact = (self.tokens.len() - self.bf16_rows) as u32;
        self.logit_rows.len() - self.logit_rows.partition_point(|row| *row < exact)
    }
}

#[cfg(test)]
mod tests {
    use super::StepInput;

    #[test]
    fn logits_of_bf16_rows_are_counted_from_the_end() {
        let count = |logit_rows: &[u32], bf16_rows| {
            StepInput { tokens: &[0; 10], logit_rows, bf16_rows, ..StepInput::default() }.bf16_logit_rows()
        };
        assert_eq!(count(&[0, 1, 6, 9], 4), 2);
        assert_eq!(count(&[0, 1, 6, 9], 0), 0);
        assert_eq!(count(&[0, 1, 6, 9], 10), 4);
        assert_eq!(count(&[], 5), 0);
    }
}
