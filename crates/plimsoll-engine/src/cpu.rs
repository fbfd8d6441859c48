//! The engine's CPU runner: a model on the CPU device, one generation of memory.

use std::sync::Arc;

use plimsoll_device::{Buf, CpuDevice, DeviceError, StepInput};
use plimsoll_models::Model;

use crate::runner::Runner;

/// A model on the CPU.
pub struct CpuRunner {
    model: Arc<dyn Model>,
    device: CpuDevice,
    logits: Option<Buf>,
}

impl CpuRunner {
    /// A runner over a built device.
    pub fn new(model: Arc<dyn Model>, device: CpuDevice) -> Self {
        Self { model, device, logits: None }
    }

    /// The device, to look at or to take apart.
    pub fn device(&mut self) -> &mut CpuDevice {
        &mut self.device
    }

    /// Gives the device back.
    pub fn into_device(self) -> CpuDevice {
        self.device
    }
}

impl Runner for CpuRunner {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.device.begin_step();
        self.logits = None;
        self.logits = Some(self.model.forward(&mut self.device, step)?.logits);
        Ok(())
    }

    fn decommit(&mut self, pages: &[u32]) {
        let memory = self.device.memory();
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            memory.decommit_pages(run[0] as usize..run[0] as usize + run.len());
        }
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let logits = self.logits.expect("a step was run");
        self.device.row_mut(logits, row)
    }
}
