//! The delta rule over heads of 128 × 128: one row a sequence with the states in memory, and many rows of one state.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use plimsoll_kernels::*;

use crate::{Aligned, isa};

const DIM: usize = 128;
const SIZE: usize = DIM * DIM;
const HEADS: usize = 32;
const SLOTS: usize = 64;
/// Rows that stay with their state.
const ROWS: usize = 64;

struct Rule {
    states: Aligned<f32>,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    scratch: Aligned<f32>,
    out: Vec<f32>,
}

impl Rule {
    fn new() -> Rule {
        Rule {
            states: Aligned::new(SIZE * HEADS * SLOTS, |_| 0.01),
            qkv: (0..ROWS * 3 * DIM).map(|i| (i as f32 * 0.7).sin() * 0.1).collect(),
            gates: vec![0.9; ROWS],
            scratch: Aligned::new(delta_scratch_len(DIM), |_| 0.0),
            out: vec![0.0; ROWS * DIM],
        }
    }

    /// As many rows of a head as slots are named, starting from the slot `from`.
    fn run(&mut self, head: usize, from: usize, named: &[u32]) {
        let input = DeltaInput {
            q: &self.qkv,
            k: &self.qkv[DIM..],
            v: &self.qkv[2 * DIM..],
            ld: 3 * DIM,
            decay: &self.gates,
            beta: &self.gates,
            gate_ld: 1,
            key_dim: DIM,
            value_dim: DIM,
            rule: StateRule::Delta,
        };
        let base = self.states[head * SIZE..].as_mut_ptr();
        let slots = StateSlots { base, stride: HEADS * SIZE, start: Some(from as u32), out: named };
        let target = DeltaOutput { ptr: self.out.as_mut_ptr(), ld: DIM };
        // SAFETY: slots are within `states`, rows within `out`.
        unsafe { gated_delta(isa(), &input, 0..DIM / STATE_TILE, &slots, &mut self.scratch, target) };
    }
}

/// One row of one head after another; its state is read and written, `ahead` slots further on.
fn one_row(bencher: Bencher, ahead: usize) {
    let mut rule = Rule::new();
    let mut turn = 0;
    bencher.counter(BytesCount::new(8 * SIZE)).bench_local(|| {
        let slot = turn / HEADS;
        rule.run(turn % HEADS, slot, &[((slot + ahead) % SLOTS) as u32]);
        turn = (turn + 1) % (HEADS * SLOTS);
    });
}

#[divan::bench(sample_size = 16, sample_count = 5000, max_time = 0.5)]
fn one_row_in_place(bencher: Bencher) {
    one_row(bencher, 0);
}

#[divan::bench(sample_size = 16, sample_count = 5000, max_time = 0.5)]
fn one_row_to_another_slot(bencher: Bencher) {
    one_row(bencher, 1);
}

/// Two products, decay, update: four multiplications and four additions an element, two of them one instruction.
#[divan::bench(max_time = 0.5, counters = [ItemsCount::new(7 * ROWS * SIZE)])]
fn rows_64(bencher: Bencher) {
    let mut rule = Rule::new();
    let mut named = [NO_SLOT; ROWS];
    named[ROWS - 1] = 0;
    let mut head = 0;
    bencher.bench_local(|| {
        rule.run(head, 0, &named);
        head = (head + 1) % HEADS;
    });
}
