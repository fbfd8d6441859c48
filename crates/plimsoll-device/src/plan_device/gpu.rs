//! What a step asks of a GPU: words that it is sent, dispatches, operations that it lacks.

use super::PlanDevice;
use crate::work::Calls;

/// Words of four bytes that a GPU is sent for each sequence of a model with recurrent layers: first row, rows, slot.
const SEQ_WORDS: usize = 3;

impl PlanDevice<'_> {
    /// An operation that was asked for and that the weights' target lacks, in words.
    pub fn missing(&self) -> Option<&'static str> {
        self.missing
    }

    /// Words of four bytes that everything that ran sends to a device with memory of its own, but for page ids.
    pub fn upload_words(&self) -> usize {
        self.upload
    }

    /// What the step has asked for.
    pub fn calls(&self) -> Calls {
        self.calls
    }

    /// Begins a step: what it sends and asks for is counted from here on.
    pub fn begin_step(&mut self) {
        (self.upload, self.rows_uploaded, self.windows_uploaded, self.slots_uploaded) = (0, false, false, false);
        self.calls = Calls::default();
    }

    /// Recurrent layers are sent each row's slot, and each sequence's rows: of as many sequences as rows, at most.
    pub(super) fn send_slots(&mut self, rows: usize) {
        if !std::mem::replace(&mut self.slots_uploaded, true) {
            self.upload += (1 + SEQ_WORDS) * rows;
        }
    }

    /// An operation without a kernel on GPUs.
    pub(super) fn not_on_gpu(&mut self, operation: &'static str) {
        if self.weights.on_gpu() {
            self.missing.get_or_insert(operation);
        }
    }
}
