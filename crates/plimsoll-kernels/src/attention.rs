//! Attention of a few query rows over paged keys and values, for one key/value head and its group of query heads: entry points,
//! checks, and how partial results combine. A split is computed in `attention/split.rs`.
//!
//! Positions are cut into *splits* of [`SPLIT`] at absolute positions. A split computes its scores (lane = position, one chain over
//! head_dim), their maximum, exponentials, their sum, and Σ p · V (lane = dimension, one chain over positions, ascending). Splits
//! combine in ascending order. This order is the same in prefill and decode, on one thread or many. Attention in bfloat16 has other
//! chains (`attention/bf16.rs`), and they too are always the same. A query's result therefore does not depend on the rows beside it,
//! nor on the thread that computed a split.
//!
//! Neighbouring rows that share all pages of a split form a *run*. They belong to one sequence, or to several with the same beginning.
//! The keys and values of a run are loaded once for all its rows.

#[cfg(target_arch = "x86_64")]
mod bf16;
mod combine;
mod split;
mod tile;

use crate::isa::Isa;
use crate::kv::{KvLayout, PAGE};
use crate::simd::LANES;
use combine::{Merge, clear, finish};
use split::Split;

/// Positions in a split.
pub const SPLIT: usize = 512;
/// Pages in a split.
pub const SPLIT_PAGES: usize = SPLIT / PAGE;
/// Queries (row, head) computed together.
const TILE: usize = 8;
/// Queries computed together in bfloat16: four tiles of the matrix unit.
const BF16_TILE: usize = 64;
/// Floats before the accumulator of a partial result: maximum, sum, padding.
const HEADER: usize = LANES;

/// The positions a query row sees: `first..end` of its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Index of the sequence's first page in [`KvPages::pages`].
    pub pages_at: u32,
    /// First visible position.
    pub first: u32,
    /// One past the last visible position; the row's own position + 1 for causal attention.
    pub end: u32,
}

/// The KV cache, seen by one key/value head of one layer.
#[derive(Clone, Copy)]
pub struct KvPages<'a> {
    /// The layer's shape.
    pub layout: KvLayout,
    /// The layer's part of page 0.
    pub base: *const u8,
    /// Distance of two pages, in bytes.
    pub stride: usize,
    /// Page ids of all sequences. For a sequence that begins at `at`, positions `16 i .. 16 i + 16` are in page `pages[at + i]`, which is
    /// at `base + pages[at + i] · stride`.
    pub pages: &'a [u32],
    /// The key/value head.
    pub kv_head: usize,
}

/// The query rows: row r, head h of the group at `r · ld + h · width`.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// The rows, from the group's first head.
    pub data: &'a [f32],
    /// Distance of two rows, in floats.
    pub ld: usize,
    /// Query heads that share the key/value head.
    pub heads: usize,
    /// The visible positions of each row; one span per row.
    pub spans: &'a [Span],
}

/// The parameters of the scores and the softmax.
#[derive(Clone, Copy, Debug)]
pub struct AttendParams<'a> {
    /// Factor on the queries.
    pub scale: f32,
    /// If set, score = cap · tanh(score / cap).
    pub softcap: Option<f32>,
    /// Queries, keys, probabilities and values are rounded to bfloat16: at least twice as fast, if [`Isa::rounds_attention`].
    pub bf16: bool,
    /// One extra logit per head of the group: it takes part in the softmax and has no value.
    pub sinks: Option<&'a [f32]>,
}

/// The output: row r, head h at `ptr + r · ld + h · width`.
#[derive(Clone, Copy)]
pub struct AttendOutput {
    /// Row 0, the group's first head.
    pub ptr: *mut f32,
    /// Distance of two rows, in floats.
    pub ld: usize,
}

/// Returns the floats of the partial result of one query (row, head) over one split.
pub fn attend_partial_len(layout: &KvLayout) -> usize {
    HEADER + layout.head_dim()
}

/// Returns the floats of scratch that [`attend`] needs for `rows` rows of `heads` heads.
pub fn attend_scratch_len(layout: &KvLayout, bf16: bool, rows: usize, heads: usize) -> usize {
    attend_split_scratch_len(layout, bf16) + (rows * heads + tile(bf16)) * attend_partial_len(layout)
}

