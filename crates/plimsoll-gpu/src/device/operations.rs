//! Every operation as dispatches.

use plimsoll_device::{
    Activation, Attention, Blend, Buf, CausalConv, Device, DeviceError, Experts, GatedDelta, Input, KvDtype, LinearId,
    Mark, Mode, Near, NgramConv, Ngrams, Places, Rotary, Selection, SelectiveScan, StepInput, Unfold, VectorId,
};

use super::{GpuDevice, at};
use crate::kernel::{Kernel, LINEAR_ROWS, Q8_BLOCK, THREADS, TILE_PANELS, TILE_ROWS, TILES_FROM, grid};

/// Returns the workgroups for `count` elements, one element per thread.
pub(super) fn elements(count: usize) -> [u32; 2] {
    if count == 0 { [0; 2] } else { grid(count.div_ceil(THREADS as usize)) }
}

/// Returns the workgroups for `rows` rows, one row per workgroup.
pub(super) fn by_row(rows: usize) -> [u32; 2] {
    if rows == 0 { [0; 2] } else { grid(rows) }
}

impl GpuDevice {
    /// Dispatches a kernel over `count` elements of `x` and `y`.
    fn plain(&mut self, kernel: Kernel, x: u32, y: u32, count: usize, act: u32, cap: f32) {
        self.call(kernel, elements(count), &[x, y, count as u32, act, cap.to_bits()]);
    }

    /// Fills a matrix with the uploaded words from `sent` on.
    pub(super) fn fetch(&mut self, out: Buf, sent: u32) {
        self.plain(Kernel::Fetch, at(out), sent, out.rows * out.cols, 0, 0.0);
    }

    /// Dispatches a kernel over the elements of rows like `x`; see [`crate::kernel`].
    fn rowwise(&mut self, kernel: Kernel, out: Buf, x: Buf, by: u32, column: usize) {
        let count = match kernel {
            Kernel::Gather => out.rows * x.cols,
            _ => x.rows * x.cols,
        };
        let params = [at(out), at(x), by, x.cols as u32, count as u32, out.cols as u32, column as u32];
        self.call(kernel, elements(count), &params);
    }

    fn norm(&mut self, kernel: Kernel, [out, x]: [Buf; 2], weight: VectorId, bias: Option<VectorId>, eps: f32) {
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "a norm keeps the shape");
        let (weight, bias) = (self.vector(weight), bias.map_or(0, |bias| self.vector(bias)));
        let params = [at(out), at(x), x.rows as u32, x.cols as u32, weight, bias, eps.to_bits()];
        self.call(kernel, by_row(x.rows), &params);
    }

    fn multiply_rows(&mut self, x: Buf, id: LinearId, out: Buf, mode: Mode) {
        let linear = self.weights.table().linear(id);
        let packing = linear.packing;
        let shape = (out.rows, out.cols, x.cols);
        assert_eq!(shape, (x.rows, packing.out(), packing.k()), "shape of '{}'", linear.name);
        let (bias, add) = (self.bias(id), u32::from(mode == Mode::Add));
        for i in 0..self.weights.segments().pieces(id).len() {
            let piece = self.weights.segments().pieces(id)[i];
            let params = [
                at(x),
                at(out),
                x.rows as u32,
                packing.k() as u32,
                out.cols as u32,
                piece.first_output() as u32,
                piece.outputs as u32,
                (piece.offset / 4) as u32,
                (packing.panel_bytes() / 4) as u32,
                bias,
                add,
            ];
            let (kernel, panels, rows): (fn(_) -> _, _, _) = match x.rows < TILES_FROM {
                true => (Kernel::Linear, 1, LINEAR_ROWS),
                false => (Kernel::Tiles, TILE_PANELS, TILE_ROWS),
            };
            let groups = [piece.panels.div_ceil(panels) as u32, x.rows.div_ceil(rows as usize) as u32];
            self.call_on(kernel(packing.kind()), piece.segment, groups, &params);
        }
    }
}

