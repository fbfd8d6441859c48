//! The planner: from a checkpoint's header and the options to every byte. Pure arithmetic, no weights read.
//!
//! `plimsoll plan` prints its result, start-up builds it, admission's limits come out of it: one function (I8).

pub(crate) mod advice;
mod check;
pub(crate) mod constants;
pub(crate) mod error;
mod idle;
pub(crate) mod line;
mod run;
mod shortfall;
pub(crate) mod sizes;
mod tree;
pub mod what_if;

use plimsoll_device::{Declare, KvShape, ModelShape, PAGE_TOKENS, WeightTable, Work};
use plimsoll_formats::{Checkpoint, Encoder};
use plimsoll_memory::Plan;
use plimsoll_memory::sizing::{Fraction, SizingError, StatePool};
use plimsoll_models::Model;

use crate::api::limits::Limits;
use crate::api::options::Options;
use crate::cache::PagePool;
use crate::media::{MediaPlan, MediaRules};
use crate::memory::footprint::Tables;
use crate::plan::advice::advice;
use crate::runner::encoder_batch;
use crate::sampling::TOP_LOGPROBS_MAX;
use crate::schedule::scheduler::StepLimits;
use crate::speculation::pace::Speculation;
pub use check::check_options;
use constants::EMERGENCY_RESERVE_BYTES;
pub use error::{PlanError, Shortfall};
pub use line::Line;
use run::Run;
use sizes::{Pools, Sizes};

/// Without a budget or a pool size the pool holds this many tokens for each of [`CASUAL_USERS`], not the whole machine.
const CASUAL_TOKENS: usize = 1024;
/// See [`CASUAL_TOKENS`].
const CASUAL_USERS: usize = 32;
/// Tokens of keys and values that a request with recurrent state is taken to hold, which balances the two pools.
const TYPICAL_TOKENS: usize = 4096;
/// Operations that take as long as moving one byte, roughly: what a machine that computes 16 times as fast as it reads makes of a
/// plan. Only the first guess at what drafts cost goes by it; then they are timed.
const FLOPS_PER_BYTE: u64 = 16;

/// Tokens of the input for which an encoder's plan states the work.
pub const INPUT_TOKENS: usize = 128;

/// The size-independent half: a model and what its weights take.
pub struct Blueprint {
    /// The architecture, with ids into `weights`.
    pub model: Box<dyn Model>,
    /// Every weight's place and format.
    pub weights: WeightTable,
    /// Context length the model was made for.
    pub max_context: usize,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// What makes the model an encoder: then it makes embeddings or scores, and no text.
    pub encoder: Option<Encoder>,
    /// How media are prepared for it, if it takes any.
    pub media: Option<MediaRules>,
}

/// A complete plan: components, limits, sizes.
pub struct EnginePlan {
    /// The tree.
    pub plan: Plan,
    /// The bounds for requests.
    pub limits: Limits,
    /// The bounds of a step.
    pub step: StepLimits,
    /// Pages of the pool.
    pub pages: usize,
    /// State slots of the pool; 0 for models without recurrent state.
    pub slots: usize,
    /// Shape of a page.
    pub kv: KvShape,
    /// Bytes of step workspace.
    pub workspace: usize,
    /// Work of the largest prefill step and of one decode step of a single sequence; for an encoder, of the largest step and of an
    /// input of [`INPUT_TOKENS`].
    pub work: [Work; 2],
    /// Work of a step that checks the drafts of a single sequence, and of the draft passes after it. None without
    /// drafts.
    pub draft_work: Option<[Work; 2]>,
    /// How drafts are dealt with.
    pub speculation: Speculation,
    /// What it takes besides text.
    pub media: Option<MediaPlan>,
    /// A line for each option that was set and changes nothing for this model.
    pub idle_flags: Vec<String>,
    /// What sizing goes by.
    pub(crate) sizing: Sizes,
    /// The line, or less where more could not be used.
    pub(crate) sizing_total: u64,
    /// Share of the room for the pool.
    pub(crate) fraction: Fraction,
    /// Whether start-up may decide on another pool where this one does not hold: the operator left its size open.
    pub(crate) measure: bool,
    /// Whether requests are shortened to the pool rather than refused: the operator named no length.
    pub(crate) clamp_context: bool,
    pub(crate) tables: Tables,
    /// The longest request the operator or the model allows, whatever the pool.
    context: usize,
}

