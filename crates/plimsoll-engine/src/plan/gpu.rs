//! The GPU's part of a plan: where weights and pages lie, how many bytes each step transfers, and how many the driver takes.

use plimsoll_device::{
    Buf, CANDIDATES_MAX, CachedLayer, ComputeDtype, KvGroup, ModelShape, PAGE_TOKENS, SeqSpan, Target,
};
use plimsoll_gpu::segments::{CALL_BYTES, Segments, load_bytes};
use plimsoll_memory::Bytes;
use plimsoll_memory::host::Remedy;

use super::run::Ran;
use super::{Blueprint, Draft, MemoryLimit};
use crate::api::options::Options;
use crate::api::plan_error::PlanError;
use crate::cache::Pools;
use crate::media::MediaPlan;
use crate::memory::footprint::engine_bytes;
use crate::schedule::scheduler::StepLimits;

/// Bytes that a driver takes beside the buffers: its code, compiled kernels, descriptors, command buffers. Measured on Mesa 22.3
/// (lavapipe): see docs/gpu.md.
const DRIVER_BYTES: u64 = 192 << 20;

/// Bytes of a GPU's own memory that stay free for its driver and other processes. No driver of such a GPU has been measured yet; published
/// reports give 100 to 300 MiB.
pub(super) const DEVICE_RESERVE_BYTES: u64 = 384 << 20;

/// A GPU as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuLimit {
    /// Name, interface and driver, for people.
    pub name: String,
    /// The largest buffer, in bytes.
    pub buffer: u64,
    /// Whether this is a software GPU, which computes on the host's cores.
    pub software: bool,
    /// Its own memory; `None` where it shares the machine's.
    pub own: Option<OwnMemory>,
    /// Bytes of the machine's memory that the driver recommends to use at most (Metal's working set). `None` with own memory, or without
    /// such a recommendation.
    pub working_set: Option<u64>,
}

/// The memory of a GPU that has its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnMemory {
    /// Bytes of it that this process may use.
    pub bytes: u64,
    /// Where the number comes from, for people.
    pub source: String,
}

/// An engine's needs on a GPU: its memory, the bytes it transfers, and its buffer limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPlan {
    /// Name, interface and driver, for people.
    pub name: String,
    /// Whether this is a software GPU, which computes on the host's cores.
    pub software: bool,
    /// Its own memory; `None` where it shares the machine's.
    pub own: Option<OwnMemory>,
    /// Bytes of the machine's memory that the driver recommends to use at most; `None` for a GPU with memory of its own.
    pub working_set: Option<u64>,
    /// Bytes of a step's temporaries.
    pub arena: usize,
    /// The most bytes that a step sends to the GPU.
    pub upload: usize,
    /// The most bytes that a step fetches from the GPU.
    pub readback: usize,
    /// Bytes of the weights in their buffers.
    pub weights: u64,
    /// Bytes on their way to the GPU while weights are loaded.
    pub loading: usize,
    /// The most dispatches of a step.
    pub calls: usize,
    /// The most matrices, and single rows of them, that a step fetches one by one.
    pub outputs: usize,
    /// The most pages that a layer's buffer holds.
    pub pages_max: usize,
    /// The most state slots, or window pages, that a layer's buffer holds.
    pub slots_max: usize,
    /// Bytes on the heap: input before it is sent, recorded dispatches, a row of logits, and fetched output.
    pub heap: u64,
}

impl GpuPlan {
    /// Bytes of step workspace: the arena and the input. Where memory is shared, the transfer buffers count as well, or the loading buffers
    /// if these are larger.
    pub fn workspace(&self) -> usize {
        match self.own {
            Some(_) => self.arena + self.upload,
            None => (self.arena + 2 * self.upload + self.readback).max(self.loading),
        }
    }

    /// Bytes of the host's transfer buffers, for a GPU with memory of its own.
    pub fn transfers(&self) -> usize {
        (self.upload + self.readback).max(self.loading)
    }

