//! A panel's weights in the matrix unit's layout: bfloat16, of every four elements the first and third, then the second and fourth,
//! side by side for each of sixteen outputs.
//!
//! A weight is its level times its scale plus its offset, rounded once to single precision and then, like an activation, to bfloat16.
//! Without offsets, −(zero point · scale) takes the offset's place.

use crate::bf16::round_up;
use crate::linear::Weights;
use crate::linear::codes::{self, ByFormat};
use crate::packing::{BLOCK, PANEL, PackKind, QuantPacking, SUPER};
use crate::simd::{LANES, Simd};

/// Bytes of four elements of sixteen columns.
const QUAD_BYTES: usize = 4 * 2 * LANES;

/// A panel, group after group.
pub(super) trait Unpack: Copy {
    /// Writes the tile of group `group`, 32 of k.
    ///
    /// # Safety
    /// The panel has the group, and `to` is valid for writing a tile.
    unsafe fn group<S: Simd>(self, s: S, group: usize, to: *mut u8);
}

/// An operation on a panel in any weight format.
pub(super) trait Panel {
    fn with(self, unpack: impl Unpack);
}

/// Runs `panel` on panel `number` of these weights.
pub(super) fn of(weights: &Weights<'_>, number: usize, panel: impl Panel) {
    let packing = weights.packing;
    let data = weights.data[number * packing.panel_bytes()..].as_ptr();
    let PackKind::Quant(quant) = packing.kind() else {
        return panel.with(Plain { data });
    };
    let scale_bytes = quant.super_bytes() * BLOCK / SUPER;
    Done(&Any { quant, k: packing.k(), scale_bytes, data }, panel).run_for(quant);
}

/// Quantized weights of any format.
struct Any {
    quant: QuantPacking,
    k: usize,
    /// Bytes of scales per block, roughly.
    scale_bytes: usize,
    data: *const u8,
}

/// An operation on a panel of quantized weights.
struct Done<'a, P>(&'a Any, P);

impl<P: Panel> ByFormat for Done<'_, P> {
    fn run<const CODE: u8, const HALVES: bool, const OFFSET: bool>(self) {
        self.1.with(Quantized::<CODE, HALVES, OFFSET>(self.0));
    }
}

/// Codes of form `CODE` in groups of 16 (`HALVES`) or 32, with offsets (`OFFSET`) or a zero point.
#[derive(Clone, Copy)]
struct Quantized<'a, const CODE: u8, const HALVES: bool, const OFFSET: bool>(&'a Any);

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool> Unpack for Quantized<'_, CODE, HALVES, OFFSET> {
    #[inline(always)]
    unsafe fn group<S: Simd>(self, s: S, group: usize, to: *mut u8) {
        let Any { quant, k, scale_bytes, data } = *self.0;
        let block_bytes = codes::block_bytes(CODE);
        let halves = if HALVES { 2 } else { 1 };
        // SAFETY: the panel lies as `packing` says, and has the group; the rest is the caller's word.
        unsafe {
            let block = data.add(group * block_bytes);
            let all_scales = data.add(k / BLOCK * block_bytes);
            codes::prefetch::<S, CODE>(s, data, k, group, scale_bytes);
            let mut scales = [(s.zero(), s.zero()); 2];
            for (half, of) in scales[..halves].iter_mut().enumerate() {
                *of = codes::scales::<S, HALVES, OFFSET>(s, &quant, all_scales, group * halves + half);
                if !OFFSET {
                    of.1 = s.mul(s.splat(-f32::from(quant.zero)), of.0);
                }
            }
            let scales = [scales[0], scales[halves - 1]];
            if codes::bits(CODE) == 4 {
                let table = s.load_u8(quant.levels().as_ptr());
                for quad in 0..4 {
                    let both = s.load_bytes(block.add(64 * quad));
                    let codes = [
                        s.pick::<0>(table, both),
                        s.pick::<8>(table, both),
                        s.pick::<16>(table, both),
                        s.pick::<24>(table, both),
                    ];
                    store_weights(s, to.add(QUAD_BYTES * quad), codes, scales[0]);
                    let codes = [
                        s.pick::<4>(table, both),
                        s.pick::<12>(table, both),
                        s.pick::<20>(table, both),
                        s.pick::<28>(table, both),
                    ];
                    store_weights(s, to.add(QUAD_BYTES * (quad + 4)), codes, scales[1]);
                }
                return;
            }
            for (quad, all) in codes::levels::<S, CODE>(s, block, quant.levels()).into_iter().enumerate() {
                let codes = [s.byte::<0>(all), s.byte::<1>(all), s.byte::<2>(all), s.byte::<3>(all)];
                let codes = [s.float(codes[0]), s.float(codes[1]), s.float(codes[2]), s.float(codes[3])];
                store_weights(s, to.add(QUAD_BYTES * quad), codes, scales[quad / 4]);
            }
        }
    }
}

/// Stores the upper halves of four consecutive elements of sixteen columns as the unit takes its second operand: the first and third side
/// by side for each column, then the second and fourth.
///
/// # Safety
/// `to` is valid for writing [`QUAD_BYTES`].
#[inline(always)]
unsafe fn store_quad<S: Simd>(s: S, to: *mut u8, elements: [S::F; 4]) {
    // SAFETY: the caller's word.
    unsafe {
        s.store(to.cast(), s.upper_halves(elements[0], elements[2]));
        s.store(to.add(QUAD_BYTES / 2).cast(), s.upper_halves(elements[1], elements[3]));
    }
}

/// Scales and stores four elements.
///
/// # Safety
/// As for [`store_quad`].
#[inline(always)]
unsafe fn store_weights<S: Simd>(s: S, to: *mut u8, codes: [S::F; 4], (scale, offset): (S::F, S::F)) {
    let mut weights = [s.zero(); 4];
    for (weight, code) in weights.iter_mut().zip(codes) {
        *weight = round_up(s, s.fma(code, scale, offset));
    }
    // SAFETY: the caller's word.
    unsafe { store_quad(s, to, weights) }
}

/// Weights that are bfloat16 already.
#[derive(Clone, Copy)]
struct Plain {
    data: *const u8,
}

impl Unpack for Plain {
    #[inline(always)]
    unsafe fn group<S: Simd>(self, s: S, group: usize, to: *mut u8) {
        // SAFETY: the panel has the group, element after element for all outputs; the rest is the caller's word.
        unsafe {
            let from = self.data.add(group * BLOCK * 2 * PANEL);
            for line in 0..BLOCK * 2 * PANEL / 64 {
                s.prefetch(from.wrapping_add(codes::PREFETCH + 64 * line));
            }
            for quad in 0..BLOCK / 4 {
                let mut elements = [s.zero(); 4];
                for (i, element) in elements.iter_mut().enumerate() {
                    *element = s.load_bf16(from.add((4 * quad + i) * 2 * PANEL));
                }
                store_quad(s, to.add(QUAD_BYTES * quad), elements);
            }
        }
    }
}
