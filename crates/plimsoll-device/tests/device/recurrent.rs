//! Recurrent layers on the CPU device: a row's bits depend on its own sequence's rows alone. Chunks, neighbours, threads and slots'
//! former contents must not show, and a row verified as a draft is the row stepped to.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    CpuDevice, Declare, Device, DtypePolicy, GatedDelta, Isa, NO_STATE, PlanDevice, SeqSpan, StepInput, WeightTable,
};

const LAYERS: usize = 2;
const ROWS: usize = 23;

/// Two recurrent layers with odd widths.
fn model() -> (WeightTable, [GatedDelta; LAYERS]) {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let mut random = Random::new(1);
    let mut values = |n: usize| declare.values(random.floats(n));
    let (key_heads, value_heads, key_dim, value_dim, taps) = (2, 6, 20, 40, 4);
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    let specs = std::array::from_fn(|layer| GatedDelta {
        layer,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv: values(channels * taps),
        taps,
        // One layer of either order of heads.
        tiled: layer == 1,
        a_log: values(value_heads),
        dt_bias: values(value_heads),
    });
    (declare.finish(), specs)
}

fn new_device(slots: usize, threads: usize, isa: Isa) -> (CpuDevice, [GatedDelta; LAYERS]) {
    let (table, specs) = model();
    let shape = shape(Some(specs[0].state_shape(LAYERS)));
    (device(&table, &checkpoint("llama"), &shape, slots, threads, isa), specs)
}

/// A sequence's inputs, row by row: q|k|v, a and b.
fn inputs(spec: &GatedDelta, seed: u64) -> Vec<[Vec<f32>; 3]> {
    let mut random = Random::new(seed + 100);
    let widths = [spec.channels(), spec.value_heads, spec.value_heads];
    (0..ROWS).map(|_| widths.map(|width| random.floats(width))).collect()
}

/// Some rows of a sequence: which, from which slot, and where each state goes.
struct Part<'a> {
    rows: &'a [[Vec<f32>; 3]],
    state: Option<u32>,
    out: Vec<u32>,
}

