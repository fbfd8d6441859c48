//! The memory of a GPU, and this process's share of it, as the driver reports them.

/// The memory of a GPU that has its own, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMemory {
    /// Bytes of the whole memory.
    pub total: u64,
    /// Bytes that this process may hold, and bytes that it holds, if the driver reports them (VK_EXT_memory_budget).
    pub budget: Option<[u64; 2]>,
}

impl OwnMemory {
    /// Returns the bytes that this process may take beside those it holds; all bytes if the driver does not report them.
    pub fn free(&self) -> u64 {
        self.budget.map_or(self.total, |[budget, used]| budget.saturating_sub(used))
    }
}

/// Reads the size of a GPU's memory from its driver.
pub(crate) fn read(adapter: &wgpu::Adapter) -> Option<OwnMemory> {
    #[cfg(feature = "noop")]
    if let Some(gpu) = crate::noop::chosen() {
        return gpu.own.map(|[total, may]| OwnMemory { total, budget: Some([may, 0]) });
    }
    ask(adapter)
}

/// Reads the size of the GPU's largest device-local heap.
#[cfg(not(target_vendor = "apple"))]
#[allow(unsafe_code, reason = "the driver is asked through its own interface")]
fn ask(adapter: &wgpu::Adapter) -> Option<OwnMemory> {
    use ash::{ext, vk};

    // SAFETY: the adapter of the interface is only queried; it is neither destroyed nor kept.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let shared = adapter.shared_instance();
    let (instance, device) = (shared.raw_instance(), adapter.raw_physical_device());
    let says = shared.instance_api_version() >= vk::API_VERSION_1_1
        && adapter.physical_device_capabilities().supports_extension(ext::memory_budget::NAME);
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let properties = if says {
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the device belongs to the instance, which is alive, and both structures have the required types.
        unsafe { instance.get_physical_device_memory_properties2(device, &mut properties) };
        properties.memory_properties
    } else {
        // SAFETY: the device belongs to the instance, which is alive.
        unsafe { instance.get_physical_device_memory_properties(device) }
    };
    let heaps = properties.memory_heaps_as_slice().iter().enumerate();
    let own = heaps.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
    let (i, heap) = own.max_by_key(|(_, heap)| heap.size)?;
    let budget = says.then(|| [budget.heap_budget[i], budget.heap_usage[i]]);
    Some(OwnMemory { total: heap.size, budget })
}

/// Reads Metal's recommended maximum: of the machine's memory, or of a GPU's own memory in an older Mac.
#[cfg(target_vendor = "apple")]
#[allow(unsafe_code, reason = "the driver is asked through its own interface")]
fn ask(adapter: &wgpu::Adapter) -> Option<OwnMemory> {
    use objc2_metal::MTLDevice;

    // SAFETY: the adapter of the interface is only queried; it is neither destroyed nor kept.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }?;
    let total = adapter.raw_device().recommendedMaxWorkingSetSize();
    // 0 if the system does not report it.
    (total > 0).then_some(OwnMemory { total, budget: None })
}
