//! An open device: buffers, pipelines, and the first failure.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_memory::{Component, Ledger, faults};
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry,
    BindingType, Buffer, BufferBindingType, BufferDescriptor, BufferUsages, ComputePipeline, ComputePipelineDescriptor,
    ErrorFilter, Features, MemoryHints, PipelineCompilationOptions, PipelineLayout, PipelineLayoutDescriptor,
    ShaderModuleDescriptor, ShaderSource, ShaderStages,
};

use crate::adapter::{Adapter, Limits};
use crate::error::GpuError;
use crate::kernel::{Kernel, PARAMS_MAX, Second};

/// Bytes of one block of memory that small buffers share; every other buffer has memory of its own.
const BLOCK_BYTES: u64 = 1 << 20;

/// An open device.
pub struct Context {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    limits: Limits,
    name: String,
    /// Layouts of group 0, and of group 1 with weights, or with a cache or states.
    groups: [BindGroupLayout; 3],
    layouts: [PipelineLayout; 3],
    pipelines: Vec<ComputePipeline>,
    by_kernel: HashMap<Kernel, usize>,
    failed: Arc<Mutex<Option<String>>>,
    /// The adapter, to read the free memory.
    adapter: wgpu::Adapter,
}

fn binding(binding: u32, read_only: bool) -> BindGroupLayoutEntry {
    let ty = BindingType::Buffer {
        ty: BufferBindingType::Storage { read_only },
        has_dynamic_offset: false,
        min_binding_size: None,
    };
    BindGroupLayoutEntry { binding, visibility: ShaderStages::COMPUTE, ty, count: None }
}

fn place(second: Second) -> usize {
    match second {
        Second::Nothing => 0,
        Second::Weights => 1,
        Second::Cache | Second::States => 2,
    }
}

