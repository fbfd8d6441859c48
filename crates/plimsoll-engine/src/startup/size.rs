//! Sizing: the number of tokens in the pool, and the builds that test it.
//!
//! The arithmetic is that of `plimsoll_memory::sizing`. The planner feeds it with planned bytes, start-up with measured ones. Where these
//! agree, both choose the same pool (I8). Weights stay while generations are built and dropped.

use std::sync::Arc;

use plimsoll_device::{ModelShape, PAGE_TOKENS};
use plimsoll_memory::sizing::{
    self, DeviceNow, Event, Failure, Generations, Measured, Mode, PoolCount, ProfileConfig, Released, ScalesWith, Shape,
};
use plimsoll_memory::{Component, EmergencyReserve, Ledger};

use crate::api::cancel::Cancel;
use crate::api::start_error::StartError;
use crate::cache::Pools;
use crate::cache::{self, KvCache, KvEventLog, Link, PagePool, PrefixIndex};
use crate::media::MediaSpec;
use crate::memory::footprint::Tables;
use crate::plan::EnginePlan;
use crate::plan::sizes::Sizes;
use crate::runner::Runner;
use crate::runner::backend::{Backend, Extent, refused};
use crate::sampling::Sampler;
use crate::startup::phases::Phases;
use crate::startup::self_test::{self_test, self_test_encoder};

/// Returns the configuration with which `auto_profile` builds the pools of `plan`. Where the operator left the pool's size open, the pools
/// are built as planned, and measured again if the plan does not hold. Otherwise the size is pinned.
pub(crate) fn profile_config(plan: &EnginePlan) -> ProfileConfig {
    let tokens = (plan.pages * PAGE_TOKENS) as u64;
    let context = u64::from(plan.limits.max_req_total_len);
    let sizing = Sizes { requests_max: plan.requests(), ..plan.sizing };
    let mut config = sizing.config(&plan.step, context, plan.fraction, plan.clamp_context);
    config.batch_max_tokens = config.batch_max_tokens.min(tokens);
    config.probe_floor_tokens = sizing::PROBE_FLOOR_TOKENS.min(tokens);
    // A pool that is smaller than its probe would be is not measured with a probe.
    config.mode = match plan.measure && config.probe_tokens() <= tokens {
        true => Mode::Planned { tokens, state_slots: plan.slots as u64 },
        false => Mode::Pinned { tokens },
    };
    config
}

/// All parts with a size that depends on capacity, and handles to the longer-lived parts that they use.
pub(crate) struct PoolBuild<R> {
    /// Model, weights and this generation's memory.
    pub runner: R,
    /// Page table and prefix index.
    pub cache: KvCache,
    /// Emergency reserve.
    pub emergency_reserve: Option<EmergencyReserve>,
}

/// Builds generations over loaded weights.
pub(crate) struct PoolBuilder<'a, B> {
    /// The plan that is built.
    pub plan: &'a EnginePlan,
    /// The model's dimensions, for the device.
    pub shape: ModelShape,
    /// The ledger that every byte is entered in.
    pub ledger: Arc<Ledger>,
    /// The model's weights on a device.
    pub backend: B,
    /// The sampler; its largest scratch is part of the self-test.
    pub sampler: Sampler,
    /// Whether pages are touched when they are mapped.
    pub touch: bool,
    /// The tables beside the pages.
    pub tables: Tables,
    /// Tokens of the current generation; 0 without one.
    pub tokens: u64,
    /// Returns the bytes that this process may hold in total at this moment, its present bytes included.
    pub room: Box<dyn FnMut() -> u64 + 'a>,
    /// The most bytes of the workspace that a step has taken.
    pub workspace_peak: u64,
    /// Checked between two steps of the self-test.
    pub cancel: Cancel,
    /// Limits and output pool of the largest batches of media, for a model with an encoder.
    pub media: Option<MediaSpec>,
    /// The root of the prefixes' links; `None` without a tier below memory.
    pub root: Option<Link>,
}

/// The components with a size that depends on the generation.
const SIZED: [Component; 5] = [
    Component::KvPages,
    Component::StateSlots,
    Component::PrefixIndex,
    Component::StepWorkspace,
    Component::EmergencyReserve,
];

