//! Costs of a step on a GPU: words uploaded, dispatches, and operations without a kernel.

use super::PlanDevice;
use crate::work::Calls;

/// Words of four bytes that each sequence of a model with recurrent layers uploads to a GPU: first row, rows, slot.
const SEQ_WORDS: usize = 3;

impl PlanDevice<'_> {
    /// Returns the name of an operation that the step needs and that the weights' target lacks.
    pub fn missing(&self) -> Option<&'static str> {
        self.missing
    }

    /// Returns the words of four bytes that all operations so far upload to a device with memory of its own, without page ids.
    pub fn upload_words(&self) -> usize {
        self.upload
    }

    /// Returns the dispatches of the step.
    pub fn calls(&self) -> Calls {
        self.calls
    }

    /// Begins a step: uploads and dispatches are counted from here on.
    pub fn begin_step(&mut self) {
        (self.upload, self.rows_uploaded, self.windows_uploaded, self.slots_uploaded) = (0, false, false, false);
        self.calls = Calls::default();
    }

    /// Counts the upload of recurrent layers: each row's slot, and each sequence's rows. There are at most as many sequences as rows.
    pub(super) fn send_slots(&mut self, rows: usize) {
        if !std::mem::replace(&mut self.slots_uploaded, true) {
            self.upload += (1 + SEQ_WORDS) * rows;
        }
    }

    /// Records an operation without a kernel on GPUs.
    pub(super) fn not_on_gpu(&mut self, operation: &'static str) {
        if self.weights.on_gpu() {
            self.missing.get_or_insert(operation);
        }
    }
}
