//! A vision encoder's operations on the device: attention of one sequence at any head width, angles in several axes, blended table
//! rows, columns; against scalar twins and against the operations that do the same for a text.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    Attention, Buf, CpuDevice, Declare, Device, DtypePolicy, EncoderShape, Isa, KvShape, ModelShape, PlanDevice,
    SeqSpan, StepInput, Unfold,
};

fn with_encoder(head_dim: usize) -> ModelShape {
    ModelShape { encoder: Some(EncoderShape::new(head_dim, 64)), ..shape(None) }
}

fn spec(heads: usize) -> Attention {
    Attention { layer: 0, heads, scale: 0.25, ..Attention::WHOLE }
}

fn filled(seed: u64, rows: usize, width: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(seed);
    (0..rows).map(|_| random.floats(width)).collect()
}

/// One sequence of `rows` rows: what comes of it, and the workspace that was planned and taken.
fn attend(rows_: usize, heads: usize, width: usize, threads: usize, isa: Isa) -> Vec<Vec<u32>> {
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let shape = with_encoder(width);
    let mut device = device(&table, &checkpoint, &shape, 0, threads, isa);
    let [q, k, v] = [1, 2, 3].map(|seed| matrix(&mut device, &filled(seed, rows_, heads * width)));
    let out = device.temp(rows_, heads * width).unwrap();
    device.attend_all(&spec(heads), out, q, k, v, &mut std::iter::once((0, rows_))).unwrap();
    let mut plan = PlanDevice::new(&table, &shape.kv);
    let [pq, pk, pv, planned] = [(); 4].map(|()| plan.temp(rows_, heads * width).unwrap());
    plan.attend_all(&spec(heads), planned, pq, pk, pv, &mut std::iter::once((0, rows_))).unwrap();
    let workspace = plan.high_water() + plimsoll_device::cpu::scratch_bytes(&shape, threads).next_multiple_of(64);
    assert!(device.memory().workspace_peak().abs_diff(workspace) < 64, "planned {workspace}");
    rows(&mut device, out)
}

/// softmax(q·k / 4)·v of one head, in double precision.
fn twin(heads: usize, width: usize, count: usize) -> Vec<Vec<f64>> {
    let [q, k, v] = [1, 2, 3].map(|seed| filled(seed, count, heads * width));
    let one = |q: &Vec<f32>| {
        let head = |h: usize| {
            let part = |row: &Vec<f32>| row[h * width..][..width].iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
            let q = part(q);
            let scores: Vec<f64> =
                k.iter().map(|k| 0.25 * q.iter().zip(part(k)).map(|(a, b)| a * b).sum::<f64>()).collect();
            let sum: f64 = scores.iter().map(|score| score.exp()).sum();
            let term = |d: usize| scores.iter().zip(&v).map(|(s, v)| s.exp() / sum * part(v)[d]).sum::<f64>();
            (0..width).map(term).collect::<Vec<f64>>()
        };
        (0..heads).flat_map(head).collect()
    };
    q.iter().map(one).collect()
}

#[test]
fn heads_of_any_width_attend() {
    for (count, heads, width) in [(1, 1, 4), (33, 2, 20), (90, 2, 72), (40, 3, 16)] {
        let found = attend(count, heads, width, 2, Isa::detect());
        assert_eq!(attend(count, heads, width, 1, Isa::Portable), found, "{count} rows of {heads} heads of {width}");
        for (row, expected) in found.iter().zip(twin(heads, width, count)) {
            for (bits, expected) in row.iter().zip(expected) {
                let found = f64::from(f32::from_bits(*bits));
                assert!((found - expected).abs() <= 4e-6, "{found} instead of {expected}");
            }
        }
    }
}

#[test]
fn one_sequence_is_what_it_is_among_others() {
    let (count, heads, width) = (70, 4, 16);
    let alone = attend(count, heads, width, 3, Isa::detect());
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let shape = ModelShape { kv: KvShape::none(), ..with_encoder(width) };
    let mut device = device(&table, &checkpoint, &shape, 0, 2, Isa::detect());
    let [q, k, v] = [1, 2, 3].map(|seed| matrix(&mut device, &filled(seed, count, heads * width)));
    let out = device.temp(count, heads * width).unwrap();
    let seqs = [SeqSpan { first_row: 0, rows: count, start: 0, pages_at: 0, pages: 5, seen_from: 0, state: None }];
    let step = StepInput { seqs: &seqs, pages: &[0, 1, 2, 3, 4], ..StepInput::default() };
    device.attend_within(&spec(heads), out, q, k, v, &step).unwrap();
    assert_eq!(rows(&mut device, out), alone);
}

/// A device with a table of frequencies and an embedding, and room.
fn plain() -> (CpuDevice, plimsoll_device::VectorId, plimsoll_device::LinearId) {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::F32);
    let inv_freq = declare.values(vec![1.0, 0.3, 0.01, 0.002]);
    let table = declare.linear("model.embed_tokens.weight", 384, 64).unwrap();
    (device(&declare.finish(), &checkpoint, &with_encoder(16), 0, 2, Isa::detect()), inv_freq, table)
}

