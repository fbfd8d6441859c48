//! A fixture model on the CPU device, run step by step as the engine would: spans, slots and drafts.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::cpu::TableReads;
use plimsoll_device::{
    Buf, CpuDevice, CpuMemory, CpuWeights, Declare, Device, DtypePolicy, Isa, KvDtype, MediaRows, ModelShape, NO_STATE,
    PAGE_TOKENS, PlanDevice, SeqSpan, StepInput, TablePlace, ThreadPool,
};
use plimsoll_formats::{Checkpoint, VisionKind};
use plimsoll_media::Size;
use plimsoll_media::image::Rgb;
use plimsoll_memory::{Component, Ledger};
use plimsoll_models::{EncoderInput, EncoderKind, Grid, Model, Output};
use serde_json::Value;

/// Positions that the rig's sequence may have.
pub const CONTEXT: usize = 512;
/// State slots of the rig.
pub const SLOTS: usize = 8;

/// The directory of a fixture model.
pub fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model)
}

/// A fixture's checkpoint.
pub fn checkpoint(model: &str) -> Checkpoint {
    let file = folder(model).join("model.gguf");
    let path = if file.is_file() { file } else { folder(model) };
    Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A fixture's reference.
pub fn reference(model: &str) -> Value {
    let file = folder(model).join("reference.json");
    serde_json::from_slice(&std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))).unwrap()
}

/// A JSON list of numbers as ids.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// log softmax(logits)[id].
pub fn logprob(logits: &[f32], id: u32) -> f64 {
    let top = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
    f64::from(logits[id as usize] - top) - sum.ln()
}

/// Returns the id of the greatest logit; the first of equal ones.
pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold((0, f32::MIN), |best, (i, x)| if *x > best.1 { (i, *x) } else { best });
    best.0 as u32
}

/// The image or frame that `tools/fixturelib/vision.py` draws by the same formula.
pub fn image(seed: usize, frame: usize, size: Size) -> Rgb {
    let mut data = Vec::new();
    for y in 0..size.height as usize {
        for x in 0..size.width as usize {
            for c in 0..3 {
                data.push((((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255) as u8);
            }
        }
    }
    Rgb { size, data }
}

/// One sequence's part of a step.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// Tokens of the part.
    pub tokens: Vec<u32>,
    /// Position of the first token.
    pub start: usize,
    /// The state slot to start from.
    pub from: Option<u32>,
    /// For each row the slot that its state is written to.
    pub to: Vec<u32>,
    /// Number of the rig's sequence, which determines its pages.
    pub sequence: usize,
    /// Places of the rows in time, height and width; empty: their positions.
    pub places: Vec<[f32; 3]>,
    /// The position after the last that each row sees; empty: a row sees nothing after itself.
    pub ends: Vec<u32>,
    /// Encoder rows, each block with the number of its first row in the part.
    pub media: Vec<(usize, Vec<f32>)>,
}

impl Part {
    /// Tokens of sequence 0 from `start`; the last token's state is written to `slot`.
    pub fn new(tokens: &[u32], start: usize, from: Option<u32>, slot: u32) -> Self {
        let mut to = vec![NO_STATE; tokens.len()];
        *to.last_mut().unwrap() = slot;
        Self { tokens: tokens.to_vec(), start, from, to, ..Self::default() }
    }
}

/// The arrays behind a step.
struct Step {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seqs: Vec<SeqSpan>,
    pages: Vec<u32>,
    logit_rows: Vec<u32>,
    state_out: Vec<u32>,
    places: Vec<[f32; 3]>,
    ends: Vec<u32>,
}

impl Step {
    fn new(parts: &[Part], states: bool) -> Self {
        let (mut places, mut ends) = (Vec::new(), Vec::new());
        let (mut tokens, mut positions, mut seqs) = (Vec::new(), Vec::new(), Vec::new());
        let (mut pages, mut state_out) = (Vec::new(), Vec::new());
        for part in parts {
            let rows = part.tokens.len();
            let count = (part.start + rows).div_ceil(PAGE_TOKENS);
            seqs.push(SeqSpan {
                first_row: tokens.len(),
                rows,
                start: part.start,
                pages_at: pages.len(),
                pages: count,
                seen_from: 0,
                state: part.from,
            });
            tokens.extend_from_slice(&part.tokens);
            positions.extend(part.start as u32..(part.start + rows) as u32);
            let first = part.sequence * (CONTEXT / PAGE_TOKENS);
            pages.extend(first as u32..(first + count) as u32);
            state_out.extend_from_slice(&part.to);
            match part.ends.is_empty() {
                true => ends.extend(part.start as u32 + 1..=(part.start + rows) as u32),
                false => ends.extend_from_slice(&part.ends),
            }
            match part.places.is_empty() {
                true => places.extend((part.start..part.start + rows).map(|position| [position as f32; 3])),
                false => places.extend_from_slice(&part.places),
            }
        }
        if parts.iter().all(|part| part.places.is_empty()) {
            places.clear();
        }
        if parts.iter().all(|part| part.ends.is_empty()) {
            ends.clear();
        }
        let logit_rows = (0..tokens.len() as u32).collect();
        if !states {
            state_out.clear();
        }
        Self { tokens, positions, seqs, pages, logit_rows, state_out, places, ends }
    }

    fn input<'a>(&'a self, media: &'a [MediaRows<'a>]) -> StepInput<'a> {
        StepInput {
            tokens: &self.tokens,
            positions: &self.positions,
            seqs: &self.seqs,
            pages: &self.pages,
            window_pages: &self.pages,
            logit_rows: &self.logit_rows,
            state_out: &self.state_out,
            places: &self.places,
            ends: &self.ends,
            media,
            ..StepInput::default()
        }
    }
}

