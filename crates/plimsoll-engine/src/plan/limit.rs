//! The memory limit that a plan is made under.

use plimsoll_memory::host::Remedy;

use super::gpu::GpuLimit;

/// What this process may use: the limit, less what peers use inside it.
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    /// Bytes.
    pub bytes: u64,
    /// Where the number comes from, for people.
    pub source: String,
    /// Whether the operator set it: then the pool fills the room.
    pub chosen: bool,
    /// What others use of the limit that it comes from.
    pub peers: u64,
    /// How that limit is raised.
    pub remedy: Remedy,
    /// The GPU that carries out the steps, or why there is none; absent: the host's cores do.
    pub gpu: Option<Result<GpuLimit, String>>,
}

impl MemoryLimit {
    /// The same limit with nothing free in the GPU's own memory, or of what it may use of the machine's.
    pub(super) fn without_device_memory(&self) -> Self {
        let mut limit = self.clone();
        if let Some(Ok(GpuLimit { own, working_set, .. })) = &mut limit.gpu {
            own.iter_mut().for_each(|own| own.bytes = 0);
            working_set.iter_mut().for_each(|bytes| *bytes = 0);
        }
        limit
    }

    /// A limit of the operator's own: that of a budget, on this machine or another.
    pub fn of_budget(bytes: u64, source: impl Into<String>) -> Self {
        Self { bytes, source: source.into(), chosen: true, peers: 0, remedy: Remedy::Budget, gpu: None }
    }
}
