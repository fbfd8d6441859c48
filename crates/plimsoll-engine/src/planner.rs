//! The planner: from a checkpoint's header and the options to every byte. Pure arithmetic, no weights read.
//!
//! `plimsoll plan` prints its result, start-up builds it, admission's limits come out of it: one function (I8).

use plimsoll_device::{
    Declare, DeclareError, DeviceError, KvShape, PAGE_TOKENS, PlanDevice, SeqSpan, StepInput, WeightTable, Work,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::sizing::Fraction;
use plimsoll_memory::{Bytes, Component, Plan, PlanLine};
use plimsoll_models::Model;
use thiserror::Error;

use crate::accounts::{index_bytes, sampler_bytes, table_bytes, tokenizer_bytes};
use crate::cache::PagePool;
use crate::options::Options;
use crate::request::Limits;
use crate::sampling::TOP_LOGPROBS_MAX;
use crate::scheduler::StepLimits;
use crate::sizing::Sizes;

/// The process before it holds anything of the plan: data touched, runtime, logging, threads that do not compute. Measured: 0.5 MiB
/// at ready and under a soak.
const PROCESS_BASELINE_BYTES: u64 = 2 << 20;
/// Each compute thread on top: the touched part of its stack and its share of the system's allocator.
const THREAD_BYTES: u64 = 128 << 10;
/// Given back on the first failed allocation, so that the failure can be handled at all.
const CANARY_BYTES: u64 = 16 << 20;
/// Without a budget or a pool size the pool holds this many tokens for each of [`CASUAL_USERS`], not the whole machine.
const CASUAL_TOKENS: usize = 1024;
/// See [`CASUAL_TOKENS`].
const CASUAL_USERS: usize = 32;

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
}

/// Why no plan can be made.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The checkpoint does not fit its own configuration, or the architecture is unknown.
    #[error(transparent)]
    Declare(#[from] DeclareError),
    /// The planner's own run failed: a bug, reported as itself.
    #[error("planning a step: {0}")]
    Step(#[from] DeviceError),
    /// An option is out of range.
    #[error("{flag} {problem}")]
    Option {
        /// The flag's name.
        flag: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// The machine has no room for even one request.
    #[error("{0}")]
    DoesNotFit(Box<Shortfall>),
}

/// Why it does not fit, in numbers.
#[derive(Debug, Error)]
#[error(
    "it does not fit: {} are needed for one request of {tokens} tokens, the line is at {} ({limit_source}): {} short.\n{plan}\n\
     largest component: {largest}. Try --batch-max-tokens {}, --max-req-total-len {}, --kv-dtype q8, or a budget of {}",
    Bytes(*needed), Bytes(*limit), Bytes(needed.saturating_sub(*limit)), batch_max_tokens / 2, tokens / 2, Bytes(*needed)
)]
pub struct Shortfall {
    /// Bytes needed.
    pub needed: u64,
    /// Bytes there are.
    pub limit: u64,
    /// Where the limit comes from.
    pub limit_source: String,
    /// Tokens of the smallest useful pool.
    pub tokens: usize,
    /// The row budget that was planned with.
    pub batch_max_tokens: usize,
    /// The component that takes most.
    pub largest: &'static str,
    /// The plan with that pool.
    pub plan: Plan,
}

/// What this process may use: the line, less what peers use inside it.
#[derive(Clone, Debug)]
pub struct Line {
    /// Bytes.
    pub bytes: u64,
    /// Where the number comes from, for people.
    pub source: String,
    /// Whether the operator set it: then the pool fills the room.
    pub chosen: bool,
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
    /// Shape of a page.
    pub kv: KvShape,
    /// Bytes of step workspace.
    pub workspace: usize,
    /// Work of the largest prefill step and of one decode step of a single sequence.
    pub work: [Work; 2],
    /// What sizing goes by.
    pub(crate) sizing: Sizes,
    /// The line, or less where more could not be used.
    pub(crate) sizing_total: u64,
    /// Share of the room for the pool.
    pub(crate) fraction: Fraction,
    /// Whether start-up measures before it decides on the pool: the operator set a line and left the size open.
    pub(crate) measure: bool,
    /// Whether requests are shortened to the pool rather than refused: the operator named no length.
    pub(crate) clamp_context: bool,
    prefix_cache: bool,
    /// The longest request the operator or the model allows, whatever the pool.
    context: usize,
}

