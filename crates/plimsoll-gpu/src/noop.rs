//! For tests: a GPU without a driver, wgpu's `noop`. Its buffers are real and copies between them are carried out, but no kernel is: every
//! result is what the buffers held. So plans, the ledger and refusals are tested on any machine, with any limits.

use std::sync::{Mutex, PoisonError};

use wgpu::{Backends, InstanceDescriptor, NoopBackendOptions};

/// What the GPU says of itself.
#[derive(Clone, Copy, Debug)]
pub struct NoopGpu {
    /// Bytes of a buffer at most.
    pub buffer: u64,
    /// Bytes of its own memory, and how many of them this process may use; none where it shares the machine's.
    pub own: Option<[u64; 2]>,
}

static STAND_IN: Mutex<Option<NoopGpu>> = Mutex::new(None);

/// From now on this is the only GPU of the process; `None`: its real ones are there again.
pub fn stand_in(gpu: Option<NoopGpu>) {
    *STAND_IN.lock().unwrap_or_else(PoisonError::into_inner) = gpu;
}

/// The GPU that stands in, if one does.
pub(crate) fn chosen() -> Option<NoopGpu> {
    *STAND_IN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Its adapter.
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
