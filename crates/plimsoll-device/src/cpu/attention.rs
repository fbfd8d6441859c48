//! Attention on all cores. One task is a few rows for one key/value head and its query heads. The rows are of one sequence, or of
//! neighbours with a common prefix, so that the prefix is loaded once.
//!
//! A few long units would keep some threads busy while others wait. A task is then one *split* of such a unit.
//! Positions are cut at absolute places, the same ones for every number of threads. One task joins the partial results, always
//! in the same order. No bit of the result depends on the way that was taken.

use std::ops::Range;

use arrayvec::ArrayVec;
use plimsoll_kernels::{self as kernels, AttendOutput, AttendParams, Isa, KvLayout, KvPages, Queries, RopeStyle, Span};

use super::arena::Arena;
use super::cut::TASKS_PER_THREAD;
use super::{CpuDevice, CpuWeights, rope_style};
use crate::device::{Attention, Buf, Device, Rotary, SeqSpan, StepInput};
use crate::kv::{CachedLayer, KvGroup, PAGE_TOKENS};
use tasks::{ROWS_MAX, Share, Tasks, UNITS_PER_THREAD, task_rows};

mod tasks;

/// Below this number of rows, waking another thread costs more than it saves.
const FEW_ROWS: usize = 3;

/// The positions that each row of a task attends to.
type Spans = ArrayVec<Span, ROWS_MAX>;

/// Floats of scratch that one thread needs for heads of `layout` with `group` query heads each. `bf16`: some tasks compute in bfloat16.
pub(super) fn scratch_floats(layout: &KvLayout, group: usize, bf16: bool) -> usize {
    // A bf16 task has more rows, and needs more scratch for each. All other tasks fit there too.
    kernels::attend_scratch_len(layout, bf16, task_rows(bf16, group), group)
}

impl CpuDevice {
    /// Returns the place of one layer in the KV cache.
    pub(super) fn cached(&mut self, layer: usize) -> Place {
        let CachedLayer { group, offset, layout, .. } = self.memory.shape.layers()[layer];
        let bytes = self.memory.bytes_of(group);
        // In bounds: a layer is part of page 0, if there is a page at all.
        let base = self.memory.kv.as_mut_ptr().wrapping_add(bytes.start + offset);
        let (len, stride) = (bytes.len().saturating_sub(offset), self.memory.shape.page_bytes(group));
        Place { base, len, stride, layout, group, causal: true }
    }

    /// Returns the place of `pages` pages for heads of `layout`, at byte `offset` of the workspace.
    pub(super) fn in_workspace(&mut self, offset: usize, pages: usize, layout: KvLayout) -> Place {
        let stride = layout.bytes_per_page().next_multiple_of(64);
        let len = pages * stride;
        let workspace = &mut self.memory.workspace;
        assert!(offset + len <= workspace.len(), "pages inside the workspace");
        let base = workspace.as_mut_ptr().wrapping_add(offset);
        Place { base, len, stride, layout, group: KvGroup::Whole, causal: false }
    }

    /// Writes every row's key and value to its place. With `ready`, first normalises and rotates keys and queries. Tasks divide the pages
    /// by page number or, with few pages, the heads of each page. So no two tasks write one place, even if sequences share a page.
    pub(super) fn store_kv(
        &mut self,
        place: &Place,
        ready: Option<(&Rotary, Buf)>,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) {
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let heads = place.layout.kv_heads();
        let pages = step.seqs.iter().map(|seq| seq.rows.div_ceil(PAGE_TOKENS)).sum::<usize>();
        let (tasks, parts) = match k.rows {
            0..FEW_ROWS => (1, 1),
            _ if pages < threads * TASKS_PER_THREAD => (threads, heads),
            _ => (threads * TASKS_PER_THREAD, 1),
        };
        let layout = place.layout.heads(heads / parts);
        let ready = ready.map(|(rotary, q)| Ready::new(&self.weights, isa, rotary, [q, k], layout.width(), parts));
        let (k, v) = (k.reshape(k.cols / parts), v.reshape(v.cols / parts));
        let bytes = layout.bytes_per_page();
        self.pool.run(tasks, &|thread, task| {
            for seq in step.seqs {
                let pages = &step.pages_of(place.group)[seq.pages_at..][..seq.pages];
                let end = seq.start + seq.rows;
                let first = seq.start / PAGE_TOKENS;
                let pages = (first..end.div_ceil(PAGE_TOKENS)).zip(&pages[first..]);
                let all = pages.flat_map(|(page, id)| (0..parts).map(move |part| (page, *id as usize, part)));
                for (page, id, part) in all.filter(|(_, id, part)| (id * parts + part) % tasks == task) {
                    // SAFETY: this task's part of this page.
                    let bytes = unsafe { place.slice(id * place.stride + part * bytes, bytes) };
                    for position in seq.start.max(page * PAGE_TOKENS)..end.min((page + 1) * PAGE_TOKENS) {
                        let row = (seq.first_row + position - seq.start) * parts + part;
                        // SAFETY: rows are inside the workspace, and parts of them belong to one task each; scratch to one thread.
                        unsafe {
                            if let Some(ready) = &ready {
                                ready.make(&arena, arena.scratch(thread), row);
                            }
                            let slot = position % PAGE_TOKENS;
                            kernels::kv_store(isa, &layout, bytes, slot, arena.row(k, row), arena.row(v, row));
                        }
                    }
                }
            }
        });
    }

