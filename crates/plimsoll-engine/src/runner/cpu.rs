//! The engine's CPU runner: a model on the CPU device.

use std::sync::Arc;

use plimsoll_device::cpu::TableReads;
use plimsoll_device::{Buf, CANDIDATE_BLOCK, CpuDevice, Device, DeviceError, KvGroup, Mark, StepInput};
use plimsoll_models::{EncoderInput, EncoderKind, Model, Output, Pass};

use crate::cache::Part;
use crate::runner::Runner;

/// The passes of one step over one workspace: the model's, then its draft head's. The planner runs the same code.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    output: Option<Output>,
    /// The candidates of the last pass's rows, one row after another, where the step requests them.
    candidates: Option<Buf>,
    /// Hidden states of the last draft pass's wanted rows, and the mark of the workspace after them.
    carry: Option<(Buf, Mark)>,
    /// The chunk that is computed layer by layer, and the mark of the workspace after its buffers.
    begun: Option<(Pass, Mark)>,
}

impl Passes {
    /// The model's own pass, the first of a step. Its buffers lie after those of a chunk that is computed layer by layer.
    pub fn forward(
        &mut self,
        model: &dyn Model,
        device: &mut dyn Device,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.release_step_buffers(device);
        let output = model.forward(device, step)?;
        self.candidates = find_candidates(device, output, step)?;
        self.output = Some(output);
        Ok(())
    }

    /// The last pass's outputs in the workspace.
    #[cfg(feature = "gpu")]
    pub fn output(&self) -> Option<Output> {
        self.output
    }

    /// The candidates of the last pass's rows, one row after another.
    #[cfg(feature = "gpu")]
    pub fn candidates(&self) -> Option<Buf> {
        self.candidates
    }

    /// Releases the buffers of the last step. True if a chunk that is computed layer by layer keeps its own.
    pub fn release_step_buffers(&mut self, device: &mut dyn Device) -> bool {
        (self.output, self.candidates, self.carry) = (None, None, None);
        if let Some((_, mark)) = self.begun {
            device.release(mark);
        }
        self.begun.is_some()
    }

    /// Begins a step that is computed layer by layer, in an empty workspace.
    pub fn begin(
        &mut self,
        model: &dyn Model,
        device: &mut dyn Device,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        *self = Self::default();
        let pass = model.begin(device, step)?;
        self.begun = Some((pass, device.mark()));
        Ok(())
    }

    /// Computes the next layer. True after the last one. If it fails, the step is dropped.
    pub fn advance(
        &mut self,
        model: &dyn Model,
        device: &mut dyn Device,
        step: &StepInput<'_>,
    ) -> Result<bool, DeviceError> {
        self.release_step_buffers(device);
        let (mut pass, mark) = self.begun.take().expect("a step was begun");
        self.output = model.advance(device, &mut pass, step)?;
        match self.output {
            Some(output) => self.candidates = find_candidates(device, output, step)?,
            None => self.begun = Some((pass, mark)),
        }
        Ok(self.output.is_some())
    }

    /// Runs a pass of the draft head.
    pub fn draft(
        &mut self,
        model: &dyn Model,
        device: &mut dyn Device,
        from: &[u32],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (Some(drafter), Some(last)) = (model.drafter(), self.output.take()) else {
            return Err(DeviceError::NoDraft);
        };
        self.candidates = None;
        let wanted = step.logit_rows;
        let (hidden, carry, mark) = match self.carry {
            // The pass before is released, except for the hidden states that were set aside.
            Some((carry, mark)) => {
                device.release(mark);
                (carry, carry, mark)
            }
            None => {
                let rows = if drafter.continues_hidden() { wanted.len() } else { 0 };
                let carry = device.temp(rows, last.hidden.cols)?;
                (last.hidden, carry, device.mark())
            }
        };
        let output = drafter.draft(device, hidden, from, step)?;
        self.candidates = find_candidates(device, output, step)?;
        let carry = carry.first(wanted.len().min(carry.rows));
        if carry.rows > 0 {
            device.gather(carry, output.hidden, wanted);
        }
        self.carry = Some((carry, mark));
        self.output = Some(output);
        Ok(())
    }
}

