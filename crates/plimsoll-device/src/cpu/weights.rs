//! Loading: packs the mapped checkpoint straight into the weight region, with one copy.
//!
//! Panels of 16 rows are decoded and packed in parallel. Each tensor's file pages are released when it is done, so the
//! load peak is the final size plus one tensor.

use std::sync::{Arc, Mutex};

use arrayvec::ArrayVec;
use plimsoll_formats::{Checkpoint, Row, RowBuf, RowScales};
use plimsoll_kernels::{
    F8Row, PANEL, PackError, PackKind, PackScales, Packing, QuantRow, QuantRowScales, Weights, pack_panel_f8,
    pack_panel_f32, pack_panel_quant,
};
use plimsoll_memory::{Component, Ledger, Region};

use super::load_error::LoadError;
use super::packed::PackedFile;
use super::tables::{FileTables, TableReads};
use crate::device::DeviceError;
use crate::pool::ThreadPool;
use crate::weights::{Form, LinearDecl, LinearId, VectorDecl, VectorId, VectorSource, WeightTable};

/// Panels per task: enough work to be worth claiming, few enough to balance.
pub const PANELS_PER_TASK: usize = 8;

/// Memory of the packed weights.
enum Place {
    Region(Region),
    File(PackedFile),
}

/// A model's weights, packed, in one piece of memory.
pub struct CpuWeights {
    table: WeightTable,
    place: Place,
    /// Tables that stay in the model's files.
    in_files: Option<FileTables>,
    /// For each matrix, the matrix that was multiplied after it the last time; itself until then.
    followers: Box<[LinearId]>,
    /// The matrix that was multiplied last.
    latest: LinearId,
}

impl CpuWeights {
    /// Packs every weight of `table` from `checkpoint`. Calls `progress` with the packed bytes as it goes.
    pub fn load(
        table: WeightTable,
        checkpoint: &Checkpoint,
        ledger: &Arc<Ledger>,
        pool: &mut ThreadPool,
        progress: impl FnMut(u64),
    ) -> Result<Self, LoadError> {
        Self::load_unless(table, checkpoint, ledger, pool, progress, || false)
    }

    /// As [`Self::load`], but calls `stopped` between two tensors and fails with [`LoadError::Stopped`] once it returns
    /// true.
    pub fn load_unless(
        table: WeightTable,
        checkpoint: &Checkpoint,
        ledger: &Arc<Ledger>,
        pool: &mut ThreadPool,
        progress: impl FnMut(u64),
        stopped: impl Fn() -> bool,
    ) -> Result<Self, LoadError> {
        let mut region = Region::map(ledger, Component::Weights, table.bytes as u64, false)?;
        let packed = pack(&table, checkpoint, region.bytes_mut(), pool, progress, stopped);
        checkpoint.unchanged().map_err(LoadError::Changed)?;
        packed?;
        Self::at(table, Place::Region(region), (checkpoint, ledger, pool.threads()))
    }

    /// Returns the weights of `table` in a packed file that was opened for it. Tables that stay in the checkpoint's files are read there,
    /// by `threads` threads.
    pub fn mapped(
        table: WeightTable,
        file: PackedFile,
        from: (&Checkpoint, &Arc<Ledger>, usize),
    ) -> Result<Self, LoadError> {
        Self::at(table, Place::File(file), from)
    }

    fn at(table: WeightTable, place: Place, from: (&Checkpoint, &Arc<Ledger>, usize)) -> Result<Self, LoadError> {
        let followers = (0..table.linears.len()).map(LinearId).collect();
        let in_files = FileTables::open(&table, from)?;
        Ok(Self { table, place, in_files, followers, latest: LinearId(0) })
    }