impl<B: Backend> PoolBuilder<'_, B> {
    /// Bytes that this process holds or has planned: planned bytes of fixed parts, mapped bytes of a generation's parts.
    fn own(&self) -> u64 {
        let bytes = |component: &Component| match *component {
            // Counted by its upper limit, as in the size of a token: the exact number jumps at powers of two.
            Component::PrefixIndex => self.tokens * self.tables.bytes_per_token() + self.plan.sizing.slot_tables,
            component if SIZED.contains(&component) => self.ledger.mapped(component),
            component => self.ledger.row(component).planned,
        };
        // With a GPU's own memory the pools' tables count in the arithmetic, as in the plan.
        let own = self.plan.plan.device.is_some();
        let counts = |component: &&Component| {
            !own || component.on_device() || matches!(component, Component::PrefixIndex | Component::EmergencyReserve)
        };
        Component::ALL.iter().filter(counts).map(bytes).sum()
    }

    /// Refuses an allocation that exceeds the free memory, before the kernel fails it.
    fn check_room(&mut self, component: Component, bytes: u64) -> Result<(), sizing::OutOfMemory> {
        match bytes.saturating_sub(self.device().available) {
            0 => Ok(()),
            shortfall => Err(sizing::OutOfMemory { component: component.name().into(), requested: bytes, shortfall }),
        }
    }

    fn tables(&self, pages: usize, slots: usize) -> Result<KvCache, sizing::OutOfMemory> {
        let bytes = self.plan.index_bytes(pages, slots);
        let refused =
            || sizing::OutOfMemory { component: Component::PrefixIndex.name().into(), requested: bytes, shortfall: 1 };
        let pool = PagePool::new(pages).map_err(|_| refused())?;
        let notes = match self.tables.kv_events {
            true => Some(KvEventLog::new(pages).ok_or_else(refused)?),
            false => None,
        };
        let index = match self.tables.prefix_cache {
            true => Some(PrefixIndex::new(pages).map_err(|_| refused())?),
            false => None,
        };
        let index = match (index, notes) {
            (Some(index), Some(notes)) => Some(index.with_event_log(notes)),
            (index, _) => index,
        };
        let states = match self.shape.state {
            Some(_) => Some(cache::StatePool::new(slots, pages).map_err(|_| refused())?),
            None => None,
        };
        let windows = match self.shape.kv.window() {
            Some(window) => Some(cache::WindowPool::new(slots, pages, window).map_err(|_| refused())?),
            None => None,
        };
        let cache = KvCache::new(pool, index, states).with_windows(windows);
        Ok(match &self.root {
            Some(root) => cache.with_tier(*root),
            None => cache,
        })
    }
}

