//! Operations of image and audio encoders, and of the models that take their outputs.

use plimsoll_device::{
    Attention, EncoderShape, KvDtype, KvLayer, KvShape, Mode, ModelShape, Near, SeqSpan, StepInput, Unfold,
};

use super::common::random::Random;
use super::common::{Rig, alone, checkpoint, close, cpu, gpu};
use super::{both, small_shape, some_linears, vectors};

/// Attends every row of sequences of these lengths to all rows of its own sequence.
fn attend(device: &mut dyn Rig, heads: usize, lengths: &[usize], qkv: &[Vec<Vec<f32>>; 3]) -> Vec<Vec<f32>> {
    let spec = Attention { layer: 0, heads, scale: 0.25, ..Attention::WHOLE };
    let scope = device.mark();
    let [q, k, v] = qkv.each_ref().map(|rows| device.put_rows(rows));
    let out = device.temp(q.rows, q.cols).unwrap();
    // Runs twice, like two layers.
    for _ in 0..2 {
        let mut first = 0;
        let mut sequences = lengths.iter().map(|rows| {
            first += rows;
            (first - rows, *rows)
        });
        device.attend_all(&spec, out, q, k, v, &mut sequences).unwrap();
    }
    let rows = device.rows_of(&[out]).remove(0);
    device.release(scope);
    rows
}

#[test]
#[ignore = "external"]
fn rows_attend_to_their_sequence() {
    let _alone = alone();
    let (table, ..) = vectors();
    let checkpoint = checkpoint("llama");
    for (heads, width, lengths) in
        [(1, 4, &[1][..]), (2, 20, &[33, 1, 5]), (2, 72, &[90]), (3, 16, &[40, 64, 65]), (16, 6, &[7, 7])]
    {
        let shape = ModelShape { encoder: Some(EncoderShape::new(width, 64)), ..small_shape() };
        let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
        let mut random = Random::new(width as u64);
        let qkv: [_; 3] = std::array::from_fn(|_| random.rows(lengths.iter().sum(), heads * width));
        let what = format!("{lengths:?} rows of {heads} heads of {width}");
        let expected = attend(&mut cpu, heads, lengths, &qkv);
        let got = attend(&mut gpu, heads, lengths, &qkv);
        close(&what, &got, &expected, 1e-5);
        let mut first = 0;
        for rows in lengths {
            let own = qkv.each_ref().map(|all| all[first..first + rows].to_vec());
            assert_eq!(attend(&mut gpu, heads, &[*rows], &own), got[first..first + rows], "{what}: {rows} alone");
            first += rows;
        }
    }
}

#[test]
#[ignore = "external"]
fn rows_attend_to_the_rows_before() {
    let _alone = alone();
    let (table, ..) = vectors();
    let (checkpoint, shape) = (checkpoint("llama"), small_shape());
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    for (heads, width, seen, lengths) in
        [(1, 5, 1, &[3][..]), (2, 12, 5, &[33, 1, 4]), (3, 16, 12, &[40, 5]), (1, 72, 64, &[90])]
    {
        let mut random = Random::new(width as u64);
        let rows: usize = lengths.iter().sum();
        let qkv: [_; 3] = std::array::from_fn(|_| random.rows(rows, heads * width));
        let distances = random.rows(seen, heads * width);
        let run = |device: &mut dyn Rig, lengths: &[usize], qkv: &[Vec<Vec<f32>>; 3]| {
            let scope = device.mark();
            let [q, k, v] = qkv.each_ref().map(|rows| device.put_rows(rows));
            let (keys, out) = (device.put_rows(&distances), device.temp(q.rows, q.cols).unwrap());
            let mut first = 0;
            let mut sequences = lengths.iter().map(|rows| {
                first += rows;
                (first - rows, *rows)
            });
            let near = Near { heads, rows: seen, cap: 2.0 };
            device.attend_near(&near, out, [q, k, v], keys, &mut sequences);
            let rows = device.rows_of(&[out]).remove(0);
            device.release(scope);
            rows
        };
        let what = format!("{lengths:?} rows of {heads} heads of {width} that see {seen}");
        let expected = run(&mut cpu, lengths, &qkv);
        let got = run(&mut gpu, lengths, &qkv);
        close(&what, &got, &expected, 1e-5);
        let alone = qkv.each_ref().map(|all| all[..lengths[0]].to_vec());
        assert_eq!(run(&mut gpu, &lengths[..1], &alone), got[..lengths[0]], "{what}: the first alone");
    }
}

