//! Matrices that files store otherwise than by rows: convolutions, channels first or last, and experts with their inputs first; and
//! parts of a joined projection with their parts of its bias.

use std::path::PathBuf;

use crate::common::{matrix, rows, shape};
use plimsoll_device::{
    CpuDevice, CpuMemory, CpuWeights, Declare, Device, DtypePolicy, Isa, LinearId, Mode, ThreadPool,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, Ledger};

/// A directory that goes away with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A checkpoint of these f32 tensors, each numbered through from 0.
fn stored(name: &str, tensors: &[(&str, &[usize])]) -> Folder {
    let folder = std::env::temp_dir().join(format!("plimsoll-forms-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let llama = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama");
    std::fs::copy(llama.join("config.json"), folder.join("config.json")).unwrap();
    let (mut head, mut data) = (Vec::new(), Vec::new());
    for (name, shape) in tensors {
        let (from, count) = (data.len(), shape.iter().product::<usize>());
        (0..count).for_each(|i| data.extend((i as f32).to_le_bytes()));
        head.push(format!(r#""{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{from},{}]}}"#, data.len()));
    }
    let mut head = format!("{{{}}}", head.join(","));
    head.extend(std::iter::repeat_n(' ', head.len().next_multiple_of(8) - head.len()));
    let file = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    Folder(folder)
}

fn load(folder: &Folder, declare: impl FnOnce(&mut Declare<'_>) -> LinearId) -> (CpuDevice, LinearId) {
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    let mut declaring = Declare::new(&checkpoint, DtypePolicy::Auto);
    let id = declare(&mut declaring);
    let ledger = std::sync::Arc::new(Ledger::new());
    Component::ALL.iter().for_each(|component| ledger.plan(*component, 1 << 30));
    let mut pool = ThreadPool::new(2).unwrap();
    let weights = CpuWeights::load(declaring.finish(), &checkpoint, &ledger, &mut pool, |_| {}).unwrap();
    let memory = CpuMemory::map(&ledger, &shape(None), 1, 0, 8 << 20, 2, false).unwrap();
    (CpuDevice::new(weights, pool, Isa::detect(), memory), id)
}

/// The packed rows of a matrix of out × k.
fn unpacked(device: &mut CpuDevice, id: LinearId, out: usize, k: usize) -> Vec<Vec<f32>> {
    let x = device.temp(out, k).unwrap();
    let ids: Vec<u32> = (0..out as u32).collect();
    device.embed(x, id, &ids, 1.0);
    rows(device, x).into_iter().map(|row| row.into_iter().map(f32::from_bits).collect()).collect()
}

#[test]
fn a_convolution_is_the_same_matrix_channels_first_or_last() {
    // Two channels, three frames of 4 × 4.
    let (out, window) = (20, [2usize, 3, 4, 4]);
    let points = 3 * 4 * 4;
    let first = stored("first", &[("conv.weight", &[out, 2, 3, 4, 4])]);
    let (mut device, id) = load(&first, |declare| declare.convolution("conv", out, &window, false).unwrap());
    for (row, values) in unpacked(&mut device, id, out, 2 * points).iter().enumerate() {
        assert!(values.iter().enumerate().all(|(i, value)| *value == (row * 2 * points + i) as f32), "row {row}");
    }
    let last = stored("last", &[("conv.weight", &[out, 3, 4, 4, 2])]);
    let (mut device, id) = load(&last, |declare| declare.convolution("conv", out, &window, false).unwrap());
    for (row, values) in unpacked(&mut device, id, out, 2 * points).iter().enumerate() {
        let stored = |i: usize| row * 2 * points + i % points * 2 + i / points;
        assert!(values.iter().enumerate().all(|(i, value)| *value == stored(i) as f32), "row {row}");
    }
}

#[test]
fn experts_with_their_inputs_first_are_turned() {
    // Three experts of 5 inputs and 2 · 150 outputs: the second half of the last one's.
    let (experts, k, width) = (3, 5, 300);
    let folder = stored("turned", &[("w.weight", &[experts, k, width])]);
    let (row, column, out) = (2 * k, 150, 150);
    let (mut device, id) = load(&folder, |declare| {
        declare.turned("w.weight", &[experts, k, width], (row, column, 1), (out, k), None).unwrap()
    });
    for (r, values) in unpacked(&mut device, id, out, k).iter().enumerate() {
        assert!(values.iter().enumerate().all(|(i, x)| *x == ((row + i) * width + column + r) as f32), "row {r}");
    }
}

#[test]
fn a_part_of_a_projection_has_its_part_of_the_bias() {
    let folder = stored("part", &[("qkv.weight", &[12, 3]), ("qkv.bias", &[12])]);
    let (mut device, id) = load(&folder, |declare| declare.part_with_bias("qkv", 12, (4, 4), 3).unwrap());
    let x = matrix(&mut device, &[vec![1.0, 0.0, 2.0]]);
    let out = device.temp(1, 4).unwrap();
    device.linear(x, &[(id, out)], Mode::Store).unwrap();
    let expected: Vec<f32> = (4..8).map(|r| (3 * r) as f32 + 2.0 * (3 * r + 2) as f32 + r as f32).collect();
    assert_eq!(device.row_mut(out, 0), expected);
}