/// Returns the floats of scratch that [`attend_split`] needs: a tile's scaled queries and scores; in bfloat16 the split's keys and
/// values too.
pub fn attend_split_scratch_len(layout: &KvLayout, bf16: bool) -> usize {
    #[cfg(target_arch = "x86_64")]
    if bf16 {
        return bf16::scratch_len(layout);
    }
    tile(bf16) * (layout.head_dim() + SPLIT)
}

/// Returns the number of queries computed together.
fn tile(bf16: bool) -> usize {
    if bf16 { BF16_TILE } else { TILE }
}

impl<'a> KvPages<'a> {
    /// The pages of the sequence that begins at `at`.
    fn of(&self, at: u32) -> KvPages<'a> {
        KvPages { pages: &self.pages[at as usize..], ..*self }
    }

    /// The ids of a split's pages; none past the end of the list. If the sequence ends before the split does, the next sequence's ids are
    /// among them. This does no harm: equal ids are equal pages.
    fn of_split(&self, at: u32, split: usize) -> Option<&'a [u32]> {
        self.pages.get(at as usize + split * SPLIT_PAGES..)?.get(..SPLIT_PAGES)
    }

    /// Returns K of this head in the page of position `16 · page` of the first sequence; V follows at `layout.half_bytes()`.
    ///
    /// # Safety
    /// The page is within the sequence.
    #[inline(always)]
    unsafe fn page(&self, page: usize) -> *const u8 {
        // SAFETY: page ids are within the cache by the contract of `attend`.
        unsafe {
            let id = *self.pages.get_unchecked(page) as usize;
            self.base.add(id * self.stride + self.kv_head * self.layout.head_bytes())
        }
    }
}

impl<'a> Queries<'a> {
    /// Returns `count` rows from `first` on.
    pub fn rows(&self, first: usize, count: usize) -> Queries<'a> {
        Queries { data: &self.data[first * self.ld..], spans: &self.spans[first..][..count], ..*self }
    }

    fn count(&self) -> usize {
        self.spans.len() * self.heads
    }

    /// Returns the query with flat index `query` = row · heads + head.
    fn get(&self, query: usize, width: usize) -> &[f32] {
        let (row, head) = (query / self.heads, query % self.heads);
        &self.data[row * self.ld + head * width..][..width]
    }

    /// Returns the first visible position of a query and one past the last.
    fn span(&self, query: usize) -> (usize, usize) {
        let span = self.spans[query / self.heads];
        (span.first as usize, span.end as usize)
    }
}

fn check(isa: Isa, kv: &KvPages<'_>, queries: &Queries<'_>, params: &AttendParams<'_>) {
    assert!(params.sinks.is_none_or(|sinks| sinks.len() == queries.heads), "a sink a head");
    assert!(kv.kv_head < kv.layout.kv_heads(), "kv head {} of {}", kv.kv_head, kv.layout.kv_heads());
    for span in queries.spans {
        let end = span.pages_at as usize + (span.end as usize).div_ceil(PAGE);
        assert!(end <= kv.pages.len(), "{span:?} beyond the {} pages", kv.pages.len());
    }
    assert!(!params.bf16 || isa.rounds_attention() && isa.available(), "{isa} does not multiply what is rounded");
}