impl<B: Backend> Generations for PoolBuilder<'_, B> {
    type G = PoolBuild<B::Runner>;

    fn device(&mut self) -> DeviceNow {
        let (total, own) = (self.plan.sizing_total, self.own());
        // Peers that have grown since the limit was read leave less room than the limit.
        let room = match self.plan.plan.device {
            Some(_) => self.backend.room(&self.ledger),
            None => (self.room)(),
        };
        let available = room.min(total).saturating_sub(own);
        DeviceNow { total, own_reserved: own, available }
    }

    fn build(&mut self, shape: Shape) -> Result<PoolBuild<B::Runner>, Failure> {
        let mut phases = Phases::begin();
        let (pages, slots) = (shape.tokens as usize / PAGE_TOKENS, shape.state_slots as usize);
        let kv_bytes = self.shape.kv.bytes(pages, slots) as u64;
        let state_bytes = (slots * self.shape.state.map_or(0, |state| state.slot_bytes())) as u64;
        self.check_room(Component::KvPages, kv_bytes + state_bytes + self.plan.workspace as u64)?;
        let cache = self.tables(pages, slots)?;
        let extent = Extent { pools: Pools { pages, slots }, workspace: self.plan.workspace, touch: self.touch };
        let runner = self.backend.build(&self.ledger, &self.shape, extent)?;
        self.ledger.observe(Component::PrefixIndex, self.plan.index_bytes(pages, slots));
        self.tokens = shape.tokens;
        phases.ended("KV cache");
        Ok(PoolBuild { runner, cache, emergency_reserve: None })
    }

    fn place_reserve(&mut self, pool_build: &mut PoolBuild<B::Runner>, bytes: u64) -> Result<(), sizing::OutOfMemory> {
        if bytes == 0 {
            // The engine host has a reserve for its hosted engines.
            return Ok(());
        }
        self.check_room(Component::EmergencyReserve, bytes)?;
        let emergency_reserve = EmergencyReserve::map(&self.ledger, bytes).map_err(|error| refused(&error))?;
        pool_build.emergency_reserve = Some(emergency_reserve);
        Ok(())
    }

    fn self_test(&mut self, pool_build: &mut PoolBuild<B::Runner>) -> Result<Measured, Failure> {
        let mut phases = Phases::begin();
        let (plan, cache) = (self.plan, &pool_build.cache);
        let pools = Pools { pages: cache.pool.total(), slots: cache.slots() };
        let context = plan.limits.max_req_total_len as usize;
        let (runner, sampler) = (&mut pool_build.runner, &mut self.sampler);
        let ran = self_test(runner, sampler, &plan.step, context, pools, &self.cancel);
        ran.map_err(|error| Failure::Other(StartError::SelfTest(error).into()))?;
        if let (Some(media), Some(spec)) = (&plan.media, &self.media) {
            let ran = self_test_encoder(&mut pool_build.runner, media, spec, &self.cancel);
            ran.map_err(|error| Failure::Other(StartError::Media(error).into()))?;
        }
        pool_build.runner.forget();
        // Rows that the self-test fetched are not counted as rows of requests.
        pool_build.runner.take_fetched();
        pool_build.runner.take_table_reads();
        let measured = B::workspace_peak(&mut pool_build.runner) as u64;
        let planned = plan.workspace as u64;
        if measured > planned {
            let component = Component::StepWorkspace.name();
            return Err(Failure::Other(StartError::SelfTestExceeds { component, measured, planned }.into()));
        }
        self.workspace_peak = measured;
        phases.ended("self-test");
        Ok(Measured { peak_reserved: self.own() })
    }

    fn pools(&self, pool_build: &PoolBuild<B::Runner>) -> Vec<PoolCount> {
        let count = |name: &str, free, total| PoolCount { name: name.into(), free: free as u64, total: total as u64 };
        let KvCache { pool, states, windows, .. } = &pool_build.cache;
        let windows =
            windows.as_ref().map(|windows| count("window pages", windows.pool().free(), windows.pool().total()));
        let slots = states.as_ref().map(|states| count("state slots", states.free(), states.total()));
        std::iter::once(count("KV pages", pool.free(), pool.total())).chain(slots).chain(windows).collect()
    }

    fn components(&self) -> Vec<sizing::Component> {
        let rows = self.ledger.rows().into_iter();
        let component = |row: plimsoll_memory::ledger::Row| sizing::Component {
            name: row.component.name().into(),
            bytes: row.peak.max(self.ledger.mapped(row.component)),
            scales_with: match row.component {
                Component::KvPages | Component::StateSlots | Component::PrefixIndex => ScalesWith::Capacity,
                Component::StepWorkspace => ScalesWith::PrefillTokens,
                _ => ScalesWith::Fixed,
            },
        };
        rows.map(component).collect()
    }

    fn teardown(&mut self, pool_build: PoolBuild<B::Runner>) -> Released {
        let before = self.own();
        let PoolBuild { runner, cache, emergency_reserve } = pool_build;
        self.backend.take_apart(runner);
        drop((cache, emergency_reserve));
        self.ledger.observe(Component::PrefixIndex, 0);
        self.tokens = 0;
        Released { before, after: self.own() }
    }

    fn survivors(&self) -> Vec<sizing::Component> {
        let sized = |component: &sizing::Component| SIZED.iter().any(|s| s.name() == component.name);
        let held = |component: sizing::Component| {
            let row = self.ledger.rows().into_iter().find(|row| row.component.name() == component.name);
            sizing::Component { bytes: row.map_or(0, |row| self.ledger.mapped(row.component)), ..component }
        };
        self.components().into_iter().filter(sized).map(held).filter(|component| component.bytes > 0).collect()
    }

    fn trim(&mut self) {
        plimsoll_memory::heap::trim();
    }

    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Warning(_) | Event::OutOfMemory { .. } => tracing::warn!("{event}"),
            _ => tracing::info!("{event}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use plimsoll_device::{CpuWeights, Isa, ThreadPool};
    use plimsoll_formats::Checkpoint;
    use plimsoll_memory::sizing::{SizingError, auto_profile};

    use super::*;
    use crate::api::options::Options;
    use crate::plan::constants::PROCESS_BASELINE_BYTES;
    use crate::plan::{Blueprint, MemoryLimit};
    use crate::runner::backend::CpuBackend;

    /// A memory limit that leaves a pool of some MiB, in a build for tests as in a release.
    const LINE: u64 = (222 << 20) + PROCESS_BASELINE_BYTES;

    /// Tokens, attempts, and the probe's tokens; or the error.
    type Found = Result<(u64, u32, Option<u64>), SizingError>;

    /// Runs start-up's sizing on a fixture, as planned, or always with a probe if `auto`. `room` returns the machine's room and gets the
    /// number of the call.
    fn size(auto: bool, mut room: impl FnMut(u64) -> u64) -> (EnginePlan, Found) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = Options {
            batch_max_tokens: 64,
            graph_max_batch_size: 8,
            running_max_req_size: 64,
            threads: Some(1),
            ..Options::default()
        };
        let options = Options { graph_max_batch_size: 64, ..options };
        let line = MemoryLimit::of_budget(LINE, "a test");
        let blueprint = Blueprint::new(&checkpoint, &options).unwrap();
        let plan = blueprint.plan(&options, 1, &line).unwrap();
        let ledger = Arc::new(Ledger::new());
        plan.plan.enter(&ledger);
        let Blueprint { model, weights, .. } = blueprint;
        let mut threads = ThreadPool::new(1).unwrap();
        let weights = CpuWeights::load(weights, &checkpoint, &ledger, &mut threads, |_| {}).unwrap();
        let mut asked = 0;
        let mut builder = PoolBuilder {
            plan: &plan,
            shape: weights.table().shaped(model.shape(options.kv_dtype)),
            backend: CpuBackend::new(Arc::from(model), Isa::detect(), weights, threads),
            ledger,
            sampler: Sampler::new(plan.limits.vocab_size as usize).unwrap(),
            touch: true,
            tables: plan.tables,
            tokens: 0,
            room: Box::new(move || {
                asked += 1;
                room(asked)
            }),
            workspace_peak: 0,
            cancel: Cancel::default(),
            media: None,
            root: None,
        };
        let mut config = profile_config(&plan);
        let tokens = (plan.pages * PAGE_TOKENS) as u64;
        assert_eq!(config.mode, Mode::Planned { tokens, state_slots: 0 });
        if auto {
            config.mode = Mode::Auto;
        }
        let outcome = auto_profile(&config, &mut builder).map(|o| (o.shape.tokens, o.attempts, o.probe_tokens));
        drop(builder);
        (plan, outcome)
    }

    #[test]
    fn i8_what_is_measured_is_what_was_planned() {
        for auto in [false, true] {
            let (plan, outcome) = size(auto, |_| u64::MAX);
            let (tokens, attempts, probe) = outcome.unwrap();
            assert_eq!((tokens, attempts), ((plan.pages * PAGE_TOKENS) as u64, 1));
            assert_eq!(probe.is_some(), auto, "a plan that holds needs no probe");
        }
    }

    #[test]
    fn one_refusal_costs_five_per_cent_and_a_second_attempt() {
        let questions = std::cell::Cell::new(0);
        let (_, first) = size(true, |n| {
            questions.set(n);
            u64::MAX
        });
        let first = first.unwrap().0;
        // The calls of an undisturbed start are counted. The last one, before the emergency reserve, returns too little.
        let (_, second) = size(true, |n| if n == questions.get() { LINE - (1 << 20) } else { u64::MAX });
        let (tokens, attempts, _) = second.unwrap();
        assert_eq!(attempts, 2, "of {} questions", questions.get());
        let page = PAGE_TOKENS as u64;
        assert_eq!(tokens, first * 95 / 100 / page * page);
    }

    #[test]
    fn a_plan_that_does_not_hold_is_measured_anew() {
        let (plan, calm) = size(false, |_| u64::MAX);
        // Another process takes 4 MiB after the plan was made. This shows when the planned pool is built.
        let (_, outcome) = size(false, |_| LINE - (4 << 20));
        let (tokens, _, probe) = outcome.unwrap();
        assert!(probe.is_some() && tokens < calm.unwrap().0, "{tokens} of {}", plan.pages * PAGE_TOKENS);
    }

    #[test]
    fn pool_without_a_given_size_may_shrink_under_any_limit() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        for (asked, chosen) in [(None, true), (None, false), (Some(1024), true), (Some(1024), false)] {
            let options = Options { max_total_token_num: asked, batch_max_tokens: 64, ..Options::default() };
            let line = MemoryLimit { chosen, ..MemoryLimit::of_budget(LINE, "a test") };
            let plan = Blueprint::new(&checkpoint, &options).unwrap().plan(&options, 1, &line).unwrap();
            let mode = profile_config(&plan).mode;
            assert_eq!(matches!(mode, Mode::Planned { .. }), asked.is_none(), "{asked:?} {chosen}: {mode:?}");
        }
    }

    #[test]
    fn what_no_smaller_pool_cures_is_explained() {
        let (_, outcome) = size(true, |n| if n < 6 { u64::MAX } else { 1 << 20 });
        let Err(SizingError::OutOfMemory(diagnosis)) = outcome else { panic!("{outcome:?}") };
        let text = diagnosis.to_string();
        assert!(text.contains("--batch-max-tokens") && text.contains("--max-total-token-num"), "{text}");
    }
}