#[test]
#[ignore = "external"]
fn tables_of_two_kinds_of_layers_are_sent_once() {
    let _alone = alone();
    let (table, ..) = vectors();
    let (checkpoint, shape) = (checkpoint("llama"), small_shape());
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    let x = Random::new(5).rows(48, 32);
    let run = |device: &mut dyn Rig| {
        let scope = device.mark();
        let x = device.put_rows(&x);
        let [mut from, mut to] = [x, device.temp(48, 32).unwrap()];
        let spec = Attention { layer: 0, heads: 2, scale: 1.0, ..Attention::WHOLE };
        // Windows and whole frames in turn: two tables of 48 rows, and one more that is not kept.
        for layer in 0..9 {
            let length = if layer % 3 == 2 { 48 } else { 16 };
            let mut sequences = (0..48).step_by(length).map(|first| (first, length));
            device.attend_all(&spec, to, from, from, x, &mut sequences).unwrap();
            (from, to) = (to, from);
            if layer == 0 {
                to = device.temp(48, 32).unwrap();
            }
        }
        let rows = device.rows_of(&[from]).remove(0);
        device.release(scope);
        rows
    };
    close("layers in turn", &run(&mut gpu), &run(&mut cpu), 1e-5);
}

/// Two layers with a window, one without between them, as ModernBERT has them.
#[test]
#[ignore = "external"]
fn rows_attend_through_a_window_of_their_sequence() {
    let _alone = alone();
    let (table, ..) = vectors();
    let lengths = [33, 1, 90, 5];
    let shape = ModelShape { encoder: Some(EncoderShape::new(16, 64)), ..small_shape() };
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint("llama"), &shape), gpu(&table, &checkpoint("llama"), &shape));
    let qkv: [_; 3] = std::array::from_fn(|i| Random::new(i as u64).rows(lengths.iter().sum(), 48));
    let (mut seqs, mut pages) = (Vec::new(), 0);
    for rows in lengths {
        let first_row = seqs.last().map_or(0, |seq: &SeqSpan| seq.first_row + seq.rows);
        let count = rows.div_ceil(16);
        seqs.push(SeqSpan { first_row, rows, start: 0, pages_at: pages, pages: count, seen_from: 0, state: None });
        pages += count;
    }
    let ids: Vec<u32> = (0..pages as u32).collect();
    for window in [1, 7, 64] {
        let run = |device: &mut dyn Rig| {
            let scope = device.mark();
            let [q, k, v] = qkv.each_ref().map(|rows| device.put_rows(rows));
            let outs = [(); 3].map(|()| device.temp(q.rows, q.cols).unwrap());
            let step = StepInput { seqs: &seqs, pages: &ids, ..StepInput::default() };
            for (out, window) in outs.into_iter().zip([Some(window), None, Some(window)]) {
                let spec = Attention { heads: 3, scale: 0.25, window, ..Attention::WHOLE };
                device.attend_within(&spec, out, q, k, v, &step).unwrap();
            }
            let rows = device.rows_of(&outs).concat();
            device.release(scope);
            rows
        };
        close(&format!("a window of {window}"), &run(&mut gpu), &run(&mut cpu), 1e-5);
    }
}

#[test]
#[ignore = "external"]
fn blended_rows_of_packed_tables() {
    let _alone = alone();
    for name in ["llama", "llama-bf16", "llama-f16", "gguf-llama-q4_0", "mlx-llama-4bit-g64"] {
        let (table, ids) = some_linears(name);
        let (checkpoint, shape) = (checkpoint(name), small_shape());
        let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
        for id in ids {
            let packing = table.linear(id).packing;
            let last = packing.out() as u32 - 1;
            let x = Random::new(3).rows(5, packing.k());
            let blend = |row: usize| {
                let row = row as u32;
                [(row, 0.5), (last / 2 + row, 0.25), (last - row, -1.0), (u32::MAX, 0.0)]
            };
            let run = |device: &mut dyn Rig, rows: &[Vec<f32>], from: usize| {
                let scope = device.mark();
                let x = device.put_rows(rows);
                device.add_blended(x, id, &|row| blend(from + row));
                let rows = device.rows_of(&[x]).remove(0);
                device.release(scope);
                rows
            };
            let got = run(&mut gpu, &x, 0);
            close(&format!("{name}: {packing:?}"), &got, &run(&mut cpu, &x, 0), 2e-6);
            assert_eq!(run(&mut gpu, &x[3..4], 3)[0], got[3], "{name}: a row alone");
        }
    }
}