#[test]
fn angles_by_axis_are_those_of_each_axis() {
    let (mut device, inv_freq, _) = plain();
    let places: Vec<[u32; 3]> = (0..40).map(|i| [i, 1000 + 3 * i, 77]).collect();
    let place = |row: usize| places[row].map(|at| at as f32);
    let axes = [0, 1, 2, 1];
    let by_axis = device.temp(40, 8).unwrap();
    device.rope_angles_by_axis(by_axis, inv_freq, &axes, &place, 0.7);
    let by_axis = rows(&mut device, by_axis);
    for axis in 0..3 {
        let positions: Vec<u32> = places.iter().map(|place| place[axis]).collect();
        let (own, same) = (device.temp(40, 8).unwrap(), device.temp(40, 8).unwrap());
        device.rope_angles(own, inv_freq, &positions, 0.7);
        device.rope_angles_by_axis(same, inv_freq, &axes, &|row| [positions[row] as f32; 3], 0.7);
        let own = rows(&mut device, own);
        assert_eq!(rows(&mut device, same), own, "a place that is one position");
        for (row, (found, own)) in by_axis.iter().zip(&own).enumerate() {
            for i in (0..4).filter(|i| usize::from(axes[*i]) == axis) {
                assert_eq!([found[i], found[i + 4]], [own[i], own[i + 4]], "row {row}, frequency {i}");
            }
        }
    }
}

#[test]
fn blended_rows_are_weighted_sums() {
    let (mut device, _, table) = plain();
    let x = matrix(&mut device, &filled(9, 20, 64));
    let all = device.temp(384, 64).unwrap();
    let ids: Vec<u32> = (0..384).collect();
    device.embed(all, table, &ids, 1.0);
    let floats = |device: &mut CpuDevice, x: Buf| -> Vec<Vec<f32>> {
        rows(device, x).into_iter().map(|row| row.into_iter().map(f32::from_bits).collect()).collect()
    };
    let table_rows = floats(&mut device, all);
    let blend = |row: usize| {
        let row = row as u32;
        [(row, 0.5), (row + 100, 0.25), (383 - row, -1.0), (u32::MAX, 0.0)]
    };
    device.add_blended(x, table, &blend);
    for (row, (found, given)) in floats(&mut device, x).iter().zip(filled(9, 20, 64)).enumerate() {
        for i in 0..64 {
            let of = |row: usize| table_rows[row][i];
            let expected = given[i] + (of(row) * 0.5 + of(row + 100) * 0.25 - of(383 - row));
            assert!((found[i] - expected).abs() < 1e-6, "{} instead of {expected}", found[i]);
        }
    }
}

#[test]
fn columns_are_put_where_they_belong() {
    let (mut device, ..) = plain();
    let (out, x) = (matrix(&mut device, &filled(1, 30, 12)), matrix(&mut device, &filled(2, 10, 5)));
    device.put(out.span(7, 10), x, 3);
    let mut expected = filled(1, 30, 12);
    for (row, values) in filled(2, 10, 5).iter().enumerate() {
        expected[7 + row][3..8].copy_from_slice(values);
    }
    let bits: Vec<Vec<u32>> = expected.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
    assert_eq!(rows(&mut device, out), bits);
}

/// PyTorch's convolution of a plane with one channel after another, as [outer][inner][channel] sums, in double precision.
fn convolved(plane: &[Vec<f32>], inner: usize, kernel: &[f32], spec: &Unfold, moments: usize) -> Vec<f64> {
    let (channels, outer) = (plane[0].len(), plane.len() / inner);
    let [taps_outer, taps_inner] = spec.taps;
    let mut sums = Vec::new();
    for window in 0..moments * spec.windows() {
        let (o, i) = (window / spec.windows() * spec.step[0], window % spec.windows() * spec.step[1]);
        let mut sum = 0.0;
        for c in 0..channels {
            for ti in 0..taps_inner {
                for to in 0..taps_outer {
                    let (o, i) = ((o + to).wrapping_sub(spec.pad[0]), (i + ti).wrapping_sub(spec.pad[1]));
                    if o < outer && i < inner {
                        let weight = kernel[(c * taps_inner + ti) * taps_outer + to];
                        sum += f64::from(plane[o * inner + i][c]) * f64::from(weight);
                    }
                }
            }
        }
        sums.push(sum);
    }
    sums
}

#[test]
fn windows_are_cut_in_the_order_of_a_kernel() {
    for (outer, inner, channels, moments) in [(7, 10, 3, 4), (1, 5, 1, 1), (2, 9, 4, 3)] {
        for spec in [
            Unfold { inner, taps: [3, 3], step: [2, 2], pad: [1, 1] },
            Unfold { inner, taps: [1, inner], step: [1, inner], pad: [0, 0] },
        ] {
            let (mut device, ..) = plain();
            let plane = filled(outer as u64, outer * inner, channels);
            let x = matrix(&mut device, &plane);
            let columns = channels * spec.taps[0] * spec.taps[1];
            // More moments than the plane has: silence behind it. Nothing of before may shine through.
            let out = matrix(&mut device, &vec![vec![f32::NAN; columns]; moments * spec.windows()]);
            device.unfold(out, x, &spec);
            let kernel = filled(77, 1, columns).remove(0);
            let expected = convolved(&plane, inner, &kernel, &spec, moments);
            for (row, expected) in rows(&mut device, out).iter().zip(expected) {
                let values = row.iter().map(|bits| f64::from(f32::from_bits(*bits)));
                let sum: f64 = values.zip(&kernel).map(|(value, weight)| value * f64::from(*weight)).sum();
                assert!((sum - expected).abs() < 1e-12, "{sum} instead of {expected}: {spec:?}");
            }
        }
    }
}

#[test]
fn rows_of_a_table_are_added_by_number() {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::F32);
    let table = declare.values((0..12).map(|i| i as f32).collect());
    let mut device = device(&declare.finish(), &checkpoint, &with_encoder(16), 0, 2, Isa::detect());
    let x = matrix(&mut device, &filled(3, 7, 4));
    device.add_rows(x, table, &|row| row % 3);
    for (row, (found, given)) in rows(&mut device, x).iter().zip(filled(3, 7, 4)).enumerate() {
        for (i, (found, given)) in found.iter().zip(given).enumerate() {
            assert_eq!(f32::from_bits(*found), given + (row % 3 * 4 + i) as f32);
        }
    }
}