/// Returns the encoder rows of all parts, numbered by the rows of the step.
fn media(parts: &[Part]) -> Vec<MediaRows<'_>> {
    let mut first = 0;
    let mut rows = Vec::new();
    for part in parts {
        rows.extend(part.media.iter().map(|(row, values)| MediaRows { first_row: first + row, values }));
        first += part.tokens.len();
    }
    rows
}

/// A model on a device of two threads, its cache in f32, with room for two sequences.
pub struct Rig {
    pub model: Box<dyn Model>,
    pub shape: ModelShape,
    device: CpuDevice,
}

impl Rig {
    /// Loads a fixture, every weight as f32.
    pub fn new(model: &str, with_drafter: bool) -> Self {
        Self::with(model, with_drafter, DtypePolicy::F32)
    }

    /// Loads a fixture with its weights in `dtype`.
    pub fn with(model: &str, with_drafter: bool, dtype: DtypePolicy) -> Self {
        Self::of(checkpoint(model), with_drafter, dtype)
    }

    /// Loads a fixture with its tables in its files, behind caches of `cache_bytes` bytes.
    pub fn in_files(model: &str, cache_bytes: u64) -> Self {
        Self::with_tables(checkpoint(model), false, DtypePolicy::Auto, Some(cache_bytes))
    }

