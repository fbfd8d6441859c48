//! A step's one submission, and its outputs. Other matrices on the device can be fetched afterwards.

use plimsoll_device::{Buf, DeviceError};
use plimsoll_memory::faults;
use wgpu::{CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, MapMode, PollType};

use super::GpuDevice;
use crate::kernel::Second;
use crate::segments::CALL_BYTES;

/// Checks that a part of a step takes no more than planned.
fn fits(what: &'static str, needed: usize, capacity: usize) -> Result<(), DeviceError> {
    if needed > capacity { Err(DeviceError::Transfer { what, needed, capacity }) } else { Ok(()) }
}

impl GpuDevice {
    /// Submits the recorded operations, waits, and fetches `outputs`.
    ///
    /// # Errors
    /// [`DeviceError::Transfer`] if the upload or the outputs are larger than planned, [`DeviceError::Gpu`] if the device failed.
    pub fn finish(&mut self, outputs: &[Buf]) -> Result<(), DeviceError> {
        let done = self.submit(outputs);
        self.forget();
        done
    }

    fn submit(&mut self, outputs: &[Buf]) -> Result<(), DeviceError> {
        if faults::asked(faults::Site::LoseDevice) {
            self.context.device.destroy();
        }
        let sizes = self.memory.sizes;
        fits("input", self.record.sent.len(), sizes.upload)?;
        fits("dispatches", self.record.calls.len() * CALL_BYTES, sizes.calls * CALL_BYTES)?;
        self.came.clear();
        fits("output", outputs.iter().map(|output| output.bytes()).sum(), sizes.readback)?;
        self.stage()?;
        let mut encoder = self.context.device.create_command_encoder(&CommandEncoderDescriptor::default());
        let sent = self.record.sent.len() as u64;
        if sent > 0 {
            encoder.copy_buffer_to_buffer(&self.memory.staging.buffer, 0, &self.memory.sent.buffer, 0, sent);
        }
        self.encode(&mut encoder);
        self.bring(encoder, outputs)
    }

    /// Copies matrices behind those already fetched, submits everything, and waits.
    fn bring(&mut self, mut encoder: CommandEncoder, outputs: &[Buf]) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.readable) {
            self.memory.readback.buffer.unmap();
        }
        let mut end = self.came.last().map_or(0, |(last, at)| at + last.bytes());
        for output in outputs.iter().filter(|output| output.bytes() > 0) {
            let (from, to) = (&self.memory.arena.buffer, &self.memory.readback.buffer);
            encoder.copy_buffer_to_buffer(from, output.offset() as u64, to, end as u64, output.bytes() as u64);
            self.came.push((*output, end));
            end += output.bytes();
            self.fetched += output.bytes() as u64;
        }
        self.context.queue.submit([encoder.finish()]);
        if end > 0 {
            self.memory.readback.buffer.slice(..end as u64).map_async(MapMode::Read, |_| {});
            self.readable = true;
        }
        self.map_staging()?;
        self.context.failure().map_or(Ok(()), |words| Err(DeviceError::Gpu(words)))
    }

    fn encode(&self, encoder: &mut CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        pass.set_bind_group(0, &self.first_group, &[]);
        let (mut pipeline, mut second) = (None, None);
        for call in &self.record.calls {
            if pipeline.replace(call.pipeline) != Some(call.pipeline) {
                pass.set_pipeline(self.context.pipeline(call.pipeline));
            }
            if call.second.is_some() && second != call.second {
                second = call.second;
                let group = match call.second {
                    Some((Second::Weights, segment)) => &self.weights.groups[segment],
                    Some((Second::Cache, layer)) => &self.memory.cache_groups[layer],
                    Some((Second::States, layer)) => &self.memory.state_groups[layer],
                    Some((Second::Nothing, _)) | None => continue,
                };
                pass.set_bind_group(1, group, &[]);
            }
            pass.set_immediates(0, call.params());
            pass.dispatch_workgroups(call.groups[0], call.groups[1], 1);
        }
    }

    /// Writes the upload into the staging buffer.
    fn stage(&mut self) -> Result<(), DeviceError> {
        if self.record.sent.is_empty() {
            return Ok(());
        }
        if !self.staged {
            self.map_staging()?;
        }
        let staging = &self.memory.staging.buffer;
        let view = staging.slice(..self.record.sent.len() as u64).get_mapped_range_mut();
        let mut view = view.map_err(|error| DeviceError::Gpu(error.to_string()))?;
        view.copy_from_slice(&self.record.sent);
        drop(view);
        staging.unmap();
        self.staged = false;
        Ok(())
    }

    /// Waits for the device, with the staging buffer mapped afterwards.
    fn map_staging(&mut self) -> Result<(), DeviceError> {
        if !std::mem::replace(&mut self.staged, true) {
            self.memory.staging.buffer.slice(..).map_async(MapMode::Write, |_| {});
        }
        let waited = self.context.device.poll(PollType::wait_indefinitely());
        waited.map(|_| ()).map_err(|error| DeviceError::Gpu(error.to_string()))
    }

    /// Returns the bytes that were fetched since the last call.
    pub fn take_fetched(&mut self) -> u64 {
        std::mem::take(&mut self.fetched)
    }

    /// Returns a row of a matrix of the last step, as [`Self::elements`].
    pub fn row_mut(&mut self, x: Buf, row: usize) -> &mut [f32] {
        self.elements(x.span(row, 1))
    }

    /// Returns the elements of a matrix of the last step, or of some rows of a matrix. It fetches a matrix that [`Self::finish`] did not
    /// fetch, as long as no other step was begun. The result is a copy: changes in it are lost with the next call.
    pub fn elements(&mut self, x: Buf) -> &mut [f32] {
        let found = self.place_of(x).or_else(|| {
            let end = self.came.last().map_or(0, |(last, at)| at + last.bytes());
            fits("output", end + x.bytes(), self.memory.sizes.readback).ok()?;
            let encoder = self.context.device.create_command_encoder(&CommandEncoderDescriptor::default());
            self.bring(encoder, &[x]).ok()?;
            Some(end)
        });
        self.row.clear();
        let view = found.and_then(|at| {
            let view = self.memory.readback.buffer.slice(..(at + x.bytes()) as u64).get_mapped_range();
            Some((at, view.ok()?))
        });
        match view {
            Some((at, view)) => {
                let floats = view[at..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                self.row.extend(floats);
            }
            // The device failed: NaN, so that the step fails.
            None => self.row.resize(x.rows * x.cols, f32::NAN),
        }
        &mut self.row
    }

    /// Returns the offset of a matrix among the fetched ones, either as a whole or as part of one.
    fn place_of(&self, x: Buf) -> Option<usize> {
        let holds = |(whole, _): &&(Buf, usize)| {
            whole.cols == x.cols
                && whole.offset() <= x.offset()
                && x.offset() + x.bytes() <= whole.offset() + whole.bytes()
        };
        self.came.iter().find(holds).map(|(whole, at)| at + x.offset() - whole.offset())
    }
}
