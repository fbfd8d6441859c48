//! What encoders ask of a GPU: what goes to it and comes back, and dispatches.

use plimsoll_device::{Calls, DeviceError, PlanDevice};
use plimsoll_models::EncoderInput;

use super::{Candidate, MediaPlan, Planner};

/// What one batch asks of a GPU at most; nothing where the host's cores encode.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Transfers {
    /// Words that it sends.
    pub upload: usize,
    /// Dispatches.
    pub calls: Calls,
    /// Numbers that come back.
    pub output: usize,
    /// An operation that the GPU lacks.
    pub missing: Option<&'static str>,
}

impl Transfers {
    /// Room for either of two batches.
    pub fn max(self, other: Self) -> Self {
        Self {
            upload: self.upload.max(other.upload),
            calls: self.calls.max(other.calls),
            output: self.output.max(other.output),
            missing: self.missing.or(other.missing),
        }
    }
}

impl MediaPlan {
    /// Numbers of an output row.
    pub(crate) fn output_width(&self) -> usize {
        self.width
    }

    /// The flag that makes the largest items smaller.
    pub(crate) fn size_flag(&self) -> &'static str {
        if self.image.is_some() { "--max-image-pixels" } else { "--max-audio-seconds" }
    }
}

impl Planner<'_> {
    /// Of `batch` items: as many of the one that asks for most. What is sent and comes back grows with the rows alone, and a batch has no
    /// more dispatches than its items have one by one.
    pub(super) fn transfers(&self, batch: usize, candidates: &[Candidate]) -> Result<Transfers, DeviceError> {
        let mut most = Transfers::default();
        if !self.weights.on_gpu() {
            return Ok(most);
        }
        for candidate in candidates {
            let mut device = PlanDevice::new(self.weights, self.kv);
            let input = EncoderInput { grids: &[candidate.grid], patches: &[] };
            let output = self.encoder.encode(&mut device, &input)?;
            let calls = device.calls();
            most = most.max(Transfers {
                upload: batch * device.upload_words(),
                calls: Calls { plain: batch * calls.plain, grouped: batch * calls.grouped },
                output: batch * output.rows * output.cols,
                missing: device.missing(),
            });
        }
        Ok(most)
    }
}