impl EnginePlan {
    /// Page table and prefix index for a pool of `pages` pages.
    pub(crate) fn index_bytes(&self, pages: usize) -> u64 {
        index_bytes(pages, self.prefix_cache)
    }

    /// The plan with the pool that start-up came to build.
    pub(crate) fn resize(&mut self, pages: usize) {
        let index = self.index_bytes(pages);
        for line in &mut self.plan.lines {
            match line.component {
                Component::KvPages => *line = kv_line(self.kv, pages),
                Component::PrefixIndex => line.bytes = index,
                _ => {}
            }
        }
        self.pages = pages;
        self.limits.max_total_token_num = (pages * PAGE_TOKENS) as u64;
        self.limits.max_req_total_len = self.context.min(pages * PAGE_TOKENS) as u32;
    }
}

fn kv_line(kv: KvShape, pages: usize) -> PlanLine {
    let detail = format!(
        "{} tokens = {pages} pages x {} ({} layers, {:?})",
        pages * PAGE_TOKENS,
        Bytes(kv.page_bytes() as u64),
        kv.layers,
        kv.dtype
    );
    PlanLine { component: Component::KvPages, bytes: (pages * kv.page_bytes()) as u64, detail }
}

/// What is known before the pool's size is.
struct Draft<'a> {
    options: &'a Options,
    line: &'a Line,
    threads: usize,
    kv: KvShape,
    step: StepLimits,
    workspace: usize,
    context: usize,
}