    /// Loads a checkpoint from any path.
    pub fn at(path: &Path, with_drafter: bool, dtype: DtypePolicy) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self::of(checkpoint, with_drafter, dtype)
    }

    fn of(checkpoint: Checkpoint, with_drafter: bool, dtype: DtypePolicy) -> Self {
        Self::with_tables(checkpoint, with_drafter, dtype, None)
    }

    fn with_tables(checkpoint: Checkpoint, with_drafter: bool, dtype: DtypePolicy, table_cache: Option<u64>) -> Self {
        let tables = table_cache.map_or(TablePlace::Memory, |_| TablePlace::File);
        let mut declare = Declare::new(&checkpoint, dtype).with_tables_in(tables);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, with_drafter)
            .unwrap_or_else(|e| panic!("{}: {e}", checkpoint.dir().display()));
        let table = declare.finish().on(Isa::detect()).with_table_cache(table_cache);
        let shape = model.shape(KvDtype::F32);
        let workspace = {
            let mut plan = PlanDevice::new(&table, &shape.kv);
            let largest = Step::new(&[Part::new(&[0; CONTEXT], 0, None, 0)], shape.state.is_some());
            let output = model.forward(&mut plan, &largest.input(&[])).unwrap();
            if let Some(drafter) = model.drafter() {
                drafter.draft(&mut plan, output.hidden, &largest.logit_rows, &largest.input(&[])).unwrap();
            }
            for sense in EncoderKind::ALL {
                let Some(encoder) = model.encoder(sense) else { continue };
                let mut encode = PlanDevice::new(&table, &shape.kv);
                // Tiles have one size; other images have any size.
                let grids = match checkpoint.config.vision.as_ref().map(|vision| (vision.encoder, vision.table_side)) {
                    _ if sense == EncoderKind::Audio => vec![Grid::audio(4096)],
                    Some((VisionKind::Intern(_), side)) => [Grid { frames: 40, height: side, width: side }].to_vec(),
                    Some((VisionKind::Siglip | VisionKind::Idefics3 | VisionKind::Llama4(_), side)) => {
                        vec![Grid { frames: 1, height: side, width: side }; 8]
                    }
                    Some((VisionKind::Gemma4(_) | VisionKind::Pixtral(_), _)) => {
                        vec![Grid { frames: 1, height: 66, width: 66 }]
                    }
                    _ => vec![Grid { frames: 1, height: 64, width: 64 }],
                };
                encoder.encode(&mut encode, &EncoderInput { grids: &grids, patches: &[] }).unwrap();
                plan = if encode.high_water() > plan.high_water() { encode } else { plan };
            }
            // Drafts after the first take one row each.
            plan.high_water() + (1 << 20) + plimsoll_device::cpu::scratch_bytes(&shape, 2)
        };
        let ledger = Arc::new(Ledger::new());
        for component in [Component::Weights, Component::KvPages, Component::StateSlots, Component::StepWorkspace] {
            ledger.plan(component, 1 << 30);
        }
        ledger.plan(Component::TableCache, table.table_cache_bytes() as u64);
        let mut pool = ThreadPool::new(2).unwrap();
        let weights = CpuWeights::load(table, &checkpoint, &ledger, &mut pool, |_| {}).unwrap();
        let pages = 2 * CONTEXT / PAGE_TOKENS;
        let slots = if shape.state.is_some() { SLOTS } else { pages };
        let memory = CpuMemory::map(&ledger, &shape, pages, slots, workspace, 2, false).unwrap();
        Self { model, shape, device: CpuDevice::new(weights, pool, Isa::detect(), memory) }
    }

    /// Returns the reads of table rows in files since the last call.
    pub fn table_reads(&mut self) -> TableReads {
        self.device.check_weights().expect("every row was read");
        self.device.take_table_reads()
    }

    /// Runs one step and returns the logits of every row.
    pub fn step(&mut self, parts: &[Part]) -> Vec<Vec<f32>> {
        let output = self.forward(parts);
        self.rows(output.logits)
    }

    /// Runs one step that computes only the logits of these rows.
    pub fn only_logits(&mut self, parts: &[Part], rows: &[u32]) -> Vec<Vec<f32>> {
        let step = Step { logit_rows: rows.to_vec(), ..Step::new(parts, self.shape.state.is_some()) };
        self.device.begin_step();
        let media = media(parts);
        // The sequences of these rows, one span for each run of adjacent rows. The first try has no spans.
        let mut spans: Vec<SeqSpan> = Vec::new();
        for (at, row) in rows.iter().map(|row| *row as usize).enumerate() {
            let seq = step.seqs.iter().find(|seq| (seq.first_row..seq.first_row + seq.rows).contains(&row)).unwrap();
            let start = seq.start + row - seq.first_row;
            match spans.last_mut().filter(|span| span.pages_at == seq.pages_at && span.start + span.rows == start) {
                Some(span) => span.rows += 1,
                None => spans.push(SeqSpan { first_row: at, rows: 1, start, state: None, ..*seq }),
            }
        }
        let mut input = StepInput { only_logits: true, ..step.input(&media) };
        let output = self.model.forward(&mut self.device, &input).unwrap();
        let first = self.rows(output.logits);
        // With a recurrent state the step cannot be repeated: it may write the slot that it reads.
        if self.shape.state.is_some() {
            return first;
        }
        input.logit_seqs = &spans;
        self.device.begin_step();
        let output = self.model.forward(&mut self.device, &input).unwrap();
        assert_eq!(first, self.rows(output.logits), "with the sequences of rows with logits");
        assert_eq!((output.logits.rows, output.hidden.rows), (rows.len(), rows.len()));
        self.rows(output.logits)
    }

    /// Runs one step layer by layer, with another step before each layer. Returns the logits of every row of the first step, and those of
    /// the others.
    pub fn by_layers(&mut self, parts: &[Part], between: &[Part]) -> (Vec<Vec<f32>>, Vec<Vec<Vec<f32>>>) {
        let [step, other] = [parts, between].map(|parts| Step::new(parts, self.shape.state.is_some()));
        let [media, others] = [media(parts), media(between)];
        self.device.begin_step();
        let mut pass = self.model.begin(&mut self.device, &step.input(&media)).unwrap();
        let mark = self.device.mark();
        let mut meanwhile = Vec::new();
        loop {
            let output = self.model.forward(&mut self.device, &other.input(&others)).unwrap();
            meanwhile.push(self.rows(output.logits));
            self.device.release(mark);
            if let Some(output) = self.model.advance(&mut self.device, &mut pass, &step.input(&media)).unwrap() {
                return (self.rows(output.logits), meanwhile);
            }
        }
    }

    /// Runs one step and leaves its output in the workspace.
    pub fn forward(&mut self, parts: &[Part]) -> Output {
        let step = Step::new(parts, self.shape.state.is_some());
        self.device.begin_step();
        self.model.forward(&mut self.device, &step.input(&media(parts))).unwrap()
    }

    /// Returns the encoder's output for images or audio clips.
    pub fn encode(&mut self, sense: EncoderKind, grids: &[Grid], patches: &[f32]) -> Vec<Vec<f32>> {
        self.device.begin_step();
        let encoder = self.model.encoder(sense).expect("an encoder");
        let output = encoder.encode(&mut self.device, &EncoderInput { grids, patches }).unwrap();
        self.rows(output)
    }

    /// Encodes every item alone, all together, and all in another order. Asserts equal bits and returns each item's output.
    pub fn encode_in_company(&mut self, sense: EncoderKind, items: &[(Grid, &[f32])]) -> Vec<Vec<Vec<f32>>> {
        let alone: Vec<_> = items.iter().map(|(grid, values)| self.encode(sense, &[*grid], values)).collect();
        let forward: Vec<usize> = (0..items.len()).collect();
        let mut turned = forward.clone();
        turned.reverse();
        turned.rotate_left(1);
        for order in [forward, turned] {
            let grids: Vec<Grid> = order.iter().map(|i| items[*i].0).collect();
            let values: Vec<f32> = order.iter().flat_map(|i| items[*i].1.iter().copied()).collect();
            let expected: Vec<Vec<f32>> = order.iter().flat_map(|i| alone[*i].clone()).collect();
            assert_eq!(self.encode(sense, &grids, &values), expected, "in the order {order:?}");
        }
        assert!(alone.iter().flatten().flatten().all(|x| x.is_finite()));
        alone
    }

    /// Returns the most bytes of workspace that were in use, scratch included.
    pub fn workspace_peak(&mut self) -> usize {
        self.device.memory().workspace_peak()
    }

    /// A pass of the draft head in the same step: `parts` name the following tokens, `rows` the rows of `hidden`.
    pub fn draft(&mut self, hidden: Buf, rows: &[u32], parts: &[Part]) -> Output {
        let step = Step::new(parts, false);
        let drafter = self.model.drafter().expect("a draft head");
        drafter.draft(&mut self.device, hidden, rows, &step.input(&media(parts))).unwrap()
    }

    /// Returns the rows of a matrix in the workspace.
    pub fn rows(&mut self, x: Buf) -> Vec<Vec<f32>> {
        (0..x.rows).map(|row| self.device.row_mut(x, row).to_vec()).collect()
    }
}
