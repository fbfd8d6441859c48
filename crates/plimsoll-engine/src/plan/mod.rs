//! The planner computes every byte from a checkpoint's header and the options. Pure arithmetic: it reads no weights.
//!
//! `plimsoll plan` prints the result, start-up builds it, and admission takes its limits from it: one function (I8).

pub(crate) mod advice;
mod check;
pub(crate) mod constants;
pub(crate) mod disk;
mod draft;
pub(crate) mod gpu;
mod idle;
pub(crate) mod limit;
mod run;
mod shortfall;
pub(crate) mod sizes;
mod tree;
pub mod what_if;

use plimsoll_device::{Declare, KvGroup, KvShape, ModelShape, PAGE_TOKENS, WeightTable, Work};
use plimsoll_formats::{Checkpoint, Encoder};
use plimsoll_memory::Plan;
use plimsoll_memory::host::Remedy;
use plimsoll_memory::sizing::{Fraction, SizingError, StatePool};
use plimsoll_models::Model;

use crate::api::limits::Limits;
use crate::api::options::Options;
pub use crate::api::plan_error::{PlanError, Shortfall};
use crate::cache::Pools;
use crate::cache::WindowPool;
use crate::media::{MediaPlan, MediaRules};
use crate::memory::footprint::Tables;
use crate::plan::advice::{advice, with_two};
use crate::sampling::TOP_LOGPROBS_MAX;
use crate::schedule::scheduler::StepLimits;
use crate::speculation::pace::Speculation;
pub use check::check_options;
use constants::EMERGENCY_RESERVE_BYTES;
use disk::DiskPlan;
use draft::Draft;
use gpu::GpuStep;
pub use gpu::{GpuLimit, GpuPlan, OwnMemory};
pub use limit::MemoryLimit;
pub use run::INPUT_TOKENS;
use run::Run;
use sizes::Sizes;

/// Without a budget or a pool size the pool holds this many tokens for each of [`CASUAL_USERS`], not the whole machine.
const CASUAL_TOKENS: usize = 1024;
/// See [`CASUAL_TOKENS`].
const CASUAL_USERS: usize = 32;
/// Assumed tokens of keys and values of a request with recurrent state; it balances the two pools.
const TYPICAL_TOKENS: usize = 4096;
/// The same for a request with sliding windows, its history in the prefix cache included.
const TYPICAL_WINDOW_TOKENS: usize = 8192;
/// Operations that take about as long as moving one byte. A plan assumes a machine that computes 16 times as fast as it reads. Only the
/// first estimate of the cost of drafts uses it; later estimates are timed.
const FLOPS_PER_BYTE: u64 = 16;

/// The size-independent half of a plan: a model and its weight table.
pub struct Blueprint {
    /// The architecture, with ids into `weights`.
    pub model: Box<dyn Model>,
    /// Every weight's place and format.
    pub weights: WeightTable,
    /// Context length the model was made for.
    pub max_context: usize,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// The configuration of an encoder, which makes embeddings or scores and no text; `None` for other models.
    pub encoder: Option<Encoder>,
    /// The rules for preparing media; `None` if the model takes text only.
    pub media: Option<MediaRules>,
}

/// A complete plan: components, limits, sizes.
pub struct EnginePlan {
    /// The tree of components.
    pub plan: Plan,
    /// The bounds for requests.
    pub limits: Limits,
    /// The bounds of a step.
    pub step: StepLimits,
    /// Pages of the pool.
    pub pages: usize,
    /// State slots of the pool, or window pages for a model with sliding windows; 0 for models without either.
    pub slots: usize,
    /// The layers of the cache.
    pub kv: KvShape,
    /// Bytes of step workspace.
    pub workspace: usize,
    /// Work of the largest prefill step and of one decode step of a single sequence; for an encoder, of the largest step and of an
    /// input of [`INPUT_TOKENS`].
    pub work: [Work; 2],
    /// Work of a step that checks the drafts of a single sequence, and of the draft passes after it. None without
    /// drafts.
    pub draft_work: Option<[Work; 2]>,
    /// How the scheduler decides about drafts.
    pub speculation: Speculation,
    /// Media limits and their memory; `None` for a model that takes text only.
    pub media: Option<MediaPlan>,
    /// The part on a GPU; `None` if the host's cores carry out the steps.
    pub gpu: Option<GpuPlan>,
    /// A line for each option that was set and changes nothing for this model.
    pub idle_flags: Vec<String>,
    /// The sizes that pool sizing calculates with.
    pub(crate) sizing: Sizes,
    /// The limit in bytes, or less where more would be useless.
    pub(crate) sizing_total: u64,
    /// Share of the room for the pool.
    pub(crate) fraction: Fraction,
    /// Whether start-up may choose another pool where this one does not hold: the operator left its size open.
    pub(crate) measure: bool,
    /// Whether requests are shortened to the pool rather than refused: the operator set no length.
    pub(crate) clamp_context: bool,
    pub(crate) tables: Tables,
    /// Buffers and index of the prefix cache on disk, if there is one.
    pub(crate) disk: Option<DiskPlan>,
    /// The longest request that the operator and the model allow, whatever the pool's size.
    context: usize,
}