impl Blueprint {
    /// Declares the checkpoint's model.
    pub fn new(checkpoint: &Checkpoint, options: &Options) -> Result<Self, PlanError> {
        let mut declare = Declare::new(checkpoint, options.dtype);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false)?;
        Ok(Self {
            model,
            weights: declare.finish(),
            max_context: checkpoint.config.max_context,
            eos: checkpoint.config.eos_token_ids.clone(),
        })
    }

    /// Plans an engine under `line`.
    pub fn plan(&self, options: &Options, threads: usize, line: &Line) -> Result<EnginePlan, PlanError> {
        check(options)?;
        let shape = self.model.shape(options.kv_dtype);
        let kv = shape.kv;
        let step = StepLimits {
            rows: options.batch_max_tokens,
            logit_rows: options.graph_max_batch_size,
            running: options.running_max_req_size,
            prefill_rows_beside_decode: options.batch_max_tokens,
        };
        let (workspace, prefill) = self.run(kv, step.rows, step.logit_rows, 0)?;
        let (_, decode) = self.run(kv, 1, 1, 127)?;
        let scratch = plimsoll_device::cpu::scratch_bytes(&shape, threads);
        let workspace = workspace + scratch;
        let context = options.max_req_total_len.unwrap_or(self.max_context).min(self.max_context);
        let draft = Draft { options, line, threads, kv, step, workspace, context };
        let (sizing, sizing_total) = self.sizes(&draft);
        let pages = self.pages(&draft, &sizing, sizing_total)?;
        let plan = self.tree(&draft, pages);
        let limits = self.limits(options, context, pages);
        let measure = line.chosen && options.max_total_token_num.is_none();
        Ok(EnginePlan {
            plan,
            limits,
            step,
            pages,
            kv,
            workspace,
            work: [prefill, decode],
            sizing,
            sizing_total,
            fraction: options.mem_fraction,
            measure,
            clamp_context: options.max_req_total_len.is_none() || !measure,
            prefix_cache: options.prefix_cache,
            context,
        })
    }

    /// Runs `forward` on the planner's device: a step of `rows` rows of one sequence from position `start`.
    fn run(&self, kv: KvShape, rows: usize, logit_rows: usize, start: usize) -> Result<(usize, Work), PlanError> {
        let tokens = vec![0; rows];
        let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
        let pages: Vec<u32> = (0..(start + rows).div_ceil(PAGE_TOKENS) as u32).collect();
        let wanted: Vec<u32> = (0..logit_rows as u32).collect();
        let seqs = [SeqSpan { first_row: 0, rows, start, pages_at: 0, pages: pages.len(), seen_from: 0, state: None }];
        let input = StepInput {
            tokens: &tokens,
            positions: &positions,
            seqs: &seqs,
            pages: &pages,
            logit_rows: &wanted,
            state_out: &[],
        };
        let mut device = PlanDevice::new(&self.weights, kv);
        self.model.forward(&mut device, &input)?;
        Ok((device.high_water(), device.work()))
    }

    /// Sizes for the arithmetic, and the part of the line that is worth using: no more than all running requests at full
    /// length could ever fill, and without a line of the operator's own no more than a casual pool.
    fn sizes(&self, draft: &Draft<'_>) -> (Sizes, u64) {
        let Draft { options, line, kv, context, .. } = draft;
        let empty = self.tree(draft, 0);
        let canary = empty.bytes(Component::Canary);
        let sizes = Sizes { fixed: empty.total() - canary, canary, page_bytes: kv.page_bytes() as u64 };
        let useful = options.running_max_req_size * context.next_multiple_of(PAGE_TOKENS);
        let casual = (CASUAL_USERS * CASUAL_TOKENS).max(*context).next_multiple_of(PAGE_TOKENS);
        let most = if line.chosen { useful } else { useful.min(casual) };
        let total = line.bytes.min(sizes.total_for(most as u64, options.mem_fraction));
        (sizes, total)
    }

    /// How many pages the pool gets.
    fn pages(&self, draft: &Draft<'_>, sizes: &Sizes, total: u64) -> Result<usize, PlanError> {
        let Draft { options, line, context, .. } = draft;
        if let Some(tokens) = options.max_total_token_num {
            let pages = usize::try_from(tokens).unwrap_or(usize::MAX).div_ceil(PAGE_TOKENS);
            let bytes =
                (pages as u64).checked_mul(sizes.page_bytes).and_then(|kv| kv.checked_add(sizes.fixed + sizes.canary));
            if pages > PagePool::PAGES_MAX || bytes.is_none_or(|bytes| bytes > line.bytes) {
                return Err(self.shortfall(draft, pages.min(PagePool::PAGES_MAX)));
            }
            return match self.tree(draft, pages).total() {
                total if total > line.bytes => Err(self.shortfall(draft, pages)),
                _ => Ok(pages),
            };
        }
        let fits = sizes.tokens(total, options.mem_fraction) as usize / PAGE_TOKENS;
        // The least that serves anybody: one full step's worth of one request.
        let least = (*context).min(options.batch_max_tokens);
        let needed = options.max_req_total_len.map_or(least, |_| *context).div_ceil(PAGE_TOKENS);
        if fits < needed {
            return Err(self.shortfall(draft, needed));
        }
        Ok(fits.min(PagePool::PAGES_MAX))
    }

    fn shortfall(&self, draft: &Draft<'_>, pages: usize) -> PlanError {
        let Draft { options, line, .. } = draft;
        let plan = self.tree(draft, pages);
        let largest = plan.lines.iter().max_by_key(|l| l.bytes).map_or("none", |l| l.component.name());
        PlanError::DoesNotFit(Box::new(Shortfall {
            needed: plan.total(),
            limit: line.bytes,
            limit_source: line.source.clone(),
            tokens: pages * PAGE_TOKENS,
            batch_max_tokens: options.batch_max_tokens,
            largest,
            plan,
        }))
    }

    /// The tree of components with a pool of `pages`.
    fn tree(&self, draft: &Draft<'_>, pages: usize) -> Plan {
        let Draft { options, line, threads, kv, step, workspace, context } = *draft;
        // Without a pool this is the fixed part for a pool of any size.
        let context = if pages == 0 { context } else { context.min(pages * PAGE_TOKENS) };
        let weights = self.weights.bytes as u64;
        let vocab = self.model.vocab_size();
        let tokenizer = tokenizer_bytes(vocab, options.tokenizer_bytes);
        let scratch = sampler_bytes(vocab);
        let tables = table_bytes(&step, options.max_waiting, context);
        let entry = |component, bytes: u64, detail: String| PlanLine { component, bytes, detail };
        let lines = vec![
            entry(
                Component::Weights,
                weights,
                format!("{} matrices, {} vectors, packed once", self.weights.linears.len(), self.weights.vectors.len()),
            ),
            kv_line(kv, pages),
            entry(
                Component::StepWorkspace,
                workspace as u64,
                format!("one step of {} rows, {} with logits", options.batch_max_tokens, options.graph_max_batch_size),
            ),
            entry(
                Component::RequestTable,
                options.request_bytes + tables,
                format!(
                    "{} running + {} waiting requests: ids, unread output",
                    options.running_max_req_size, options.max_waiting
                ),
            ),
            entry(
                Component::PrefixIndex,
                index_bytes(pages, options.prefix_cache),
                "page table and prefix tree, one row a page".into(),
            ),
            entry(
                Component::Tokenizer,
                tokenizer + scratch,
                format!(
                    "{vocab} tokens: tokenizer and template {}, sampler's scratch {}",
                    Bytes(tokenizer),
                    Bytes(scratch)
                ),
            ),
            entry(Component::HostHeap, options.http_bytes, "connections, bodies, parsing, grammars".into()),
            entry(
                Component::ProcessBaseline,
                PROCESS_BASELINE_BYTES + THREAD_BYTES * threads as u64,
                format!("data, runtime, {threads} compute threads"),
            ),
            entry(Component::Canary, CANARY_BYTES, "ballast, released on the first failed allocation".into()),
        ];
        Plan { limit: line.bytes, limit_source: line.source.clone(), lines }
    }

    fn limits(&self, options: &Options, context: usize, pages: usize) -> Limits {
        let pool = pages * PAGE_TOKENS;
        Limits {
            max_req_total_len: context.min(pool) as u32,
            max_total_token_num: pool as u64,
            running_max_req_size: options.running_max_req_size as u32,
            max_waiting: options.max_waiting as u32,
            batch_max_tokens: options.batch_max_tokens as u32,
            vocab_size: self.model.vocab_size() as u32,
            max_logprobs: TOP_LOGPROBS_MAX as u32,
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            host_bytes: options.request_bytes,
        }
    }
}

