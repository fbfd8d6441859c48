//! A device over a fixture's weights with a plan that has room for anything, and matrices to fill and read.

#![allow(dead_code)] // each test file uses its part

pub mod random;

use std::path::Path;
use std::sync::Arc;

use plimsoll_device::{
    Buf, CpuDevice, CpuMemory, CpuWeights, Device, Isa, KvDtype, KvLayer, KvShape, ModelShape, StateShape, ThreadPool,
    WeightTable,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, Ledger};

pub fn checkpoint(name: &str) -> Checkpoint {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
    Checkpoint::open(&models.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The shape of a small model, with this state.
pub fn shape(state: Option<StateShape>) -> ModelShape {
    let kv = KvShape::new(KvDtype::F16, [KvLayer { kv_heads: 2, head_dim: 16, heads: 4, window: None }]);
    ModelShape { kv, state, hidden: 256, encoder: None, bf16: false }
}

/// A device with `slots` slots of state and 32 MiB of workspace.
pub fn device(
    table: &WeightTable,
    checkpoint: &Checkpoint,
    shape: &ModelShape,
    slots: usize,
    threads: usize,
    isa: Isa,
) -> CpuDevice {
    device_of(table, checkpoint, shape, [256, slots], threads, isa)
}

/// [`device`] with these numbers of pages and slots. Pages that no test touches take no memory.
pub fn device_of(
    table: &WeightTable,
    checkpoint: &Checkpoint,
    shape: &ModelShape,
    [pages, slots]: [usize; 2],
    threads: usize,
    isa: Isa,
) -> CpuDevice {
    let ledger = Arc::new(Ledger::new());
    Component::ALL.iter().for_each(|component| ledger.plan(*component, 1 << 40));
    let mut pool = ThreadPool::new(threads).unwrap();
    let weights = CpuWeights::load(table.clone(), checkpoint, &ledger, &mut pool, |_| {}).unwrap();
    let memory = CpuMemory::map(&ledger, shape, pages, slots, 32 << 20, threads, false).unwrap();
    CpuDevice::new(weights, pool, isa, memory)
}

/// A matrix with these rows.
pub fn matrix(device: &mut CpuDevice, rows: &[Vec<f32>]) -> Buf {
    let buf = device.temp(rows.len(), rows[0].len()).unwrap();
    rows.iter().enumerate().for_each(|(i, row)| device.row_mut(buf, i).copy_from_slice(row));
    buf
}

/// The rows of a matrix, as bits.
pub fn rows(device: &mut CpuDevice, buf: Buf) -> Vec<Vec<u32>> {
    (0..buf.rows).map(|row| device.row_mut(buf, row).iter().map(|x| x.to_bits()).collect()).collect()
}
