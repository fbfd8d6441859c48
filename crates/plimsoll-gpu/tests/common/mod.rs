//! A fixture's weights on a GPU that software stands for, and the same on the CPU.
#![allow(dead_code, reason = "each test file uses its part")]

#[path = "../../../plimsoll-device/tests/common/random.rs"]
pub mod random;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_device::{
    Buf, CpuDevice, CpuMemory, CpuWeights, Device, Isa, ModelShape, Target, ThreadPool, WeightTable,
};
use plimsoll_formats::Checkpoint;
use plimsoll_gpu::{Adapter, AdapterChoice, Context, GpuDevice, GpuMemory, GpuWeights, Sizes};
use plimsoll_memory::{Component, Ledger};

/// Functions of a device for tests, beside its operations.
pub trait Rig: Device {
    /// The device.
    fn as_device(&mut self) -> &mut dyn Device;
    /// Creates a matrix with these rows.
    fn put_rows(&mut self, rows: &[Vec<f32>]) -> Buf;
    /// Returns the rows of matrices, after all recorded operations.
    fn rows_of(&mut self, bufs: &[Buf]) -> Vec<Vec<Vec<f32>>>;
}

impl Rig for CpuDevice {
    fn as_device(&mut self) -> &mut dyn Device {
        self
    }

    fn put_rows(&mut self, rows: &[Vec<f32>]) -> Buf {
        let buf = self.temp(rows.len(), rows[0].len()).unwrap();
        rows.iter().enumerate().for_each(|(i, row)| self.row_mut(buf, i).copy_from_slice(row));
        buf
    }

    fn rows_of(&mut self, bufs: &[Buf]) -> Vec<Vec<Vec<f32>>> {
        let rows = |buf: &Buf| (0..buf.rows).map(|row| self.row_mut(*buf, row).to_vec()).collect();
        bufs.iter().map(rows).collect()
    }
}

impl Rig for GpuDevice {
    fn as_device(&mut self) -> &mut dyn Device {
        self
    }

    fn put_rows(&mut self, rows: &[Vec<f32>]) -> Buf {
        let buf = self.temp(rows.len(), rows[0].len()).unwrap();
        self.fill(buf, &rows.concat());
        buf
    }

    fn rows_of(&mut self, bufs: &[Buf]) -> Vec<Vec<Vec<f32>>> {
        self.finish(bufs).unwrap();
        let rows = |buf: &Buf| (0..buf.rows).map(|row| self.row_mut(*buf, row).to_vec()).collect();
        bufs.iter().map(rows).collect()
    }
}

/// Held by a test while it runs: the devices share the cores.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn checkpoint(name: &str) -> Checkpoint {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name);
    let file = folder.join("model.gguf");
    Checkpoint::open(if file.is_file() { &file } else { &folder }).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn ledger() -> Arc<Ledger> {
    let ledger = Arc::new(Ledger::new());
    Component::ALL.iter().for_each(|component| ledger.plan(*component, 1 << 40));
    ledger
}

/// The sizes of both devices.
pub const PAGES: usize = 64;

pub fn cpu(table: &WeightTable, checkpoint: &Checkpoint, shape: &ModelShape) -> CpuDevice {
    let (ledger, isa) = (ledger(), Isa::detect());
    let mut pool = ThreadPool::new(2).unwrap();
    let weights = CpuWeights::load(table.clone().on(isa), checkpoint, &ledger, &mut pool, |_| {}).unwrap();
    let memory = CpuMemory::map(&ledger, shape, PAGES, PAGES, 64 << 20, 2, false).unwrap();
    CpuDevice::new(weights, pool, isa, memory)
}

pub fn gpu(table: &WeightTable, checkpoint: &Checkpoint, shape: &ModelShape) -> GpuDevice {
    gpu_on(opened(), table, checkpoint, shape)
}

pub fn opened() -> Context {
    let choice = AdapterChoice { index: None, allow_software: true };
    let adapter = Adapter::find(choice).expect("a Vulkan driver; tests/gpu/install.sh installs one");
    Context::open(&adapter).unwrap()
}

/// A GPU that is open already, with the kernels that were made for other weights.
pub fn gpu_on(mut context: Context, table: &WeightTable, checkpoint: &Checkpoint, shape: &ModelShape) -> GpuDevice {
    let ledger = ledger();
    let mut pool = ThreadPool::new(2).unwrap();
    let table = table.clone().on(Target::Gpu);
    let loaded = GpuWeights::load_unless(&mut context, table, checkpoint, &ledger, &mut pool, |_| {}, || false);
    let (arena, upload, readback) = (64 << 20, 4 << 20, 16 << 20);
    let sizes = Sizes { pages: [PAGES; 2], slots: PAGES, arena, upload, readback, calls: 1 << 14, outputs: 64 };
    let memory = GpuMemory::new(&mut context, &ledger, shape, sizes).unwrap();
    GpuDevice::new(context, loaded.unwrap(), memory)
}

/// The same numbers, but for so much of the greatest of them.
pub fn close(what: &str, got: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    let widest = expected.iter().flatten().fold(1e-3f32, |widest, x| widest.max(x.abs()));
    assert_eq!(got.len(), expected.len(), "{what}: rows");
    for (row, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{what}: columns");
        for (col, (got, expected)) in got.iter().zip(expected).enumerate() {
            let off = (got - expected).abs();
            assert!(off <= tolerance * widest, "{what}: row {row}, column {col}: {got} for {expected}");
        }
    }
}
