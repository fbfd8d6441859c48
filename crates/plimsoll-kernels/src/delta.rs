//! Recurrent layers with a state of one matrix of `key_dim` × `value_dim` a head, row by row: the gated delta rule, and Mamba-2's.
//!
//! For each row, with decay d = e^g, write strength b, and q, k, v of the row:
//! kept = Sᵀk, δ = (v − d·kept)·b, out = d·Sᵀq + δ·(k·q), then S = d·S + k⊗δ. This is the rule of Gated DeltaNet (Yang et al., 2024,
//! arXiv 2412.06464). Both products are taken before the update, so each element of S is read and written once per row.
//! Mamba-2 (Dao, Gu 2024, arXiv 2405.21060) has δ = v·b instead, and adds skip·v to out: k is its B, q its C, b its time step.
//!
//! Columns of S are independent. A *tile* of sixteen columns stays in the first-level cache while all rows of a span pass through it in
//! order. Prompts, decoding and verified drafts therefore share one arithmetic: the division of rows into spans, or of spans into
//! steps, changes no bit. A head's matrix is stored tile after tile, each with `key_dim` rows of its columns; only this module depends
//! on that.

use std::ops::Range;

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// Columns of a state matrix that are stored together.
pub const STATE_TILE: usize = LANES;
/// Tiles that advance together if there are registers for it: they share every broadcast of k and q.
const PAIR: usize = 2;

/// A value in the `out` of [`StateSlots`]: the state after this row is not stored.
pub const NO_SLOT: u32 = u32::MAX;

/// The memory of a span's states: slot i is at `base + i · stride`.
#[derive(Clone, Copy)]
pub struct StateSlots<'a> {
    /// The used part of slot 0 (a head's matrix, a channel's history).
    pub base: *mut f32,
    /// Distance of two slots, in floats.
    pub stride: usize,
    /// The slot with the starting state; none: zeros.
    pub start: Option<u32>,
    /// For each row the slot that receives the state after it, or [`NO_SLOT`].
    pub out: &'a [u32],
}

impl StateSlots<'_> {
    /// Returns the starting state, or null for zeros.
    ///
    /// # Safety
    /// The slot is within the states.
    pub(crate) unsafe fn start(&self) -> *const f32 {
        // SAFETY: this function's contract.
        self.start.map_or(std::ptr::null(), |slot| unsafe { self.base.add(slot as usize * self.stride) })
    }

    /// Returns the place for the state after `row`, or null if it is not stored.
    ///
    /// # Safety
    /// The slot is within the states.
    pub(crate) unsafe fn out(&self, row: usize) -> *mut f32 {
        match self.out[row] {
            NO_SLOT => std::ptr::null_mut(),
            // SAFETY: this function's contract.
            slot => unsafe { self.base.add(slot as usize * self.stride) },
        }
    }
}

/// The value that a row writes into the state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StateRule {
    /// The row's value minus the state's value for the row's key: Gated DeltaNet.
    Delta,
    /// The row's value. The output gets `skip` times the value added: Mamba-2.
    Additive {
        /// The factor of the value in the output.
        skip: f32,
    },
}

/// One head's inputs in one span: row r of q, k and v at `r · ld`, of decay and beta at `r · gate_ld`.
#[derive(Clone, Copy)]
pub struct DeltaInput<'a> {
    /// Queries, normalised and scaled, from the head's first element.
    pub q: &'a [f32],
    /// Keys, normalised.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Distance of two rows, in floats.
    pub ld: usize,
    /// Factor on the old state: e^g, as [`delta_gates`] computes it.
    pub decay: &'a [f32],
    /// Write strength: the factor on the written value.
    pub beta: &'a [f32],
    /// Distance of two rows of gates, in floats.
    pub gate_ld: usize,
    /// Rows of the state matrix.
    pub key_dim: usize,
    /// Columns of the state matrix.
    pub value_dim: usize,
    /// The value that a row writes.
    pub rule: StateRule,
}

/// The output: row r at `ptr + r · ld`, with `value_dim` floats. Only the columns of the tiles are written.
#[derive(Clone, Copy)]
pub struct DeltaOutput {
    /// Row 0, the head's first column.
    pub ptr: *mut f32,
    /// Distance of two rows, in floats.
    pub ld: usize,
}

