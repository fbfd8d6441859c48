//! The planner: from a checkpoint's header and the options to every byte. Pure arithmetic, no weights read.
//!
//! `plimsoll plan` prints its result, start-up builds it, admission's limits come out of it: one function (I8).

use plimsoll_device::{Declare, DeclareError, DeviceError, KvShape, PAGE_TOKENS, PlanDevice, SeqSpan, StepInput, WeightTable, Work};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Bytes, Component, Plan, PlanLine};
use plimsoll_models::Model;
use thiserror::Error;

use crate::cache::{PagePool, PrefixIndex};
use crate::options::Options;
use crate::request::Limits;
use crate::sampling::{Sampler, TOP_LOGPROBS_MAX};
use crate::scheduler::StepLimits;

/// The process before it holds anything of the plan: code touched, stacks, runtime, logging.
const PROCESS_BASELINE_BYTES: u64 = 24 << 20;
/// Given back on the first failed allocation, so that the failure can be handled at all.
const CANARY_BYTES: u64 = 16 << 20;
/// Host bytes per vocabulary entry: the tokenizer's tables of tokens, merges and bytes.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 1024;
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
}

impl Blueprint {
    /// Declares the checkpoint's model.
    pub fn new(checkpoint: &Checkpoint, options: &Options) -> Result<Self, PlanError> {
        let mut declare = Declare::new(checkpoint, options.dtype);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare)?;
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
        let pages = self.pages(options, line, kv, workspace)?;
        let plan = self.tree(options, line, kv, workspace, pages);
        let limits = self.limits(options, pages);
        Ok(EnginePlan { plan, limits, step, pages, kv, workspace, work: [prefill, decode] })
    }

    /// Runs `forward` on the planner's device: a step of `rows` rows of one sequence from position `start`.
    fn run(&self, kv: KvShape, rows: usize, logit_rows: usize, start: usize) -> Result<(usize, Work), PlanError> {
        let tokens = vec![0; rows];
        let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
        let pages: Vec<u32> = (0..(start + rows).div_ceil(PAGE_TOKENS) as u32).collect();
        let wanted: Vec<u32> = (0..logit_rows as u32).collect();
        let seqs = [SeqSpan { first_row: 0, rows, start, pages_at: 0, pages: pages.len() }];
        let input = StepInput { tokens: &tokens, positions: &positions, seqs: &seqs, pages: &pages, logit_rows: &wanted };
        let mut device = PlanDevice::new(&self.weights, kv);
        self.model.forward(&mut device, &input)?;
        Ok((device.high_water(), device.work()))
    }

    /// How many pages the pool gets.
    fn pages(&self, options: &Options, line: &Line, kv: KvShape, workspace: usize) -> Result<usize, PlanError> {
        let per_page = page_bytes(kv) as u64;
        let fixed = self.tree(options, line, kv, workspace, 0).total();
        let room = line.bytes.saturating_sub(fixed);
        let context = options.max_req_total_len.unwrap_or(self.max_context).min(self.max_context);
        // The least that serves anybody: one full step's worth of one request.
        let least = context.min(options.batch_max_tokens).div_ceil(PAGE_TOKENS);
        if let Some(tokens) = options.max_total_token_num {
            let pages = (tokens as usize).div_ceil(PAGE_TOKENS);
            if pages as u64 * per_page > room {
                return Err(self.shortfall(options, line, kv, workspace, pages));
            }
            return Ok(pages);
        }
        let fits = (options.mem_fraction.of(room) / per_page) as usize;
        let needed = options.max_req_total_len.map_or(least, |len| len.div_ceil(PAGE_TOKENS));
        if fits < needed {
            return Err(self.shortfall(options, line, kv, workspace, needed));
        }
        let casual = (CASUAL_USERS * CASUAL_TOKENS).max(context).div_ceil(PAGE_TOKENS);
        // No more than all running requests at full length could ever use.
        let useful = options.running_max_req_size * context.div_ceil(PAGE_TOKENS);
        Ok(if line.chosen { fits.min(useful) } else { fits.min(casual).min(useful) })
    }

    fn shortfall(&self, options: &Options, line: &Line, kv: KvShape, workspace: usize, pages: usize) -> PlanError {
        let plan = self.tree(options, line, kv, workspace, pages);
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
    fn tree(&self, options: &Options, line: &Line, kv: KvShape, workspace: usize, pages: usize) -> Plan {
        let weights = self.weights.bytes as u64;
        let vocab = self.model.vocab_size();
        let scratch = Sampler::bytes_for(vocab) as u64 + 4 * vocab as u64;
        let queue = 512 * (options.running_max_req_size + options.max_waiting) as u64;
        let entry = |component, bytes: u64, detail: String| PlanLine { component, bytes, detail };
        let lines = vec![
            entry(Component::Weights, weights, format!("{} matrices, {} vectors, packed once", self.weights.linears.len(), self.weights.vectors.len())),
            entry(
                Component::KvPages,
                (pages * kv.page_bytes()) as u64,
                format!("{} tokens = {pages} pages x {} ({} layers, {:?})", pages * PAGE_TOKENS, Bytes(kv.page_bytes() as u64), kv.layers, kv.dtype),
            ),
            entry(
                Component::StepWorkspace,
                workspace as u64,
                format!("one step of {} rows, {} with logits", options.batch_max_tokens, options.graph_max_batch_size),
            ),
            entry(
                Component::RequestTable,
                options.request_bytes + queue,
                format!("{} running + {} waiting requests: ids, unread output", options.running_max_req_size, options.max_waiting),
            ),
            entry(
                Component::PrefixIndex,
                (pages * index_bytes_per_page()) as u64,
                "page table and prefix tree, one row a page".into(),
            ),
            entry(Component::Tokenizer, TOKENIZER_BYTES_PER_TOKEN * vocab as u64 + scratch, format!("{vocab} tokens, and the sampler's scratch")),
            entry(Component::HostHeap, options.http_bytes, "connections, bodies, parsing".into()),
            entry(Component::ProcessBaseline, PROCESS_BASELINE_BYTES, "code, stacks, runtime".into()),
            entry(Component::Canary, CANARY_BYTES, "ballast, released on the first failed allocation".into()),
        ];
        Plan { limit: line.bytes, limit_source: line.source.clone(), lines }
    }

    fn limits(&self, options: &Options, pages: usize) -> Limits {
        let pool = pages * PAGE_TOKENS;
        let context = options.max_req_total_len.unwrap_or(self.max_context).min(self.max_context);
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

/// Bytes a page costs: its keys and values, and its row in page table and prefix index.
fn page_bytes(kv: KvShape) -> usize {
    kv.page_bytes() + index_bytes_per_page()
}

/// Upper bound per page: tables are powers of two, so the cost of one page is taken from a large pool.
fn index_bytes_per_page() -> usize {
    const MANY: usize = (1 << 16) + 1;
    (PagePool::bytes_for(MANY) + PrefixIndex::bytes_for(MANY)).div_ceil(MANY)
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
        return problem("--running-max-req-size", format!("is {running}, more than --graph-max-batch-size ({decode}): every running request decodes in every step"));
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