impl EnginePlan {
    /// Page table and prefix index for a pool of `pages` pages.
    pub(crate) fn index_bytes(&self, pages: usize, slots: usize) -> u64 {
        self.tables.bytes(pages, self.sizing.state.map(|_| slots))
    }

    /// Requests that state slots or window pages are planned for; as many as may run, for a model without either.
    pub(crate) fn requests(&self) -> usize {
        let per_request = self.sizing.state.map_or(0, |state| state.slots_per_request as usize);
        self.slots.checked_div(per_request).unwrap_or(self.step.running).max(1)
    }
}

/// Bytes of the table of this many state slots or window pages, with the page table of one page.
fn slot_table_bytes(windows: bool, slots: Option<usize>) -> u64 {
    Tables { prefix_cache: false, kv_events: false, windows, tier: false }.bytes(1, slots)
}

/// The cost of work, in bytes moved.
fn cost(work: &Work) -> u64 {
    work.weight_bytes + work.kv_bytes + work.state_bytes + work.flops / FLOPS_PER_BYTE
}

impl Blueprint {
    /// Declares the checkpoint's model.
    pub fn new(checkpoint: &Checkpoint, options: &Options) -> Result<Self, PlanError> {
        let mut declare = Declare::new(checkpoint, options.dtype).with_tables_in(options.tables());
        check::check_draft(options, checkpoint)?;
        let model = plimsoll_models::build_all(&checkpoint.config, &mut declare, options.enable_mtp)?;
        let weights = declare.finish().on(options.target()).computed_in(options.compute_dtype);
        let weights = weights.with_table_cache(options.table_cache_bytes);
        let media = MediaRules::read(checkpoint, &*model)?;
        let mut blueprint = Self {
            model,
            weights,
            media,
            max_context: checkpoint.config.max_context,
            eos: checkpoint.config.eos_token_ids.clone(),
            encoder: checkpoint.config.encoder,
        };
        if !blueprint.rounds(options)? {
            blueprint.weights = std::mem::take(&mut blueprint.weights).full_precision_rows();
        }
        Ok(blueprint)
    }

    /// Plans an engine under `limit`; if it does not fit, with advice.
    pub fn plan(&self, options: &Options, threads: usize, limit: &MemoryLimit) -> Result<EnginePlan, PlanError> {
        let mut planned = self.try_plan(options, threads, limit);
        if let Err(PlanError::DoesNotFit(shortfall)) = &mut planned {
            // Under a limit of 0 bytes, the error states the smallest possible need.
            let nothing = match shortfall.remedy {
                Remedy::Gpu | Remedy::WorkingSet { .. } => limit.without_device_memory(),
                _ => MemoryLimit { bytes: 0, ..limit.clone() },
            };
            let media = self.media_plan(options)?;
            let needed = |options: &Options| match self.try_plan(options, threads, &nothing) {
                Err(PlanError::DoesNotFit(shortfall)) => Some(shortfall.needed),
                _ => None,
            };
            shortfall.advice = advice(options, media.as_ref(), shortfall.needed, needed);
            let two = with_two(options, media.as_ref(), &shortfall.advice);
            shortfall.needed_with_two = needed(&two).unwrap_or(shortfall.needed);
        }
        planned
    }

