//! Linear layers on all cores: the input is quantized once, then tasks take panels of outputs and blocks of rows, as `cut` says.
//! How the work is cut has no influence on any result.

use arrayvec::ArrayVec;
use plimsoll_kernels::{self as kernels, ActLayout, Acts, Bf16Acts, Bf16Layout, Isa, Target, Weights};

use super::arena::Arena;
use super::cut::Cut;
use super::rows::for_rows;
use super::{CpuDevice, CpuWeights};
use crate::ahead::{Ahead, PIECES};
use crate::device::{Buf, Device, DeviceError, Input, Mode, Norm};
use crate::weights::LinearId;

/// Most layers of one operation.
const LAYERS: usize = 4;

/// Quantized and bf16 copies of an input that layers share, and their place in the workspace. First come the ordinary rows, quantized
/// if a layer needs that, then the bf16 rows.
pub(super) struct Shared {
    quantized: Option<(ActLayout, usize)>,
    pub bf16: Bf16Layout,
    pub bf16_at: usize,
}

/// A function that computes a row of an input.
pub(super) type MakeRow<'a> = dyn Fn(&CpuWeights, &Arena, usize) + Sync + 'a;

/// One layer times some rows.
struct Product<'a> {
    weights: Weights<'a>,
    input: kernels::Input<'a>,
    out: Buf,
    cut: Cut,
}

