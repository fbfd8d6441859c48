//! The memory accounts of an engine's host side: planned by formula, and entered in the ledger as measured.
//!
//! Regions enter themselves; heap memory is entered here. Every heap byte has exactly one owner: tables of known size, requests by their
//! reservations, or the host heap, which is the counted rest. What must not be in here: device memory.

use plimsoll_device::{KvShape, WeightTable};
use plimsoll_memory::{Component, Ledger};

use crate::api::options::Options;
use crate::cache::{KvEventLog, PAGE_TOKENS, PagePool, PrefixIndex, StatePool, WindowPool, unsaved_bytes};
use crate::memory::process::ProcessAccount;
use crate::request::state::{Arrival, RequestState};
use crate::runner::step_buffers::{DraftRows, StepBuffers};
use crate::sampling::Sampler;
use crate::schedule::scheduler::{Seq, StepEntry, StepLimits};

/// Bytes per vocabulary entry of this program's tokenizers, where they are not measured. They hold names and texts in arenas that grow by
/// doubling, and an index at most half full. A table of two merges a token is at most seven eighths full. Measured: 66 bytes (SmolLM2,
/// 49k), 80 (Qwen2.5, 152k), 111 (Gemma 3, 262k).
const TOKENIZER_BYTES_PER_TOKEN: u64 = 144;
/// Bytes of the special tokens' automata and of the chat template's program.
const TOKENIZER_BYTES_FIXED: u64 = 1 << 20;
/// A measured tokenizer's bytes are rounded up to a multiple of this.
const TOKENIZER_STEP_BYTES: u64 = 32 << 10;

/// Bytes of every engine's other heap memory: its handle, plan, metrics, threads' names and handles.
const ENGINE_FIXED_BYTES: u64 = 24 << 10;
/// Bytes of a weight's record and name, and of its place in the model.
const WEIGHT_RECORD_BYTES: u64 = 192;

/// Heap bytes that do not depend on requests: the engine's own, and the table of its weights.
pub(crate) fn engine_bytes(weights: &WeightTable) -> u64 {
    ENGINE_FIXED_BYTES + WEIGHT_RECORD_BYTES * (weights.linears.len() + weights.vectors.len()) as u64
}

/// Bytes of tokenizer and chat template: the measurement if there is one, rounded up so that every run plans the same, else the formula.
pub(crate) fn tokenizer_bytes(vocab: usize, measured: Option<u64>) -> u64 {
    match measured {
        Some(bytes) => bytes.next_multiple_of(TOKENIZER_STEP_BYTES),
        None => TOKENIZER_BYTES_FIXED + TOKENIZER_BYTES_PER_TOKEN * vocab as u64,
    }
}

/// Bytes of the sampler's scratch and of the copy of the row being sampled.
pub(crate) fn sampler_bytes(vocab: usize) -> u64 {
    (Sampler::bytes_for(vocab) + vocab * size_of::<f32>()) as u64
}

/// Bytes of the arrival queue, the scheduler's lists and the step's buffers, all of fixed size. Requests have up to `context` tokens.
pub(crate) fn table_bytes(step: &StepLimits, max_waiting: usize, context: usize) -> u64 {
    let places = step.running + max_waiting;
    // A bounded channel has one stamp beside each place.
    let arrivals = places * (size_of::<Arrival>() + size_of::<usize>());
    // A preempted sequence returns to the queue, so the queue has a place for every sequence.
    let lists = (places + step.running) * size_of::<Seq<RequestState>>() + 2 * step.running * size_of::<StepEntry>();
    // Sequences can share pages, and each lists all pages that it uses.
    let pages = |step: &StepLimits| step.running * context.div_ceil(PAGE_TOKENS);
    let chunk = step.of_layers();
    let buffers = StepBuffers::bytes_for(step, pages(step)) + StepBuffers::bytes_for(&chunk, pages(&chunk));
    // Draft rows of each sequence, and three lists with one entry a sequence.
    let drafting = step.running * (size_of::<DraftRows>() + 3 * size_of::<usize>());
    (arrivals + lists + buffers + drafting) as u64
}

/// The tables of a pool of pages, beside its page table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    /// A prefix tree.
    pub prefix_cache: bool,
    /// A log of the prefix tree's changes, for other processes.
    pub kv_events: bool,
    /// The slots beside the pages are window pages.
    pub windows: bool,
    /// Lists of pages that a tier below memory is to keep.
    pub tier: bool,
}

impl Tables {
    /// The tables that these options need, for a model with this cache.
    pub fn of(options: &Options, kv: &KvShape) -> Self {
        let Options { prefix_cache, kv_events, .. } = *options;
        Self { prefix_cache, kv_events, windows: kv.window().is_some(), tier: options.disk_cache.is_some() }
    }