/// Floats of scratch that [`gated_delta`] needs.
pub fn delta_scratch_len(key_dim: usize) -> usize {
    PAIR * STATE_TILE * key_dim
}

/// Advances `tiles` of one head's state over the rows of a span (as many as `slots.out` has), as the module's head describes.
///
/// Panics if the inputs, the tiles or the scratch do not fit.
///
/// # Safety
/// Every slot named in `slots` is valid for `key_dim · value_dim` floats at its place, and nothing else accesses the
/// columns of `tiles` in it, nor those in the output, during the call (a slot to start from may be read by others
/// unless it is written here).
pub unsafe fn gated_delta(
    isa: Isa,
    input: &DeltaInput<'_>,
    tiles: Range<usize>,
    slots: &StateSlots<'_>,
    scratch: &mut [f32],
    out: DeltaOutput,
) {
    let DeltaInput { key_dim, value_dim, .. } = *input;
    let Some(last) = slots.out.len().checked_sub(1) else { return };
    let holds = |values: &[f32], ld: usize, width: usize| values.len() >= last * ld + width;
    assert!(holds(input.q, input.ld, key_dim) && holds(input.k, input.ld, key_dim), "queries and keys of {last} rows");
    assert!(holds(input.v, input.ld, value_dim), "values of {last} rows");
    assert!(holds(input.decay, input.gate_ld, 1) && holds(input.beta, input.gate_ld, 1), "gates of {last} rows");
    assert!(tiles.end <= value_dim.div_ceil(STATE_TILE), "tiles {tiles:?} of {value_dim} columns");
    assert!(scratch.len() >= delta_scratch_len(key_dim), "{} floats of scratch", scratch.len());
    match input.rule {
        StateRule::Delta => advance::<true>(isa, input, tiles, slots, scratch, out),
        StateRule::Additive { .. } => advance::<false>(isa, input, tiles, slots, scratch, out),
    }
}

/// [`gated_delta`] after its checks; its contract holds here. `CORRECT`: by [`StateRule::Delta`].
fn advance<const CORRECT: bool>(
    isa: Isa,
    input: &DeltaInput<'_>,
    tiles: Range<usize>,
    slots: &StateSlots<'_>,
    scratch: &mut [f32],
    out: DeltaOutput,
) {
    let (mut tile, whole_tiles) = (tiles.start, input.value_dim / STATE_TILE);
    while tile < tiles.end {
        let whole = whole_tiles.min(tiles.end) - tile.min(whole_tiles);
        if isa >= Isa::Avx512 && whole >= PAIR {
            isa.run_widest(Tiles::<PAIR, false, CORRECT> { input, slots, tile, scratch, out });
            tile += PAIR;
        } else if whole > 0 {
            isa.run(Tiles::<1, false, CORRECT> { input, slots, tile, scratch, out });
            tile += 1;
        } else {
            isa.run(Tiles::<1, true, CORRECT> { input, slots, tile, scratch, out });
            tile += 1;
        }
    }
}

/// `P` neighbouring tiles. `PART`: the last tile of a head with a number of columns that is not a multiple of sixteen.
struct Tiles<'a, const P: usize, const PART: bool, const CORRECT: bool> {
    input: &'a DeltaInput<'a>,
    slots: &'a StateSlots<'a>,
    tile: usize,
    scratch: &'a mut [f32],
    out: DeltaOutput,
}

/// A state of `P` tiles in memory; tile p starts at `p · step`.
#[derive(Clone, Copy)]
struct At<const P: usize> {
    ptr: *mut f32,
    step: usize,
    /// Columns of a tile, which is also the distance of its rows in floats.
    width: usize,
}

impl<const P: usize> At<P> {
    /// Loads row `row` of tile `p`.
    ///
    /// # Safety
    /// Both are within the state, which can be read.
    #[inline(always)]
    unsafe fn load<S: Simd, const PART: bool>(self, s: S, p: usize, row: usize) -> S::F {
        // SAFETY: this function's contract; a whole tile's row is sixteen floats.
        unsafe {
            let at = self.ptr.add(p * self.step + row * self.width);
            if PART { s.load_part(std::slice::from_raw_parts(at, self.width), 0.0) } else { s.load(at) }
        }
    }

