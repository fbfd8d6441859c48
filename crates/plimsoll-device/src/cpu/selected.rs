//! Sparse attention over selected blocks. It stores index keys in the cache, computes the keys of complete blocks, chooses blocks for
//! each row, and attends over them.
//!
//! A block's key takes the place of its last position's index key. A sequence that is cut within a block writes that position again, so
//! the index keys that make up a block's key are always there. A row's result depends on its own position and the cache alone.

use std::ops::Range;

use plimsoll_kernels::{self as kernels, AttendOutput, AttendParams, Best, KvPages, Queries, RopeStyle, SPLIT, Span};

use super::CpuDevice;
use super::attention::Place;
use super::cut::TASKS_PER_THREAD;
use super::rows::cos_sin;
use crate::device::{Attention, Buf, Selection, SeqSpan, StepInput};
use crate::kv::{IndexLayout, PAGE_TOKENS};

/// Below this number of rows, waking another thread costs more than it saves.
const FEW_ROWS: usize = 16;

/// The index keys of one layer.
struct Keys<'a> {
    place: &'a Place,
    layout: IndexLayout,
    /// Bytes of the layer's part of a page before the index keys.
    before: usize,
    pages: &'a [u32],
}

impl Keys<'_> {
    /// A position's slot, to be written.
    ///
    /// # Safety
    /// Nothing else accesses the slot while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slot_mut(&self, seq: &SeqSpan, position: usize) -> &mut [u8] {
        // SAFETY: this function's contract.
        unsafe { self.place.slice(self.at(seq, position), self.layout.slot_bytes()) }
    }

    /// A position's slot.
    ///
    /// # Safety
    /// Nothing writes the slot while the slice lives.
    unsafe fn slot(&self, seq: &SeqSpan, position: usize) -> &[u8] {
        // SAFETY: this function's contract.
        unsafe { self.place.shared(self.at(seq, position), self.layout.slot_bytes()) }
    }

    /// Returns the offset of a position's slot, in bytes from the layer's part of page 0.
    fn at(&self, seq: &SeqSpan, position: usize) -> usize {
        let page = self.pages[seq.pages_at..][..seq.pages][position / PAGE_TOKENS] as usize;
        page * self.place.stride + self.before + position % PAGE_TOKENS * self.layout.slot_bytes()
    }

    fn write(&self, slot: &mut [u8], key: &[f32]) {
        let bytes = &mut slot[IndexLayout::KEY_AT..];
        match self.layout.wide {
            true => bytes.as_chunks_mut::<4>().0.iter_mut().zip(key).for_each(|(to, x)| *to = x.to_ne_bytes()),
            false => {
                let halves = bytes.as_chunks_mut::<2>().0.iter_mut().zip(key);
                halves.for_each(|(to, x)| *to = kernels::f32_to_bf16(*x).to_ne_bytes());
            }
        }
    }

    fn read(&self, slot: &[u8], key: &mut [f32]) {
        let bytes = &slot[IndexLayout::KEY_AT..];
        match self.layout.wide {
            true => key.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, from)| *x = f32::from_ne_bytes(*from)),
            false => {
                let halves = key.iter_mut().zip(bytes.as_chunks::<2>().0);
                halves.for_each(|(x, from)| *x = kernels::bf16_to_f32(u16::from_ne_bytes(*from)));
            }
        }
    }
}

impl CpuDevice {
    /// [`crate::Device::attend_selected`].
    pub(super) fn run_selected(
        &mut self,
        spec: &Selection,
        out: Buf,
        q: Buf,
        [queries, keys, chosen]: [Buf; 3],
        step: &StepInput<'_>,
    ) {
        let place = self.cached(spec.attention.layer);
        let layer = self.memory.shape.layers()[spec.attention.layer];
        let layout = layer.index.expect("a layer that selects keeps index keys");
        assert_eq!((keys.cols, queries.cols), (layout.width, spec.heads * layout.width), "widths of the index");
        assert_eq!((chosen.rows, chosen.cols), (q.rows, 2 * spec.blocks), "room for the choice");
        let pages = step.pages_of(place.group);
        let cached = Keys { place: &place, layout, before: layer.kv_bytes(), pages };
        self.store_index(spec, &cached, keys, step);
        let from = spec.attention.selects_from.expect("selects_from is set where layers select");
        let selects = |seq: &&SeqSpan| seq.start + seq.rows > from;
        if step.seqs.iter().any(|seq| selects(&seq)) {
            self.select(spec, &cached, [queries, chosen], step);
            self.attend_blocks(spec, &place, [out, q, chosen], step);
        }
    }