    /// Returns all packed bytes, to compare these weights with others.
    pub fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Region(region) => region.bytes(),
            Place::File(file) => file.bytes(),
        }
    }

    /// Checks that the file of mapped weights was neither written to nor cut since its bytes were checked, and that all rows of tables
    /// that stay in files could be read. This takes one system call a file; weights in memory need none.
    ///
    /// # Errors
    /// [`DeviceError::WeightsChanged`], [`DeviceError::Table`]: results computed since the last call may be wrong.
    pub fn intact(&self) -> Result<(), DeviceError> {
        if let Place::File(file) = &self.place {
            file.intact().map_err(|error| DeviceError::WeightsChanged(error.to_string()))?;
        }
        let tables = self.in_files.as_ref().map_or(Ok(()), FileTables::intact);
        tables.map_err(|error| DeviceError::Table(error.to_string()))
    }

    /// Looks up `count` rows of a table that stays in the model's files, as [`FileTables::look_up`]. `place` returns the table's matrix
    /// that has the i-th row, and the row's number there.
    pub(super) fn look_up<'a>(
        &mut self,
        pool: &mut ThreadPool,
        (table, count): (usize, usize),
        place: impl Fn(usize) -> (LinearId, usize) + Sync,
        out: impl Fn(usize) -> &'a mut [f32] + Sync,
    ) {
        let tables = self.in_files.as_mut().expect("a table in a file was opened with the weights");
        let weights = &self.table;
        let place = |i: usize| {
            let (id, row) = place(i);
            (weights.linear(id).in_file.expect("a part of a table in a file"), row)
        };
        tables.look_up(pool, (table, count), place, out);
    }

    /// Returns the rows of tables in files that were looked up since the last call.
    pub fn take_table_reads(&mut self) -> TableReads {
        self.in_files.as_mut().map(FileTables::take_reads).unwrap_or_default()
    }

    /// The declarations.
    pub fn table(&self) -> &WeightTable {
        &self.table
    }

    /// A packed matrix with its declaration.
    pub(crate) fn linear(&self, id: LinearId) -> (&LinearDecl, &[u8]) {
        let linear = self.table.linear(id);
        assert!(linear.in_file.is_none(), "'{}' stays in its file", linear.name);
        (linear, &self.bytes()[linear.offset..][..linear.packing.bytes()])
    }

    /// Returns a packed matrix in the form that kernels take, with its bias.
    pub(crate) fn matrix(&self, id: LinearId) -> Weights<'_> {
        let (linear, data) = self.linear(id);
        Weights { packing: &linear.packing, data, bias: linear.bias.map(|bias| self.vector(bias)) }
    }

    /// Records that these matrices are multiplied now, in this order.
    pub(crate) fn multiplied(&mut self, ids: impl Iterator<Item = LinearId>) {
        for id in ids {
            self.followers[self.latest.0] = id;
            self.latest = id;
        }
    }

    /// Returns the matrices that are expected next: the one that followed the latest matrix last time, its follower, and so on.
    pub(crate) fn expected(&self) -> impl Iterator<Item = Weights<'_>> {
        let follower = |id: &LinearId| Some(self.followers[id.0]).filter(|follower| follower != id);
        std::iter::successors(follower(&self.latest), follower).map(|id| self.matrix(id))
    }

    /// A vector's values.
    pub(crate) fn vector(&self, id: VectorId) -> &[f32] {
        let vector = self.table.vector(id);
        let bytes = &self.bytes()[vector.offset..][..vector.len * 4];
        // SAFETY: every bit pattern is an f32; the assertion below checks alignment and length.
        let (before, values, after) = unsafe { bytes.align_to::<f32>() };
        assert!(before.is_empty() && after.is_empty(), "vectors start on cache lines");
        values
    }
}

