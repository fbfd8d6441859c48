//! The plan as a tree of components, one line each.

use plimsoll_device::{KvGroup, KvShape, PAGE_TOKENS, WeightTable};
use plimsoll_formats::DRAFT_PREFIX;
use plimsoll_memory::{Bytes, Component, DeviceLimit, Plan, PlanLine};

use super::constants::{EMERGENCY_RESERVE_BYTES, HEAP_KEPT_BYTES, PROCESS_BASELINE_BYTES};
use super::disk::DiskPlan;
use super::gpu::DEVICE_RESERVE_BYTES;
use super::{Blueprint, Draft, EnginePlan, GpuPlan};
use crate::api::options::Options;
use crate::cache::Pools;
use crate::media::MediaPlan;
use crate::memory::footprint::{Tables, engine_bytes, sampler_bytes, table_bytes, tokenizer_bytes};
use crate::schedule::scheduler::StepLimits;

/// Bytes of each compute thread: the touched part of its stack, and its share of the system's allocator.
const THREAD_BYTES: u64 = 128 << 10;

/// Names the chunk that waits between two layers in the workspace, as text.
fn layered_words(step: &StepLimits) -> String {
    match step.layered {
        true => format!(", beside a prompt's {} between two layers", step.rows),
        false => String::new(),
    }
}

/// Names the uses of the workspace, as text.
fn step_words(draft: &Draft<'_>) -> String {
    let step = &draft.step;
    format!("one step of {} rows, {} with logits", step.rows, step.logit_rows)
        + &layered_words(step)
        + &draft.media.map_or_else(String::new, MediaPlan::words)
        + &draft.gpu.as_ref().map_or_else(String::new, GpuPlan::words)
}

/// Names the driver's part of the process, as text.
fn driver_words(gpu: Option<&GpuPlan>) -> String {
    gpu.map_or_else(String::new, |gpu| format!(", {} for the driver of {}", Bytes(gpu.driver()), gpu.name))
}

/// Returns the extra lines for a GPU with memory of its own: one in the machine's memory, one in the GPU's.
fn own_lines(gpu: &GpuPlan) -> Vec<PlanLine> {
    if gpu.own.is_none() {
        return Vec::new();
    }
    let transfers = format!("sent, fetched and loaded, beside {}", gpu.name);
    let reserve = format!("an allowance for the driver of {}, and what is left free", gpu.name);
    vec![
        PlanLine { component: Component::Transfers, bytes: gpu.transfers() as u64, detail: transfers },
        PlanLine { component: Component::DeviceReserve, bytes: DEVICE_RESERVE_BYTES, detail: reserve },
    ]
}

fn kv_line(kv: &KvShape, Pools { pages, slots }: Pools) -> PlanLine {
    if kv.layers().is_empty() {
        let detail = "none: an encoder keeps nothing from step to step".into();
        return PlanLine { component: Component::KvPages, bytes: 0, detail };
    }
    let mut detail = format!(
        "{} tokens = {pages} pages x {} ({} layers, {:?})",
        pages * PAGE_TOKENS,
        Bytes(kv.page_bytes(KvGroup::Whole) as u64),
        kv.count(KvGroup::Whole),
        kv.dtype()
    );
    let mut windows = 0;
    if let Some(window) = kv.window() {
        windows = slots;
        let (bytes, layers) = (Bytes(kv.page_bytes(KvGroup::Window) as u64), kv.count(KvGroup::Window));
        detail += &format!(", {slots} window pages x {bytes} ({layers} layers that see {window} tokens)");
    }
    PlanLine { component: Component::KvPages, bytes: kv.bytes(pages, windows) as u64, detail }
}

fn state_line(slot_bytes: u64, slots_per_request: u64, slots: usize) -> PlanLine {
    let detail = format!(
        "{slots} slots x {}: {} requests x {slots_per_request} (checkpoints included)",
        Bytes(slot_bytes),
        slots as u64 / slots_per_request
    );
    PlanLine { component: Component::StateSlots, bytes: slots as u64 * slot_bytes, detail }
}

impl EnginePlan {
    /// Adjusts the plan to the pools that start-up built.
    pub(crate) fn resize(&mut self, pages: usize, slots: usize) {
        if self.step.encoder_batch {
            // There are no pools.
            return;
        }
        let index = self.index_bytes(pages, slots);
        let (slot_bytes, slots_per_request) =
            self.sizing.state.map_or((0, 1), |state| (state.slot_bytes, state.slots_per_request));
        self.slots = slots;
        if let Some(state) = self.sizing.state.filter(|_| self.kv.window().is_none()) {
            self.step.running = self.step.running.min((slots / state.slots_per_request as usize).max(1));
            self.limits.running_max_req_size = self.step.running as u32;
        }
        for line in &mut self.plan.lines {
            match line.component {
                Component::KvPages => *line = kv_line(&self.kv, Pools { pages, slots }),
                Component::StateSlots => *line = state_line(slot_bytes, slots_per_request, slots),
                Component::PrefixIndex => line.bytes = index,
                _ => {}
            }
        }
        self.pages = pages;
        self.limits.max_total_token_num = (pages * PAGE_TOKENS) as u64;
        self.limits.max_req_total_len = self.context.min(pages * PAGE_TOKENS) as u32;
    }
}

