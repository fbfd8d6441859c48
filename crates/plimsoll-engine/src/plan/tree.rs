//! The plan as a tree of components, one line each.

use plimsoll_device::{KvShape, PAGE_TOKENS};
use plimsoll_memory::{Bytes, Component, Plan, PlanLine};

use super::constants::{EMERGENCY_RESERVE_BYTES, HEAP_KEPT_BYTES, PROCESS_BASELINE_BYTES};
use super::sizes::Pools;
use super::{Blueprint, Draft, EnginePlan};
use crate::media::MediaPlan;
use crate::memory::footprint::{Tables, engine_bytes, sampler_bytes, table_bytes, tokenizer_bytes};
use crate::schedule::scheduler::StepLimits;

/// Each compute thread on top: the touched part of its stack and its share of the system's allocator.
const THREAD_BYTES: u64 = 128 << 10;

/// What stands in the workspace beside a step.
fn layered_words(step: &StepLimits) -> String {
    match step.layered {
        true => format!(", beside a prompt's {} between two layers", step.rows),
        false => String::new(),
    }
}

fn kv_line(kv: KvShape, pages: usize) -> PlanLine {
    if kv.layers == 0 {
        let detail = "none: an encoder keeps nothing from step to step".into();
        return PlanLine { component: Component::KvPages, bytes: 0, detail };
    }
    let detail = format!(
        "{} tokens = {pages} pages x {} ({} layers, {:?})",
        pages * PAGE_TOKENS,
        Bytes(kv.page_bytes() as u64),
        kv.layers,
        kv.dtype
    );
    PlanLine { component: Component::KvPages, bytes: (pages * kv.page_bytes()) as u64, detail }
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
    /// The plan with the pools that start-up came to build.
    pub(crate) fn resize(&mut self, pages: usize, slots: usize) {
        if self.step.encoder_batch {
            // There are no pools.
            return;
        }
        let index = self.index_bytes(pages, slots);
        let (slot_bytes, slots_per_request) =
            self.sizing.state.map_or((0, 1), |state| (state.slot_bytes, state.slots_per_request));
        if let Some(state) = self.sizing.state {
            self.slots = slots;
            self.step.running = self.step.running.min((slots / state.slots_per_request as usize).max(1));
            self.limits.running_max_req_size = self.step.running as u32;
        }
        for line in &mut self.plan.lines {
            match line.component {
                Component::KvPages => *line = kv_line(self.kv, pages),
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

impl Blueprint {
    /// The tree of components with these pools.
    pub(super) fn tree(&self, draft: &Draft<'_>, pools: Pools) -> Plan {
        let Draft { options, line, threads, shape, step, workspace, context, .. } = *draft;
        let Pools { pages, slots } = pools;
        let stateful = shape.state.map(|_| slots);
        // Without a pool this is the fixed part for pools of any size.
        let context = if pages == 0 { context } else { context.min(pages * PAGE_TOKENS) };
        let weights = self.weights.bytes as u64;
        let vocab = self.model.vocab_size();
        let tokenizer = tokenizer_bytes(vocab, options.tokenizer_bytes);
        let scratch = sampler_bytes(vocab);
        let tables = engine_bytes(&self.weights) + table_bytes(&step, options.max_waiting, context);
        let entry = |component, bytes: u64, detail: String| PlanLine { component, bytes, detail };
        // A hosted engine's engine host has planned the rest.
        let (baseline, kept) = if options.hosted { (0, 0) } else { (PROCESS_BASELINE_BYTES, HEAP_KEPT_BYTES) };
        let mut lines = vec![
            entry(
                Component::Weights,
                weights,
                format!("{} matrices, {} vectors, packed once", self.weights.linears.len(), self.weights.vectors.len()),
            ),
            kv_line(shape.kv, pages),
            entry(
                Component::StepWorkspace,
                workspace as u64,
                format!("one step of {} rows, {} with logits", step.rows, step.logit_rows)
                    + &layered_words(&step)
                    + &draft.media.map_or_else(String::new, MediaPlan::words),
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
                Tables::of(options).bytes(pages, stateful),
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
                baseline + THREAD_BYTES * threads as u64 + self.weights.host_bytes() as u64,
                format!("data, runtime, {threads} compute threads, table of weights"),
            ),
        ];
        if !options.hosted {
            let detail =
                format!("{} blocks, one for each refused allocation", plimsoll_memory::emergency_reserve::BLOCKS);
            lines.push(entry(Component::EmergencyReserve, EMERGENCY_RESERVE_BYTES, detail));
        }
        if let Some(state) = shape.state {
            let (per_request, bytes) = (options.slots_per_request(), state.slot_bytes());
            lines.insert(2, state_line(bytes as u64, per_request as u64, slots));
        }
        lines.extend(draft.media.iter().flat_map(|media| media.lines()));
        Plan { limit: line.bytes, limit_source: line.source.clone(), lines }
    }
}