    /// Returns the media plan; `None` for a model that takes text only.
    pub fn media_plan(&self, options: &Options) -> Result<Option<MediaPlan>, PlanError> {
        let Some(rules) = &self.media else { return Ok(None) };
        rules.plan(&*self.model, &self.weights, &self.model.shape(options.kv_dtype).kv, options)
    }

    /// The largest step that the scheduler may form.
    fn step_limits(&self, options: &Options, shape: &ModelShape, context: usize, image_rows: usize) -> StepLimits {
        let (drafts, rows, whole) = (options.drafts(), options.batch_max_tokens, self.encoder.is_some());
        StepLimits {
            rows,
            // Every running sequence's newest token, and its drafts.
            logit_rows: (options.graph_max_batch_size * (1 + drafts)).min(rows),
            running: options.running_max_req_size,
            slots: shape.state.map_or(0, |_| options.slots_per_sequence()),
            window: shape.kv.window().unwrap_or(0),
            drafts,
            draft_head: options.draft_head(),
            draft_model: options.draft_model.is_some(),
            encoder_batch: whole,
            layered: context > rows && !whole,
            media: self.media.is_some(),
            image_rows,
            bf16: self.weights.bf16(),
            candidates: self.weights.on_gpu() && !whole,
        }
    }

    /// As [`Self::plan`], without advice.
    pub(crate) fn try_plan(
        &self,
        options: &Options,
        threads: usize,
        limit: &MemoryLimit,
    ) -> Result<EnginePlan, PlanError> {
        check::check_model(options, self.encoder.is_some())?;
        let shape = self.weights.shaped(self.model.shape(options.kv_dtype));
        let media = self.media_plan(options)?;
        let image_rows = media.as_ref().map_or(0, MediaPlan::rows_in_one_step);
        check::check_image_rows(options, image_rows)?;
        let context = options.max_req_total_len.unwrap_or(self.max_context).min(self.max_context);
        let step = self.step_limits(options, &shape, context, image_rows);
        let (drafts, rows) = (options.drafts(), step.rows);
        let context = if step.encoder_batch { context.min(step.rows) } else { context };
        let lanes = options.graph_max_batch_size.min(step.rows);
        let draft_passes = if step.draft_head { drafts } else { 0 };
        let full =
            Run { rows, logit_rows: step.logit_rows, lanes, draft_passes, layered: step.layered, ..Run::default() };
        let [largest, decode] = self.steps(&shape, &step, full, context)?;
        let checked =
            Run { rows: 1 + drafts, logit_rows: 1 + drafts, draft_passes, each: step.slots > 1, ..Run::ALONE };
        let checked = if drafts > 0 { Some(self.run(&shape, checked)?) } else { None };
        let encode = media.as_ref().map_or(0, |media| media.workspace);
        let of_gpu = GpuStep { shape: &shape, limits: &step, largest: &largest, media: media.as_ref(), context };
        let gpu = self.on_gpu(options, limit, &of_gpu)?;
        let on_host = largest.workspace.max(largest.below + encode) + options.target().scratch_bytes(&shape, threads);
        let workspace = gpu.as_ref().map_or(on_host, GpuPlan::workspace);
        let mut draft = Draft { options, limit, threads, shape, step, workspace, context, media: media.as_ref(), gpu };
        let recommended = self.working_set_limit(&draft);
        draft.limit = recommended.as_ref().unwrap_or(limit);
        let (sizing, sizing_total) = self.sizes(&draft);
        let pools = self.pools(&draft, &sizing, sizing_total)?;
        if let Some(state) = sizing.state.filter(|_| draft.shape.state.is_some()) {
            draft.step.running = pools.slots / state.slots_per_request as usize;
        }
        let plan = self.tree_under_both(&draft, pools)?;
        let limits = self.limits(&draft, pools.pages);
        let draft_cost = checked.as_ref().map(|c| (cost(&c.forward) + cost(&c.draft)) as f64);
        Ok(EnginePlan {
            plan,
            limits,
            step: draft.step,
            pages: pools.pages,
            slots: pools.slots,
            kv: draft.shape.kv.clone(),
            workspace,
            work: [largest.forward, decode.forward],
            draft_work: checked.map(|checked| [checked.forward, checked.draft]),
            speculation: Speculation {
                optimistic: options.optimistic(),
                // Unchecked drafts are output: they are not to depend on timing.
                adaptive: options.mtp_adaptive && !options.optimistic(),
                cost: draft_cost.map_or(1.0, |checked| checked / cost(&decode.forward).max(1) as f64),
            },
            media: draft.media.cloned(),
            gpu: draft.gpu.clone(),
            idle_flags: self.idle_flags(options),
            sizing,
            sizing_total,
            fraction: options.mem_fraction,
            measure: draft.measure(),
            clamp_context: draft.clamp_context(),
            tables: Tables::of(options, &draft.shape.kv),
            disk: DiskPlan::new(options, &draft.shape, context, draft.media),
            context,
        })
    }

