//! y = x · Wᵀ (+ bias) over packed weights: the entry, its checks, and the walk over panels and rows. The inner loops are in
//! `linear/float.rs` and `linear/quant.rs`; `packing` describes the layout of a panel.
//!
//! A tile is some rows of x times one or a few panels, over all of k, with every sum in registers; it is the unit of work
//! and no boundary of arithmetic: a row's sums are formed in the same order in every tile.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod codes;
mod float;
mod quant;

use std::ops::Range;

use crate::acts::Acts;
use crate::bf16::Bf16Acts;
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::Kernel;
use crate::ops::Activation;
use crate::packing::{BLOCK, PANEL, PackKind, Packing};
use crate::simd::Simd;

/// A packed weight matrix with its optional bias.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// The shape.
    pub packing: &'a Packing,
    /// `packing.bytes()` bytes. Any alignment is correct, 64 is fast.
    pub data: &'a [u8],
    /// One value per output, added to its sum.
    pub bias: Option<&'a [f32]>,
}

/// The activations: the rows to multiply.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// Floats, for float weights: row r starts at `r · ld`.
    F32 {
        /// The rows.
        data: &'a [f32],
        /// Distance of two rows, in floats; at least k.
        ld: usize,
    },
    /// Quantized activations, for quantized weights.
    Acts(&'a Acts<'a>),
    /// Activations in bfloat16, for weights with [`Packing::takes_bf16`], only on [`Isa::Amx`].
    Bf16(&'a Bf16Acts<'a>),
}

/// Whether a result replaces y or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// y = result.
    Store,
    /// y = y + result.
    Add,
}

/// The output: row r, output o at `ptr + r · ld + o`.
#[derive(Clone, Copy)]
pub struct Target {
    /// Row 0, output 0.
    pub ptr: *mut f32,
    /// Distance of two rows, in floats.
    pub ld: usize,
    /// Store or add.
    pub mode: Mode,
}

/// Multiplies `rows` of `input` by the outputs of `panels` (panel p holds outputs `16p .. min(16p + 16, out)`).
///
/// Float weights: `acc = fma(x[k], w[k], acc)` for k ascending, from 0. F8: such a sum for each group, ascending, and
/// acc = fma(sum, scale, acc).
///
/// Quantized weights, for groups ascending (larger groups: for every 32 elements): dot = Σ (level − zero) · number over the group, an
/// exact integer; acc = fma(float(dot) · scale_act, scale_w, acc); then, with offsets, acc = fma(offset_w, scale_act · Σ number, acc).
///
/// Activations in bfloat16: a quantized weight is level · scale + offset, rounded once (without offsets, −(zero · scale) takes the
/// offset's place). Every weight is then rounded to bfloat16. For every 32 of k, ascending, two sums start at 0 and grow by fused
/// multiply-adds: one over elements 0 and 1 of every four, the other over elements 2 and 3. Then acc = acc + (the one + the other).
/// Magnitudes below 2⁻¹²⁶ count as 0.
///
/// Then the bias is added, then, in [`Mode::Add`], the result to what y holds.
///
/// Panics if a range, a length or the kind of input does not fit.
///
/// # Safety
/// For every row in `rows` and every output of `panels`, `target` points to a float that is valid for reading and
/// writing and that nothing else accesses during the call.
pub unsafe fn linear(
    isa: Isa,
    weights: &Weights<'_>,
    input: Input<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    target: Target,
) {
    let packing = weights.packing;
    check_weights(weights, &panels);
    if panels.is_empty() || rows.is_empty() {
        return;
    }
    match (packing.kind(), input) {
        (PackKind::Quant(quant), Input::Acts(acts)) => {
            let layout = acts.layout();
            assert!(layout.k == packing.k() && rows.end <= layout.rows, "{rows:?} × {} of {layout:?}", packing.k());
            // SAFETY: shapes were just checked; the target is the caller's word.
            unsafe { quant::multiply(isa, weights, quant, acts, panels, rows, target) }
        }
        (PackKind::F32 | PackKind::F16 | PackKind::Bf16 | PackKind::F8 { .. }, Input::F32 { data, ld }) => {
            let needed = (rows.end - 1).checked_mul(ld).and_then(|start| start.checked_add(packing.k()));
            let enough = needed.is_some_and(|needed| needed <= data.len());
            assert!(ld >= packing.k() && enough, "rows {rows:?} of {} in {} floats, ld {ld}", packing.k(), data.len());
            // SAFETY: shapes were just checked; the target is the caller's word.
            unsafe { float::multiply(isa, weights, data, ld, panels, rows, target) }
        }
        #[cfg(target_arch = "x86_64")]
        (_, Input::Bf16(acts)) if packing.takes_bf16() && isa == Isa::Amx => {
            check_bf16(isa, weights, acts, &rows);
            // SAFETY: shapes were just checked; the target is the caller's word.
            unsafe { bf16::multiply(isa, weights, acts, panels, rows, target) }
        }
        (kind, _) => panic!("weights of kind {kind:?} multiply another kind of input on {isa}"),
    }
}