impl Context {
    /// Opens the device.
    ///
    /// # Errors
    /// [`GpuError::Open`] with the driver's reason.
    pub fn open(adapter: &Adapter) -> Result<Self, GpuError> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("plimsoll"),
            required_features: Features::IMMEDIATES,
            required_limits: adapter.adapter.limits(),
            memory_hints: MemoryHints::Manual { suballocated_device_memory_block_size: BLOCK_BYTES..BLOCK_BYTES },
            ..wgpu::DeviceDescriptor::default()
        };
        let opened = pollster::block_on(adapter.adapter.request_device(&descriptor));
        let refused =
            |error: wgpu::RequestDeviceError| GpuError::Open { name: adapter.name.clone(), reason: error.to_string() };
        let (device, queue) = opened.map_err(refused)?;
        let failed = Arc::new(Mutex::new(None));
        let note = Arc::clone(&failed);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            // The first error is the cause of all later ones.
            note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.to_string());
        }));
        let note = Arc::clone(&failed);
        device.set_device_lost_callback(move |_, words| {
            note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(words);
        });
        let group = |entries: &[BindGroupLayoutEntry]| {
            device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: None, entries })
        };
        let groups = [
            group(&[binding(0, false), binding(1, true), binding(2, true), binding(3, true)]),
            group(&[binding(0, true)]),
            group(&[binding(0, false)]),
        ];
        let layout = |bound: &[Option<&BindGroupLayout>]| {
            device.create_pipeline_layout(&PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: bound,
                immediate_size: (PARAMS_MAX * size_of::<u32>()) as u32,
            })
        };
        let [first, weights, cache] = &groups;
        let layouts =
            [layout(&[Some(first)]), layout(&[Some(first), Some(weights)]), layout(&[Some(first), Some(cache)])];
        let (limits, name) = (adapter.limits(), adapter.name.clone());
        let (pipelines, by_kernel) = (Vec::new(), HashMap::new());
        let adapter = adapter.adapter.clone();
        Ok(Self { device, queue, limits, name, groups, layouts, pipelines, by_kernel, failed, adapter })
    }

    /// Returns name, interface and driver, for display.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the device's size limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// For tests: from now on, weights lie in segments of at most `bytes`, as on a device with smaller buffers.
    pub fn cut_weights_at(&mut self, bytes: u64) {
        self.limits.buffer = bytes;
    }

    /// Returns the bytes that the device's buffers take, and the bytes reserved for them, if the allocator reports them.
    pub fn allocated(&self) -> Option<(u64, u64)> {
        self.device
            .generate_allocator_report()
            .map(|report| (report.total_allocated_bytes, report.total_reserved_bytes))
    }

    /// Returns the bytes of the GPU's own memory that this process may still take, if its driver reports them.
    pub fn free_memory(&self) -> Option<u64> {
        crate::budget::read(&self.adapter).filter(|memory| memory.budget.is_some()).map(|memory| memory.free())
    }

    /// Returns the device's first failure, if there was one.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes the pipelines of kernels that have none yet.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] with the compiler's message.
    pub fn prepare(&mut self, kernels: impl IntoIterator<Item = Kernel>) -> Result<(), GpuError> {
        for kernel in kernels {
            if self.by_kernel.contains_key(&kernel) {
                continue;
            }
            let scope = self.device.push_error_scope(ErrorFilter::Validation);
            let source = ShaderSource::Wgsl(kernel.source().into());
            let module = self.device.create_shader_module(ShaderModuleDescriptor { label: None, source });
            // Every kernel writes a workgroup's memory before it reads it.
            let options = PipelineCompilationOptions { zero_initialize_workgroup_memory: false, ..Default::default() };
            let pipeline = self.device.create_compute_pipeline(&ComputePipelineDescriptor {
                label: None,
                layout: Some(&self.layouts[place(kernel.second())]),
                module: &module,
                entry_point: Some("main"),
                compilation_options: options,
                cache: None,
            });
            if let Some(error) = pollster::block_on(scope.pop()) {
                return Err(GpuError::Kernel(format!("{kernel:?}: {error}")));
            }
            self.by_kernel.insert(kernel, self.pipelines.len());
            self.pipelines.push(pipeline);
        }
        Ok(())
    }

    /// The number of a kernel's pipeline.
    ///
    /// # Panics
    /// When it was not prepared: a bug.
    pub(crate) fn pipeline_of(&self, kernel: Kernel) -> usize {
        *self.by_kernel.get(&kernel).unwrap_or_else(|| panic!("{kernel:?} was not prepared"))
    }

    /// The pipeline with this number.
    pub(crate) fn pipeline(&self, number: usize) -> &ComputePipeline {
        &self.pipelines[number]
    }

    /// A buffer of at least `bytes` bytes, entered in the ledger.
    ///
    /// # Errors
    /// [`GpuError::Refused`]: the driver has no memory, or the plan is sealed.
    pub(crate) fn buffer(
        &self,
        ledger: &Arc<Ledger>,
        component: Component,
        bytes: usize,
        usage: BufferUsages,
    ) -> Result<DeviceBuffer, GpuError> {
        let size = (bytes as u64).next_multiple_of(16).max(16);
        let refused = |reason: String| GpuError::Refused { component: component.name(), bytes: size, reason };
        if !ledger.count_allocation() {
            return Err(refused("the server is ready, and its memory fixed".into()));
        }
        if faults::refuses_region(component) {
            return Err(refused("a test asked for it".into()));
        }
        let memory = self.device.push_error_scope(ErrorFilter::OutOfMemory);
        let valid = self.device.push_error_scope(ErrorFilter::Validation);
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: Some(component.name()),
            size,
            usage,
            mapped_at_creation: false,
        });
        let (valid, memory) = (pollster::block_on(valid.pop()), pollster::block_on(memory.pop()));
        if let Some(error) = memory.or(valid) {
            return Err(refused(error.to_string()));
        }
        ledger.commit(component, bytes as u64);
        Ok(DeviceBuffer { buffer, bytes: bytes as u64, component, ledger: Arc::clone(ledger) })
    }

    /// Group 0 of every kernel's bindings.
    pub(crate) fn first_group(&self, buffers: [&Buffer; 4]) -> BindGroup {
        let [arena, sent, vectors, lookup] = buffers.map(Buffer::as_entire_binding);
        let entry = |binding, resource| BindGroupEntry { binding, resource };
        let entries = [entry(0, arena), entry(1, sent), entry(2, vectors), entry(3, lookup)];
        self.device.create_bind_group(&BindGroupDescriptor { label: None, layout: &self.groups[0], entries: &entries })
    }

    /// Group 1 of kernels that have one.
    pub(crate) fn second_group(&self, second: Second, buffer: &Buffer) -> BindGroup {
        let entries = [BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }];
        let layout = &self.groups[place(second)];
        self.device.create_bind_group(&BindGroupDescriptor { label: None, layout, entries: &entries })
    }
}

/// A buffer of one component, entered in the ledger until it is dropped.
pub(crate) struct DeviceBuffer {
    pub buffer: Buffer,
    bytes: u64,
    component: Component,
    ledger: Arc<Ledger>,
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // Now, not when the last bind group is dropped.
        self.buffer.destroy();
        self.ledger.release(self.component, self.bytes);
    }
}
