//! The most likely tokens of rows: the bits and the order of the CPU, whatever stands in a row.

use plimsoll_device::{Buf, CANDIDATE_BLOCK, CANDIDATES_MAX};

use super::common::random::Random;
use super::common::{Rig, alone, checkpoint, cpu, gpu};
use super::{small_shape, vectors};

/// Rows of every kind: random, with few values, all alike, without numbers, with all that is no usual number.
fn rows(cols: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(cols as u64);
    let plain = random.floats(cols);
    let few: Vec<f32> = random.floats(cols).iter().map(|x| (3.0 * x).round() * 0.5).collect();
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, -1e-40, f32::MAX, f32::MIN, 1e-38];
    let odd: Vec<f32> = random.floats(cols).iter().map(|x| odd[(x.abs() * 1e4) as usize % odd.len()]).collect();
    let mut last = vec![f32::NEG_INFINITY; cols];
    last[cols - 1] = -7.5;
    vec![plain, few, vec![0.25; cols], odd, vec![f32::NAN; cols], last]
}

fn found(device: &mut dyn Rig, rows: &[Vec<f32>], counts: &[u32]) -> Vec<Vec<f32>> {
    let scope = device.mark();
    let x = device.put_rows(rows);
    let count = counts.iter().sum::<u32>() as usize;
    let out = device.temp(count, 2).unwrap();
    let blocks = device.temp(x.rows, x.cols.div_ceil(CANDIDATE_BLOCK)).unwrap();
    device.candidates(out, blocks, x, counts);
    let found = device.rows_of(&[out]).remove(0);
    device.release(scope);
    found
}

#[test]
#[ignore = "external"]
fn candidates_are_those_of_the_cpu() {
    let _alone = alone();
    let (table, ..) = vectors();
    let (checkpoint, shape) = (checkpoint("llama"), small_shape());
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>();
    for cols in [1, 2, 63, 64, 65, 128, 300, 4095, 4097, 100_003] {
        let rows = rows(cols);
        let most = CANDIDATES_MAX as u32;
        for counts in [[1; 6], [most; 6], [0, 3, 0, 70, 1, 2], [20, 0, most, 0, 0, 5]] {
            let [expected, got] = [found(&mut cpu, &rows, &counts), found(&mut gpu, &rows, &counts)];
            assert_eq!(bits(&got), bits(&expected), "{cols} columns, {counts:?}");
        }
        // A row has the same candidates whatever stands beside it.
        for row in &rows {
            let one = std::slice::from_ref(row);
            assert_eq!(bits(&found(&mut gpu, one, &[40])), bits(&found(&mut cpu, one, &[40])), "{cols} columns, alone");
        }
    }
}

/// Rows that a step did not fetch can be fetched after it, and no row is fetched twice.
#[test]
#[ignore = "external"]
fn rows_that_were_left_are_fetched_when_they_are_asked_for() {
    let _alone = alone();
    let (table, ..) = vectors();
    let mut gpu = gpu(&table, &checkpoint("llama"), &small_shape());
    let rows = Random::new(1).rows(5, 37);
    let x: Buf = gpu.put_rows(&rows);
    gpu.finish(&[x.span(1, 2)]).unwrap();
    let before = gpu.context().allocated();
    assert_eq!(gpu.take_fetched(), 2 * 37 * 4);
    for (row, bytes) in [(1, 0), (2, 0), (4, 37 * 4), (0, 37 * 4), (4, 0), (1, 0)] {
        assert_eq!(gpu.row_mut(x, row), &rows[row][..], "row {row}");
        assert_eq!(gpu.take_fetched(), bytes, "row {row}");
    }
    assert_eq!(gpu.elements(x.span(1, 2)), &rows[1..3].concat()[..]);
    assert_eq!(gpu.context().allocated(), before, "bytes on the device");
}
