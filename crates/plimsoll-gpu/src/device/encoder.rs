//! Operations of image and audio encoders, as dispatches.

use plimsoll_device::weights::VectorSource;
use plimsoll_device::{Attention, Blend, Buf, LinearId, Mode, Near, StepInput, Unfold, VectorId};

use super::operations::{by_row, elements};
use super::{GpuDevice, at};
use crate::kernel::Kernel;

impl GpuDevice {
    /// Reads rows of a table by uploaded row numbers, or sums of four rows; see [`crate::kernel`].
    pub(super) fn table_rows(&mut self, out: Buf, table: LinearId, sent: u32, scale: f32, blend: bool) {
        let packing = self.weights.table().linear(table).packing;
        assert_eq!(out.cols, packing.k(), "rows as wide as those of the table");
        for i in 0..self.weights.segments().pieces(table).len() {
            let piece = self.weights.segments().pieces(table)[i];
            let params = [
                at(out),
                out.rows as u32,
                packing.k() as u32,
                sent,
                piece.first_output() as u32,
                piece.outputs as u32,
                (piece.offset / 4) as u32,
                (packing.panel_bytes() / 4) as u32,
                scale.to_bits(),
                u32::from(blend),
            ];
            let groups = by_row(out.rows * packing.k().div_ceil(64));
            self.call_on(Kernel::Embed(packing.kind()), piece.segment, groups, &params);
        }
    }

