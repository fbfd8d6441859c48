//! The seam between engine and device: run one step, look at its logits.
//!
//! The engine schedules and samples; a runner owns model, device and the memory of one generation. Tests and the simulator bring
//! runners of their own.

use plimsoll_device::{DeviceError, StepInput};

/// Carries out steps.
pub trait Runner {
    /// Computes one step: keys and values of every row, logits of the wanted ones.
    ///
    /// A step may be run again: it overwrites what it wrote.
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError>;

    /// Gives the physical memory of pages that nobody holds back to the system; it returns when they are written again. The
    /// pages come in ascending order: neighbours go back together.
    fn decommit(&mut self, pages: &[u32]) {
        let _ = pages;
    }

    /// The logits of the `row`-th wanted row of the last step, as wide as the vocabulary.
    fn logits(&mut self, row: usize) -> &mut [f32];
}
