//! The device: it records operations, and submits a step at once.

mod candidates;
mod encoder;
mod experts;
mod operations;
mod output;
mod recurrent;

use plimsoll_device::{Buf, KvGroup, LinearId, SeqSpan, StepInput, VectorId};
use wgpu::BindGroup;

use crate::context::Context;
use crate::kernel::{Kernel, Second};
use crate::memory::GpuMemory;
use crate::record::Record;
use crate::weights::GpuWeights;

/// Offsets of a step's rows and page ids in the upload, in words.
#[derive(Clone, Copy, Debug)]
struct SentRows {
    table: u32,
    pages: [u32; 2],
}

/// The device: weights, and the memory of the current pool build.
pub struct GpuDevice {
    context: Context,
    weights: GpuWeights,
    memory: GpuMemory,
    /// Bind group of the arena, the upload, the vectors, and the table of experts.
    first_group: BindGroup,
    record: Record,
    sent_rows: Option<SentRows>,
    /// The sequences with uploaded rows: a layer may take some of a step's rows.
    sent_seqs: Vec<SeqSpan>,
    /// Offsets of the step's sequences and slots in the upload, for recurrent layers.
    sent_slots: Option<[u32; 2]>,
    /// Offsets of the tables of an encoder's rows in the upload, and their words.
    sent_tables: [Option<[u32; 2]>; 2],
    /// Matrices that were fetched last, each with its offset in the buffer, in bytes.
    came: Vec<(Buf, usize)>,
    /// Fetched bytes since the last [`Self::take_fetched`].
    fetched: u64,
    /// Whether the staging buffer is mapped; then, whether the readback buffer is.
    staged: bool,
    readable: bool,
    /// Elements of the matrix that was read last.
    row: Vec<f32>,
}

impl GpuDevice {
    /// A device over loaded weights.
    pub fn new(context: Context, weights: GpuWeights, memory: GpuMemory) -> Self {
        let buffers = [&memory.arena.buffer, &memory.sent.buffer, &weights.vectors.buffer, &weights.lookup.buffer];
        let first_group = context.first_group(buffers);
        let record = Record::new(memory.sizes.calls, memory.sizes.upload);
        let (staged, readable) = (false, false);
        let (sent_rows, sent_seqs, sent_slots) = (None, Vec::new(), None);
        let (came, row) = (Vec::with_capacity(memory.sizes.outputs), Vec::new());
        Self {
            context,
            weights,
            memory,
            first_group,
            record,
            sent_rows,
            sent_seqs,
            sent_slots,
            sent_tables: [None; 2],
            came,
            fetched: 0,
            staged,
            readable,
            row,
        }
    }

    /// The open device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the device's failure, if it has failed.
    pub fn failure(&self) -> Option<String> {
        self.context.failure()
    }

    /// Returns the memory of the current pool build.
    pub fn memory(&self) -> &GpuMemory {
        &self.memory
    }

    /// The most bytes of step workspace that steps have used.
    pub fn workspace_peak(&self) -> usize {
        self.memory.workspace_peak()
    }

    /// Takes the device apart, for another pool build over the same weights. The memory is freed.
    pub fn into_parts(self) -> (Context, GpuWeights) {
        let Self { context, weights, memory, first_group, .. } = self;
        // Nothing points into the memory when it is freed.
        drop(first_group);
        drop(memory);
        (context, weights)
    }

    /// Fills a matrix with these values, as the device's next operation.
    ///
    /// # Panics
    /// When the number of values is not that of the matrix.
    pub fn fill(&mut self, x: Buf, values: &[f32]) {
        assert_eq!(values.len(), x.rows * x.cols, "values of a matrix");
        let sent = self.record.send(values.iter().map(|value| value.to_bits()));
        self.fetch(x, sent);
    }

    /// Starts a step: releases all temporaries of the last one.
    pub fn begin_step(&mut self) {
        self.memory.stack.clear();
        self.forget();
    }

    /// Drops all operations that were recorded and not submitted.
    pub fn forget(&mut self) {
        self.record.clear();
        (self.sent_rows, self.sent_slots, self.sent_tables) = (None, None, [None; 2]);
    }

    /// Adds a dispatch of a kernel that accesses only the arena and the upload.
    fn call(&mut self, kernel: Kernel, groups: [u32; 2], params: &[u32]) {
        self.call_on(kernel, 0, groups, params);
    }

    /// Adds a dispatch over a segment of the weights, or a layer's cache or states.
    fn call_on(&mut self, kernel: Kernel, second: usize, groups: [u32; 2], params: &[u32]) {
        debug_assert_eq!(params.len(), kernel.params().len(), "{kernel:?}");
        let second = Some((kernel.second(), second)).filter(|(kind, _)| *kind != Second::Nothing);
        self.record.call(self.context.pipeline_of(kernel), second, groups, params);
    }

    /// Returns the offset of a vector, in words.
    fn vector(&self, id: VectorId) -> u32 {
        (self.weights.segments().vector(id) / size_of::<f32>()) as u32
    }

    /// Returns 1 more than the offset of a matrix's bias, or 0.
    fn bias(&self, id: LinearId) -> u32 {
        self.weights.table().linear(id).bias.map_or(0, |bias| self.vector(bias) + 1)
    }

    /// Uploads a step's page ids once, and its rows once for each set of rows that layers take. `causal`: a row attends to no later
    /// position, unless the step says so.
    fn rows_of(&mut self, step: &StepInput<'_>, causal: bool) -> SentRows {
        let sent = self.sent_rows.filter(|_| self.sent_seqs == step.seqs);
        if let Some(sent) = sent {
            return sent;
        }
        let seqs = step.seqs.iter();
        let rows = seqs.flat_map(|seq| {
            let words = move |i: usize| {
                let own = seq.start + if causal { i + 1 } else { seq.rows };
                let end = step.ends.get(seq.first_row + i).map_or(own, |end| (*end as usize).max(own));
                [seq.start + i, seq.pages_at, seq.seen_from, end].map(|word| word as u32)
            };
            (0..seq.rows).flat_map(words)
        });
        let table = self.record.send(rows);
        let send = |group| self.record.send(step.pages_of(group).iter().copied());
        // The pages are those of the whole step, for any set of its rows.
        let pages = self.sent_rows.map_or_else(|| [KvGroup::Whole, KvGroup::Window].map(send), |sent| sent.pages);
        let sent = SentRows { table, pages };
        self.sent_rows = Some(sent);
        self.sent_seqs.clear();
        self.sent_seqs.extend_from_slice(step.seqs);
        sent
    }
}

/// Returns the offset of a matrix in the arena, in words.
fn at(x: Buf) -> u32 {
    (x.offset() / size_of::<f32>()) as u32
}