/// Computes attention of all rows of `queries` over their visible positions. A row that sees nothing becomes zeros.
///
/// `scratch` holds at least [`attend_scratch_len`] floats. Panics if it does not, or if spans exceed the pages.
///
/// # Safety
/// Every page of a sequence, from the first to the last in which any row of the call sees something, lies at
/// `kv.base + id · kv.stride`, is readable for `bytes_per_page`, and is not written during the call. The output of
/// every row and head is valid for writing, and nothing else accesses it during the call.
pub unsafe fn attend(
    isa: Isa,
    kv: &KvPages<'_>,
    queries: &Queries<'_>,
    params: &AttendParams<'_>,
    scratch: &mut [f32],
    out: AttendOutput,
) {
    check(isa, kv, queries, params);
    let (len, tile) = (attend_partial_len(&kv.layout), tile(params.bf16));
    let needed = attend_scratch_len(&kv.layout, params.bf16, queries.spans.len(), queries.heads);
    assert!(scratch.len() >= needed, "{} floats of scratch, {needed} needed", scratch.len());
    let (own, rest) = scratch.split_at_mut(attend_split_scratch_len(&kv.layout, params.bf16));
    let (partials, states) = rest[..(queries.count() + tile) * len].split_at_mut(tile * len);
    states.chunks_exact_mut(len).for_each(clear);
    for split in attend_splits(queries.spans) {
        let add = |first: usize, count: usize, compute: &mut dyn FnMut(&mut [f32])| {
            let partials = &mut partials[..count * len];
            partials.chunks_exact_mut(len).for_each(clear);
            compute(partials);
            isa.run(Merge { len, states: &mut states[first * len..][..count * len], partials });
        };
        // SAFETY: the caller's word on pages; spans were checked.
        unsafe { tiles(isa, kv, queries, params, split, own, add) };
    }
    for (query, state) in states.chunks_exact_mut(len).enumerate() {
        // SAFETY: the caller's word on the output.
        unsafe { finish(isa, (queries.heads, kv.layout.width()), query, (state, params.sinks), out) };
    }
}

/// Computes [`attend`] for positions `split · SPLIT .. (split + 1) · SPLIT`: one partial result of [`attend_partial_len`] floats per
/// query, row after row. [`attend_combine`] combines them.
///
/// # Safety
/// As for [`attend`], without its output.
pub unsafe fn attend_split(
    isa: Isa,
    kv: &KvPages<'_>,
    queries: &Queries<'_>,
    params: &AttendParams<'_>,
    split: usize,
    scratch: &mut [f32],
    partials: &mut [f32],
) {
    check(isa, kv, queries, params);
    let len = attend_partial_len(&kv.layout);
    assert_eq!(partials.len(), queries.count() * len, "floats of partial results");
    let scratch = &mut scratch[..attend_split_scratch_len(&kv.layout, params.bf16)];
    partials.chunks_exact_mut(len).for_each(clear);
    let write = |first: usize, count: usize, compute: &mut dyn FnMut(&mut [f32])| {
        compute(&mut partials[first * len..][..count * len]);
    };
    // SAFETY: the caller's word on pages; spans were checked.
    unsafe { tiles(isa, kv, queries, params, split, scratch, write) };
}

/// Calls `each` for every tile of every run of a split, with its first query, the number of queries, and a function that computes their
/// partial results into cleared memory.
///
/// # Safety
/// As for [`attend_split`] after its checks, with as much scratch.
unsafe fn tiles(
    isa: Isa,
    kv: &KvPages<'_>,
    queries: &Queries<'_>,
    params: &AttendParams<'_>,
    split: usize,
    scratch: &mut [f32],
    mut each: impl FnMut(usize, usize, &mut dyn FnMut(&mut [f32])),
) {
    let tile = tile(params.bf16);
    for (row, rows) in attend_runs(kv, queries.spans, split) {
        let (kv, queries) = (kv.of(queries.spans[row].pages_at), queries.rows(row, rows));
        // SAFETY: the caller's word.
        let running = unsafe { Running::new(isa, &kv, &queries, params, split, scratch) };
        for from in (0..queries.count()).step_by(tile) {
            let (first, count) = (row * queries.heads + from, tile.min(queries.count() - from));
            // SAFETY: likewise.
            each(first, count, &mut |partials| unsafe { running.run(from, scratch, partials) });
        }
        running.done();
    }
}

/// Returns the rows that see a part of a split, as runs of neighbours that share its pages: first row and number of rows.
pub fn attend_runs<'a>(kv: &KvPages<'a>, spans: &'a [Span], split: usize) -> impl Iterator<Item = (usize, usize)> {
    let sees = move |span: &Span| attend_splits(std::slice::from_ref(span)).contains(&split);
    let alike = move |a: &Span, b: &Span| {
        a.pages_at == b.pages_at
            || kv.of_split(a.pages_at, split).is_some_and(|ids| kv.of_split(b.pages_at, split) == Some(ids))
    };
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next + spans[next..].iter().position(sees)?;
        let count = spans[first..].iter().take_while(|span| sees(span) && alike(&spans[first], span)).count();
        next = first + count;
        Some((first, count))
    })
}