impl Device for GpuDevice {
    fn temp(&mut self, rows: usize, cols: usize) -> Result<Buf, DeviceError> {
        let bytes = Buf::at(0, rows, cols).bytes();
        Ok(Buf::at(self.memory.stack.take(bytes)?, rows, cols))
    }

    fn mark(&self) -> Mark {
        self.memory.stack.mark().into()
    }

    fn release(&mut self, mark: Mark) {
        self.memory.stack.release(mark.into());
    }

    fn embed(&mut self, out: Buf, table: LinearId, tokens: &[u32], scale: f32) {
        assert_eq!(out.rows, tokens.len(), "one token a row");
        let sent = self.record.send(tokens.iter().copied());
        self.table_rows(out, table, sent, scale, false);
    }

    fn add_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>) {
        self.run_blended(x, table, blend);
    }

    fn add_rows(&mut self, x: Buf, table: VectorId, which: &(dyn Fn(usize) -> usize + Sync)) {
        let sent = self.record.send((0..x.rows).map(|row| which(row) as u32));
        let table = self.vector(table) as usize;
        self.rowwise(Kernel::AddRows, x, x, sent, table);
    }

    fn place(&mut self, x: Buf, first_row: usize, values: &[f32], width: usize, from: usize, mode: Mode) {
        self.run_place(x, first_row, values, (width, from), mode);
    }

    fn rms_norm(&mut self, out: Buf, x: Buf, weight: VectorId, eps: f32) {
        self.norm(Kernel::RmsNorm, [out, x], weight, None, eps);
    }

    fn layer_norm(&mut self, out: Buf, x: Buf, weight: VectorId, bias: VectorId, eps: f32) {
        self.norm(Kernel::LayerNorm, [out, x], weight, Some(bias), eps);
    }

    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        _bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let x = input.ready(self);
        for (id, out) in layers {
            self.multiply_rows(x, *id, *out, mode);
        }
        Ok(())
    }

    fn rope_angles(&mut self, out: Buf, inv_freq: VectorId, positions: &[u32], scale: f32) {
        assert_eq!(out.rows, positions.len(), "one position a row");
        self.angles(out, inv_freq, scale, |row| positions[row] as f32, |position, _| *position);
    }

    fn rope_angles_by_axis(&mut self, out: Buf, inv_freq: VectorId, axes: &[u8], places: Places<'_>, scale: f32) {
        assert_eq!(out.cols, 2 * axes.len(), "an axis for every frequency");
        self.angles(out, inv_freq, scale, places, |place, i| place[usize::from(axes[i])]);
    }

    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, interleaved: bool) {
        // `x` may have one row per head; a row of angles serves all heads of its token.
        let heads = x.rows * x.cols / head_dim;
        let (half, count) = (angles.cols / 2, heads * angles.cols / 2);
        let by_token = heads.checked_div(angles.rows).unwrap_or(0);
        let params =
            [at(x), at(angles), by_token as u32, head_dim as u32, half as u32, count as u32, u32::from(interleaved)];
        self.call(Kernel::Rope, elements(count), &params);
    }

    fn glu(&mut self, gate: Buf, up: Buf, act: Activation) {
        assert_eq!((gate.rows, gate.cols), (up.rows, up.cols), "gate and up have one shape");
        self.plain(Kernel::Glu, at(gate), at(up), gate.rows * gate.cols, act as u32, 0.0);
    }

    fn activate(&mut self, x: Buf, act: Activation) {
        self.plain(Kernel::Activate, at(x), 0, x.rows * x.cols, act as u32, 0.0);
    }

    fn multiply(&mut self, x: Buf, weight: VectorId) {
        let weight = self.vector(weight);
        self.rowwise(Kernel::Multiply, x, x, weight, 0);
    }

    fn scale_rows(&mut self, x: Buf, factor: &(dyn Fn(usize) -> f32 + Sync)) {
        let sent = self.record.send((0..x.rows).map(|row| factor(row).to_bits()));
        self.rowwise(Kernel::ScaleRows, x, x, sent, 0);
    }

    fn scale_by(&mut self, x: Buf, by: Buf) {
        assert_eq!((by.rows, by.cols), (x.rows, 1), "one factor a row");
        self.rowwise(Kernel::ScaleBy, x, x, at(by), 0);
    }

    fn add(&mut self, x: Buf, y: Buf) {
        assert_eq!((x.rows, x.cols), (y.rows, y.cols), "both have one shape");
        self.plain(Kernel::Add, at(x), at(y), x.rows * x.cols, 0, 0.0);
    }

    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        out: Buf,
        q: Buf,
        kv: Option<[Buf; 2]>,
        step: &StepInput<'_>,
    ) {
        let layer = self.memory.layers[spec.layer];
        let (dtype, head_dim) = (layer.layout.dtype(), layer.layout.head_dim());
        assert_eq!(q.cols, spec.heads * head_dim, "heads of queries are as wide as those of keys");
        if let Some(Rotary { norms, eps, angles, interleaved }) = rotary.copied() {
            let made = || std::iter::once(q).chain(kv.map(|[k, _]| k));
            for (x, norm) in made().zip(norms.into_iter().flatten()) {
                let heads = x.reshape(head_dim);
                self.rms_norm(heads, heads, norm, eps);
            }
            for x in made() {
                self.rope(x, angles, head_dim, interleaved);
            }
        }
        let rows = self.rows_of(step, true);
        let (pages, page_words) = (rows.pages[layer.group as usize], (layer.bytes() / 4) as u32);
        if let Some([k, v]) = kv {
            let (half, pairs) = ((head_dim / 2) as u32, k.cols / 2);
            let count = match dtype {
                KvDtype::Q8 => k.rows * layer.layout.kv_heads() * head_dim.div_ceil(Q8_BLOCK),
                _ => k.rows * pairs,
            };
            let params = [at(k), at(v), half, pairs as u32, count as u32, rows.table, pages, page_words];
            self.call_on(Kernel::Store(dtype), spec.layer, elements(count), &params);
        }
        let group = (spec.heads / layer.layout.kv_heads()) as u32;
        let sinks = spec.sinks.map_or(0, |sinks| self.vector(sinks) + 1);
        let params = [
            at(q),
            at(out),
            q.rows as u32,
            spec.heads as u32,
            group,
            rows.table,
            pages,
            page_words,
            spec.window.filter(|_| !spec.chunked).unwrap_or(0) as u32,
            spec.window.filter(|_| spec.chunked).unwrap_or(0) as u32,
            sinks,
            spec.scale.to_bits(),
            spec.softcap.unwrap_or(0.0).to_bits(),
        ];
        self.call_on(Kernel::Attend(dtype, head_dim), spec.layer, by_row(q.rows * spec.heads), &params);
    }

    fn attend_within(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let table = match spec.window {
            Some(_) => self.windows_of(spec, step),
            None => self.rows_of(step, false).table,
        };
        self.attend_in_rows(spec, [out, q, k, v], table);
        Ok(())
    }

    fn attend_all(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        let table = self.table_of(sequences, q.rows);
        self.attend_in_rows(spec, [out, q, k, v], table);
        Ok(())
    }

    fn attend_near(
        &mut self,
        spec: &Near,
        out: Buf,
        qkv: [Buf; 3],
        distances: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) {
        let table = self.table_of(sequences, out.rows);
        self.run_near(spec, out, qkv, distances, table);
    }

    fn attend_selected(&mut self, _: &Selection, _: Buf, _: Buf, _: [Buf; 3], _: &StepInput<'_>) {
        unreachable!("the plan refuses sparse attention")
    }

    fn embed_ngrams(&mut self, _: &Ngrams, _: Buf, _: Buf, _: &StepInput<'_>) {
        unreachable!("the plan refuses n-gram embeddings")
    }

    fn gate_streams(&mut self, _: Buf, _: Buf, _: Buf) {
        unreachable!("the plan refuses n-gram embeddings")
    }

    fn ngram_conv(&mut self, _: &NgramConv, _: Buf, _: &StepInput<'_>) {
        unreachable!("the plan refuses n-gram embeddings")
    }

    fn causal_conv(&mut self, spec: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>) {
        self.run_conv(spec, x, gates, step);
    }

    fn selective_scan(&mut self, spec: &SelectiveScan, out: Buf, x: Buf, gates: [Buf; 2], step: &StepInput<'_>) {
        self.run_scan(spec, out, x, gates, step);
    }

    fn gated_delta(
        &mut self,
        spec: &GatedDelta,
        out: Buf,
        qkv: Buf,
        a: Buf,
        b: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.run_delta(spec, out, qkv, [a, b], step);
        Ok(())
    }

    fn experts(&mut self, spec: &Experts<'_>, out: Buf, x: Buf, router: Buf, mode: Mode) -> Result<(), DeviceError> {
        self.run_experts(spec, [out, x, router], mode)
    }

    fn add_gated(&mut self, x: Buf, y: Buf, gate: Buf) {
        assert_eq!((x.rows, x.cols, x.rows, 1), (y.rows, y.cols, gate.rows, gate.cols), "one shape, one gate a row");
        self.rowwise(Kernel::AddGated, x, y, at(gate), 0);
    }

    fn put(&mut self, out: Buf, x: Buf, column: usize) {
        assert!(out.rows == x.rows && column + x.cols <= out.cols, "columns {column}.. of {}", out.cols);
        self.rowwise(Kernel::Put, out, x, 0, column);
    }

    fn take(&mut self, out: Buf, x: Buf, column: usize) {
        assert!(out.rows == x.rows && column + out.cols <= x.cols, "columns {column}.. of {}", x.cols);
        let count = (out.rows * out.cols) as u32;
        let params = [at(out), at(x), 0, out.cols as u32, count, x.cols as u32, column as u32];
        self.call(Kernel::Take, elements(out.rows * out.cols), &params);
    }

    fn unfold(&mut self, out: Buf, x: Buf, spec: &Unfold) {
        self.run_unfold(out, x, spec);
    }

    fn gather(&mut self, out: Buf, x: Buf, rows: &[u32]) {
        assert_eq!((out.rows, out.cols), (rows.len(), x.cols), "gather keeps the width");
        assert!(rows.iter().all(|row| (*row as usize) < x.rows), "rows {rows:?} of {}", x.rows);
        let sent = self.record.send(rows.iter().copied());
        self.rowwise(Kernel::Gather, out, x, sent, 0);
    }

    fn arrange(&mut self, out: Buf, x: Buf, from: &(dyn Fn(usize) -> usize + Sync)) {
        assert!(x.cols <= out.cols, "{} columns in rows of {}", x.cols, out.cols);
        let within = |row: usize| {
            let from = from(row);
            assert!(from < x.rows, "row {from} of {}", x.rows);
            from as u32
        };
        let sent = self.record.send((0..out.rows).map(within));
        self.rowwise(Kernel::Gather, out, x, sent, 0);
    }

    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
        assert!(rows.is_sorted_by(|a, b| a < b), "rows ascend, so that none is overwritten before it is moved");
        assert!(rows.last().is_none_or(|row| (*row as usize) < x.rows), "rows {rows:?} of {}", x.rows);
        let sent = self.record.send(rows.iter().copied());
        if !rows.is_empty() {
            let params = [at(x), x.cols as u32, rows.len() as u32, sent];
            self.call(Kernel::KeepRows, [x.cols.div_ceil(THREADS as usize) as u32, 1], &params);
        }
        x.span(0, rows.len())
    }

    fn clamp(&mut self, x: Buf, low: f32, high: f32) {
        // A shader compiler may assume that no number is infinite.
        let [low, high] = [low, high].map(|bound| bound.clamp(f32::MIN, f32::MAX).to_bits());
        let count = x.rows * x.cols;
        self.call(Kernel::Clamp, elements(count), &[at(x), count as u32, low, high]);
    }

    fn candidates(&mut self, out: Buf, blocks: Buf, x: Buf, counts: &[u32]) {
        self.find_candidates(out, blocks, x, counts);
    }

    fn softcap(&mut self, x: Buf, cap: f32) {
        self.plain(Kernel::Softcap, at(x), 0, x.rows * x.cols, 0, cap);
    }
}