/// Packs all weights, each at the place of its declaration.
fn pack(
    table: &WeightTable,
    checkpoint: &Checkpoint,
    target: &mut [u8],
    pool: &mut ThreadPool,
    mut progress: impl FnMut(u64),
    stopped: impl Fn() -> bool,
) -> Result<(), LoadError> {
    for linear in table.linears.iter().filter(|linear| linear.in_file.is_none()) {
        if stopped() {
            return Err(LoadError::Stopped);
        }
        let bytes = &mut target[linear.offset..][..linear.packing.bytes()];
        pack_panels(linear, checkpoint, 0..linear.packing.panels(), bytes, pool)?;
        checkpoint.release(&linear.name);
        progress(linear.packing.bytes() as u64);
    }
    for vector in &table.vectors {
        write_vector(vector, checkpoint, &mut target[vector.offset..][..vector.len * 4])?;
    }
    Ok(())
}

/// Packs some panels of a matrix into `target`, in parallel. The first is a multiple of [`PANELS_PER_TASK`].
///
/// # Errors
/// [`LoadError`]: the checkpoint's rows could not be read.
///
/// # Panics
/// When `target` has another length than these panels.
pub fn pack_panels(
    linear: &LinearDecl,
    checkpoint: &Checkpoint,
    panels: std::ops::Range<usize>,
    target: &mut [u8],
    pool: &mut ThreadPool,
) -> Result<(), LoadError> {
    let packing = &linear.packing;
    assert!(panels.start.is_multiple_of(PANELS_PER_TASK), "panel {} begins no task", panels.start);
    assert_eq!(target.len(), panels.len() * packing.panel_bytes(), "bytes of {} panels", panels.len());
    let chunk_bytes = packing.panel_bytes() * PANELS_PER_TASK;
    let chunks: Vec<Mutex<&mut [u8]>> = target.chunks_mut(chunk_bytes).map(Mutex::new).collect();
    let failed: Mutex<Option<LoadError>> = Mutex::new(None);
    pool.run(chunks.len(), &|_, task| {
        let mut chunk = chunks[task].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut scratch = Scratch::new(packing.k());
        let fail = |error| {
            failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
        };
        let first = panels.start + task * PANELS_PER_TASK;
        let all = first * PANEL;
        if let Err(error) = scratch.read_turned(linear, checkpoint, all..(all + PANELS_PER_TASK * PANEL)) {
            return fail(error);
        }
        for (i, panel) in chunk.chunks_exact_mut(packing.panel_bytes()).enumerate() {
            let rows = (first + i) * PANEL;
            let rows = rows..(rows + PANEL).min(packing.out());
            if let Err(error) = scratch.pack_panel(linear, checkpoint, rows, panel) {
                return fail(error);
            }
        }
    });
    failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
}

/// Writes a vector's elements into `target`, four bytes each.
///
/// # Errors
/// [`LoadError`]: the checkpoint's rows could not be read.
pub fn write_vector(vector: &VectorDecl, checkpoint: &Checkpoint, target: &mut [u8]) -> Result<(), LoadError> {
    let mut write = |values: &mut dyn Iterator<Item = f32>| {
        target.chunks_exact_mut(4).zip(values).for_each(|(bytes, value)| bytes.copy_from_slice(&value.to_le_bytes()));
    };
    match &vector.source {
        VectorSource::Values(values) => write(&mut values.iter().copied()),
        VectorSource::Tensor { name, first, stride, change } => {
            let mut row = RowBuf::new();
            // A tensor of several dimensions has several rows; its size comes from the declaration.
            let cols = checkpoint.tensor(name).map_or(1, |info| info.cols()).max(1);
            let (skipped, first) = (first / cols, first % cols);
            let needed = first + vector.len.saturating_sub(1) * stride + 1;
            let mut values = Vec::with_capacity(needed);
            while values.len() < needed {
                let index = skipped + values.len() / cols;
                decode(checkpoint, name, index, &mut row)?;
                let from = values.len();
                values.resize(from + row.len(), 0.0);
                row.dequantize(&mut values[from..]);
            }
            write(&mut values[first..].iter().step_by(*stride).map(|value| change.of(*value)));
        }
    }
    Ok(())
}

fn decode(checkpoint: &Checkpoint, name: &str, row: usize, out: &mut RowBuf) -> Result<(), LoadError> {
    checkpoint.decode_rows(name, row, out).map_err(|source| LoadError::Format { tensor: name.into(), source })
}