/// Computes the gate of a feed-forward layer: activation(x · Gᵀ) · (x · Uᵀ), rounded, for the outputs of `panels` of both matrices and
/// `rows`. Each result equals the one of [`linear`], [`crate::glu_rough`] and [`crate::round_row`]. `out` is the first byte of a buffer
/// of rounded activations, with as many rows as `acts` and as wide as the matrices' outputs.
///
/// Panics if shapes do not fit, or if `isa` is not [`Isa::Amx`].
///
/// # Safety
/// `out` is valid for writing the whole buffer, and nothing else accesses these rows' results of `panels` during the
/// call.
pub unsafe fn linear_glu(
    isa: Isa,
    [gate, up]: [&Weights<'_>; 2],
    activation: Activation,
    acts: &Bf16Acts<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    out: *mut u8,
) {
    for weights in [gate, up] {
        check_weights(weights, &panels);
        check_bf16(isa, weights, acts, &rows);
    }
    let wide = gate.packing.out();
    assert!(wide == up.packing.out() && wide.is_multiple_of(BLOCK), "{wide} and {} outputs", up.packing.out());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: shapes were just checked; the target is the caller's word.
    unsafe {
        bf16::multiply_glu(isa, [gate, up], activation, acts, panels, rows, out);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (activation, panels, out);
}

fn check_weights(weights: &Weights<'_>, panels: &Range<usize>) {
    let packing = weights.packing;
    assert!(panels.end <= packing.panels(), "panels {panels:?} of {}", packing.panels());
    assert_eq!(weights.data.len(), packing.bytes(), "bytes of the packed matrix");
    if let Some(bias) = weights.bias {
        assert_eq!(bias.len(), packing.out(), "biases");
    }
}

fn check_bf16(isa: Isa, weights: &Weights<'_>, acts: &Bf16Acts<'_>, rows: &Range<usize>) {
    let (packing, layout) = (weights.packing, acts.layout());
    assert!(isa == Isa::Amx && isa.available() && packing.takes_bf16(), "{packing:?} on {isa}");
    assert!(layout.k == packing.k() && rows.end <= layout.rows, "{rows:?} × {} of {layout:?}", packing.k());
    let whole = |row: usize| row.is_multiple_of(16) || row == layout.rows;
    assert!(rows.start.is_multiple_of(16) && whole(rows.end), "{rows:?} of {} cut a tile", layout.rows);
}

/// The part of y that a tile of one panel writes: its first row and the panel's first output.
#[derive(Clone, Copy)]
struct TileTarget {
    ptr: *mut f32,
    ld: usize,
    mode: Mode,
    /// Outputs of this panel: 1 to 16.
    columns: usize,
    /// The panel's first bias, or null.
    bias: *const f32,
}

impl TileTarget {
    /// # Safety
    /// The panel and the row are within the matrix and the target that [`linear`] was given.
    #[inline(always)]
    unsafe fn new(weights: &Weights<'_>, target: Target, panel: usize, row: usize) -> TileTarget {
        let first = panel * PANEL;
        TileTarget {
            // SAFETY: within the target, by this function's contract.
            ptr: unsafe { target.ptr.add(row * target.ld + first) },
            ld: target.ld,
            mode: target.mode,
            columns: PANEL.min(weights.packing.out() - first),
            bias: weights.bias.map_or(std::ptr::null(), |bias| bias[first..].as_ptr()),
        }
    }

    /// Finishes the sums of row `row` of the tile.
    ///
    /// # Safety
    /// The row is within the target that [`linear`] was given.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, row: usize, acc: S::F) {
        // SAFETY: within the target, by this function's contract.
        let y = unsafe { self.ptr.add(row * self.ld) };
        let mut result = acc;
        if !self.bias.is_null() {
            // SAFETY: as many biases follow as the panel has outputs.
            let bias = unsafe { std::slice::from_raw_parts(self.bias, self.columns) };
            result = s.add(result, s.load_part(bias, 0.0));
        }
        // SAFETY: the caller of `linear` gave this call sole access to the row's outputs.
        let y = unsafe { std::slice::from_raw_parts_mut(y, self.columns) };
        if self.mode == Mode::Add {
            result = s.add(s.load_part(y, 0.0), result);
        }
        s.store_part(y, result);
    }
}

/// Finishes the sums of some rows of a tile; the sums are in memory, sixteen outputs per row.
#[cfg(target_arch = "x86_64")]
struct Finish {
    target: TileTarget,
    rows: Range<usize>,
    sums: *const f32,
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Finish {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows {
            // SAFETY: the code that makes this value promises that the rows are within the target and have sums.
            unsafe { self.target.write(s, row, s.load(self.sums.add(row * PANEL))) };
        }
    }
}