#[test]
#[ignore = "external"]
fn angles_by_axis() {
    let _alone = alone();
    both(1e-6, "angles by axis", |device, ids| {
        let angles = device.temp(40, 16).unwrap();
        let places = |row: usize| [row as f32, 1000.0 + 3.5 * row as f32, 77.0];
        device.rope_angles_by_axis(angles, ids[6], &[0, 1, 2, 1, 0, 0, 2, 1], &places, 0.7);
        vec![angles]
    });
}

#[test]
#[ignore = "external"]
fn rows_from_outside_in_any_pieces() {
    let _alone = alone();
    let values = Random::new(11).floats(20 * 12);
    both(0.0, "rows from outside", |device, _| {
        let mut random = Random::new(12);
        let [pieces, whole, other] = [20, 20, 9].map(|rows| device.put_rows(&random.rows(rows, 5)));
        // In pieces that follow one another, some of them in spans, one empty; then into another matrix and with another mode.
        let mut first = 0;
        for rows in [1, 7, 0, 4, 8] {
            let own = &values[first * 12..(first + rows) * 12];
            device.place(pieces.span(first, rows), 0, own, 12, 3, Mode::Store);
            first += rows;
        }
        device.place(other, 2, &values[..12], 12, 7, Mode::Store);
        device.place(other, 6, &values[12..36], 12, 0, Mode::Add);
        device.place(other, 4, &values[36..48], 12, 0, Mode::Add);
        device.place(whole, 0, &values, 12, 3, Mode::Store);
        device.place(whole, 0, &values, 12, 0, Mode::Add);
        vec![pieces, whole, other]
    });
}

#[test]
#[ignore = "external"]
fn rows_in_an_order_that_is_computed() {
    let _alone = alone();
    both(0.0, "rows in order", |device, _| {
        let mut random = Random::new(13);
        let [out, x] = [random.rows(70, 9), random.rows(70, 5)].map(|rows| device.put_rows(&rows));
        device.arrange(out, x, &|row| (row * 11 + 3) % 70);
        vec![out]
    });
}

#[test]
#[ignore = "external"]
fn windows_of_a_convolution() {
    let _alone = alone();
    for (outer, inner, channels, moments) in [(7, 10, 3, 4), (1, 5, 1, 1), (2, 9, 4, 3), (30, 33, 8, 15)] {
        for spec in [
            Unfold { inner, taps: [3, 3], step: [2, 2], pad: [1, 1] },
            Unfold { inner, taps: [1, inner], step: [1, inner], pad: [0, 0] },
        ] {
            both(0.0, &format!("{spec:?} of {outer} x {channels}"), |device, _| {
                let x = device.put_rows(&Random::new(14).rows(outer * inner, channels));
                let out = device.temp(moments * spec.windows(), channels * spec.taps[0] * spec.taps[1]).unwrap();
                device.unfold(out, x, &spec);
                vec![out]
            });
        }
    }
}

/// A row of an image sees the rows of the image behind it, whatever the window.
#[test]
#[ignore = "external"]
fn rows_that_see_what_is_behind_them() {
    let _alone = alone();
    let (table, ..) = vectors();
    let checkpoint = checkpoint("llama");
    let layer = KvLayer { kv_heads: 1, head_dim: 16, heads: 2, window: None };
    let shape = ModelShape { kv: KvShape::new(KvDtype::F32, [layer]), ..small_shape() };
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    for window in [None, Some(6)] {
        let spec = Attention { layer: 0, heads: 2, scale: 0.25, window, ..Attention::WHOLE };
        let run = |device: &mut dyn Rig| {
            let mut random = Random::new(21);
            let scope = device.mark();
            let [q, k, v] = [32, 16, 16].map(|cols| device.put_rows(&random.rows(30, cols)));
            let out = device.temp(30, 32).unwrap();
            // Text, an image of 12 rows from position 9 on, text; then another sequence of 4.
            let end = |row: u32| match row {
                9..21 => 21,
                26.. => row - 26 + 1,
                _ => row + 1,
            };
            let ends: Vec<u32> = (0..30).map(end).collect();
            let seq = |first_row, rows, pages_at| SeqSpan {
                first_row,
                rows,
                start: 0,
                pages_at,
                pages: 2,
                seen_from: 0,
                state: None,
            };
            let seqs = [seq(0, 26, 0), seq(26, 4, 2)];
            let pages = [5, 3, 9, 1];
            let step =
                StepInput { seqs: &seqs, pages: &pages, window_pages: &pages, ends: &ends, ..StepInput::default() };
            device.attention(&spec, None, out, q, Some([k, v]), &step);
            let rows = device.rows_of(&[out]).remove(0);
            device.release(scope);
            rows
        };
        close(&format!("window {window:?}"), &run(&mut gpu), &run(&mut cpu), 1e-5);
    }
}