    /// Sizes for the arithmetic, and the part of the limit that is worth using: no more than all running requests at full
    /// length could ever fill, and without a limit of the operator's own no more than a casual pool.
    fn sizes(&self, draft: &Draft<'_>) -> (Sizes, u64) {
        let Draft { options, limit, shape, context, .. } = draft;
        let state = self.second_pool(draft);
        let casual = !limit.chosen && options.max_total_token_num.is_none();
        let running = options.running_max_req_size;
        let useful = running * context.next_multiple_of(PAGE_TOKENS);
        let casual_tokens = (CASUAL_USERS * CASUAL_TOKENS).max(*context).next_multiple_of(PAGE_TOKENS);
        let most = if limit.chosen { useful } else { useful.min(casual_tokens) } as u64;
        let mut requests_max = if casual { running.min(CASUAL_USERS) } else { running };
        if let Some(windows) = state.filter(|_| shape.kv.window().is_some()) {
            // More windows than requests of the usual length would leave the pool of whole contexts behind.
            let tokens = options.max_total_token_num.unwrap_or(most);
            requests_max = requests_max.min(tokens.div_ceil(windows.tokens_per_request) as usize).max(1);
        }
        let (page_bytes, fraction) = (shape.kv.page_bytes(KvGroup::Whole) as u64, options.mem_fraction);
        let emergency_reserve = if options.hosted { 0 } else { EMERGENCY_RESERVE_BYTES };
        let tables = Tables::of(options, &shape.kv);
        let sizes = Sizes { fixed: 0, emergency_reserve, page_bytes, tables, slot_tables: 0, state, requests_max };
        // The table of slots does not grow with the page pool: it counts in full.
        let slots = state.map_or(0, |state| requests_max * state.slots_per_request as usize);
        let table = |slots| slot_table_bytes(tables.windows, state.map(|_| slots));
        let slot_tables = table(slots) - table(0);
        let empty = self.tree(draft, Pools { pages: 0, slots: 0 });
        let sizes = Sizes { fixed: draft.taken(&empty) - emergency_reserve + slot_tables, slot_tables, ..sizes };
        // A pool of a given size counts in full, however many requests could use it.
        let most = most.max(options.max_total_token_num.unwrap_or(0));
        let total = draft.budget().min(sizes.total_for(most, requests_max, fraction));
        (sizes, total)
    }

    /// Returns the pool beside the pages of the whole context: recurrent state, or window pages. Requests of the usual length fill both
    /// pools.
    fn second_pool(&self, draft: &Draft<'_>) -> Option<StatePool> {
        let Draft { options, shape, context, step, .. } = draft;
        let (slot_bytes, slots_per_request, tokens) = match (shape.state, shape.kv.window()) {
            (Some(state), _) => (state.slot_bytes(), options.slots_per_request(), TYPICAL_TOKENS.min(*context)),
            (None, Some(window)) => {
                let tokens = TYPICAL_WINDOW_TOKENS.min(*context);
                let own = WindowPool::per_sequence(window, step.rows).min(context.div_ceil(PAGE_TOKENS));
                let kept = if options.prefix_cache { options.state_checkpoints } else { 0 };
                let with_kept = own + kept * WindowPool::tail_of(window);
                // No more than the pages of a usual request.
                let slots = with_kept.min(tokens.div_ceil(PAGE_TOKENS)).max(own);
                (shape.kv.page_bytes(KvGroup::Window), slots, tokens)
            }
            (None, None) => return None,
        };
        Some(StatePool {
            slot_bytes: slot_bytes as u64,
            slots_per_request: slots_per_request as u64,
            tokens_per_request: tokens as u64,
            min_requests: 1,
            ratio: options.state_ratio,
        })
    }

