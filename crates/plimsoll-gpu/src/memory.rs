//! What belongs to one generation on a device: keys, values, recurrent states, the step arena, and what goes to the device and comes back.

use std::sync::Arc;

use plimsoll_device::{CachedLayer, KvGroup, ModelShape, StateShape};
use plimsoll_memory::step::StepStack;
use plimsoll_memory::{Component, Ledger};
use wgpu::{BindGroup, BufferUsages, CommandEncoderDescriptor, PollType};

use crate::context::{Context, DeviceBuffer};
use crate::error::GpuError;
use crate::kernel::{Kernel, Second};

/// How large a generation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Pages of the whole context, and pages of the window group.
    pub pages: [usize; 2],
    /// Slots of recurrent state.
    pub slots: usize,
    /// Bytes of a step's temporaries.
    pub arena: usize,
    /// Bytes that a step is sent, at most.
    pub upload: usize,
    /// Bytes that come back from a step, at most.
    pub readback: usize,
    /// Dispatches of a step, at most.
    pub calls: usize,
    /// Matrices, and rows of them, that come back one by one, at most.
    pub outputs: usize,
}

impl Sizes {
    /// Bytes beside the pages: the arena, what is sent in a buffer here and one there, and what comes back.
    pub fn step_bytes(&self) -> usize {
        self.arena + 2 * self.upload + self.readback
    }
}

/// Buffers of one generation.
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
    /// Buffers of transfers are not among what a step takes of the GPU's memory.
    apart: bool,
}

impl GpuMemory {
    /// Makes all buffers and pipelines of a generation.
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

    /// Writes every buffer once, so that the memory is really there.
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

    /// The most bytes of step workspace that steps have used: of the arena, and what goes both ways or, where the GPU has memory of its
    /// own, lies there of it.
    pub(crate) fn workspace_peak(&self) -> usize {
        let beside = if self.apart { self.sizes.upload } else { self.sizes.step_bytes() - self.sizes.arena };
        self.stack.high_water() + beside
    }
}

/// What buffers of transfers belong to.
pub(crate) fn transfers(ledger: &Ledger) -> Component {
    if ledger.on_host(Component::StepWorkspace) { Component::StepWorkspace } else { Component::Transfers }
}

/// Kernels over a layer's keys and values.
fn kernels_of(layer: &CachedLayer) -> [Kernel; 2] {
    let dtype = layer.layout.dtype();
    [Kernel::Store(dtype), Kernel::Attend(dtype, layer.layout.head_dim())]
}

/// Kernels over a recurrent layer's states. The shape does not say by which rule they change.
fn state_kernels(state: &StateShape) -> Vec<Kernel> {
    let conv = Kernel::Conv(state.conv_history + 1);
    let steps = [Kernel::NormHeads, Kernel::Gates, Kernel::TimeSteps];
    let rules = [false, true].map(|added| Kernel::Recur(state.key_dim, added));
    let matrices = steps.into_iter().chain(rules).filter(|_| state.heads > 0);
    std::iter::once(conv).chain(matrices).collect()
}