    /// Normalises and rotates queries, for a layer that reads the keys of another layer.
    pub(super) fn ready_queries(&mut self, rotary: &Rotary, q: Buf, head_dim: usize) {
        if let Some([norm, _]) = rotary.norms {
            let heads = q.reshape(head_dim);
            self.rms_norm(heads, heads, norm, rotary.eps);
        }
        self.rope(q, rotary.angles, head_dim, rotary.interleaved);
    }

    /// Attends over the stored keys and values.
    pub(super) fn attend(&mut self, place: &Place, spec: &Attention, out: Buf, q: Buf, step: &StepInput<'_>) {
        let Place { base, stride, layout, group, causal, .. } = *place;
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let sinks = spec.sinks.map(|sinks| self.weights.vector(sinks));
        let scratch = threads * self.memory.scratch;
        let bf16_from = if self.memory.bf16 { q.rows - step.bf16_rows } else { q.rows };
        let (pages, ends) = (step.pages_of(group), step.ends);
        let job = |tasks| Job { isa, arena, spec, sinks, pages, ends, q, out, layout, base, stride, causal, tasks };
        let mut all = Tasks::new(step, layout.kv_heads(), spec.heads, bf16_from, spec.window);
        let [mut long, mut short] = all.by_length(threads);
        let mut waves = Waves::new(&job(long), threads, scratch);
        if waves.is_none() && all.count < threads * UNITS_PER_THREAD {
            all = all.apart();
            [long, short] = all.by_length(threads);
            waves = Waves::new(&job(long), threads, scratch);
        }
        let job = match waves {
            Some(waves) => {
                waves.run(&job(long), &mut self.pool);
                job(short)
            }
            None => job(all),
        };
        // Heads of the same rows have neighbouring keys and values. With enough rows for all threads, one lookup serves all heads.
        let heads = layout.kv_heads();
        let heads = if job.tasks.count >= heads * threads * TASKS_PER_THREAD { heads } else { 1 };
        self.pool.run(job.tasks.count / heads, &|thread, task| job.whole(thread, task * heads, heads));
    }
}

/// The norms and the rotation of queries and keys.
struct Ready<'a> {
    isa: Isa,
    style: RopeStyle,
    /// Norm weights for a query head, and for a key head.
    norms: Option<[&'a [f32]; 2]>,
    eps: f32,
    angles: Buf,
    head_dim: usize,
    /// Parts of every row: some key heads, and their query heads.
    parts: usize,
    /// Queries and keys, a row for every part.
    heads: [Buf; 2],
}

impl<'a> Ready<'a> {
    fn new(weights: &'a CpuWeights, isa: Isa, rotary: &Rotary, heads: [Buf; 2], head_dim: usize, parts: usize) -> Self {
        let Rotary { norms, eps, angles, interleaved } = *rotary;
        let style = rope_style(interleaved);
        let norms = norms.map(|norms| norms.map(|norm| weights.vector(norm)));
        Self { isa, style, norms, eps, angles, head_dim, parts, heads: heads.map(|x| x.reshape(x.cols / parts)) }
    }

    /// One part of a row.
    ///
    /// # Safety
    /// The part and the angles are inside the workspace. Nothing else accesses the part, and nothing writes the angles.
    unsafe fn make(&self, arena: &Arena, scratch: &mut [f32], part: usize) {
        let (row, cols) = (part / self.parts, self.angles.cols);
        // SAFETY: this function's contract.
        let (cos, sin) = unsafe { arena.matrix(self.angles) }[row * cols..][..cols].split_at(cols / 2);
        for (i, heads) in self.heads.into_iter().enumerate() {
            // SAFETY: likewise.
            let heads = unsafe { arena.row(heads, part) };
            if let Some(norms) = self.norms {
                for head in heads.chunks_exact_mut(self.head_dim) {
                    let copy = &mut scratch[..head.len()];
                    copy.copy_from_slice(head);
                    kernels::rms_norm(self.isa, head, copy, norms[i], self.eps);
                }
            }
            kernels::rope(self.isa, self.style, heads, self.head_dim, cos, sin);
        }
    }
}

