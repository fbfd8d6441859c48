//! The interface between engine and device: run one step, read its logits.
//!
//! The engine schedules and samples; a runner owns model, device and the memory of one pool build. Tests and the simulator bring
//! runners of their own.

pub(crate) mod backend;
pub mod cpu;
pub(crate) mod encoder_batch;
#[cfg(feature = "gpu")]
pub mod gpu;
pub(crate) mod step_buffers;

use plimsoll_device::cpu::TableReads;
use plimsoll_device::{DeviceError, KvGroup, StepInput};
use plimsoll_models::{EncoderInput, EncoderKind};

use crate::cache::Part;

/// Runs the steps of a model on a device.
pub trait Runner {
    /// Computes one step: the KV cache of every row, logits of the wanted rows, and recurrent states where the step names slots for them.
    ///
    /// A failed step may leave wrong data. Its pages are overwritten when it runs again, and its state slots are not read again.
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError>;

    /// Begins a step that is computed layer by layer, with other steps between the layers. [`Self::advance`] continues it. An earlier begun
    /// step is dropped.
    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let _ = step;
        Ok(())
    }

    /// Computes the next layer of the step that [`Self::begin`] was given; `step` is the same one. True after the last layer: then logits
    /// and hidden states can be read, as after [`Self::forward`]. A runner without layers computes all at once.
    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        self.forward(step).map(|()| true)
    }

    /// Drops the step that [`Self::begin`] has started.
    fn forget(&mut self) {}

    /// Why the device was lost, if it was. The contents of pages and slots are lost with it.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Opens the device again, with the same weights and empty pools. It does this once; the error has the reason if it cannot.
    fn reopen(&mut self) -> Result<(), String> {
        Err("there is no device to open".into())
    }

    /// One pass of the draft head: row r of `step` continues row `from[r]` of the last [`Self::forward`]. After an
    /// earlier pass in the same step, it continues the `from[r]`-th row of that pass with wanted logits. It stands at
    /// that row's position (a further pass: one further) and names the token that follows it. The wanted logits are the
    /// head's guess at the next token.
    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        let _ = (from, step);
        Err(DeviceError::NoDraft)
    }

    /// Runs an encoder over images or audio clips. It uses the workspace of steps, between two steps; a chunk that is computed layer by
    /// layer keeps its part. [`Self::embedding`] reads the outputs.
    fn encode(&mut self, kind: EncoderKind, items: &EncoderInput<'_>) -> Result<(), DeviceError> {
        let _ = (kind, items);
        Err(DeviceError::NoEncoder)
    }

    /// The `row`-th row of output of the last [`Self::encode`]. Rows of all its items follow one another.
    fn embedding(&mut self, row: usize) -> &[f32] {
        let _ = row;
        &[]
    }

    /// The hidden state, after the final norm, of the `row`-th row of the last [`Self::forward`], of which hidden states are read
    /// ([`StepInput::pooled`]); empty for a runner without a model.
    fn hidden(&mut self, row: usize) -> &[f32] {
        let _ = row;
        &[]
    }

    /// Gives the physical memory of unused pages of a group back to the system; writing to a page brings it back. The pages
    /// come in ascending order, so that neighbours go back together.
    fn decommit(&mut self, group: KvGroup, pages: &[u32]) {
        let _ = (group, pages);
    }

    /// Copies a part out of its pool: page, window page or state slot `id`.
    fn save(&mut self, part: Part, id: u32, out: &mut [u8]) {
        let _ = (part, id, out);
    }

    /// Copies the bytes of [`Self::save`] into another place of the same pool, which then holds the same part.
    fn restore(&mut self, part: Part, id: u32, bytes: &[u8]) {
        let _ = (part, id, bytes);
    }

    /// The most likely tokens of the `row`-th wanted row of the last step or draft pass: pairs of a logit and an id, the most likely first,
    /// equal ones by id. The id is −1 after the last logit that is a number. None where the step did not request them
    /// ([`StepInput::candidates`]) or the device does not find them.
    fn candidates(&mut self, row: usize) -> Option<&[[f32; 2]]> {
        let _ = row;
        None
    }

    /// Bytes copied back from a device with its own memory since the last call.
    fn take_fetched(&mut self) -> u64 {
        0
    }

    /// Rows of tables in the model's files that were looked up since the last call.
    fn take_table_reads(&mut self) -> TableReads {
        TableReads::default()
    }

    /// The logits of the `row`-th wanted row of the last step or draft pass, as wide as the vocabulary.
    fn logits(&mut self, row: usize) -> &mut [f32];
}
