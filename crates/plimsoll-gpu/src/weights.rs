//! Loading: copies the mapped checkpoint through one bounded staging buffer into segments on the device.

use std::sync::Arc;

use plimsoll_device::cpu::{LoadError, PANELS_PER_TASK, pack_panels, write_vector};
use plimsoll_device::{ThreadPool, WeightTable};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, Ledger};
use wgpu::{BindGroup, BufferUsages, MapMode, PollType};

use crate::context::{Context, DeviceBuffer};
use crate::error::GpuError;
use crate::kernel::{Kernel, Second};
use crate::memory::transfers;
use crate::segments::{Segments, load_bytes};

/// A model's weights on a device.
pub struct GpuWeights {
    table: WeightTable,
    segments: Segments,
    _buffers: Vec<DeviceBuffer>,
    pub(crate) groups: Vec<BindGroup>,
    pub(crate) vectors: DeviceBuffer,
    pub(crate) lookup: DeviceBuffer,
}

/// The staging buffer of bytes that are copied to the device.
struct Staging<'a> {
    context: &'a Context,
    buffer: DeviceBuffer,
}

impl Staging<'_> {
    /// Copies `bytes` into `target` at `offset`, and waits until they are there.
    fn copy(&self, bytes: &[u8], target: &DeviceBuffer, offset: usize) -> Result<(), GpuError> {
        let failed = |error: &dyn std::fmt::Display| GpuError::Failed(error.to_string());
        // The padding after a part of a word is never read.
        let size = bytes.len().next_multiple_of(4) as u64;
        let slice = self.buffer.buffer.slice(..size);
        slice.map_async(MapMode::Write, |_| {});
        self.context.device.poll(PollType::wait_indefinitely()).map_err(|error| failed(&error))?;
        let mut view = slice.get_mapped_range_mut().map_err(|error| failed(&error))?;
        view.slice(..bytes.len()).copy_from_slice(bytes);
        drop(view);
        self.buffer.buffer.unmap();
        let mut encoder = self.context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&self.buffer.buffer, 0, &target.buffer, offset as u64, size);
        self.context.queue.submit([encoder.finish()]);
        self.context.device.poll(PollType::wait_indefinitely()).map_err(|error| failed(&error))?;
        self.context.failure().map_or(Ok(()), |words| Err(GpuError::Failed(words)))
    }
}

impl GpuWeights {
    /// Packs every weight of `table` on the host's cores, chunk by chunk, and copies it to the device. Calls `progress` with the packed
    /// bytes as it goes, and `stopped` between two tensors.
    ///
    /// # Errors
    /// [`GpuError`]: no memory, or the checkpoint could not be read, or the caller has cancelled loading.
    pub fn load_unless(
        context: &mut Context,
        table: WeightTable,
        checkpoint: &Checkpoint,
        ledger: &Arc<Ledger>,
        pool: &mut ThreadPool,
        mut progress: impl FnMut(u64),
        stopped: impl Fn() -> bool,
    ) -> Result<Self, GpuError> {
        let segments = Segments::new(&table, context.limits().buffer as usize)?;
        let kinds = table.linears.iter().map(|linear| linear.packing.kind());
        context.prepare(kinds.flat_map(|kind| [Kernel::Linear(kind), Kernel::Tiles(kind), Kernel::Embed(kind)]))?;
        if !table.experts.is_empty() {
            let matrices = table.experts.iter().cloned().flatten().map(|i| table.linears[i].packing.kind());
            let both = matrices.flat_map(|kind| [Kernel::Experts(kind), Kernel::ExpertTiles(kind)]);
            context.prepare(both.chain(Kernel::ROUTING))?;
        }
        let context = &*context;
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
        let buffer = |bytes: &usize| context.buffer(ledger, Component::Weights, *bytes, usage);
        let buffers = segments.segments().iter().map(buffer).collect::<Result<Vec<_>, _>>()?;
        let vectors = buffer(&segments.vector_bytes())?;
        let lookup = buffer(&segments.lookup_bytes())?;
        let mut chunk = vec![0; load_bytes(&table)];
        let usage = BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC;
        let staging = context.buffer(ledger, transfers(ledger), chunk.len(), usage)?;
        let staging = Staging { context, buffer: staging };
        for (linear, pieces) in table.linears.iter().zip(segments.all()) {
            if stopped() {
                return Err(LoadError::Stopped.into());
            }
            let panel_bytes = linear.packing.panel_bytes();
            let together = (chunk.len() / panel_bytes / PANELS_PER_TASK * PANELS_PER_TASK).max(1);
            for piece in pieces {
                for first in (0..piece.panels).step_by(together) {
                    let panels = together.min(piece.panels - first);
                    let bytes = &mut chunk[..panels * panel_bytes];
                    let from = piece.first_panel + first;
                    pack_panels(linear, checkpoint, from..from + panels, bytes, pool)?;
                    staging.copy(bytes, &buffers[piece.segment], piece.offset + first * panel_bytes)?;
                }
            }
            checkpoint.release(&linear.name);
            progress(linear.packing.bytes() as u64);
        }
        for (vector, offset) in table.vectors.iter().zip(segments.vectors()) {
            let bytes = &mut chunk[..vector.len * size_of::<f32>()];
            write_vector(vector, checkpoint, bytes)?;
            staging.copy(bytes, &vectors, *offset)?;
        }
        let words_at_once = chunk.len() / size_of::<u32>();
        for (i, words) in segments.lookup().chunks(words_at_once).enumerate() {
            let bytes = &mut chunk[..size_of_val(words)];
            bytes.chunks_exact_mut(4).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
            staging.copy(bytes, &lookup, i * words_at_once * size_of::<u32>())?;
        }
        checkpoint.unchanged().map_err(LoadError::Changed)?;
        let groups = buffers.iter().map(|segment| context.second_group(Second::Weights, &segment.buffer)).collect();
        Ok(Self { table, segments, _buffers: buffers, groups, vectors, lookup })
    }

    /// The declarations.
    pub fn table(&self) -> &WeightTable {
        &self.table
    }

    /// Returns the places of the weights.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }
}