impl EnginePlan {
    /// Page table and prefix index for a pool of `pages` pages.
    pub(crate) fn index_bytes(&self, pages: usize, slots: usize) -> u64 {
        self.tables.bytes(pages, self.sizing.state.map(|_| slots))
    }
}

/// The table of this many state slots, with the page table of one page.
fn slot_table_bytes(slots: Option<usize>) -> u64 {
    Tables { prefix_cache: false, kv_events: false }.bytes(1, slots)
}

/// What is known before the pool's size is.
struct Draft<'a> {
    options: &'a Options,
    line: &'a Line,
    threads: usize,
    shape: ModelShape,
    step: StepLimits,
    workspace: usize,
    context: usize,
    media: Option<&'a MediaPlan>,
}

impl Draft<'_> {
    /// Whether start-up may decide on another pool than was planned.
    fn measure(&self) -> bool {
        self.options.max_total_token_num.is_none()
    }

    /// Whether requests are shortened to the pool.
    fn clamp_context(&self) -> bool {
        self.options.max_req_total_len.is_none() || !self.measure()
    }
}

impl Blueprint {
    /// Declares the checkpoint's model.
    pub fn new(checkpoint: &Checkpoint, options: &Options) -> Result<Self, PlanError> {
        let mut declare = Declare::new(checkpoint, options.dtype);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, options.enable_mtp)?;
        let weights = declare.finish().on(options.isa()).computed_in(options.compute_dtype);
        let media = match model.vision() {
            Some(_) => MediaRules::read(checkpoint)?,
            None => None,
        };
        let mut blueprint = Self {
            model,
            weights,
            media,
            max_context: checkpoint.config.max_context,
            eos: checkpoint.config.eos_token_ids.clone(),
            encoder: checkpoint.config.encoder,
        };
        if !blueprint.rounds(options)? {
            blueprint.weights = std::mem::take(&mut blueprint.weights).unrounded();
        }
        Ok(blueprint)
    }

    /// Plans an engine under `line`; if it does not fit, with advice.
    pub fn plan(&self, options: &Options, threads: usize, line: &Line) -> Result<EnginePlan, PlanError> {
        let mut planned = self.try_plan(options, threads, line);
        if let Err(PlanError::DoesNotFit(shortfall)) = &mut planned {
            // Under a line of nothing, what does not fit says what the least needs.
            let nothing = Line { bytes: 0, ..line.clone() };
            let media = self.media_plan(options)?;
            shortfall.advice = advice(options, media.as_ref(), shortfall.needed, |options| {
                match self.try_plan(options, threads, &nothing) {
                    Err(PlanError::DoesNotFit(shortfall)) => Some(shortfall.needed),
                    _ => None,
                }
            });
        }
        planned
    }

    /// What media take; none for a model of text alone.
    pub fn media_plan(&self, options: &Options) -> Result<Option<MediaPlan>, PlanError> {
        let Some(rules) = &self.media else { return Ok(None) };
        rules.plan(&*self.model, &self.weights, self.model.shape(options.kv_dtype).kv, options)
    }

    /// As [`Self::plan`], without advice.
    pub(crate) fn try_plan(&self, options: &Options, threads: usize, line: &Line) -> Result<EnginePlan, PlanError> {
        check_options(options)?;
        self.check_encoder(options)?;
        let shape = self.weights.shaped(self.model.shape(options.kv_dtype));
        let drafts = options.drafts();
        let context = options.max_req_total_len.unwrap_or(self.max_context).min(self.max_context);
        let (rows, whole) = (options.batch_max_tokens, self.encoder.is_some());
        let step = StepLimits {
            rows,
            // Every running sequence's newest token, and its drafts.
            logit_rows: (options.graph_max_batch_size * (1 + drafts)).min(rows),
            running: options.running_max_req_size,
            slots: shape.state.map_or(0, |_| options.slots_per_sequence()),
            drafts,
            draft_head: options.enable_mtp,
            encoder_batch: whole,
            layered: context > rows && !whole,
            media: self.media.is_some(),
            rounded: self.weights.rounded(),
        };
        let context = if step.encoder_batch { context.min(step.rows) } else { context };
        let lanes = options.graph_max_batch_size.min(step.rows);
        let draft_passes = if step.draft_head { drafts } else { 0 };
        let alone = Run { start: 127, rows: 1, logit_rows: 1, lanes: 1, ..Run::default() };
        let (largest, decode) = match step.encoder_batch {
            true => {
                let input = INPUT_TOKENS.min(context);
                (self.run_whole(&shape, &encoder_batch::largest(&step, context))?, self.run_whole(&shape, &[input])?)
            }
            false => {
                let (rows, logit_rows, layered) = (step.rows, step.logit_rows, step.layered);
                let full = Run { rows, logit_rows, lanes, draft_passes, layered, ..Run::default() };
                (self.run(&shape, full)?, self.run(&shape, alone)?)
            }
        };
        let checked = Run { rows: 1 + drafts, logit_rows: 1 + drafts, draft_passes, each: step.slots > 1, ..alone };
        let checked = if drafts > 0 { Some(self.run(&shape, checked)?) } else { None };
        let scratch = plimsoll_device::cpu::scratch_bytes(&shape, threads);
        let media = self.media_plan(options)?;
        let encode = media.as_ref().map_or(0, |media| media.workspace);
        let workspace = largest.workspace.max(largest.below + encode) + scratch;
        let mut draft = Draft { options, line, threads, shape, step, workspace, context, media: media.as_ref() };
        let (sizing, sizing_total) = self.sizes(&draft);
        let pools = self.pools(&draft, &sizing, sizing_total)?;
        if let Some(state) = sizing.state {
            draft.step.running = pools.slots / state.slots_per_request as usize;
        }
        let plan = self.tree(&draft, pools);
        let limits = self.limits(&draft, pools.pages);
        let cost = |work: &Work| work.weight_bytes + work.kv_bytes + work.state_bytes + work.flops / FLOPS_PER_BYTE;
        let draft_cost = checked.as_ref().map(|c| (cost(&c.forward) + cost(&c.draft)) as f64);
        Ok(EnginePlan {
            plan,
            limits,
            step: draft.step,
            pages: pools.pages,
            slots: pools.slots,
            kv: shape.kv,
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
            idle_flags: self.idle_flags(options),
            sizing,
            sizing_total,
            fraction: options.mem_fraction,
            measure: draft.measure(),
            clamp_context: draft.clamp_context(),
            tables: Tables::of(options),
            context,
        })
    }

    /// Options that mean nothing for an encoder.
    fn check_encoder(&self, options: &Options) -> Result<(), PlanError> {
        if self.encoder.is_none() {
            return Ok(());
        }
        if options.kv_events {
            let problem = "tells what the prefix cache holds, but this model is an encoder: it has none".into();
            return Err(PlanError::Option { flag: "--kv-events", problem });
        }
        match options.max_total_token_num {
            Some(tokens) => Err(PlanError::Option {
                flag: "--max-total-token-num",
                problem: format!("is {tokens}, but this model is an encoder: it has no keys and values to keep"),
            }),
            None => Ok(()),
        }
    }

    /// Sizes for the arithmetic, and the part of the line that is worth using: no more than all running requests at full
    /// length could ever fill, and without a line of the operator's own no more than a casual pool.
    fn sizes(&self, draft: &Draft<'_>) -> (Sizes, u64) {
        let Draft { options, line, shape, context, .. } = draft;
        let state = shape.state.map(|state| StatePool {
            slot_bytes: state.slot_bytes() as u64,
            slots_per_request: options.slots_per_request() as u64,
            tokens_per_request: TYPICAL_TOKENS.min(*context) as u64,
            min_requests: 1,
            ratio: options.state_ratio,
        });
        let casual = !line.chosen && options.max_total_token_num.is_none();
        let running = options.running_max_req_size;
        let requests_max = if casual { running.min(CASUAL_USERS) } else { running };
        let (page_bytes, fraction) = (shape.kv.page_bytes() as u64, options.mem_fraction);
        let emergency_reserve = if options.hosted { 0 } else { EMERGENCY_RESERVE_BYTES };
        let sizes = Sizes { fixed: 0, emergency_reserve, page_bytes, tables: Tables::of(options), state, requests_max };
        // The table of slots does not grow with the page pool: it counts in full.
        let slots = state.map_or(0, |state| requests_max * state.slots_per_request as usize);
        let tables = slot_table_bytes(state.map(|_| slots)) - slot_table_bytes(state.map(|_| 0));
        let empty = self.tree(draft, Pools { pages: 0, slots: 0 });
        let sizes = Sizes { fixed: empty.total() - emergency_reserve + tables, ..sizes };
        let useful = running * context.next_multiple_of(PAGE_TOKENS);
        let casual_tokens = (CASUAL_USERS * CASUAL_TOKENS).max(*context).next_multiple_of(PAGE_TOKENS);
        let most = if line.chosen { useful } else { useful.min(casual_tokens) } as u64;
        // A pool of a given size is worth what it takes, however many could use it.
        let most = most.max(options.max_total_token_num.unwrap_or(0));
        let total = line.bytes.min(sizes.total_for(most, requests_max, fraction));
        (sizes, total)
    }

    /// How many pages and state slots the pools get.
    fn pools(&self, draft: &Draft<'_>, sizes: &Sizes, total: u64) -> Result<Pools, PlanError> {
        let Draft { options, line, context, step, .. } = draft;
        let slots_per_request = sizes.state.map_or(0, |state| state.slots_per_request as usize);
        // The smallest useful pool: one full step of one request.
        let least = (*context).min(options.batch_max_tokens);
        let needed = options.max_req_total_len.map_or(least, |_| *context).div_ceil(PAGE_TOKENS);
        let short = |pages| self.shortfall(draft, Pools { pages, slots: slots_per_request });
        if step.encoder_batch {
            let none = Pools { pages: 0, slots: 0 };
            return if self.tree(draft, none).total() <= line.bytes { Ok(none) } else { Err(short(0)) };
        }
        if let Some(tokens) = options.max_total_token_num {
            let pages = usize::try_from(tokens).unwrap_or(usize::MAX).div_ceil(PAGE_TOKENS);
            // More than there can be; the tree below says whether it fits.
            if pages > PagePool::PAGES_MAX || (pages as u64).checked_mul(sizes.page_bytes).is_none() {
                return Err(short(pages.min(PagePool::PAGES_MAX)));
            }
            // The state of as many requests as there is room for beside the pages.
            let taken = self.tree(draft, Pools { pages, slots: 0 }).total()
                + slot_table_bytes(Some(sizes.requests_max * slots_per_request));
            let beside = line.bytes.saturating_sub(taken).checked_div(sizes.request_state_bytes()).unwrap_or(u64::MAX);
            let requests = usize::try_from(beside).unwrap_or(usize::MAX).min(sizes.requests_max);
            let pools = Pools { pages, slots: requests * slots_per_request };
            return match self.tree(draft, pools).total() {
                total if total > line.bytes || requests == 0 => Err(short(pages)),
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
        Ok(Pools { pages: pages.min(PagePool::PAGES_MAX), slots: slots as usize })
    }

    fn limits(&self, draft: &Draft<'_>, pages: usize) -> Limits {
        let Draft { options, context, step, .. } = *draft;
        let pool = pages * PAGE_TOKENS;
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
            embedding_size: draft.shape.hidden as u32,
            labels: self.encoder.and_then(|encoder| encoder.labels).unwrap_or(0) as u32,
            token_types: self.encoder.map_or(0, |encoder| encoder.token_types) as u32,
        }
    }
}