/// One thread's buffers for one panel.
struct Scratch {
    rows: Vec<RowBuf>,
    floats: Vec<Vec<f32>>,
    groups: Vec<Groups>,
    /// For a matrix that is stored with its inputs first: the columns that become a task's rows.
    turned: Vec<f32>,
}

/// Scales of one row in the form that the packer takes: wider groups repeat their scale.
#[derive(Default)]
struct Groups {
    scale: Vec<f32>,
    offset: Vec<f32>,
    scale_bits: Vec<u16>,
    offset_bits: Vec<u16>,
    scale_bytes: Vec<u8>,
}

impl Scratch {
    fn new(k: usize) -> Self {
        Self {
            rows: vec![RowBuf::new(); PANEL],
            floats: vec![vec![0.0; k]; PANEL],
            groups: (0..PANEL).map(|_| Groups::default()).collect(),
            turned: Vec::new(),
        }
    }

    fn pack_panel(
        &mut self,
        linear: &LinearDecl,
        checkpoint: &Checkpoint,
        rows: std::ops::Range<usize>,
        panel: &mut [u8],
    ) -> Result<(), LoadError> {
        let count = rows.len();
        let broken = |source| LoadError::Pack { tensor: linear.name.to_string(), source };
        match linear.form {
            Form::Rows(_) => {}
            Form::Folded { parts, channels_last } => {
                for (i, row) in rows.enumerate() {
                    self.unfold(linear, (parts, channels_last), checkpoint, (i, row))?;
                }
                return self.pack_floats(&linear.packing, count, panel).map_err(broken);
            }
            Form::Turned { stride, .. } => {
                let outputs = PANELS_PER_TASK * PANEL;
                let width = outputs.min(linear.packing.out() - rows.start / outputs * outputs);
                let width = (width - 1) * stride + 1;
                for (floats, row) in self.floats.iter_mut().zip(rows) {
                    let column = self.turned.iter().skip(row % outputs * stride).step_by(width);
                    floats.iter_mut().zip(column).for_each(|(to, from)| *to = *from);
                }
                return self.pack_floats(&linear.packing, count, panel).map_err(broken);
            }
        }
        for (buf, row) in self.rows.iter_mut().zip(rows) {
            decode(checkpoint, &linear.name, linear.stored_row(row), buf)?;
        }
        let packed = match linear.packing.kind() {
            PackKind::Quant(_) => self.pack_quant(&linear.packing, count, panel),
            PackKind::F8 { .. } => self.pack_f8(&linear.packing, count, panel),
            PackKind::F32 | PackKind::F16 | PackKind::Bf16 => {
                for (buf, floats) in self.rows.iter().zip(&mut self.floats).take(count) {
                    buf.dequantize(floats);
                }
                self.pack_floats(&linear.packing, count, panel)
            }
        };
        packed.map_err(broken)
    }

    /// Reads the stored columns that become these rows, of a matrix stored with its inputs first.
    fn read_turned(
        &mut self,
        linear: &LinearDecl,
        checkpoint: &Checkpoint,
        rows: std::ops::Range<usize>,
    ) -> Result<(), LoadError> {
        let Form::Turned { row, column, stride } = linear.form else { return Ok(()) };
        let last = rows.end.min(linear.packing.out()) - 1;
        let columns = column + rows.start * stride..column + last * stride + 1;
        let read = checkpoint.decode_block(&linear.name, row..row + linear.packing.k(), columns, &mut self.turned);
        read.map_err(|source| LoadError::Format { tensor: linear.name.to_string(), source })
    }