/// One step; the outputs of every part's rows, both layers' side by side.
fn step(device: &mut CpuDevice, specs: &[GatedDelta; LAYERS], parts: &[Part<'_>]) -> Vec<Vec<Vec<u32>>> {
    device.begin_step();
    let mut seqs = Vec::new();
    let mut first_row = 0;
    for part in parts {
        let rows = part.rows.len();
        seqs.push(SeqSpan { first_row, rows, start: 0, pages_at: 0, pages: 0, seen_from: 0, state: part.state });
        first_row += rows;
    }
    let state_out: Vec<u32> = parts.iter().flat_map(|part| part.out.clone()).collect();
    let step = StepInput { seqs: &seqs, state_out: &state_out, ..StepInput::default() };
    let column = |which: usize| -> Vec<Vec<f32>> {
        parts.iter().flat_map(|part| part.rows.iter().map(move |row| row[which].clone())).collect()
    };
    let mut outputs: Vec<Vec<u32>> = vec![Vec::new(); first_row];
    for spec in specs {
        let [qkv, a, b] = [0, 1, 2].map(|which| matrix(device, &column(which)));
        let out = device.temp(first_row, spec.value_heads * spec.value_dim).unwrap();
        device.gated_delta(spec, out, qkv, a, b, &step).unwrap();
        rows(device, out).into_iter().zip(&mut outputs).for_each(|(row, all)| all.extend(row));
    }
    let mut outputs = outputs.into_iter();
    parts.iter().map(|part| outputs.by_ref().take(part.rows.len()).collect()).collect()
}

/// A sequence stepped row by row, alone, on one thread of plain Rust.
fn reference(seed: u64) -> Vec<Vec<u32>> {
    let (mut device, specs) = new_device(1, 1, Isa::Portable);
    let all = inputs(&specs[0], seed);
    let mut state = None;
    let mut outputs = Vec::new();
    for row in all.chunks(1) {
        outputs.extend(step(&mut device, &specs, &[Part { rows: row, state, out: vec![0] }]).remove(0));
        state = Some(0);
    }
    outputs
}

/// Leaves NaN in every slot.
fn poison(device: &mut CpuDevice, specs: &[GatedDelta; LAYERS], slots: u32) {
    let widths = [specs[0].channels(), specs[0].value_heads, specs[0].value_heads];
    let row = [widths.map(|width| vec![f32::NAN; width])];
    for slot in 0..slots {
        // Four rows fill the history too.
        for step_no in 0..4 {
            let state = (step_no > 0).then_some(slot);
            let out = step(device, specs, &[Part { rows: &row, state, out: vec![slot] }]);
            assert!(out[0][0].iter().all(|bits| f32::from_bits(*bits).is_nan()));
        }
    }
}

#[test]
fn chunks_neighbours_and_threads_do_not_show() {
    let expected: Vec<Vec<Vec<u32>>> = (0..4).map(reference).collect();
    for (threads, isa) in [(1, Isa::detect()), (2, Isa::detect()), (3, Isa::Portable), (4, Isa::detect())] {
        let (mut device, specs) = new_device(8, threads, isa);
        poison(&mut device, &specs, 8);
        let all: Vec<_> = (0..4).map(|seed| inputs(&specs[0], seed)).collect();
        let mut random = Random::new(threads as u64);
        let mut done = [0usize; 4];
        let mut at: [Option<u32>; 4] = [None; 4];
        // Sequences join, advance by chunks of any size and change slots, or stay in place.
        while done.iter().any(|done| *done < ROWS) {
            let mut parts = Vec::new();
            let mut who = Vec::new();
            for seq in 0..4 {
                let rows = random.below(6).min(ROWS - done[seq]);
                if rows == 0 {
                    continue;
                }
                let slot = seq as u32 * 2 + random.below(2) as u32;
                let mut out = vec![NO_STATE; rows];
                out[rows - 1] = slot;
                parts.push(Part { rows: &all[seq][done[seq]..][..rows], state: at[seq], out });
                who.push((seq, rows, slot));
            }
            if parts.is_empty() {
                continue;
            }
            for ((seq, rows, slot), outputs) in who.into_iter().zip(step(&mut device, &specs, &parts)) {
                assert!(outputs == expected[seq][done[seq]..][..rows], "sequence {seq} row {} {threads}", done[seq]);
                (done[seq], at[seq]) = (done[seq] + rows, Some(slot));
            }
        }
    }
}

#[test]
fn every_verified_row_leaves_the_state_of_stepping_to_it() {
    let expected = reference(7);
    let (mut device, specs) = new_device(5, 2, Isa::detect());
    poison(&mut device, &specs, 5);
    let all = inputs(&specs[0], 7);
    let wrong = inputs(&specs[0], 8);
    let mut random = Random::new(3);
    // A ring of five slots: four drafts, of which some prefix is right.
    step(&mut device, &specs, &[Part { rows: &all[..1], state: None, out: vec![0] }]);
    let (mut done, mut current) = (1, 0u32);
    while done < ROWS {
        let rows = 5.min(ROWS - done);
        let right = 1 + random.below(rows);
        let drafted: Vec<_> = (0..rows).map(|i| if i < right { &all } else { &wrong }[done + i].clone()).collect();
        // The last row's state may go where the first one came from.
        let out = (0..rows as u32).map(|row| (current + 1 + row) % 5).collect();
        let outputs = step(&mut device, &specs, &[Part { rows: &drafted, state: Some(current), out }]).remove(0);
        assert!(outputs[..right] == expected[done..][..right], "rows from {done}");
        done += right;
        current = (current + right as u32) % 5;
    }
}

#[test]
fn a_state_may_be_read_by_many() {
    let expected = reference(2);
    let (mut device, specs) = new_device(4, 3, Isa::detect());
    let all = inputs(&specs[0], 2);
    let out = |rows: usize, slot| (1..=rows).map(|row| if row == rows { slot } else { NO_STATE }).collect::<Vec<_>>();
    step(&mut device, &specs, &[Part { rows: &all[..9], state: None, out: out(9, 3) }]);
    let part = |rows: usize, slot| Part { rows: &all[9..9 + rows], state: Some(3), out: out(rows, slot) };
    let outputs = step(&mut device, &specs, &[part(3, 0), part(7, 1), part(1, 2)]);
    for outputs in outputs {
        assert!(outputs == expected[9..][..outputs.len()]);
    }
}

#[test]
fn value_heads_are_served_by_their_key_heads() {
    let (mut device, specs) = new_device(1, 2, Isa::detect());
    let all = inputs(&specs[0], 4);
    let part = |rows| Part { rows, state: None, out: vec![0] };
    let expected = step(&mut device, &specs, &[part(&all[..1])]).remove(0).remove(0);
    let (width, dim) = (specs[0].value_heads * specs[0].value_dim, specs[0].key_dim);
    // Another key of head 1, in both layers: exactly the value heads that it serves notice.
    let mut changed = all[..1].to_vec();
    changed[0][0][(specs[0].key_heads + 1) * dim] += 0.5;
    let outputs = step(&mut device, &specs, &[part(&changed)]).remove(0).remove(0);
    for (layer, served) in [[3, 4, 5], [1, 3, 5]].into_iter().enumerate() {
        for head in 0..specs[0].value_heads {
            let columns = layer * width + head * specs[0].value_dim..;
            let same = outputs[columns.clone()][..40] == expected[columns][..40];
            assert_eq!(same, !served.contains(&head), "layer {layer} head {head}");
        }
    }
}

#[test]
fn the_plan_counts_states_read_and_written() {
    let (table, specs) = model();
    let mut plan = PlanDevice::new(&table, &shape(None).kv);
    let span =
        |first_row, rows, state| SeqSpan { first_row, rows, start: 0, pages_at: 0, pages: 0, seen_from: 0, state };
    let seqs = [span(0, 3, None), span(3, 1, Some(2))];
    let state_out = [0, NO_STATE, 1, 2];
    let step = StepInput { seqs: &seqs, state_out: &state_out, ..StepInput::default() };
    let spec = &specs[1];
    let [qkv, a, b, out] = [spec.channels(), spec.value_heads, spec.value_heads, spec.value_heads * spec.value_dim]
        .map(|cols| plan.temp(4, cols).unwrap());
    let before = plan.high_water();
    plan.gated_delta(spec, out, qkv, a, b, &step).unwrap();
    assert_eq!(plan.high_water(), before, "no workspace of its own");
    assert_eq!(plan.work().state_bytes, 4 * spec.state_shape(1).slot_bytes() as u64);
    let one_by_hand = (320 * 3 * 4) as u64 + (6 * 20 * 40 * 4) as u64;
    assert_eq!(spec.state_shape(1).slot_bytes() as u64, one_by_hand, "whole cache lines as they are");
    assert!(plan.work().flops > 0);
}

#[test]
#[should_panic(expected = "state slot 1 of 1")]
fn a_slot_that_is_not_there_is_refused() {
    let (mut device, specs) = new_device(1, 1, Isa::detect());
    let all = inputs(&specs[0], 0);
    step(&mut device, &specs, &[Part { rows: &all[..1], state: None, out: vec![1] }]);
}