impl CpuDevice {
    pub(super) fn run_linear(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let (scope, x) = (self.mark(), input.x);
        let any = bf16_rows > 0 && layers.iter().any(|(id, _)| self.rounds(*id));
        let bf16 = if any { bf16_rows } else { 0 };
        let others = x.rows - bf16;
        let exact = input.span(0, others);
        let make = exact.norm.map(|norm| self.make_normed(exact.x, norm));
        let shared = self.share(exact.x, bf16, layers, make.as_ref().map(|make| make as &MakeRow<'_>))?;
        if any {
            self.round(input.span(others, bf16), shared.bf16, shared.bf16_at);
        }
        self.multiply_rows(x, &shared, layers, mode);
        self.release(scope);
        Ok(())
    }

    /// Returns a function that computes a row of `x` by `norm`.
    fn make_normed(&self, x: Buf, norm: Norm) -> impl Fn(&CpuWeights, &Arena, usize) + Sync + use<> {
        let (isa, Norm { from, weight, eps }) = (self.isa, norm);
        let apart = from.offset + from.bytes() <= x.offset || x.offset + x.bytes() <= from.offset;
        assert!(apart, "rows are made of other rows");
        move |weights, arena, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (x, from) = unsafe { (arena.row(x, row), arena.row(from, row)) };
            kernels::rms_norm(isa, x, from, weights.vector(weight), eps);
        }
    }

    /// Rounds the rows of an input to bf16 at byte `at` of the workspace, each row as soon as it is computed.
    pub(super) fn round(&mut self, input: Input, layout: Bf16Layout, at: usize) {
        let x = input.x;
        assert_eq!((x.rows, x.cols), (layout.rows, layout.k), "rows as they are rounded");
        let make = input.norm.map(|norm| self.make_normed(x, norm));
        let (isa, arena, weights) = (self.isa, self.arena(), &self.weights);
        for_rows(&mut self.pool, x, |_, row| {
            if let Some(make) = &make {
                make(weights, &arena, row);
            }
            // SAFETY: each row and its rounded copy are inside the workspace and belong to one task.
            unsafe { kernels::round_row(isa, layout, arena.row(x, row), arena.at(at), row) };
        });
    }

    /// Whether a layer multiplies bf16 rows. If any layer does, all layers with quantized input do.
    pub(super) fn rounds(&self, id: LinearId) -> bool {
        let table = self.weights.table();
        table.rounds(&table.linear(id).packing)
    }

    /// Takes workspace for the copies of an input that `layers` need: of the rows of `x`, and of `bf16` bf16 rows. Quantizes the rows of
    /// `x`, each as soon as `make`, if there is one, has written it.
    pub(super) fn share(
        &mut self,
        x: Buf,
        bf16: usize,
        layers: &[(LinearId, Buf)],
        make: Option<&MakeRow<'_>>,
    ) -> Result<Shared, DeviceError> {
        let table = self.weights.table();
        let layout = table.act_layout(x.rows, x.cols, layers.iter().map(|(id, _)| id));
        let at = self.memory.stack.take(table.input_bytes(x.rows + bf16, x.cols, layers))?;
        let bf16_at = at + layout.map_or(0, |layout| layout.bytes().next_multiple_of(64));
        let (isa, arena, weights) = (self.isa, self.arena(), &self.weights);
        let all = if layout.is_some() || make.is_some() { x } else { x.span(0, 0) };
        for_rows(&mut self.pool, all, |_, row| {
            if let Some(make) = make {
                make(weights, &arena, row);
            }
            if let Some(layout) = layout {
                let bytes = layout.row_bytes();
                // SAFETY: each row's input and its quantized copy are inside the workspace and belong to one task.
                let (x, acts) = unsafe { (arena.row(x, row), arena.bytes(at + row * bytes, bytes)) };
                kernels::quantize_acts(isa, layout, x, acts);
            }
        });
        let quantized = layout.map(|layout| (layout, at));
        Ok(Shared { quantized, bf16: Bf16Layout { rows: bf16, k: x.cols }, bf16_at })
    }

    /// Multiplies `x`, with its copies in `shared`, by all layers. It is one job, so that no thread waits for another between two layers.
    pub(super) fn multiply_rows(&mut self, x: Buf, shared: &Shared, layers: &[(LinearId, Buf)], mode: Mode) {
        self.weights.multiplied(layers.iter().map(|(id, _)| *id));
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        // SAFETY: `x` and its copies were written before, and during this operation they are only read.
        let (floats, quantized, bf16) = unsafe {
            let quantized = shared.quantized.map(|(layout, at)| Acts::new(layout, arena.bytes(at, layout.bytes())));
            let bytes = |layout: Bf16Layout| arena.bytes(shared.bf16_at, layout.bytes());
            let bf16 = (shared.bf16.rows > 0).then(|| Bf16Acts::new(shared.bf16, bytes(shared.bf16)));
            (arena.matrix(x), quantized, bf16)
        };
        let mut products = ArrayVec::<Product<'_>, { 2 * LAYERS }>::new();
        for (id, out) in layers {
            let weights = self.weights.matrix(*id);
            let (packing, name) = (weights.packing, &self.weights.table().linear(*id).name);
            let shape = (out.rows, out.cols, x.cols);
            assert_eq!(shape, (x.rows, packing.out(), packing.k()), "shape of '{name}'");
            let bf16 = bf16.as_ref().filter(|_| self.rounds(*id));
            let apart = bf16.map_or(0, |acts| acts.layout().rows);
            let (input, row_bytes) = match &quantized {
                Some(acts) if packing.takes_acts() => (kernels::Input::Acts(acts), acts.layout().row_bytes()),
                _ => (kernels::Input::F32 { data: floats, ld: x.cols }, x.cols * size_of::<f32>()),
            };
            let mut add = |out: Buf, input, row_bytes| {
                let cut = Cut::of(isa, packing, out.rows, row_bytes, threads);
                products.push(Product { weights, input, out, cut });
            };
            if apart < x.rows {
                add(out.span(0, x.rows - apart), input, row_bytes);
            }
            if let Some(acts) = bf16 {
                add(out.span(x.rows - apart, apart), kernels::Input::Bf16(acts), x.cols * size_of::<u16>());
            }
        }
        let mode = match mode {
            Mode::Store => kernels::Mode::Store,
            Mode::Add => kernels::Mode::Add,
        };
        let tasks_of_part: usize = products.iter().map(|product| product.cut.tasks()).sum();
        let next = next_shares(&self.weights, isa, x.rows, threads);
        let task = |_: usize, task: usize| {
            let (part, mut task) = (task / tasks_of_part, task % tasks_of_part);
            for product in &products {
                if task < product.cut.tasks() {
                    return product.run(isa, &arena, mode, part, task);
                }
                task -= product.cut.tasks();
            }
        };
        self.pool.run_then(threads * tasks_of_part, &task, Some(&next));
    }
}

/// Returns the weights that each thread is expected to read next, if the order of matrices repeats, for `rows` rows.
pub(super) fn next_shares(
    weights: &CpuWeights,
    isa: Isa,
    rows: usize,
    threads: usize,
) -> impl Fn(usize) -> Ahead + Sync {
    move |thread| {
        let mut ahead = Ahead::default();
        for weights in weights.expected().take(PIECES) {
            let packing = weights.packing;
            // The cut by rows is not used, so the bytes of a row do not matter.
            let cut = Cut::of(isa, packing, rows, 1, threads);
            let (panels, bytes) = (cut.panels(thread), packing.panel_bytes());
            ahead.add(&weights.data[panels.start * bytes..panels.end * bytes]);
        }
        ahead
    }
}

impl Product<'_> {
    fn run(&self, isa: Isa, arena: &Arena, mode: kernels::Mode, part: usize, task: usize) {
        let Some((rows, panels)) = self.cut.task(part, task) else { return };
        let target = Target { ptr: arena.pointer(self.out), ld: self.out.cols, mode };
        // SAFETY: outputs are inside the workspace and overlap neither input nor each other; tasks have disjoint rows or panels.
        unsafe { kernels::linear(isa, &self.weights, self.input, panels, rows, target) };
    }
}