    /// Exact bytes of the page table, prefix index and KV event log for a pool of `pages` pages. The table of state slots or window pages
    /// counts for a model that has `slots` of them. Ids of pages on their way back to the system count as well.
    pub fn bytes(self, pages: usize, slots: Option<usize>) -> u64 {
        if pages == 0 {
            return 0;
        }
        let index = if self.prefix_cache { PrefixIndex::bytes_for(pages) } else { 0 };
        let notes = if self.kv_events { KvEventLog::bytes_for(pages) + NOTES_CHUNKS_BYTES } else { 0 };
        let states = slots.map_or(0, |slots| match self.windows {
            true => WindowPool::bytes_for(slots, pages) + slots * size_of::<u32>() + WINDOW_CHUNKS_BYTES,
            false => StatePool::bytes_for(slots, pages),
        });
        let unsaved = if self.tier { unsaved_bytes(pages, slots.is_some()) + UNSAVED_CHUNKS_BYTES } else { 0 };
        let evicted = pages * size_of::<u32>();
        (PagePool::bytes_for(pages) + index + notes + states + unsaved + evicted + INDEX_CHUNKS_BYTES) as u64
    }

    /// The most that [`Self::bytes`] adds for one token of the pool. Tables are powers of two, and no pool costs more a page than a pool of
    /// one page.
    pub fn bytes_per_token(self) -> u64 {
        let everything = Self { prefix_cache: true, ..self };
        everything.bytes(1, Some(0)).div_ceil(PAGE_TOKENS as u64)
    }
}

/// Bytes that the allocator adds to the four blocks of page table and index.
const INDEX_CHUNKS_BYTES: usize = 4 * 24;
/// Bytes that it adds to the four blocks of window pages.
const WINDOW_CHUNKS_BYTES: usize = 4 * 24;
/// Bytes that it adds to the five blocks of the lists for a tier below memory.
const UNSAVED_CHUNKS_BYTES: usize = 5 * 24;
/// Bytes that it adds to the three blocks of the KV event log.
const NOTES_CHUNKS_BYTES: usize = 3 * 24;

/// Bytes that an engine holds on the heap for its whole life, by owner, and the process's account.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    /// Tokenizer, template and sampler.
    pub tokenizer: u64,
    /// Queue, lists and buffers.
    pub tables: u64,
    /// Page table and prefix index.
    pub index: u64,
    /// Encoder outputs, and patches on their way to the encoder.
    pub encoder: u64,
    /// Buffers and index of the prefix cache on disk.
    pub disk: u64,
    /// Whether a software GPU runs the steps: its buffers are on the heap.
    pub buffers_on_heap: bool,
    /// The rest of the heap and the process; `None` if the engine host accounts for them.
    pub process: Option<ProcessAccount>,
    /// The most bytes of the workspace that a step has used.
    pub workspace_peak: u64,
}

impl Accounts {
    /// Enters the bytes that are held now. `reserved` bytes are reserved by requests, and `staged` bytes by media before they are encoded.
    pub fn observe(&self, ledger: &Ledger, reserved: u64, staged: u64) {
        ledger.look();
        let requests = self.tables + reserved;
        let owned = self.tokenizer + self.index + self.encoder + self.disk + requests + staged;
        ledger.observe(Component::EncoderOutputs, self.encoder);
        ledger.observe(Component::MediaStaging, staged);
        ledger.observe(Component::Tokenizer, self.tokenizer);
        ledger.observe(Component::PrefixIndex, self.index);
        ledger.observe(Component::DiskCache, self.disk);
        ledger.observe(Component::RequestTable, requests);
        if let Some(process) = &self.process {
            let buffers = if self.buffers_on_heap { self.regions(ledger) } else { 0 };
            process.observe(ledger, owned + buffers);
        }
    }

    /// Bytes of mapped regions, or of a GPU's buffers, in the machine's memory.
    fn regions(&self, ledger: &Ledger) -> u64 {
        let regions = [Component::Weights, Component::KvPages, Component::StateSlots, Component::StepWorkspace];
        let regions = regions.into_iter().chain([Component::TableCache, Component::Transfers]);
        // A software GPU takes its own memory from the heap, too.
        let there = regions.filter(|component| self.buffers_on_heap || ledger.on_host(*component));
        there.map(|component| ledger.row(component).committed).sum()
    }

    /// Measures the process's baseline once, when everything planned has been touched.
    pub fn measure_baseline(&self, ledger: &Ledger) {
        ledger.look();
        if let Some(process) = &self.process {
            let regions = if self.buffers_on_heap { 0 } else { self.regions(ledger) };
            process.measure(regions + ledger.row(Component::EmergencyReserve).committed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pool_costs_more_a_token_than_the_bound() {
        for (kv_events, windows) in [(false, false), (true, false), (false, true), (true, true)] {
            let tables = Tables { prefix_cache: true, kv_events, windows, tier: kv_events };
            for pages in (1..3000).chain([4095, 4096, 4097, 65_535, 65_536, 65_537]) {
                let bytes = tables.bytes(pages, Some(0));
                let bound = tables.bytes_per_token() * (pages * PAGE_TOKENS) as u64;
                assert!(bytes <= bound, "{pages} pages take {bytes} bytes, the bound is {bound}");
            }
        }
    }

    #[test]
    fn every_heap_byte_has_one_owner() {
        let ledger = Ledger::new();
        let accounts = Accounts {
            tokenizer: 10,
            tables: 20,
            index: 30,
            encoder: 3,
            disk: 1,
            process: Some(ProcessAccount::default()),
            ..Accounts::default()
        };
        accounts.observe(&ledger, 5, 7);
        assert_eq!(ledger.row(Component::RequestTable).committed, 25);
        assert_eq!(ledger.committed_total(), 76, "the heap is not counted in this process, so there is no rest");
    }
}
