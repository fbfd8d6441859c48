//! One tile of queries over one split: which query sees which positions, and the order of the three kernels in
//! `attention/tile.rs`. The parent module decides how splits combine.
//!
//! Keys and values are loaded once for all queries of the tile. Positions that only some of the queries see are masked out of the
//! scores of the others. Their values are read only for the queries that see them: a hidden position is never multiplied into a sum,
//! not even by zero.

use super::tile::{BF16, F16, F32, Q8, Scores, Softmax, TileView, Values};
use super::{AttendParams, HEADER, KvPages, Queries, SPLIT};
use crate::isa::Isa;
use crate::kv::{KvDtype, PAGE};

/// One split of a call: the inputs that its tiles share.
pub(super) struct Split<'a> {
    pub(super) isa: Isa,
    pub(super) kv: &'a KvPages<'a>,
    pub(super) queries: &'a Queries<'a>,
    pub(super) params: &'a AttendParams<'a>,
    pub(super) split: usize,
}

impl Split<'_> {
    /// Runs the queries from `first` on, one per partial result (at most eight), in tiles of at most `TILE`.
    ///
    /// # Safety
    /// As for [`super::attend_split`] after its checks.
    pub(super) unsafe fn run(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        let len = HEADER + self.kv.layout.head_dim();
        let count = partials.len() / len;
        let mut done = 0;
        while done < count {
            let tile = match (count - done, self.isa) {
                (_, Isa::Portable) => 1,
                (8.., Isa::Avx512 | Isa::Amx) => 8,
                (4.., _) => 4,
                (few, _) => few,
            };
            let partials = &mut partials[done * len..][..tile * len];
            match self.kv.layout.dtype() {
                KvDtype::F32 => self.sized::<F32>(first + done, scratch, partials),
                KvDtype::F16 => self.sized::<F16>(first + done, scratch, partials),
                KvDtype::Bf16 => self.sized::<BF16>(first + done, scratch, partials),
                KvDtype::Q8 => self.sized::<Q8>(first + done, scratch, partials),
            }
            done += tile;
        }
    }

    fn sized<const D: u8>(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        match partials.len() / (HEADER + self.kv.layout.head_dim()) {
            8 => self.tile::<D, 8>(first, scratch, partials),
            4 => self.tile::<D, 4>(first, scratch, partials),
            3 => self.tile::<D, 3>(first, scratch, partials),
            2 => self.tile::<D, 2>(first, scratch, partials),
            _ => self.tile::<D, 1>(first, scratch, partials),
        }
    }

    /// Computes `Q` queries: scores, softmax, values.
    fn tile<const D: u8, const Q: usize>(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        let (start, end) = (self.split * SPLIT, (self.split + 1) * SPLIT);
        let dim = self.kv.layout.head_dim();
        let mut spans = [(0, 0); Q];
        let (mut low, mut high) = (usize::MAX, 0);
        for (q, span) in spans.iter_mut().enumerate() {
            let (from, to) = self.queries.span(first + q);
            *span = (from.max(start), to.min(end));
            if span.0 < span.1 {
                (low, high) = (low.min(span.0), high.max(span.1));
            }
        }
        if low >= high {
            return;
        }
        let (queries, scores) = scratch.split_at_mut(Q * dim);
        self.scale_queries::<Q>(first, queries);
        let ahead = self.queries.spans.len() == 1;
        let view = TileView { kv: self.kv, softcap: self.params.softcap, start, ahead };
        self.scores::<D, Q>(view, queries, scores, low / PAGE, high.div_ceil(PAGE));
        for (q, span) in spans.into_iter().enumerate().filter(|(_, span)| span.0 < span.1) {
            let scores = &mut scores[q * SPLIT..][..SPLIT];
            let (max, sum) = self.isa.run(Softmax { scores, start, low: span.0, high: span.1 });
            let partial = &mut partials[q * (HEADER + dim)..];
            (partial[0], partial[1]) = (max, sum);
        }
        self.all_values::<D, Q>(view, &spans, scores, partials);
    }

    /// Writes q · scale, dimension by dimension, the tile's queries side by side.
    fn scale_queries<const Q: usize>(&self, first: usize, scaled: &mut [f32]) {
        for q in 0..Q {
            let row = self.queries.get(first + q, self.kv.layout.width());
            for (d, x) in row.iter().enumerate() {
                scaled[d * Q + q] = x * self.params.scale;
            }
            (row.len()..self.kv.layout.head_dim()).for_each(|d| scaled[d * Q + q] = 0.0);
        }
    }

    /// Computes the scores of pages `first..end`, visible or not. Few queries process several pages at a time, so that the multipliers do
    /// not wait for the chains.
    fn scores<const D: u8, const Q: usize>(
        &self,
        view: TileView<'_>,
        queries: &[f32],
        scores: &mut [f32],
        first: usize,
        end: usize,
    ) {
        match (Q, self.isa) {
            (8, _) => self.isa.run_widest(Scores::<D, 8, 1> { view, queries, scores, first, end }),
            (4, Isa::Avx512 | Isa::Amx) => self.isa.run_widest(Scores::<D, 4, 2> { view, queries, scores, first, end }),
            (4, _) => self.isa.run_vector(Scores::<D, 4, 1> { view, queries, scores, first, end }),
            (3, _) => self.isa.run_vector(Scores::<D, 3, 2> { view, queries, scores, first, end }),
            (2, _) => self.isa.run_vector(Scores::<D, 2, 2> { view, queries, scores, first, end }),
            (_, Isa::Portable) => self.isa.run(Scores::<D, 1, 1> { view, queries, scores, first, end }),
            _ => self.isa.run_vector(Scores::<D, 1, 4> { view, queries, scores, first, end }),
        }
    }

    /// Adds Σ p · V for all queries: together for positions that all of them see, separately before and after.
    fn all_values<const D: u8, const Q: usize>(
        &self,
        view: TileView<'_>,
        spans: &[(usize, usize); Q],
        scores: &[f32],
        partials: &mut [f32],
    ) {
        let (mut low, mut high) = (0, usize::MAX);
        for span in spans {
            (low, high) = (low.max(span.0), high.min(span.1));
        }
        if Q == 1 || low >= high {
            self.own_values::<D>(view, spans, scores, partials);
            return;
        }
        self.own_values::<D>(view, &spans.map(|span| (span.0, low)), scores, partials);
        // Sums of four queries times 32 dimensions take all registers of AVX2 and NEON. They pay if only loads stand beside them; half
        // floats need registers to be widened.
        let narrow = matches!(self.isa, Isa::Avx2 | Isa::Neon) && matches!(D, F16 | BF16);
        match (Q, narrow) {
            (8, _) => self.isa.run_widest(Values::<D, 8, 2> { view, scores, partials, low, high }),
            (4, true) => self.isa.run_vector(Values::<D, 4, 1> { view, scores, partials, low, high }),
            (4, false) => self.isa.run_vector(Values::<D, 4, 2> { view, scores, partials, low, high }),
            (3, true) => self.isa.run_vector(Values::<D, 3, 1> { view, scores, partials, low, high }),
            (3, false) => self.isa.run_vector(Values::<D, 3, 2> { view, scores, partials, low, high }),
            (_, true) => self.isa.run_vector(Values::<D, 2, 2> { view, scores, partials, low, high }),
            (_, false) => self.isa.run_vector(Values::<D, 2, 4> { view, scores, partials, low, high }),
        }
        self.own_values::<D>(view, &spans.map(|span| (high, span.1)), scores, partials);
    }

    /// Adds Σ p · V of each query over its own span.
    fn own_values<const D: u8>(
        &self,
        view: TileView<'_>,
        spans: &[(usize, usize)],
        scores: &[f32],
        partials: &mut [f32],
    ) {
        let len = HEADER + self.kv.layout.head_dim();
        let queries = scores.chunks_exact(SPLIT).zip(partials.chunks_exact_mut(len));
        for ((low, high), (scores, partials)) in spans.iter().copied().zip(queries) {
            if low < high {
                self.isa.run(Values::<D, 1, 4> { view, scores, partials, low, high });
            }
        }
    }
}