    pub(super) fn run_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>) {
        let words = |row: usize| {
            let four = blend(row);
            four.map(|(row, _)| row).into_iter().chain(four.map(|(_, share)| share.to_bits()))
        };
        let sent = self.record.send((0..x.rows).flat_map(words));
        self.table_rows(x, table, sent, 1.0, true);
    }

    /// Writes the cosines and sines of every row: of the position times the frequency. `place` returns a row's place, once for the row;
    /// `position` returns the position for a frequency's index. They are computed here and uploaded: the sines of drivers are not good
    /// enough for long contexts.
    pub(super) fn angles<P>(
        &mut self,
        out: Buf,
        inv_freq: VectorId,
        scale: f32,
        place: impl Fn(usize) -> P,
        position: impl Fn(&P, usize) -> f32,
    ) {
        let vector = self.weights.table().vector(inv_freq);
        let VectorSource::Values(inv_freq) = &vector.source else { unreachable!("frequencies are computed") };
        let half = inv_freq.len();
        assert_eq!(out.cols, 2 * half, "cosines and sines");
        let sent = self.record.words();
        for row in 0..out.rows {
            let place = place(row);
            let angle = |i: usize| f64::from(position(&place, i) * inv_freq[i]);
            let cosines = (0..half).map(|i| angle(i).cos());
            let both = cosines.chain((0..half).map(|i| angle(i).sin()));
            self.record.send(both.map(|value| (value as f32 * scale).to_bits()));
        }
        self.fetch(out, sent);
    }

    /// Uploads rows of the host. Rows that follow one another are one dispatch, so the number of pieces does not matter.
    pub(super) fn run_place(
        &mut self,
        x: Buf,
        first_row: usize,
        values: &[f32],
        (width, from): (usize, usize),
        mode: Mode,
    ) {
        let rows = values.chunks_exact(width);
        assert!(rows.remainder().is_empty() && from + x.cols <= width, "{} values in rows of {width}", values.len());
        assert!(first_row + rows.len() <= x.rows, "{} rows from {first_row} of {}", rows.len(), x.rows);
        let (cols, add, count) = (x.cols as u32, u32::from(mode == Mode::Add), (rows.len() * x.cols) as u32);
        let sent = self.record.words();
        for (row, values) in rows.enumerate() {
            let to = at(x) + ((first_row + row) * x.cols) as u32;
            let values = values[from..from + x.cols].iter().map(|value| value.to_bits());
            self.record.send(std::iter::once(to).chain(values));
        }
        let pipeline = self.context.pipeline_of(Kernel::Place);
        if let Some(last) = self.record.calls.last_mut().filter(|call| call.pipeline == pipeline) {
            let ends = last.word(0) + last.word(2) / cols * (cols + 1);
            if (last.word(1), last.word(3), ends) == (cols, add, sent) {
                let all = last.word(2) + count;
                last.set_word(2, all);
                last.groups = elements(all as usize);
                return;
            }
        }
        self.call(Kernel::Place, elements(count as usize), &[sent, cols, count, add]);
    }

    /// Uploads the row table of these sequences, unless it is there already. Layers of an encoder attend in at most two ways.
    pub(super) fn table_of(&mut self, sequences: &mut dyn Iterator<Item = (usize, usize)>, all: usize) -> u32 {
        let (sent, mut next) = (self.record.words(), 0);
        for (first, rows) in sequences {
            assert_eq!(first, next, "sequences follow one another");
            next += rows;
            // As for a step: place in the sequence, pages, first row attended to, last row attended to plus one.
            self.record.send((0..rows as u32).flat_map(|row| [row, 0, 0, rows as u32]));
        }
        assert_eq!(next, all, "every row belongs to a sequence");
        self.known_table(sent)
    }

    /// Uploads the window of each row of a step, unless it is there already.
    pub(super) fn windows_of(&mut self, spec: &Attention, step: &StepInput<'_>) -> u32 {
        let sent = self.record.words();
        for seq in step.seqs {
            let words = |row: usize| {
                let seen = spec.seen_within(row, seq.rows);
                [row, 0, seen.start, seen.end].map(|word| word as u32)
            };
            self.record.send((0..seq.rows).flat_map(words));
        }
        self.known_table(sent)
    }

    /// Returns the offset of the table uploaded at `sent`, or of an equal one uploaded before it.
    fn known_table(&mut self, sent: u32) -> u32 {
        let words = self.record.words() - sent;
        for [before, length] in self.sent_tables.iter().copied().flatten() {
            if length == words && self.record.since(before).starts_with(self.record.since(sent)) {
                self.record.cut(sent);
                return before;
            }
        }
        if let Some(free) = self.sent_tables.iter_mut().find(|table| table.is_none()) {
            *free = Some([sent, words]);
        }
        sent
    }

    /// Attends over keys and values in rows of the arena.
    pub(super) fn attend_in_rows(&mut self, spec: &Attention, [out, q, k, v]: [Buf; 4], table: u32) {
        let head_dim = q.cols / spec.heads;
        assert_eq!((k.rows, k.cols), (v.rows, v.cols), "keys and values have one shape");
        let group = spec.heads / (k.cols / head_dim);
        let params = [
            at(q),
            at(out),
            q.rows as u32,
            spec.heads as u32,
            group as u32,
            table,
            at(k),
            at(v),
            k.cols as u32,
            spec.sinks.map_or(0, |sinks| self.vector(sinks) + 1),
            spec.scale.to_bits(),
            spec.softcap.unwrap_or(0.0).to_bits(),
        ];
        self.call(Kernel::Within(head_dim), by_row(q.rows * spec.heads), &params);
    }

    /// Attends to a few preceding rows, with a key for every distance.
    pub(super) fn run_near(&mut self, spec: &Near, out: Buf, [q, k, v]: [Buf; 3], distances: Buf, table: u32) {
        let shape = |x: Buf| (x.rows, x.cols);
        assert_eq!([shape(q), shape(k), shape(v)], [shape(out); 3], "one shape");
        assert!(distances.rows >= spec.rows && distances.cols == q.cols, "a key for every distance");
        let (rows, heads) = (spec.rows as u32, spec.heads as u32);
        let sizes = [q.rows as u32, heads, q.cols as u32 / heads, rows, spec.cap.to_bits()];
        let params = [at(out), at(q), at(k), at(v), at(distances), table];
        self.call(Kernel::Near, by_row(q.rows * spec.heads), &[params.as_slice(), &sizes].concat());
    }

    pub(super) fn run_unfold(&mut self, out: Buf, x: Buf, spec: &Unfold) {
        let Unfold { inner, taps, step, pad } = *spec;
        let windows = spec.windows();
        let whole = x.rows.is_multiple_of(inner) && out.rows.is_multiple_of(windows);
        assert!(whole, "whole lines of points and of windows");
        assert_eq!(out.cols, x.cols * taps[0] * taps[1], "a column for every channel and tap");
        let count = out.rows * out.cols;
        let sizes = [count, x.cols, inner, x.rows / inner, windows];
        let cut = [taps, step, pad].concat();
        let mut params = [at(out); 13];
        params[1] = at(x);
        params[2..].iter_mut().zip(sizes.into_iter().chain(cut)).for_each(|(param, size)| *param = size as u32);
        self.call(Kernel::Unfold, elements(count), &params);
    }
}