    /// Returns the number of pages and of state slots in the pools.
    fn pools(&self, draft: &Draft<'_>, sizes: &Sizes, total: u64) -> Result<Pools, PlanError> {
        let Draft { options, context, step, .. } = draft;
        let slots_per_request = sizes.state.map_or(0, |state| state.slots_per_request as usize);
        // The smallest useful pool: one full step of one request.
        let least = (*context).min(options.batch_max_tokens);
        let needed = options.max_req_total_len.map_or(least, |_| *context).div_ceil(PAGE_TOKENS);
        let short = |pages| self.shortfall(draft, Pools { pages, slots: slots_per_request });
        if step.encoder_batch {
            let none = Pools { pages: 0, slots: 0 };
            return if draft.taken(&self.tree(draft, none)) <= draft.budget() { Ok(none) } else { Err(short(0)) };
        }
        if let Some(tokens) = options.max_total_token_num {
            let pages = usize::try_from(tokens).unwrap_or(usize::MAX).div_ceil(PAGE_TOKENS);
            // More pages than a pool can have are refused here; the tree below shows whether fewer fit.
            if pages > draft.pages_max() || (pages as u64).checked_mul(sizes.page_bytes).is_none() {
                return Err(short(pages.min(draft.pages_max())));
            }
            // The state slots of as many requests as have room beside the pages.
            let taken = draft.taken(&self.tree(draft, Pools { pages, slots: 0 }))
                + slot_table_bytes(sizes.tables.windows, Some(sizes.requests_max * slots_per_request));
            let beside =
                draft.budget().saturating_sub(taken).checked_div(sizes.request_state_bytes()).unwrap_or(u64::MAX);
            let requests = usize::try_from(beside).unwrap_or(usize::MAX).min(sizes.requests_max);
            let slots = (requests * slots_per_request).min(draft.slots_max(slots_per_request));
            let pools = Pools { pages, slots };
            return match draft.taken(&self.tree(draft, pools)) {
                total if total > draft.budget() || requests == 0 => Err(short(pages)),
                _ => Ok(pools),
            };
        }
        let config = sizes.config(step, *context as u64, options.mem_fraction, draft.clamp_context());
        let (tokens, slots) = match sizes.pools(total, &config) {
            Ok(pools) => pools,
            Err(SizingError::Joint(error @ plimsoll_memory::sizing::JointError::Ratio { .. })) => {
                return Err(PlanError::Option { flag: "--state-ratio", problem: format!("cannot be met: {error}") });
            }
            Err(_) => return Err(short(needed)),
        };
        let pages = tokens as usize / PAGE_TOKENS;
        if pages < needed {
            return Err(short(needed));
        }
        let slots = (slots as usize).min(draft.slots_max(slots_per_request));
        if slots < slots_per_request {
            return Err(short(needed));
        }
        Ok(Pools { pages: pages.min(draft.pages_max()), slots })
    }

    fn limits(&self, draft: &Draft<'_>, pages: usize) -> Limits {
        let Draft { options, context, step, .. } = *draft;
        let pool = pages * PAGE_TOKENS;
        let dense = self.encoder.and_then(|encoder| encoder.dense);
        Limits {
            max_req_total_len: if step.encoder_batch { context } else { context.min(pool) } as u32,
            max_total_token_num: pool as u64,
            running_max_req_size: step.running as u32,
            max_waiting: options.max_waiting as u32,
            batch_max_tokens: options.batch_max_tokens as u32,
            vocab_size: self.model.vocab_size() as u32,
            max_logprobs: TOP_LOGPROBS_MAX as u32,
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            host_bytes: options.request_bytes,
            encoder: step.encoder_batch,
            embedding_size: dense.map_or(draft.shape.hidden, |dense| dense.width()) as u32,
            dense: dense.is_some(),
            labels: self.encoder.and_then(|encoder| encoder.labels).unwrap_or(0) as u32,
            token_types: self.encoder.map_or(0, |encoder| encoder.token_types) as u32,
        }
    }
}

#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod window_tests;
