//! Causal convolutions and the recurrence of Mamba-2 on the CPU device: chunks, neighbours, threads, instruction sets and slots' former
//! contents must not show.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    CausalConv, CpuDevice, Declare, Device, DtypePolicy, Isa, NO_STATE, PlanDevice, SelectiveScan, SeqSpan, StateShape,
    StepInput, WeightTable,
};

const ROWS: usize = 23;
const TAPS: usize = 4;

/// Two Mamba-2 layers with odd widths, wider than the device cuts convolutions.
struct Model {
    table: WeightTable,
    layers: [(CausalConv, SelectiveScan); 2],
}

fn model() -> Model {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let mut random = Random::new(1);
    let mut values = |n: usize| declare.values(random.floats(n));
    let layers = std::array::from_fn(|layer| {
        let (heads, groups, state_dim, head_dim) = (6, 2, 20, 40);
        let [a_log, dt_bias, skip] = [(); 3].map(|()| values(heads));
        let limits = if layer == 0 { [0.0, f32::INFINITY] } else { [0.1, 1.0] };
        let scan = SelectiveScan { layer, heads, groups, state_dim, head_dim, a_log, dt_bias, skip, limits };
        let channels = scan.channels();
        let (weight, bias) = (values(channels * TAPS), (layer == 0).then(|| values(channels)));
        (CausalConv { layer, channels, weight, bias, taps: TAPS, silu: layer == 0 }, scan)
    });
    Model { table: declare.finish(), layers }
}

fn state(model: &Model) -> StateShape {
    model.layers[0].1.state_shape(2, TAPS)
}

fn new_device(model: &Model, slots: usize, threads: usize, isa: Isa) -> CpuDevice {
    device(&model.table, &checkpoint("llama"), &shape(Some(state(model))), slots, threads, isa)
}

/// A sequence's inputs, row by row: values, B and C; two gates of the convolution; time steps.
fn inputs(model: &Model, seed: u64) -> Vec<[Vec<f32>; 4]> {
    let mut random = Random::new(seed + 100);
    let scan = &model.layers[0].1;
    let widths = [scan.channels(), scan.channels(), scan.channels(), scan.heads];
    (0..ROWS).map(|_| widths.map(|width| random.floats(width))).collect()
}

/// Some rows of a sequence: which, from which slot, and where each state goes.
struct Part<'a> {
    rows: &'a [[Vec<f32>; 4]],
    state: Option<u32>,
    out: Vec<u32>,
}