/// Memory of one layer's keys and values during an operation: in the KV cache or in the workspace.
pub(super) struct Place {
    /// The layer's part of page 0.
    pub(super) base: *mut u8,
    /// Bytes from `base` on.
    len: usize,
    /// Bytes from one page to the next.
    pub(super) stride: usize,
    pub(super) layout: KvLayout,
    /// The group of the layer, which selects the page table.
    pub(super) group: KvGroup,
    /// Whether a row attends to no later position; otherwise to all of its sequence.
    causal: bool,
}

// SAFETY: the pointer is used through `slice`; its callers promise disjoint use.
unsafe impl Sync for Place {}

impl Place {
    /// # Safety
    /// Nothing else accesses these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.len, "a page beyond the pool");
        // SAFETY: in bounds, and this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), len) }
    }

    /// Returns the same bytes as [`Self::slice`], to read them.
    ///
    /// # Safety
    /// Nothing writes these bytes while the slice lives.
    pub(super) unsafe fn shared(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= self.len, "a page beyond the pool");
        // SAFETY: in bounds, and this function's contract.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), len) }
    }
}

/// One step's attention, shared by all tasks.
struct Job<'a> {
    isa: Isa,
    arena: Arena,
    spec: &'a Attention,
    /// A logit for each query head.
    sinks: Option<&'a [f32]>,
    /// Page ids of all sequences.
    pages: &'a [u32],
    /// [`StepInput::ends`].
    ends: &'a [u32],
    q: Buf,
    out: Buf,
    layout: KvLayout,
    /// The layer's part of page 0.
    base: *const u8,
    stride: usize,
    causal: bool,
    tasks: Tasks<'a>,
}

// SAFETY: keys and values are only read while tasks hold this; the arena is shared as its own contract says.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    fn group(&self) -> usize {
        self.tasks.group
    }

    /// The sinks of a share's heads.
    fn sinks(&self, share: &Share<'_>) -> Option<&[f32]> {
        self.sinks.map(|sinks| &sinks[share.head * self.group()..][..self.group()])
    }

    fn params(&self, share: &Share<'_>) -> AttendParams<'_> {
        let bf16 = self.tasks.bf16(&share.seqs[0]);
        AttendParams { scale: self.spec.scale, softcap: self.spec.softcap, bf16, sinks: self.sinks(share) }
    }

    /// Fills `spans` with the positions that each row of a share attends to. `spans` is too large to be returned.
    fn fill(&self, spans: &mut Spans, share: &Share<'_>) {
        spans.clear();
        // Several sequences form one unit from their first rows on.
        let rows = share.seqs.iter().flat_map(|seq| (share.first..seq.rows).map(move |row| (seq, row)));
        for (seq, row) in rows.take(share.rows) {
            let Range { start: first, end } =
                if self.causal { self.seen(seq, row) } else { self.spec.seen_within(row, seq.rows) };
            assert!(end <= seq.pages * PAGE_TOKENS, "{end} positions in {} pages", seq.pages);
            spans.push(Span { pages_at: seq.pages_at as u32, first: first as u32, end: end as u32 });
        }
    }

    /// Returns the positions that a row of a decoder attends to.
    fn seen(&self, seq: &SeqSpan, row: usize) -> Range<usize> {
        // A window limits earlier positions only.
        let Range { start, end } = self.spec.seen(seq.start + row, seq.seen_from);
        start..self.ends.get(seq.first_row + row).map_or(end, |later| (*later as usize).max(end))
    }

    /// A share's rows and its cache.
    fn inputs<'s>(&'s self, share: &Share<'_>, spans: &'s [Span]) -> (KvPages<'s>, Queries<'s>) {
        // SAFETY: `q` is only read during this operation.
        let q = unsafe { &self.arena.matrix(self.q)[self.place(share, self.q)..] };
        let Self { layout, base, stride, .. } = *self;
        let kv = KvPages { layout, base, stride, pages: self.pages, kv_head: share.head };
        (kv, Queries { data: q, ld: self.q.cols, heads: self.group(), spans })
    }

    /// Returns the index of a share's first element in a matrix of rows of all query heads.
    fn place(&self, share: &Share<'_>, x: Buf) -> usize {
        (share.seqs[0].first_row + share.first) * x.cols + share.head * self.group() * self.layout.width()
    }

    /// Returns the place of a share's results.
    fn target(&self, share: &Share<'_>) -> AttendOutput {
        // In bounds of `out`: it has all rows and heads.
        AttendOutput { ptr: self.arena.pointer(self.out).wrapping_add(self.place(share, self.out)), ld: self.out.cols }
    }

    /// Computes a whole unit on one thread; with several `heads`, also the units of the same rows for the next heads.
    fn whole(&self, thread: usize, unit: usize, heads: usize) {
        let first = self.tasks.share(unit);
        let mut spans = Spans::new();
        self.fill(&mut spans, &first);
        for head in first.head..first.head + heads {
            let share = Share { head, ..first };
            let (kv, queries) = self.inputs(&share, &spans);
            // SAFETY: scratch belongs to this thread. In bounds of `out`; each task writes its own rows and heads. Page
            // ids are within the pool (the engine takes them from it), and nothing writes the cache during this
            // operation.
            unsafe {
                let scratch = self.arena.scratch(thread);
                kernels::attend(self.isa, &kv, &queries, &self.params(&share), scratch, self.target(&share));
            }
        }
    }
}