    /// Bytes that the driver takes.
    pub fn driver(&self) -> u64 {
        DRIVER_BYTES
    }

    /// The workspace's parts as text, for the plan's detail column.
    pub fn words(&self) -> String {
        let [arena, upload, readback] = [self.arena, self.upload, self.readback].map(|bytes| Bytes(bytes as u64));
        match self.own {
            Some(_) => format!("; on the GPU {arena} of temporaries, {upload} sent"),
            None => format!("; on the GPU {arena} of temporaries, {upload} sent (twice), {readback} fetched"),
        }
    }
}

/// The planner's facts about a step, for its part on a GPU.
pub(super) struct GpuStep<'a> {
    pub shape: &'a ModelShape,
    pub limits: &'a StepLimits,
    pub largest: &'a Ran,
    pub media: Option<&'a MediaPlan>,
    pub context: usize,
}

impl MemoryLimit {
    /// The GPU of `--device`.
    fn known_gpu(&self) -> Result<&GpuLimit, PlanError> {
        let why = match &self.gpu {
            Some(Ok(gpu)) => return Ok(gpu),
            Some(Err(why)) => why.as_str(),
            None => "it is not known what GPU there is",
        };
        Err(PlanError::Option { flag: "--device", problem: format!("gpu: {why}") })
    }
}

impl Blueprint {
    /// Numbers of the widest row that a step outputs: logits, scores, or the dense layers' output.
    fn widest_output(&self) -> usize {
        let of_encoder = self
            .encoder
            .map_or(0, |encoder| encoder.labels.unwrap_or(0).max(encoder.dense.map_or(0, |dense| dense.width())));
        self.model.vocab_size().max(of_encoder)
    }

    /// Plans the engine's part on a GPU; `None` where the host's cores carry out its steps.
    ///
    /// # Errors
    /// [`PlanError::Option`] for a model or an option that GPUs do not serve, and for a part that exceeds the largest buffer.
    pub(super) fn on_gpu(
        &self,
        options: &Options,
        limit: &MemoryLimit,
        step: &GpuStep<'_>,
    ) -> Result<Option<GpuPlan>, PlanError> {
        if options.target() != Target::Gpu {
            return Ok(None);
        }
        // Encoders run between two steps, or above a chunk that waits between two layers.
        let encoder = step.media.map(|media| media.transfers).unwrap_or_default();
        let encoded = step.media.map_or(0, |media| step.largest.below + media.workspace);
        served_by_gpu(options, step.largest.missing.or(encoder.missing))?;
        let problem = |flag, problem: String| PlanError::Option { flag, problem };
        let gpu = limit.known_gpu()?;
        let limit = usize::try_from(gpu.buffer).unwrap_or(usize::MAX);
        let segments = Segments::new(&self.weights, limit);
        let segments = segments.map_err(|error| problem("--device", format!("gpu: {error}")))?;
        let page_ids = step.limits.running * step.context.div_ceil(PAGE_TOKENS);
        let tables = 1 + usize::from(step.shape.kv.window().is_some());
        let words = (step.largest.upload + tables * page_ids).max(encoder.upload);
        let vocab = self.widest_output();
        let logits = step.limits.logit_rows * vocab;
        let hidden = step.limits.rows * step.shape.hidden;
        // Logits are fetched as well, because the candidates do not answer every request for a row.
        let candidates = if step.limits.candidates { 2 * CANDIDATES_MAX * step.limits.logit_rows } else { 0 };
        let upload = (words * size_of::<u32>()).next_multiple_of(256);
        let layers = || step.shape.kv.layers().iter();
        let in_group = |group| move |layer: &&CachedLayer| layer.group == group;
        let most = |group| layers().filter(in_group(group)).map(|layer| limit / layer.bytes()).min().unwrap_or(limit);
        let calls = segments.dispatches(step.largest.calls.max(encoder.calls));
        let width = step.media.map_or(0, MediaPlan::output_width);
        // Logits row by row, hidden states and candidates.
        let outputs = step.limits.logit_rows + 2;
        let lists = outputs * (size_of::<(Buf, usize)>() + size_of::<Buf>() + size_of::<[usize; 2]>());
        // The table of weights is kept, to load them again after a loss of the GPU.
        let table = engine_bytes(&self.weights) as usize;
        let plan = GpuPlan {
            name: gpu.name.clone(),
            software: gpu.software,
            own: gpu.own.clone(),
            working_set: gpu.working_set.filter(|_| gpu.own.is_none()),
            arena: step.largest.workspace.max(encoded).next_multiple_of(256),
            upload,
            readback: ((logits + hidden + candidates).max(encoder.output) * size_of::<f32>()).next_multiple_of(256),
            weights: segments.bytes() as u64,
            loading: load_bytes(&self.weights),
            calls,
            outputs,
            pages_max: most(KvGroup::Whole),
            slots_max: step.shape.state.map_or_else(|| most(KvGroup::Window), |state| limit / state.layer_bytes()),
            heap: (table
                + upload
                + CALL_BYTES * calls
                + size_of::<SeqSpan>() * step.limits.rows
                + 4 * vocab.max(width)
                + lists) as u64,
        };
        let flag = step.media.map_or("--max-image-pixels", MediaPlan::size_flag);
        for (what, bytes, of_encoder) in [
            ("temporaries", plan.arena, encoded),
            ("output", plan.readback, encoder.output * size_of::<f32>()),
            ("input", plan.upload, encoder.upload * size_of::<u32>()),
        ] {
            if bytes > limit {
                let (whose, flag) = match of_encoder > limit {
                    true => ("an encoder's", flag),
                    false => ("a step's", "--batch-max-tokens"),
                };
                let (bytes, limit) = (Bytes(bytes as u64), Bytes(limit as u64));
                let words =
                    format!("is too large for {}: {whose} {what} take {bytes}, and a buffer {limit} at most", gpu.name);
                return Err(problem(flag, words));
            }
        }
        Ok(Some(plan))
    }