/// One step; what the convolutions and the recurrences give for every part's rows.
fn step(device: &mut CpuDevice, model: &Model, parts: &[Part<'_>]) -> Vec<Vec<Vec<u32>>> {
    device.begin_step();
    let (mut seqs, mut first_row) = (Vec::new(), 0);
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
    for (conv, scan) in &model.layers {
        let [x, before, after, dt] = [0, 1, 2, 3].map(|which| matrix(device, &column(which)));
        let (decay, out) = (device.temp(first_row, scan.heads).unwrap(), device.temp(first_row, scan.width()).unwrap());
        device.causal_conv(conv, x, (!conv.silu).then_some([before, after]), &step);
        rows(device, x).into_iter().zip(&mut outputs).for_each(|(row, all)| all.extend(row));
        device.selective_scan(scan, out, x, [dt, decay], &step);
        rows(device, out).into_iter().zip(&mut outputs).for_each(|(row, all)| all.extend(row));
    }
    let mut outputs = outputs.into_iter();
    parts.iter().map(|part| outputs.by_ref().take(part.rows.len()).collect()).collect()
}

/// A sequence stepped row by row, alone, on one thread of plain Rust.
fn reference(model: &Model, seed: u64) -> Vec<Vec<u32>> {
    let mut device = new_device(model, 1, 1, Isa::Portable);
    let (mut state, mut outputs) = (None, Vec::new());
    for row in inputs(model, seed).chunks(1) {
        outputs.extend(step(&mut device, model, &[Part { rows: row, state, out: vec![0] }]).remove(0));
        state = Some(0);
    }
    outputs
}

/// Leaves NaN in every slot.
fn poison(device: &mut CpuDevice, model: &Model, slots: u32) {
    let row = [inputs(model, 0)[0].clone().map(|values| vec![f32::NAN; values.len()])];
    for slot in 0..slots {
        for step_no in 0..TAPS {
            let state = (step_no > 0).then_some(slot);
            step(device, model, &[Part { rows: &row, state, out: vec![slot] }]);
        }
    }
}

#[test]
fn chunks_neighbours_and_threads_do_not_show() {
    let model = model();
    let expected: Vec<Vec<Vec<u32>>> = (0..4).map(|seed| reference(&model, seed)).collect();
    assert!(expected.iter().flatten().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    for (threads, isa) in [(1, Isa::detect()), (2, Isa::detect()), (3, Isa::Portable), (4, Isa::detect())] {
        let mut device = new_device(&model, 8, threads, isa);
        poison(&mut device, &model, 8);
        let all: Vec<_> = (0..4).map(|seed| inputs(&model, seed)).collect();
        let mut random = Random::new(threads as u64);
        let (mut done, mut at): ([usize; 4], [Option<u32>; 4]) = ([0; 4], [None; 4]);
        while done.iter().any(|done| *done < ROWS) {
            let (mut parts, mut which) = (Vec::new(), Vec::new());
            for seq in 0..4 {
                let rows = random.below(6).min(ROWS - done[seq]);
                if rows == 0 {
                    continue;
                }
                let slot = seq as u32 * 2 + random.below(2) as u32;
                let mut out = vec![NO_STATE; rows];
                out[rows - 1] = slot;
                parts.push(Part { rows: &all[seq][done[seq]..][..rows], state: at[seq], out });
                which.push((seq, rows, slot));
            }
            if parts.is_empty() {
                continue;
            }
            for ((seq, rows, slot), outputs) in which.into_iter().zip(step(&mut device, &model, &parts)) {
                assert!(outputs == expected[seq][done[seq]..][..rows], "sequence {seq} row {} {threads}", done[seq]);
                (done[seq], at[seq]) = (done[seq] + rows, Some(slot));
            }
        }
    }
}

#[test]
fn every_verified_row_leaves_the_state_of_stepping_to_it() {
    let model = model();
    let expected = reference(&model, 7);
    let mut device = new_device(&model, 5, 2, Isa::detect());
    let (all, wrong) = (inputs(&model, 7), inputs(&model, 8));
    let mut random = Random::new(3);
    step(&mut device, &model, &[Part { rows: &all[..1], state: None, out: vec![0] }]);
    let (mut done, mut current) = (1, 0u32);
    while done < ROWS {
        let rows = 5.min(ROWS - done);
        let right = 1 + random.below(rows);
        let drafted: Vec<_> = (0..rows).map(|i| if i < right { &all } else { &wrong }[done + i].clone()).collect();
        // The last row's state may go where the first one came from.
        let out = (0..rows as u32).map(|row| (current + 1 + row) % 5).collect();
        let outputs = step(&mut device, &model, &[Part { rows: &drafted, state: Some(current), out }]).remove(0);
        assert!(outputs[..right] == expected[done..][..right], "rows from {done}");
        done += right;
        current = (current + right as u32) % 5;
    }
}

#[test]
fn heads_are_served_by_their_groups() {
    let model = model();
    let mut device = new_device(&model, 1, 2, Isa::detect());
    let scan = &model.layers[0].1;
    let row = &inputs(&model, 4)[..1];
    let part = |rows| Part { rows, state: None, out: vec![0] };
    let expected = step(&mut device, &model, &[part(row)]).remove(0).remove(0);
    // Another B of group 1, an element that its own channel alone depends on.
    let mut changed = row.to_vec();
    changed[0][0][scan.width() + scan.state_dim] += 0.5;
    let outputs = step(&mut device, &model, &[part(&changed)]).remove(0).remove(0);
    for head in 0..scan.heads {
        let columns = scan.channels() + head * scan.head_dim..scan.channels() + (head + 1) * scan.head_dim;
        assert_eq!(outputs[columns.clone()] == expected[columns], head < 3, "head {head}");
    }
}

#[test]
fn the_plan_counts_states_read_and_written() {
    let model = model();
    let mut plan = PlanDevice::new(&model.table, &shape(None).kv);
    let span =
        |first_row, rows, state| SeqSpan { first_row, rows, start: 0, pages_at: 0, pages: 0, seen_from: 0, state };
    let seqs = [span(0, 3, None), span(3, 1, Some(2))];
    let state_out = [0, NO_STATE, 1, 2];
    let step = StepInput { seqs: &seqs, state_out: &state_out, ..StepInput::default() };
    let (conv, scan) = &model.layers[1];
    let [x, out, dt, decay] =
        [scan.channels(), scan.width(), scan.heads, scan.heads].map(|cols| plan.temp(4, cols).unwrap());
    let before = plan.high_water();
    plan.causal_conv(conv, x, None, &step);
    plan.selective_scan(scan, out, x, [dt, decay], &step);
    assert_eq!(plan.high_water(), before, "no workspace of its own");
    // 320 channels that look back to 3 inputs, and 6 heads of 20 x 40, in whole cache lines as they are.
    assert_eq!(plan.work().state_bytes, 4 * (320 * 3 * 4 + 6 * 20 * 40 * 4));
    assert_eq!(state(&model).slot_bytes(), 2 * (320 * 3 * 4 + 6 * 20 * 40 * 4));
    assert!(plan.work().flops > 0);
}
