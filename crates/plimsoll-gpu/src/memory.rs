//! Memory of one pool build on a device: KV cache, recurrent states, the step arena, and the buffers of transfers.

use std::sync::Arc;

use plimsoll_device::{CachedLayer, KvGroup, ModelShape, StateShape};
use plimsoll_memory::step::StepStack;
use plimsoll_memory::{Component, Ledger};
use wgpu::{BindGroup, BufferUsages, CommandEncoderDescriptor, PollType};

use crate::context::{Context, DeviceBuffer};
use crate::error::GpuError;
use crate::kernel::{Kernel, Second};

/// Sizes of a pool build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Pages of the whole context, and pages of the window group.
    pub pages: [usize; 2],
    /// Slots of recurrent state.
    pub slots: usize,
    /// Bytes of a step's temporaries.
    pub arena: usize,
    /// Most bytes that a step uploads.
    pub upload: usize,
    /// Most bytes that are fetched from a step.
    pub readback: usize,
    /// Most dispatches of a step.
    pub calls: usize,
    /// Most matrices, and rows of matrices, that are fetched one by one.
    pub outputs: usize,
}

impl Sizes {
    /// Returns the bytes beside the pages: the arena, the upload on the host and on the device, and the fetched outputs.
    pub fn step_bytes(&self) -> usize {
        self.arena + 2 * self.upload + self.readback
    }
}

/// Buffers of one pool build.
pub struct GpuMemory {
    /// One buffer a layer: a layer's part of every page.
    cache: Vec<DeviceBuffer>,
    pub(crate) cache_groups: Vec<BindGroup>,
    /// One buffer a recurrent layer: its part of every slot.
    states: Vec<DeviceBuffer>,
    pub(crate) state_groups: Vec<BindGroup>,
    pub(crate) state_shape: Option<StateShape>,
    pub(crate) layers: Arc<[CachedLayer]>,
    pub(crate) arena: DeviceBuffer,
    pub(crate) sent: DeviceBuffer,
    /// Mapped between steps, to write.
    pub(crate) staging: DeviceBuffer,
    pub(crate) readback: DeviceBuffer,
    pub(crate) stack: StepStack,
    pub(crate) sizes: Sizes,
    /// Whether buffers of transfers are not part of a step's memory on the GPU.
    apart: bool,
}

impl GpuMemory {
    /// Creates all buffers and pipelines of a pool build.
    ///
    /// # Errors
    /// [`GpuError::Refused`], [`GpuError::Kernel`].
    pub fn new(
        context: &mut Context,
        ledger: &Arc<Ledger>,
        shape: &ModelShape,
        sizes: Sizes,
    ) -> Result<Self, GpuError> {
        let layers = shape.kv.layers();
        context.prepare(Kernel::COMMON.into_iter().chain(layers.iter().flat_map(kernels_of)))?;
        context.prepare(shape.state.iter().flat_map(state_kernels))?;
        let heads = shape.encoder.map(|encoder| encoder.head_dims.map(Kernel::Within));
        context.prepare(heads.into_iter().flatten())?;
        context.prepare(shape.encoder.iter().flat_map(|_| Kernel::ENCODER))?;
        let context = &*context;
        let mut cache = Vec::with_capacity(layers.len());
        for layer in layers {
            let pages = sizes.pages[layer.group as usize].max(1);
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
            cache.push(context.buffer(ledger, Component::KvPages, pages * layer.bytes(), usage)?);
        }
        let slots = shape.state.iter().flat_map(|state| std::iter::repeat_n(state.layer_bytes(), state.layers));
        let slots = slots.map(|bytes| {
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
            context.buffer(ledger, Component::StateSlots, sizes.slots.max(1) * bytes, usage)
        });
        let states = slots.collect::<Result<Vec<_>, _>>()?;
        let step = |bytes, usage| context.buffer(ledger, Component::StepWorkspace, bytes, usage);
        let transfer = |bytes, usage| context.buffer(ledger, transfers(ledger), bytes, usage);
        let memory = Self {
            cache_groups: cache.iter().map(|layer| context.second_group(Second::Cache, &layer.buffer)).collect(),
            cache,
            state_groups: states.iter().map(|layer| context.second_group(Second::States, &layer.buffer)).collect(),
            states,
            state_shape: shape.state,
            layers: layers.into(),
            arena: step(sizes.arena, BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST)?,
            sent: step(sizes.upload, BufferUsages::STORAGE | BufferUsages::COPY_DST)?,
            staging: transfer(sizes.upload, BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC)?,
            readback: transfer(sizes.readback, BufferUsages::MAP_READ | BufferUsages::COPY_DST)?,
            apart: transfers(ledger) != Component::StepWorkspace,
            stack: StepStack::new(sizes.arena),
            sizes,
        };
        memory.touch(context)?;
        Ok(memory)
    }

    /// Writes every buffer once, so that the driver commits the memory.
    fn touch(&self, context: &Context) -> Result<(), GpuError> {
        let mut encoder = context.device.create_command_encoder(&CommandEncoderDescriptor::default());
        let own = [&self.arena, &self.sent, &self.readback];
        self.cache
            .iter()
            .chain(&self.states)
            .chain(own)
            .for_each(|buffer| encoder.clear_buffer(&buffer.buffer, 0, None));
        context.queue.submit([encoder.finish()]);
        let waited = context.device.poll(PollType::wait_indefinitely());
        waited.map_err(|error| GpuError::Failed(error.to_string()))?;
        context.failure().map_or(Ok(()), |words| Err(GpuError::Failed(words)))
    }

    /// Pages of a group's pool.
    pub fn pages(&self, group: KvGroup) -> usize {
        self.sizes.pages[group as usize]
    }

    /// Returns the most bytes of step workspace that steps have used: of the arena, and of all transfers. On a GPU with its own memory,
    /// only the upload's buffer there counts.
    pub(crate) fn workspace_peak(&self) -> usize {
        let beside = if self.apart { self.sizes.upload } else { self.sizes.step_bytes() - self.sizes.arena };
        self.stack.high_water() + beside
    }
}

/// Returns the ledger's component for buffers of transfers.
pub(crate) fn transfers(ledger: &Ledger) -> Component {
    if ledger.on_host(Component::StepWorkspace) { Component::StepWorkspace } else { Component::Transfers }
}

/// Returns the kernels over a layer's KV cache.
fn kernels_of(layer: &CachedLayer) -> [Kernel; 2] {
    let dtype = layer.layout.dtype();
    [Kernel::Store(dtype), Kernel::Attend(dtype, layer.layout.head_dim())]
}

/// Returns the kernels over a recurrent layer's states. The shape does not say by which rule they change, so kernels of both are there.
fn state_kernels(state: &StateShape) -> Vec<Kernel> {
    let conv = Kernel::Conv(state.conv_history + 1);
    let steps = [Kernel::NormHeads, Kernel::Gates, Kernel::TimeSteps];
    let rules = [false, true].map(|added| Kernel::Recur(state.key_dim, added));
    let matrices = steps.into_iter().chain(rules).filter(|_| state.heads > 0);
    std::iter::once(conv).chain(matrices).collect()
}