    /// Reads the stored rows behind packed row `row` into the `i`-th row of floats.
    fn unfold(
        &mut self,
        linear: &LinearDecl,
        (parts, channels_last): (usize, usize),
        checkpoint: &Checkpoint,
        (i, row): (usize, usize),
    ) -> Result<(), LoadError> {
        let (buf, floats) = (&mut self.rows[0], &mut self.floats[i]);
        let width = floats.len() / parts;
        let mut values = vec![0.0; floats.len()];
        for (part, values) in values.chunks_exact_mut(width).enumerate() {
            decode(checkpoint, &linear.name, row * parts + part, buf)?;
            buf.dequantize(values);
        }
        // Stored either as points, each with its channels, or as channels, each with its points.
        let channels = if channels_last > 0 { channels_last } else { 1 };
        let points = values.len() / channels;
        for (point, values) in values.chunks_exact(channels).enumerate() {
            for (channel, value) in values.iter().enumerate() {
                floats[channel * points + point] = *value;
            }
        }
        Ok(())
    }

    fn pack_floats(&mut self, packing: &Packing, count: usize, panel: &mut [u8]) -> Result<(), PackError> {
        let rows: [&[f32]; PANEL] = std::array::from_fn(|i| self.floats[i].as_slice());
        pack_panel_f32(packing, &rows[..count], panel)
    }

    fn pack_f8(&mut self, packing: &Packing, count: usize, panel: &mut [u8]) -> Result<(), PackError> {
        let mut rows = ArrayVec::<_, PANEL>::new();
        for buf in &self.rows[..count] {
            let Row::F8 { numbers, scale, .. } = buf.row() else { return Err(PackError::KindMismatch) };
            rows.push(F8Row { codes: numbers, scale });
        }
        pack_panel_f8(packing, &rows, panel)
    }

    fn pack_quant(&mut self, packing: &Packing, count: usize, panel: &mut [u8]) -> Result<(), PackError> {
        let PackKind::Quant(quant) = packing.kind() else { return Err(PackError::KindMismatch) };
        for (buf, groups) in self.rows.iter().zip(&mut self.groups).take(count) {
            groups.fill(buf.row(), usize::from(quant.group), packing.k());
        }
        let mut rows = Vec::with_capacity(count);
        for (buf, groups) in self.rows.iter().zip(&self.groups).take(count) {
            let Row::Quant { codes, scales, .. } = buf.row() else { return Err(PackError::KindMismatch) };
            let scales = match scales {
                RowScales::Super { d, dmin, sc, m } => QuantRowScales::Super { d, dmin, sc, m },
                RowScales::SuperF32 { d, dmin, sc, m } => QuantRowScales::SuperF32 { d, dmin, sc, m },
                RowScales::Group { .. } => match quant.scales {
                    PackScales::F16 => QuantRowScales::F16 { scale: &groups.scale_bits, offset: &groups.offset_bits },
                    PackScales::E8m0Half | PackScales::Ue4m3Half => QuantRowScales::Bytes(&groups.scale_bytes),
                    _ => QuantRowScales::F32 { scale: &groups.scale, offset: &groups.offset },
                },
            };
            rows.push(QuantRow { codes, scales });
        }
        pack_panel_quant(packing, &rows, panel)
    }
}

impl Groups {
    fn fill(&mut self, row: Row<'_>, group: usize, k: usize) {
        let Row::Quant { layout, scales, .. } = row else { return };
        // The last group of a row may be cut.
        let times = (layout.group / group, k.div_ceil(group));
        if let RowScales::Group { scale, offset, scale_bits, offset_bits } = scales {
            repeat(scale, times, &mut self.scale);
            repeat(offset, times, &mut self.offset);
            repeat(scale_bits, times, &mut self.scale_bits);
            repeat(offset_bits, times, &mut self.offset_bits);
            // Scales of one byte; scales of other sizes are not read here.
            self.scale_bytes.clear();
            self.scale_bytes.extend(self.scale_bits.iter().map(|bits| *bits as u8));
        }
    }
}

fn repeat<T: Copy>(from: &[T], (times, most): (usize, usize), to: &mut Vec<T>) {
    to.clear();
    to.extend(from.iter().flat_map(|value| std::iter::repeat_n(*value, times)).take(most));
}