    /// # Safety
    /// As for [`Self::load`], and the state can be written.
    #[inline(always)]
    unsafe fn store<S: Simd, const PART: bool>(self, s: S, p: usize, row: usize, v: S::F) {
        // SAFETY: as above.
        unsafe {
            let at = self.ptr.add(p * self.step + row * self.width);
            if PART { s.store_part(std::slice::from_raw_parts_mut(at, self.width), v) } else { s.store(at, v) }
        }
    }
}

impl<const P: usize, const PART: bool, const CORRECT: bool> Kernel for Tiles<'_, P, PART, CORRECT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DeltaInput { q, k, v, ld, decay, beta, gate_ld, key_dim, value_dim, rule } = *self.input;
        let skip = s.splat(if let StateRule::Additive { skip } = rule { skip } else { 0.0 });
        let rows = self.slots.out.len();
        let first = self.tile * STATE_TILE;
        let step = STATE_TILE * key_dim;
        let width = if PART { value_dim - first } else { STATE_TILE };
        let at = |ptr: *mut f32| At::<P> { ptr, step, width };
        if self.slots.start.is_none() {
            self.scratch[..P * step].fill(0.0);
        }
        let scratch = at(self.scratch.as_mut_ptr());
        // SAFETY: slots are within the states (contract of `gated_delta`), and so are the tiles of each (checked there).
        let mut state = match unsafe { self.slots.start() } {
            start if start.is_null() => scratch,
            // SAFETY: as above.
            start => at(unsafe { start.add(self.tile * step) }.cast_mut()),
        };
        let (mut kept, mut asked) = ([s.zero(); P], [s.zero(); P]);
        if self.slots.start.is_some() {
            for (i, (k, q)) in k[..key_dim].iter().zip(&q[..key_dim]).enumerate() {
                let (k, q) = (s.splat(*k), s.splat(*q));
                for p in 0..P {
                    // SAFETY: inside the state's tiles.
                    let old = unsafe { state.load::<S, PART>(s, p, i) };
                    (kept[p], asked[p]) = products::<S, CORRECT>(s, old, [k, q], (kept[p], asked[p]));
                }
            }
        }
        for row in 0..rows {
            let (k_now, q_now) = (&k[row * ld..][..key_dim], &q[row * ld..][..key_dim]);
            let (decay, beta) = (s.splat(decay[row * gate_ld]), s.splat(beta[row * gate_ld]));
            let overlap = s.splat(dot(s, k_now, q_now));
            let mut delta = [s.zero(); P];
            for p in 0..P {
                let column = first + p * STATE_TILE;
                let values = s.load_part(&v[row * ld + column..][..width], 0.0);
                delta[p] = s.mul(if CORRECT { s.sub(values, s.mul(decay, kept[p])) } else { values }, beta);
                let start = row * self.out.ld + column;
                // SAFETY: the row's columns of these tiles are this call's to write.
                let out = unsafe { std::slice::from_raw_parts_mut(self.out.ptr.add(start), width) };
                let result = s.fma(delta[p], overlap, s.mul(decay, asked[p]));
                s.store_part(out, if CORRECT { result } else { s.fma(values, skip, result) });
            }
            // SAFETY: as for the start.
            let next = match unsafe { self.slots.out(row) } {
                out if out.is_null() => scratch,
                // SAFETY: as above.
                out => at(unsafe { out.add(self.tile * step) }),
            };
            (kept, asked) = ([s.zero(); P], [s.zero(); P]);
            if row + 1 == rows {
                for (i, k) in k_now.iter().enumerate() {
                    for (p, delta) in delta.iter().enumerate() {
                        // SAFETY: inside the tiles of both states; an element is read before it is written.
                        unsafe {
                            let old = state.load::<S, PART>(s, p, i);
                            next.store::<S, PART>(s, p, i, s.fma(s.splat(*k), *delta, s.mul(old, decay)));
                        }
                    }
                }
                return;
            }
            let (k_next, q_next) = (&k[(row + 1) * ld..][..key_dim], &q[(row + 1) * ld..][..key_dim]);
            for i in 0..key_dim {
                let (k_now, k_next, q_next) = (s.splat(k_now[i]), s.splat(k_next[i]), s.splat(q_next[i]));
                for p in 0..P {
                    // SAFETY: as above.
                    let new = unsafe {
                        let old = state.load::<S, PART>(s, p, i);
                        let new = s.fma(k_now, delta[p], s.mul(old, decay));
                        next.store::<S, PART>(s, p, i, new);
                        new
                    };
                    (kept[p], asked[p]) = products::<S, CORRECT>(s, new, [k_next, q_next], (kept[p], asked[p]));
                }
            }
            state = next;
        }
    }
}