    /// Stores every row's index key, and the keys of the blocks that this completes. Tasks divide blocks among themselves.
    fn store_index(&mut self, spec: &Selection, cached: &Keys<'_>, keys: Buf, step: &StepInput<'_>) {
        let (isa, arena, width) = (self.isa, self.arena(), keys.cols);
        let [norm, frequencies] = [spec.norm, spec.frequencies].map(|id| self.weights.vector(id));
        // Only the self-test at startup has sequences that write the same pages.
        let few = keys.rows < FEW_ROWS || write_same_pages(step, cached.pages);
        let tasks = if few { 1 } else { self.pool.threads() * TASKS_PER_THREAD };
        self.pool.run(tasks, &|thread, task| {
            // SAFETY: scratch belongs to this thread.
            let scratch = unsafe { &mut arena.scratch(thread)[..2 * width + 2 * frequencies.len()] };
            for seq in step.seqs {
                let end = seq.start + seq.rows;
                let blocks = seq.start / spec.block..end.div_ceil(spec.block);
                for block in blocks.filter(|block| block % tasks == task) {
                    let all = block * spec.block..(block + 1) * spec.block;
                    for position in all.start.max(seq.start)..all.end.min(end) {
                        let row = seq.first_row + position - seq.start;
                        let place = step.places.get(row).copied().unwrap_or([position as f32; 3]);
                        // SAFETY: nothing writes the keys; the block's slots are this task's.
                        unsafe {
                            let slot = cached.slot_mut(seq, position);
                            let places = slot.as_chunks_mut::<4>().0.iter_mut().zip(place);
                            places.for_each(|(to, axis)| *to = axis.to_ne_bytes());
                            cached.write(slot, &arena.matrix(keys)[row * width..][..width]);
                        }
                    }
                    if all.end <= end {
                        // SAFETY: the block's slots are this task's.
                        unsafe { spec.complete_block(isa, cached, seq, all, [norm, frequencies], scratch) };
                    }
                }
            }
        });
    }

    /// Chooses the blocks of every row that selects. The numbers are ascending, as the bits of floats. Behind them is room for the scores.
    fn select(&mut self, spec: &Selection, cached: &Keys<'_>, [queries, chosen]: [Buf; 2], step: &StepInput<'_>) {
        let (isa, width) = (self.isa, cached.layout.width);
        let from = spec.attention.selects_from.unwrap_or(usize::MAX);
        self.rows(chosen, |arena, thread, row| {
            let Some((seq, position)) = place_of(step, row).filter(|(_, position)| *position >= from) else { return };
            // SAFETY: rows are inside the workspace, each belongs to one task, nothing writes queries; scratch belongs to this thread.
            let (query, chosen, key) =
                unsafe { (arena.row(queries, row), arena.row(chosen, row), &mut arena.scratch(thread)[..width]) };
            let (ids, scores) = chosen.split_at_mut(spec.blocks);
            let mut best = Best::new(scores, words(ids));
            for block in 0..spec.complete(position) {
                // SAFETY: nothing writes index keys now.
                cached.read(unsafe { cached.slot(seq, (block + 1) * spec.block - 1) }, key);
                best.offer(block as u32, kernels::index_score(isa, query, key));
            }
            best.into_ids();
        });
    }

    /// Attends over the chosen blocks of the rows that select. A task is one row and one key/value head.
    fn attend_blocks(&mut self, spec: &Selection, place: &Place, [out, q, chosen]: [Buf; 3], step: &StepInput<'_>) {
        let (isa, arena) = (self.isa, self.arena());
        let Place { base, stride, layout, group, .. } = *place;
        let (heads, pages) = (layout.kv_heads(), step.pages_of(group));
        let Attention { scale, selects_from, softcap, .. } = spec.attention;
        let queries = spec.attention.heads / heads;
        let params = AttendParams { scale, softcap, bf16: false, sinks: None };
        let base = base as usize;
        self.pool.run(q.rows * heads, &|thread, task| {
            let (row, head) = (task / heads, task % heads);
            let selects = |(_, position): &(&SeqSpan, usize)| selects_from.is_some_and(|from| *position >= from);
            let Some((seq, position)) = place_of(step, row).filter(selects) else { return };
            let kv = KvPages { layout, base: base as *const u8, stride, pages, kv_head: head };
            let column = head * queries * layout.width();
            let partial = queries * kernels::attend_partial_len(&layout);
            // SAFETY: nothing writes queries or choices; scratch belongs to this thread.
            let (data, blocks, scratch) = unsafe {
                let chosen = &arena.matrix(chosen)[row * chosen.cols..][..spec.blocks];
                (&arena.matrix(q)[row * q.cols + column..], chosen, arena.scratch(thread))
            };
            let (own, rest) = scratch.split_at_mut(kernels::attend_split_scratch_len(&layout, false));
            let (state, one) = rest[..2 * partial].split_at_mut(partial);
            state.fill(0.0);
            each_run(spec, blocks, position, |split, seen| {
                let (first, end) = (seen.start as u32, seen.end as u32);
                let spans = [Span { pages_at: seq.pages_at as u32, first, end }];
                let queries = Queries { data, ld: q.cols, heads: queries, spans: &spans };
                // SAFETY: page ids are within the pool, and nothing writes the cache during this operation.
                unsafe { kernels::attend_split(isa, &kv, &queries, &params, split, own, one) };
                kernels::attend_merge(isa, &layout, state, one);
            });
            // SAFETY: in bounds of `out`; each task writes its own row and heads.
            unsafe {
                let target = AttendOutput { ptr: arena.pointer(out).add(row * out.cols + column), ld: out.cols };
                kernels::attend_combine(isa, &layout, 1, queries, state, None, target);
            }
        });
    }
}