fn check(options: &Options) -> Result<(), PlanError> {
    let problem = |flag, problem: String| Err(PlanError::Option { flag, problem });
    if options.batch_max_tokens == 0 || options.batch_max_tokens > 1 << 20 {
        return problem("--batch-max-tokens", format!("is {}; 1 to 1048576 are allowed", options.batch_max_tokens));
    }
    for (flag, value) in [
        ("--graph-max-batch-size", options.graph_max_batch_size),
        ("--running-max-req-size", options.running_max_req_size),
    ] {
        if value == 0 || value > 1 << 16 {
            return problem(flag, format!("is {value}; 1 to 65536 are allowed"));
        }
    }
    if options.graph_max_batch_size > options.batch_max_tokens {
        let (decode, rows) = (options.graph_max_batch_size, options.batch_max_tokens);
        return problem("--graph-max-batch-size", format!("is {decode}, more than --batch-max-tokens ({rows})"));
    }
    if options.running_max_req_size > options.graph_max_batch_size {
        let (running, decode) = (options.running_max_req_size, options.graph_max_batch_size);
        return problem(
            "--running-max-req-size",
            format!(
                "is {running}, more than --graph-max-batch-size ({decode}): every running request decodes in every step"
            ),
        );
    }
    if options.max_waiting > 1 << 20 {
        return problem("--max-waiting", format!("is {}; at most 1048576 are allowed", options.max_waiting));
    }
    if options.max_req_total_len == Some(0) {
        return problem("--max-req-total-len", "is 0; at least 1 is needed".into());
    }
    if options.max_total_token_num == Some(0) {
        return problem("--max-total-token-num", "is 0; at least one page of 16 tokens is needed".into());
    }
    Ok(())
}
