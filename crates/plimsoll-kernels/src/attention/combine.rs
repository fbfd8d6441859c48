//! Combines partial results of splits, and turns the result into the output. A partial result is a maximum, a sum relative to it, and
//! an accumulator.

use super::{AttendOutput, HEADER};
use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// Sets a partial result to the one of no positions.
pub(super) fn clear(state: &mut [f32]) {
    state.fill(0.0);
    state[0] = f32::NEG_INFINITY;
}

/// # Safety
/// The output of the query is valid for writing.
pub(super) unsafe fn finish(
    isa: Isa,
    (heads, width): (usize, usize),
    query: usize,
    (state, sinks): (&mut [f32], Option<&[f32]>),
    out: AttendOutput,
) {
    let (row, head) = (query / heads, query % heads);
    // SAFETY: the caller's word on the output.
    let out = unsafe { std::slice::from_raw_parts_mut(out.ptr.add(row * out.ld + head * width), width) };
    isa.run(Finish { state, sink: sinks.map(|sinks| sinks[head]), out });
}

/// Adds later partial results to earlier ones.
pub(super) struct Merge<'a> {
    pub(super) len: usize,
    pub(super) states: &'a mut [f32],
    pub(super) partials: &'a [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (state, partial) in self.states.chunks_exact_mut(self.len).zip(self.partials.chunks_exact(self.len)) {
            // If one side saw no positions, the other is the result, unchanged, however many empty splits there were.
            if partial[1] == 0.0 {
                continue;
            }
            if state[1] == 0.0 {
                state.copy_from_slice(partial);
                continue;
            }
            let (m1, m2) = (s.splat(state[0]), s.splat(partial[0]));
            let m = s.max(m1, m2);
            let (a, b) = (math::exp(s, s.sub(m1, m)), math::exp(s, s.sub(m2, m)));
            let l = s.fma(s.splat(state[1]), a, s.mul(s.splat(partial[1]), b));
            state[0] = s.to_array(m)[0];
            state[1] = s.to_array(l)[0];
            let partial = partial[HEADER..].as_chunks::<LANES>().0;
            for (acc, partial) in state[HEADER..].as_chunks_mut::<LANES>().0.iter_mut().zip(partial) {
                let sum = s.fma(s.load_part(acc, 0.0), a, s.mul(s.load_part(partial, 0.0), b));
                s.store_part(acc, sum);
            }
        }
    }
}

/// Divides by the sum, the head's sink included.
struct Finish<'a> {
    state: &'a [f32],
    sink: Option<f32>,
    out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.state[1] == 0.0 {
            self.out.fill(0.0);
            return;
        }
        let mut factor = s.div(s.splat(1.0), s.splat(self.state[1]));
        if let Some(sink) = self.sink {
            let (max, sink) = (s.splat(self.state[0]), s.splat(sink));
            let m = s.max(max, sink);
            let (a, b) = (math::exp(s, s.sub(max, m)), math::exp(s, s.sub(sink, m)));
            factor = s.div(a, s.fma(s.splat(self.state[1]), a, b));
        }
        let acc = self.state[HEADER..].as_chunks::<LANES>().0;
        for (out, acc) in self.out.chunks_mut(LANES).zip(acc) {
            s.store_part(out, s.mul(s.load_part(acc, 0.0), factor));
        }
    }
}
