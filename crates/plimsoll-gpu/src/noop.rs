//! A GPU without a driver, for tests: wgpu's `noop`. Its buffers are real and copies between them are carried out, but no kernel runs.
//! Every result has the bytes that the buffers had before. So plans, the ledger and refusals are tested on any machine, with any limits.

use std::sync::{Mutex, PoisonError};

use wgpu::{Backends, InstanceDescriptor, NoopBackendOptions};

/// Sizes that the GPU reports.
#[derive(Clone, Copy, Debug)]
pub struct NoopGpu {
    /// Most bytes of a buffer.
    pub buffer: u64,
    /// Bytes of its own memory, and how many of them this process may use; none if it shares the machine's.
    pub own: Option<[u64; 2]>,
}

static STAND_IN: Mutex<Option<NoopGpu>> = Mutex::new(None);

/// Makes this the only GPU of the process from now on. `None` restores the real ones.
pub fn stand_in(gpu: Option<NoopGpu>) {
    *STAND_IN.lock().unwrap_or_else(PoisonError::into_inner) = gpu;
}

/// Returns the test GPU, if there is one.
pub(crate) fn chosen() -> Option<NoopGpu> {
    *STAND_IN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the test GPU's adapter.
pub(crate) fn adapter(gpu: NoopGpu) -> Option<wgpu::Adapter> {
    let limits = wgpu::Limits {
        max_buffer_size: gpu.buffer,
        max_storage_buffer_binding_size: gpu.buffer,
        max_immediate_size: 128,
        ..wgpu::Limits::default()
    };
    let noop = NoopBackendOptions { limits: Some(limits), ..NoopBackendOptions::enabled() };
    let mut instance = InstanceDescriptor::new_without_display_handle();
    (instance.backends, instance.backend_options.noop) = (Backends::NOOP, noop);
    let adapters = wgpu::Instance::new(instance).enumerate_adapters(Backends::NOOP);
    pollster::block_on(adapters).pop()
}
