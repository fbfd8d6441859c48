//! Attention on all cores: one task is a few rows of one sequence for one key/value head and the query heads it serves.

use plimsoll_kernels::{self as kernels, AttendOutput, AttendParams, KvLayout, KvPages, Queries, Span};

use super::CpuDevice;
use crate::device::{Attention, Buf, SeqSpan, StepInput};
use crate::kv::PAGE_TOKENS;

/// Query rows of one task: they share every load of keys and values.
const ROWS: usize = 16;

/// Floats of scratch one thread needs for tasks over heads of `layout`, `group` query heads each.
pub(super) fn scratch_floats(layout: &KvLayout, group: usize) -> usize {
    kernels::attend_scratch_len(layout, ROWS, group)
}

impl CpuDevice {
    /// Writes every row's keys and values to its place in the cache.
    pub(super) fn store_kv(&mut self, layer: usize, k: Buf, v: Buf, step: &StepInput<'_>) {
        let (isa, arena) = (self.isa, self.arena());
        let memory = &mut self.memory;
        let (layer_bytes, page_bytes) = (memory.shape.layer_bytes(), memory.shape.page_bytes());
        let used = memory.layout.bytes_per_page();
        let cache = memory.kv.bytes_mut();
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                let position = seq.start + i;
                let page = pages[position / PAGE_TOKENS] as usize;
                let bytes = &mut cache[page * page_bytes + layer * layer_bytes..][..used];
                // SAFETY: rows of `k` and `v` are inside the workspace, and this is the only thread.
                let (k, v) = unsafe { (arena.row(k, seq.first_row + i), arena.row(v, seq.first_row + i)) };
                kernels::kv_store(isa, &memory.layout, bytes, position % PAGE_TOKENS, k, v);
            }
        }
    }

    /// Attends over what is stored.
    pub(super) fn attend(&mut self, spec: &Attention, out: Buf, q: Buf, step: &StepInput<'_>) {
        let (isa, arena) = (self.isa, self.arena());
        let memory = &mut self.memory;
        let (layout, kv_heads) = (memory.layout, memory.shape.kv_heads);
        let (group, width) = (spec.heads / kv_heads, memory.shape.head_dim);
        let stride = memory.shape.page_bytes();
        let base = Base(memory.kv.bytes()[spec.layer * memory.shape.layer_bytes()..].as_ptr());
        let params = AttendParams { scale: spec.scale, softcap: spec.softcap, sinks: &[] };
        let tasks = Tasks::new(step.seqs, kv_heads);
        self.pool.run(tasks.count, &|thread, task| {
            let Share { seq, first, rows, head } = tasks.share(task);
            let mut spans = [Span { first: 0, end: 0 }; ROWS];
            for (i, span) in spans[..rows].iter_mut().enumerate() {
                let end = seq.start + first + i + 1;
                let first = spec.window.map_or(0, |window| end.saturating_sub(window)).max(seq.seen_from);
                *span = Span { first: first as u32, end: end as u32 };
            }
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            let row = seq.first_row + first;
            let column = head * group * width;
            // SAFETY: `q` is only read here; scratch belongs to this thread.
            let (q_data, scratch) = unsafe { (&arena.matrix(q)[row * q.cols + column..], arena.scratch(thread)) };
            let queries = Queries { data: q_data, ld: q.cols, heads: group, spans: &spans[..rows] };
            let kv = KvPages { layout, base: base.get(), stride, pages, kv_head: head };
            // SAFETY: in bounds of `out`; each task writes its own rows and heads. Page ids are within the pool (the
            // engine takes them from it), and nobody writes the cache during this operation.
            unsafe {
                let target = AttendOutput { ptr: arena.pointer(out).add(row * out.cols + column), ld: out.cols };
                kernels::attend(isa, &kv, &queries, &params, scratch, target);
            }
        });
    }
}

/// The cache's address, for tasks on other threads.
struct Base(*const u8);

// SAFETY: the cache is only read while tasks hold this.
unsafe impl Sync for Base {}

impl Base {
    fn get(&self) -> *const u8 {
        self.0
    }
}

/// The tasks of one step's attention: sequence by sequence, in chunks of rows, for every key/value head.
struct Tasks<'a> {
    seqs: &'a [SeqSpan],
    kv_heads: usize,
    count: usize,
}

/// One task.
struct Share<'a> {
    seq: &'a SeqSpan,
    /// First row within the sequence's rows.
    first: usize,
    rows: usize,
    /// Key/value head.
    head: usize,
}

impl<'a> Tasks<'a> {
    fn new(seqs: &'a [SeqSpan], kv_heads: usize) -> Self {
        let chunks: usize = seqs.iter().map(|seq| seq.rows.div_ceil(ROWS)).sum();
        Self { seqs, kv_heads, count: chunks * kv_heads }
    }

    fn share(&self, task: usize) -> Share<'a> {
        let (mut chunk, head) = (task / self.kv_heads, task % self.kv_heads);
        for seq in self.seqs {
            let chunks = seq.rows.div_ceil(ROWS);
            if chunk < chunks {
                let first = chunk * ROWS;
                return Share { seq, first, rows: ROWS.min(seq.rows - first), head };
            }
            chunk -= chunks;
        }
        unreachable!("task {task} of {}", self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_and_head_is_in_one_task() {
        let span =
            |first_row, rows| SeqSpan { first_row, rows, start: 3, pages_at: 0, pages: 9, seen_from: 0, state: None };
        let seqs = [span(0, 1), span(1, 16), span(17, 33), span(50, 1)];
        let tasks = Tasks::new(&seqs, 3);
        let mut seen = vec![0; 51 * 3];
        for task in 0..tasks.count {
            let share = tasks.share(task);
            for row in 0..share.rows {
                seen[(share.seq.first_row + share.first + row) * 3 + share.head] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n == 1));
    }
}