/// Adds a state's row, times the key and times the query, to the two sums. Only a correction needs the first one.
#[inline(always)]
fn products<S: Simd, const CORRECT: bool>(
    s: S,
    row: S::F,
    [k, q]: [S::F; 2],
    (kept, asked): (S::F, S::F),
) -> (S::F, S::F) {
    (if CORRECT { s.fma(row, k, kept) } else { kept }, s.fma(row, q, asked))
}

/// a · b: sixteen partial sums, which are then added as one tree.
#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.zero();
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sum = s.fma(s.load_part(a, 0.0), s.load_part(b, 0.0), sum);
    }
    s.sum(sum)
}

/// Computes one row's gates in place, one of each per head: a becomes the decay e^(−e^a_log · softplus(a + dt_bias)), b the write
/// strength sigmoid(b). Panics if lengths differ.
pub fn delta_gates(isa: Isa, a: &mut [f32], b: &mut [f32], a_log: &[f32], dt_bias: &[f32]) {
    let heads = a.len();
    assert!(b.len() == heads && a_log.len() == heads && dt_bias.len() == heads, "gates of {heads} heads");
    isa.run(Gates { a, b, a_log, dt_bias });
}

/// Computes one row's time steps of Mamba-2 in place, one per head: dt becomes softplus(dt + dt_bias), clamped to `limits`, and `decay`
/// e^(−e^a_log · dt). Panics if lengths differ.
pub fn time_steps(isa: Isa, dt: &mut [f32], decay: &mut [f32], a_log: &[f32], dt_bias: &[f32], limits: [f32; 2]) {
    let heads = dt.len();
    assert!(decay.len() == heads && a_log.len() == heads && dt_bias.len() == heads, "time steps of {heads} heads");
    isa.run(TimeSteps { dt, decay, a_log, dt_bias, limits });
}

struct TimeSteps<'a> {
    dt: &'a mut [f32],
    decay: &'a mut [f32],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    limits: [f32; 2],
}

impl Kernel for TimeSteps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [least, most] = self.limits.map(|limit| s.splat(limit));
        let steps = self.dt.chunks_mut(LANES).zip(self.decay.chunks_mut(LANES));
        let vectors = self.a_log.chunks(LANES).zip(self.dt_bias.chunks(LANES));
        for ((dt, decay), (a_log, dt_bias)) in steps.zip(vectors) {
            let time = math::softplus(s, s.add(s.load_part(dt, 0.0), s.load_part(dt_bias, 0.0)));
            let time = s.min(s.max(time, least), most);
            let rate = math::exp(s, s.load_part(a_log, 0.0));
            s.store_part(dt, time);
            s.store_part(decay, math::exp(s, s.sub(s.zero(), s.mul(rate, time))));
        }
    }
}

struct Gates<'a> {
    a: &'a mut [f32],
    b: &'a mut [f32],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
}

impl Kernel for Gates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let gates = self.a.chunks_mut(LANES).zip(self.b.chunks_mut(LANES));
        let vectors = self.a_log.chunks(LANES).zip(self.dt_bias.chunks(LANES));
        for ((a, b), (a_log, dt_bias)) in gates.zip(vectors) {
            let time = math::softplus(s, s.add(s.load_part(a, 0.0), s.load_part(dt_bias, 0.0)));
            let rate = math::exp(s, s.load_part(a_log, 0.0));
            s.store_part(a, math::exp(s, s.sub(s.zero(), s.mul(rate, time))));
            let strength = math::sigmoid(s, s.load_part(b, 0.0));
            s.store_part(b, strength);
        }
    }
}
