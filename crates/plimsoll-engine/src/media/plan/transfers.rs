//! The transfers and dispatches of encoders on a GPU.

use plimsoll_device::{Calls, DeviceError, PlanDevice};
use plimsoll_models::EncoderInput;

use super::{Candidate, MediaPlan, Planner};

/// The most that one batch needs of a GPU; all zero where the host's cores encode.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Transfers {
    /// Words that a batch sends.
    pub upload: usize,
    /// Dispatches of a batch.
    pub calls: Calls,
    /// Numbers that a batch fetches.
    pub output: usize,
    /// An operation that the GPU lacks.
    pub missing: Option<&'static str>,
}

impl Transfers {
    /// Returns the maxima of two batches.
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
    /// Returns the most transfers of `batch` items: all of them are the item that needs most. Words sent and fetched grow with the rows
    /// alone. A batch has no more dispatches than its items have one by one.
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