/// A split, computed tile by tile in single precision or bfloat16.
enum Running<'a> {
    Full(Split<'a>),
    #[cfg(target_arch = "x86_64")]
    Bf16(bf16::Bf16Split<'a>),
}

impl<'a> Running<'a> {
    /// # Safety
    /// As for [`attend_split`] after its checks.
    unsafe fn new(
        isa: Isa,
        kv: &'a KvPages<'a>,
        queries: &'a Queries<'a>,
        params: &'a AttendParams<'a>,
        split: usize,
        scratch: &mut [f32],
    ) -> Self {
        #[cfg(target_arch = "x86_64")]
        if params.bf16 {
            // SAFETY: the caller's word; `check` has asked for the unit or the vectors.
            return Running::Bf16(unsafe { bf16::Bf16Split::new(isa, kv, queries, params, split, scratch) });
        }
        let _ = scratch;
        Running::Full(Split { isa, kv, queries, params, split })
    }

    /// # Safety
    /// As for [`Self::new`], with the same scratch.
    unsafe fn run(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        // SAFETY: the caller's word.
        unsafe {
            match self {
                Running::Full(split) => split.run(first, scratch, partials),
                #[cfg(target_arch = "x86_64")]
                Running::Bf16(split) => split.run(first, scratch, partials),
            }
        }
    }

    fn done(self) {
        #[cfg(target_arch = "x86_64")]
        if let Running::Bf16(split) = self {
            split.done();
        }
    }
}

/// Returns the range of splits that any of these rows sees.
pub fn attend_splits(spans: &[Span]) -> std::ops::Range<usize> {
    let seen = spans.iter().filter(|span| span.first < span.end);
    let first = seen.clone().map(|span| span.first as usize / SPLIT).min();
    let end = seen.map(|span| (span.end as usize).div_ceil(SPLIT)).max();
    first.unwrap_or(0)..end.unwrap_or(0)
}

/// Adds the partial results of later splits to `states`, the combined results of earlier ones, each in the layout of [`attend_split`].
/// [`attend_combine`] does the same before it writes. Use this if the results of all splits do not fit into memory at once.
///
/// Panics if the length of `partials` is not a multiple of that of `states`.
pub fn attend_merge(isa: Isa, layout: &KvLayout, states: &mut [f32], partials: &[f32]) {
    let len = attend_partial_len(layout);
    let fits = states.len().is_multiple_of(len) && partials.len().is_multiple_of(states.len().max(1));
    assert!(fits, "{} floats of partial results beside {} of states", partials.len(), states.len());
    for partials in partials.chunks_exact(states.len().max(1)) {
        isa.run(Merge { len, states, partials });
    }
}

/// Combines partial results, and the heads' `sinks`, into the output of `rows` rows of `heads` heads. `partials` holds the results of
/// consecutive splits, each as [`attend_split`] wrote it; its first part is used as working space. Splits that no row sees may be left
/// out.
///
/// Panics if the length of `partials` is no positive multiple of a split's.
///
/// # Safety
/// The output of every row and head is valid for writing, and nothing else accesses it during the call.
pub unsafe fn attend_combine(
    isa: Isa,
    layout: &KvLayout,
    rows: usize,
    heads: usize,
    partials: &mut [f32],
    sinks: Option<&[f32]>,
    out: AttendOutput,
) {
    let len = attend_partial_len(layout);
    let split_len = rows * heads * len;
    let fits = split_len > 0 && !partials.is_empty() && partials.len().is_multiple_of(split_len);
    assert!(fits, "{} floats of partial results, a multiple of {split_len} needed", partials.len());
    let (states, rest) = partials.split_at_mut(split_len);
    attend_merge(isa, layout, states, rest);
    for (query, state) in states.chunks_exact_mut(len).enumerate() {
        // SAFETY: the caller's word on the output.
        unsafe { finish(isa, (heads, layout.width()), query, (state, sinks), out) };
    }
}