/// The cut of a few units over long contexts into waves of splits. The partial results of a wave fit into the scratch
/// of all threads together.
///
/// The scratch of all threads is one piece. First comes each thread's own part, then for every unit its joined state and the partial
/// results of one wave.
struct Waves {
    /// Splits of a unit in a wave.
    splits: usize,
    waves: usize,
    /// Floats of one thread's own part.
    own: usize,
    /// Offset of the units' parts, in floats.
    units_at: usize,
    /// Floats of one unit's state and partial results.
    unit: usize,
}

impl Waves {
    /// Returns none if there is nothing to cut, or if the scratch holds too few partial results.
    fn new(job: &Job<'_>, threads: usize, scratch: usize) -> Option<Self> {
        let units = job.tasks.count;
        if threads == 1 || units == 0 {
            return None;
        }
        let (mut longest, mut tallest, mut spans) = (0, 0, Spans::new());
        for unit in 0..units {
            let share = job.tasks.share(unit);
            job.fill(&mut spans, &share);
            longest = longest.max(kernels::attend_splits(&spans).len());
            tallest = tallest.max(share.rows);
        }
        // Scratch for a bf16 unit is large enough for any other unit.
        let own = kernels::attend_split_scratch_len(&job.layout, job.tasks.any_bf16()).next_multiple_of(16);
        let result = tallest * job.group() * kernels::attend_partial_len(&job.layout);
        let results = scratch.checked_sub(threads * own)? / (units * result);
        let splits = results.saturating_sub(1).min(longest);
        let waves = longest.div_ceil(splits.max(1));
        (splits > 1).then_some(Self { splits, waves, own, units_at: threads * own, unit: (splits + 1) * result })
    }

    fn run(&self, job: &Job<'_>, pool: &mut crate::pool::ThreadPool) {
        let units = job.tasks.count;
        for wave in 0..self.waves {
            pool.run(units * self.splits, &|thread, task| {
                let (unit, index) = (task / self.splits, task % self.splits);
                let share = job.tasks.share(unit);
                let mut spans = Spans::new();
                job.fill(&mut spans, &share);
                let Some(split) = kernels::attend_splits(&spans).nth(wave * self.splits + index) else {
                    return;
                };
                let (kv, queries) = job.inputs(&share, &spans);
                let len = share.rows * job.group() * kernels::attend_partial_len(&job.layout);
                let at = self.units_at + unit * self.unit + (index + 1) * len;
                // SAFETY: this thread's own part, and a result that is this task's alone; pages as in `whole`.
                unsafe {
                    let own = job.arena.all_scratch(thread * self.own, self.own);
                    let partials = job.arena.all_scratch(at, len);
                    kernels::attend_split(job.isa, &kv, &queries, &job.params(&share), split, own, partials);
                }
            });
            pool.run(units, &|_, unit| self.join(job, wave, unit));
        }
    }

    /// Adds a wave's results to a unit's state. After the last wave it writes the unit's output.
    fn join(&self, job: &Job<'_>, wave: usize, unit: usize) {
        let share = job.tasks.share(unit);
        let mut spans = Spans::new();
        job.fill(&mut spans, &share);
        let (all, done) = (kernels::attend_splits(&spans).len(), wave * self.splits);
        if wave > 0 && done >= all {
            return;
        }
        let count = self.splits.min(all - done);
        let len = share.rows * job.group() * kernels::attend_partial_len(&job.layout);
        // SAFETY: no split is being computed, and the unit belongs to this task.
        let partials = unsafe { job.arena.all_scratch(self.units_at + unit * self.unit, (count + 1) * len) };
        if wave == 0 {
            // The state of a row that has attended to nothing: the first result replaces it.
            partials[..len].fill(0.0);
        }
        if done + count == all {
            // SAFETY: in bounds of `out`; each unit writes its own rows and heads.
            unsafe {
                let sinks = job.sinks(&share);
                kernels::attend_combine(
                    job.isa,
                    &job.layout,
                    share.rows,
                    job.group(),
                    partials,
                    sinks,
                    job.target(&share),
                );
            }
        } else {
            let (state, results) = partials.split_at_mut(len);
            kernels::attend_merge(job.isa, &job.layout, state, results);
        }
    }
}
