//! The choice of a GPU. Software on the host's cores is never chosen, unless it is allowed.

use wgpu::{Backends, DeviceType, Features, InstanceDescriptor};

use crate::budget::{self, OwnMemory};
use crate::error::GpuError;

/// Bytes of the smallest buffers that this crate can work with; every driver has larger ones.
const BUFFER_LEAST: u64 = 64 << 20;

/// The adapter to look for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterChoice {
    /// Index among the allowed adapters; absent: the first.
    pub index: Option<usize>,
    /// Whether software on the host's cores may take the place of a GPU.
    pub allow_software: bool,
}

/// Size limits of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limit of a buffer that kernels access.
    pub buffer: u64,
}

/// A GPU that was found and is not open yet.
pub struct Adapter {
    pub(crate) adapter: wgpu::Adapter,
    pub(crate) name: String,
    /// The adapter's bus address, where the driver reports it.
    place: String,
    software: bool,
    shares_memory: bool,
}

impl Adapter {
    /// Finds the chosen adapter.
    ///
    /// # Errors
    /// [`GpuError`], with the adapters that were found.
    pub fn find(choice: AdapterChoice) -> Result<Self, GpuError> {
        let mut found = Self::all();
        if found.is_empty() {
            return Err(GpuError::NoAdapter);
        }
        let names = |found: &[Self]| {
            let name = |(i, adapter): (usize, &Self)| format!("gpu:{i} ({})", adapter.name);
            found.iter().enumerate().map(name).collect::<Vec<_>>().join(", ")
        };
        if !choice.allow_software {
            let software: Vec<String> = found.iter().map(|adapter| adapter.name.clone()).collect();
            found.retain(|adapter| !adapter.software);
            if found.is_empty() {
                return Err(GpuError::OnlySoftware(software.join(", ")));
            }
        }
        let index = choice.index.unwrap_or(0);
        if index >= found.len() {
            return Err(GpuError::NoSuch { index, found: names(&found) });
        }
        let adapter = found.swap_remove(index);
        if !adapter.adapter.features().contains(Features::IMMEDIATES) {
            return Err(GpuError::Lacks { name: adapter.name, what: "immediate data" });
        }
        if adapter.limits().buffer < BUFFER_LEAST {
            return Err(GpuError::Lacks { name: adapter.name, what: "buffers of 64 MiB" });
        }
        Ok(adapter)
    }

    /// Returns all adapters of Vulkan and Metal, discrete ones first, software last.
    pub fn all() -> Vec<Self> {
        #[cfg(feature = "noop")]
        if let Some(gpu) = crate::noop::chosen() {
            let own = |adapter| Self {
                adapter,
                name: "noop".into(),
                place: String::new(),
                software: false,
                shares_memory: gpu.own.is_none(),
            };
            return crate::noop::adapter(gpu).map(own).into_iter().collect();
        }
        let backends = Backends::VULKAN | Backends::METAL;
        let instance =
            wgpu::Instance::new(InstanceDescriptor { backends, ..InstanceDescriptor::new_without_display_handle() });
        let rank = |kind: DeviceType| match kind {
            DeviceType::DiscreteGpu => 0,
            DeviceType::IntegratedGpu => 1,
            DeviceType::VirtualGpu => 2,
            DeviceType::Other => 3,
            DeviceType::Cpu => 4,
        };
        let mut adapters = pollster::block_on(instance.enumerate_adapters(backends));
        adapters.sort_by_key(|adapter| rank(adapter.get_info().device_type));
        let own = |adapter: wgpu::Adapter| {
            let info = adapter.get_info();
            let name = format!("{} ({:?}, {})", info.name, info.backend, info.driver_info);
            let software = info.device_type == DeviceType::Cpu;
            let shares_memory = software || info.device_type == DeviceType::IntegratedGpu;
            Self { adapter, name, place: info.device_pci_bus_id, software, shares_memory }
        };
        adapters.into_iter().map(own).collect()
    }

    /// Returns name, interface and driver, for display.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it computes on the host's cores.
    pub fn is_software(&self) -> bool {
        self.software
    }

    /// Whether its memory is the host's memory.
    pub fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// Returns the names of its features that kernels can use.
    pub fn features(&self) -> Vec<&'static str> {
        let features = self.adapter.features();
        let known = [
            (Features::IMMEDIATES, "immediate data"),
            (Features::SUBGROUP, "subgroups"),
            (Features::SHADER_F16, "half precision"),
            (Features::TIMESTAMP_QUERY, "timestamps"),
            (Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative matrices"),
        ];
        known.into_iter().filter(|(feature, _)| features.contains(*feature)).map(|(_, name)| name).collect()
    }

    /// Returns the size of its own memory, if its driver reports it.
    pub fn memory(&self) -> Option<OwnMemory> {
        budget::read(&self.adapter)
    }

    /// Returns the name of its memory that all processes of this machine share: `gpu`, and its bus address or else its name, on one line.
    pub fn memory_domain(&self) -> String {
        let known = if self.place.is_empty() { &self.name } else { &self.place };
        format!("gpu {}", known.replace(char::is_control, " "))
    }

    /// Returns the most bytes of shared memory that the driver recommends to use: on a Mac.
    pub fn working_set(&self) -> Option<u64> {
        let says = cfg!(target_vendor = "apple") && self.shares_memory && !self.software;
        self.memory().filter(|_| says).map(|memory| memory.total)
    }

    /// Returns the size limits of a device.
    pub fn limits(&self) -> Limits {
        let limits = self.adapter.limits();
        // Offsets in a buffer are counted in words of 32 bits.
        let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(4 << 30);
        Limits { buffer: most / 256 * 256 }
    }
}