/// Names the bytes of weights of the vision encoder and the draft model, as text. Absent parts are left out.
fn parts_words(weights: &WeightTable) -> String {
    let parts = [("visual.", "vision encoder"), (DRAFT_PREFIX, "draft model")];
    let parts = parts.map(|(prefix, name)| match weights.bytes_below(prefix) {
        0 => String::new(),
        bytes => format!("; {} of them the {name}'s", Bytes(bytes as u64)),
    });
    parts.concat()
}

/// Bytes of the compute threads, of their readers of table rows, and of the table of weights.
fn process_bytes(weights: &WeightTable, threads: usize) -> u64 {
    (THREAD_BYTES + weights.row_reader_bytes() as u64) * threads as u64 + weights.host_bytes() as u64
}

/// Returns the line of the cache of tables that stay in the model's files; `None` without such tables.
fn table_line(weights: &WeightTable, options: &Options) -> Option<PlanLine> {
    let (tables, in_files) = (weights.file_tables(), weights.file_table_bytes());
    let rows: usize = tables.iter().map(|table| table.rows).sum();
    let cache = weights.table_cache_size(options.table_cache_bytes);
    let cached = cache.rows.min(rows);
    let detail = format!("{cached} of the {rows} rows of tables that stay in the model's files ({})", Bytes(in_files));
    (!tables.is_empty()).then_some(PlanLine { component: Component::TableCache, bytes: cache.bytes as u64, detail })
}

impl Blueprint {
    /// Returns the tree of components with these pools.
    pub(super) fn tree(&self, draft: &Draft<'_>, pools: Pools) -> Plan {
        let Draft { options, limit, threads, ref shape, step, workspace, context, .. } = *draft;
        let Pools { pages, slots } = pools;
        let second = (shape.state.is_some() || shape.kv.window().is_some()).then_some(slots);
        // Without pages this is the fixed part, for pools of any size.
        let context = if pages == 0 { context } else { context.min(pages * PAGE_TOKENS) };
        let gpu = draft.gpu.as_ref();
        let weights = gpu.map_or(self.weights.bytes as u64, |gpu| gpu.weights);
        let vocab = self.model.vocab_size();
        let tokenizer = tokenizer_bytes(vocab, options.tokenizer_bytes);
        let scratch = sampler_bytes(vocab);
        let (heap, driver) = gpu.map_or((0, 0), |gpu| (gpu.heap, gpu.driver()));
        let tables = engine_bytes(&self.weights) + table_bytes(&step, options.max_waiting, context) + heap;
        let entry = |component, bytes: u64, detail: String| PlanLine { component, bytes, detail };
        // The engine host has planned these bytes for its hosted engines.
        let (baseline, kept) = if options.hosted { (0, 0) } else { (PROCESS_BASELINE_BYTES, HEAP_KEPT_BYTES) };
        let mut lines = vec![
            entry(
                Component::Weights,
                weights,
                format!("{} matrices, {} vectors, packed once", self.weights.loaded(), self.weights.vectors.len())
                    + &parts_words(&self.weights),
            ),
            kv_line(&shape.kv, pools),
            entry(Component::StepWorkspace, workspace as u64, step_words(draft)),
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
                Tables::of(options, &shape.kv).bytes(pages, second),
                match options.kv_events {
                    true => "page table, prefix tree and what others are told of it, one row a page".into(),
                    false => "page table and prefix tree, one row a page".into(),
                },
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
            entry(
                Component::HostHeap,
                options.http_bytes + kept,
                format!(
                    "upper limit, not expected use: connections, bodies, parsing, grammars; {} that the allocator keeps",
                    Bytes(kept)
                ),
            ),
            entry(
                Component::ProcessBaseline,
                baseline + process_bytes(&self.weights, threads) + driver,
                format!("data, runtime, {threads} compute threads, table of weights") + &driver_words(gpu),
            ),
        ];
        if !options.hosted {
            let detail =
                format!("{} blocks, one for each refused allocation", plimsoll_memory::emergency_reserve::BLOCKS);
            lines.push(entry(Component::EmergencyReserve, EMERGENCY_RESERVE_BYTES, detail));
        }
        lines.splice(3..3, gpu.into_iter().flat_map(own_lines));
        if let Some(state) = shape.state {
            let (per_request, bytes) = (options.slots_per_request(), state.slot_bytes());
            lines.insert(2, state_line(bytes as u64, per_request as u64, slots));
        }
        lines.extend(DiskPlan::new(options, shape, context, draft.media).map(|disk| disk.line()));
        lines.extend(draft.media.iter().flat_map(|media| media.lines()));
        lines.splice(1..1, table_line(&self.weights, options));
        let device = draft.own().map(|own| DeviceLimit { limit: own.bytes, source: own.source.clone() });
        Plan { limit: limit.bytes, limit_source: limit.source.clone(), device, lines }
    }
}