/// Finds the most likely tokens of rows that need no other logits.
fn find_candidates(device: &mut dyn Device, output: Output, step: &StepInput<'_>) -> Result<Option<Buf>, DeviceError> {
    let count: u32 = step.candidates.iter().sum();
    if count == 0 {
        return Ok(None);
    }
    let found = device.temp(count as usize, 2)?;
    let scope = device.mark();
    let blocks = device.temp(output.logits.rows, output.logits.cols.div_ceil(CANDIDATE_BLOCK))?;
    device.candidates(found, blocks, output.logits, step.candidates);
    device.release(scope);
    Ok(Some(found))
}

/// A model on the CPU.
pub struct CpuRunner {
    model: Arc<dyn Model>,
    device: CpuDevice,
    passes: Passes,
    /// Outputs of the last [`Runner::encode`].
    encoded: Option<Buf>,
}

impl CpuRunner {
    /// A runner over a built device.
    pub fn new(model: Arc<dyn Model>, device: CpuDevice) -> Self {
        Self { model, device, passes: Passes::default(), encoded: None }
    }

    /// The device, to inspect or to take apart.
    pub fn device(&mut self) -> &mut CpuDevice {
        &mut self.device
    }

    /// Clears the workspace, but for a step that is between two layers.
    fn clear_workspace(&mut self) {
        if !self.passes.release_step_buffers(&mut self.device) {
            self.device.begin_step();
        }
    }

    /// Returns the device.
    pub fn into_device(self) -> CpuDevice {
        self.device
    }
}

impl Runner for CpuRunner {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.clear_workspace();
        self.passes.forward(&*self.model, &mut self.device, step)?;
        self.device.check_weights()
    }

    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.device.begin_step();
        self.passes.begin(&*self.model, &mut self.device, step)
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        let ended = self.passes.advance(&*self.model, &mut self.device, step)?;
        self.device.check_weights()?;
        Ok(ended)
    }

    fn forget(&mut self) {
        self.passes = Passes::default();
    }

    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.passes.draft(&*self.model, &mut self.device, from, step)?;
        self.device.check_weights()
    }

    fn encode(&mut self, kind: EncoderKind, items: &EncoderInput<'_>) -> Result<(), DeviceError> {
        self.encoded = None;
        // The outputs of the last step are overwritten.
        self.clear_workspace();
        let Some(encoder) = self.model.encoder(kind) else { return Err(DeviceError::NoEncoder) };
        self.encoded = Some(encoder.encode(&mut self.device, items)?);
        self.device.check_weights()
    }

    fn embedding(&mut self, row: usize) -> &[f32] {
        let encoded = self.encoded.expect("items were encoded");
        self.device.row_mut(encoded, row)
    }

    fn decommit(&mut self, group: KvGroup, pages: &[u32]) {
        let memory = self.device.memory();
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            memory.decommit_pages(group, run[0] as usize..run[0] as usize + run.len());
        }
    }

    fn save(&mut self, part: Part, id: u32, out: &mut [u8]) {
        let memory = self.device.memory();
        out.copy_from_slice(match part {
            Part::Whole => memory.page(KvGroup::Whole, id as usize),
            Part::Window => memory.page(KvGroup::Window, id as usize),
            Part::State => memory.slot(id as usize),
        });
    }

    fn restore(&mut self, part: Part, id: u32, bytes: &[u8]) {
        let memory = self.device.memory();
        let target = match part {
            Part::Whole => memory.page_mut(KvGroup::Whole, id as usize),
            Part::Window => memory.page_mut(KvGroup::Window, id as usize),
            Part::State => memory.slot_mut(id as usize),
        };
        target.copy_from_slice(bytes);
    }

    fn take_table_reads(&mut self) -> TableReads {
        self.device.take_table_reads()
    }

    fn hidden(&mut self, row: usize) -> &[f32] {
        let hidden = self.passes.output.expect("a step was run").hidden;
        self.device.row_mut(hidden, row)
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let logits = self.passes.output.expect("a step was run").logits;
        self.device.row_mut(logits, row)
    }
}
