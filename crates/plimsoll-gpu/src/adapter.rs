//! Which GPU: never software that stands for one, unless that is allowed.

use wgpu::{Backends, DeviceType, Features, InstanceDescriptor};

use crate::budget::{self, OwnMemory};
use crate::error::GpuError;

/// Bytes of the smallest buffers that can serve anything; every driver has more.
const BUFFER_LEAST: u64 = 64 << 20;

/// Which adapter is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterChoice {
    /// Its number among those that are allowed; absent: the first.
    pub index: Option<usize>,
    /// Software on the host's cores may stand for a GPU.
    pub allow_software: bool,
}

/// Sizes that a device keeps to, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of a buffer that kernels see.
    pub buffer: u64,
}

/// A GPU that was found and is not open yet.
pub struct Adapter {
    pub(crate) adapter: wgpu::Adapter,
    pub(crate) name: String,
    /// Its place on the bus, where its driver says so.
    place: String,
    software: bool,
    shares_memory: bool,
}

impl Adapter {
    /// Looks for the adapter that is wanted.
    ///
    /// # Errors
    /// [`GpuError`] with those that were found.
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

    /// All of Vulkan and Metal, discrete ones first, software last.
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

    /// Name, interface and driver, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it computes on the host's cores.
    pub fn is_software(&self) -> bool {
        self.software
    }

    /// Whether its memory is the host's.
    pub fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// What of interest to kernels it has.
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

    /// Its own memory, as far as its driver says.
    pub fn memory(&self) -> Option<OwnMemory> {
        budget::read(&self.adapter)
    }

    /// What all processes of this machine call its memory: `gpu`, and its place on the bus or else its name, on one line.
    pub fn memory_domain(&self) -> String {
        let known = if self.place.is_empty() { &self.name } else { &self.place };
        format!("gpu {}", known.replace(char::is_control, " "))
    }

    /// Bytes of the machine's memory that its driver recommends to use at most, where it shares it: on a Mac.
    pub fn working_set(&self) -> Option<u64> {
        let says = cfg!(target_vendor = "apple") && self.shares_memory && !self.software;
        self.memory().filter(|_| says).map(|memory| memory.total)
    }

    /// What a device keeps to.
    pub fn limits(&self) -> Limits {
        let limits = self.adapter.limits();
        // Offsets in a buffer are counted in words of 32 bits.
        let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(4 << 30);
        Limits { buffer: most / 256 * 256 }
    }
}