    /// Returns the limit of a GPU that shares the machine's memory, if the driver recommends less than the plan's limit. It is the
    /// recommended bytes plus all planned bytes beside the GPU's buffers, which do not depend on the pools.
    pub(super) fn working_set_limit(&self, draft: &Draft<'_>) -> Option<MemoryLimit> {
        let gpu = draft.gpu.as_ref()?;
        let working_set = gpu.working_set?;
        let empty = self.tree(draft, Pools { pages: 0, slots: 0 });
        let beside = empty.lines.iter().filter(|line| !line.component.on_device()).map(|line| line.bytes).sum();
        let bytes = working_set.saturating_add(beside);
        (bytes < draft.limit.bytes).then(|| MemoryLimit {
            bytes,
            source: format!(
                "{} that {} recommends to use, and {} beside its buffers",
                Bytes(working_set),
                gpu.name,
                Bytes(beside)
            ),
            peers: 0,
            remedy: Remedy::WorkingSet { beside },
            ..draft.limit.clone()
        })
    }
}

/// Refuses operations and options that GPUs do not serve, with the flag's name.
fn served_by_gpu(options: &Options, missing: Option<&'static str>) -> Result<(), PlanError> {
    if let Some(operation) = missing {
        let problem =
            format!("is gpu, but this model needs {operation}, which the GPU cannot compute yet: use --device cpu");
        return Err(PlanError::Option { flag: "--device", problem });
    }
    let rounded = !matches!(options.compute_dtype, ComputeDtype::Auto | ComputeDtype::F32);
    let unserved = [
        (rounded, "--compute-dtype", "needs --device cpu: the GPU computes in single precision, which is auto or f32"),
        (options.elastic, "--elastic", "needs --device cpu: the memory of a GPU is committed at start"),
        (options.hosted, "--device", "is gpu, which serves one model alone: use --device cpu for several"),
    ];
    match unserved.into_iter().find(|(so, ..)| *so) {
        Some((_, flag, problem)) => Err(PlanError::Option { flag, problem: problem.into() }),
        None => Ok(()),
    }
}
