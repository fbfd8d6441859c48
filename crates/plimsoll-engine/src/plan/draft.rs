//! An unfinished plan, and the memory that its pools lie in.

use plimsoll_device::ModelShape;
use plimsoll_memory::{Component, Plan};

use super::MemoryLimit;
use super::gpu::{GpuPlan, OwnMemory};
use crate::api::options::Options;
use crate::cache::PagePool;
use crate::media::MediaPlan;
use crate::schedule::scheduler::StepLimits;

/// The facts that are known before the pool's size is.
pub(super) struct Draft<'a> {
    pub options: &'a Options,
    pub limit: &'a MemoryLimit,
    pub threads: usize,
    pub shape: ModelShape,
    pub step: StepLimits,
    pub workspace: usize,
    pub context: usize,
    pub media: Option<&'a MediaPlan>,
    pub gpu: Option<GpuPlan>,
}

impl Draft<'_> {
    pub fn own(&self) -> Option<&OwnMemory> {
        self.gpu.as_ref().and_then(|gpu| gpu.own.as_ref())
    }

    /// Bytes of the memory that the pools lie in.
    pub fn budget(&self) -> u64 {
        self.own().map_or(self.limit.bytes, |own| own.bytes)
    }

    /// Bytes that a plan takes of that memory. In a GPU's own memory as many bytes as the emergency reserve has stay free.
    pub fn taken(&self, plan: &Plan) -> u64 {
        match self.own() {
            Some(_) => plan.device_total() + plan.bytes(Component::EmergencyReserve),
            None => plan.total(),
        }
    }

    /// The most pages that a pool can have.
    pub fn pages_max(&self) -> usize {
        self.gpu.as_ref().map_or(PagePool::PAGES_MAX, |gpu| gpu.pages_max.min(PagePool::PAGES_MAX))
    }

    /// The most slots that a pool can have, in whole requests.
    pub fn slots_max(&self, slots_per_request: usize) -> usize {
        let most = self.gpu.as_ref().map_or(usize::MAX, |gpu| gpu.slots_max);
        most.checked_div(slots_per_request).map_or(0, |requests| requests * slots_per_request)
    }

    /// Whether start-up may choose a pool other than the planned one.
    pub fn measure(&self) -> bool {
        self.options.max_total_token_num.is_none()
    }

    /// Whether requests are shortened to the pool.
    pub fn clamp_context(&self) -> bool {
        self.options.max_req_total_len.is_none() || !self.measure()
    }
}
