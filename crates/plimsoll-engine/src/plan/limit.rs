//! The memory limit that a plan is made under.

use plimsoll_memory::host::Remedy;

use super::gpu::GpuLimit;

/// The memory that this process may use: the limit, less what peers use inside it.
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    /// The limit, in bytes.
    pub bytes: u64,
    /// Where the number comes from, for people.
    pub source: String,
    /// Whether the operator set it: if so, the pool fills the room.
    pub chosen: bool,
    /// Bytes of the underlying limit that are used outside the plan, mostly by other processes.
    pub peers: u64,
    /// How that limit is raised.
    pub remedy: Remedy,
    /// The GPU that carries out the steps, or the reason why there is none. `None`: the host's cores carry them out.
    pub gpu: Option<Result<GpuLimit, String>>,
}

impl MemoryLimit {
    /// Returns the same limit with 0 bytes of the GPU's own memory, or of the working set in the machine's memory.
    pub(super) fn without_device_memory(&self) -> Self {
        let mut limit = self.clone();
        if let Some(Ok(GpuLimit { own, working_set, .. })) = &mut limit.gpu {
            own.iter_mut().for_each(|own| own.bytes = 0);
            working_set.iter_mut().for_each(|bytes| *bytes = 0);
        }
        limit
    }

    /// A limit that the operator set as a budget, on this machine or another.
    pub fn of_budget(bytes: u64, source: impl Into<String>) -> Self {
        Self { bytes, source: source.into(), chosen: true, peers: 0, remedy: Remedy::Budget, gpu: None }
    }
}