impl Selection {
    /// Writes the key of a complete block in place of the index key of its last position.
    ///
    /// # Safety
    /// Nothing else accesses the block's slots.
    unsafe fn complete_block(
        &self,
        isa: kernels::Isa,
        cached: &Keys<'_>,
        seq: &SeqSpan,
        block: Range<usize>,
        [norm, frequencies]: [&[f32]; 2],
        scratch: &mut [f32],
    ) {
        let (sum, rest) = scratch.split_at_mut(cached.layout.width);
        let (one, angles) = rest.split_at_mut(cached.layout.width);
        let (cos, sin) = angles.split_at_mut(frequencies.len());
        sum.fill(0.0);
        for position in block.clone() {
            // SAFETY: this function's contract.
            cached.read(unsafe { cached.slot(seq, position) }, one);
            kernels::add(isa, sum, one);
        }
        sum.iter_mut().for_each(|x| *x /= self.block as f32);
        kernels::rms_norm(isa, one, sum, norm, self.eps);
        // SAFETY: this function's contract.
        let first = unsafe { cached.slot(seq, block.start) }.as_chunks::<4>().0;
        for (i, frequency) in frequencies.iter().enumerate() {
            let axis = self.axes.as_ref().map_or(0, |axes| usize::from(axes[i]));
            [cos[i], sin[i]] = cos_sin(f32::from_ne_bytes(first[axis]), *frequency, self.rope_scale);
        }
        kernels::rope(isa, RopeStyle::Halves, one, cached.layout.width, cos, sin);
        // SAFETY: this function's contract.
        cached.write(unsafe { cached.slot_mut(seq, block.end - 1) }, one);
    }
}

/// Returns a row's sequence, and its position there.
fn place_of<'a>(step: &StepInput<'a>, row: usize) -> Option<(&'a SeqSpan, usize)> {
    let seq = step.seqs.iter().find(|seq| (seq.first_row..seq.first_row + seq.rows).contains(&row))?;
    Some((seq, seq.start + row - seq.first_row))
}

/// Whether two sequences write the same page in this step.
fn write_same_pages(step: &StepInput<'_>, pages: &[u32]) -> bool {
    let written = |seq: &SeqSpan| {
        let last = (seq.start + seq.rows).div_ceil(PAGE_TOKENS);
        &pages[seq.pages_at..][seq.start / PAGE_TOKENS..last]
    };
    let same = |a: &[u32], b: &[u32]| a.iter().any(|page| b.contains(page));
    let pairs = step.seqs.iter().enumerate().flat_map(|(i, a)| step.seqs[i + 1..].iter().map(move |b| (a, b)));
    pairs.into_iter().any(|(a, b)| same(written(a), written(b)))
}

/// Returns floats as words: a row of the workspace holds either.
fn words(row: &mut [f32]) -> &mut [u32] {
    // SAFETY: both have four bytes, and every bit pattern is both.
    unsafe { std::slice::from_raw_parts_mut(row.as_mut_ptr().cast(), row.len()) }
}

/// Calls `each` for the positions that a row at `position` attends to: runs in ascending order, cut at the splits of attention.
fn each_run(spec: &Selection, blocks: &[f32], position: usize, mut each: impl FnMut(usize, Range<usize>)) {
    let tail = spec.complete(position) * spec.block..position + 1;
    let block = |id: &f32| id.to_bits() as usize * spec.block..(id.to_bits() as usize + 1) * spec.block;
    let mut runs = blocks.iter().map(block).chain(std::iter::once(tail)).peekable();
    while let Some(mut run) = runs.next() {
        while let Some(next) = runs.next_if(|next| next.start == run.end) {
            run.end = next.end;
        }
        while !run.is_empty() {
            let split = run.start / SPLIT;
            let end = run.end.min((split + 1) * SPLIT);
            each(split, run.start..end);
            run.start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::VectorId;

    #[test]
    fn neighbouring_blocks_are_one_run_and_splits_cut_it() {
        let spec = Selection {
            attention: Attention::WHOLE,
            heads: 1,
            block: 4,
            blocks: 4,
            norm: VectorId(0),
            eps: 0.0,
            frequencies: VectorId(0),
            axes: None,
            rope_scale: 1.0,
        };
        let runs = |blocks: [u32; 4], position| {
            let mut runs = Vec::new();
            each_run(&spec, &blocks.map(f32::from_bits), position, |split, run| runs.push((split, run)));
            runs
        };
        assert_eq!(runs([0, 2, 3, 6], 29), [(0, 0..4), (0, 8..16), (0, 24..30)]);
        assert_eq!(runs([0, 2, 3, 6], 39), [(0, 0..4), (0, 8..16), (0, 24..28)], "no tail behind a complete block");
        assert_eq!(runs([1, 126, 127, 128], 600), [(0, 4..8), (0, 504..512), (1, 512..516), (1, 600..601)]);
    }
}
