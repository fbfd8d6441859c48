//! Rows of tables that stay in the model's files, and the cache of the most recently used rows.
//!
//! A lookup has three parts: each row gets a slot in the cache, missing rows are read from their file, and all are decoded.
//! The last two run on all threads. A row is always decoded from the same bytes, so a cache of any size gives the same values.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_formats::{Checkpoint, FormatError, RowBuf, StoredTensors};
use plimsoll_memory::{Component, Ledger, Region};

use super::load_error::LoadError;
use crate::pool::ThreadPool;
use crate::weights::{CacheLayout, InFile, TAG, WAYS, WeightTable};

/// Rows of a batch. Within a batch no row takes the slot of another.
const BATCH_ROWS: usize = 1024;
/// Rows of one task.
const ROWS_PER_TASK: usize = 16;
/// A flag of a slot number: the row must be read from the file first.
const MISSING: u32 = 1 << 31;
/// A value instead of a slot number: the cache has no slot for the row, which is read whenever it is decoded.
const DIRECT: u32 = 1 << 30;
/// The tag of a slot without a row.
const EMPTY: u32 = u32::MAX;

/// Counts of rows that were looked up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableReads {
    /// Rows that were in the cache.
    pub cached: u64,
    /// Rows that were read from a file.
    pub read: u64,
}

/// Buffers of one thread that reads rows.
struct Reader {
    bytes: Vec<u8>,
    row: RowBuf,
}

/// The cache of one table.
struct Table {
    cache: CacheLayout,
    /// Batches so far. Rows of the current batch keep their slots.
    batch: u32,
}

/// The tables of one model.
pub(super) struct FileTables {
    stored: StoredTensors,
    tables: Box<[Table]>,
    region: Region,
    readers: Box<[Mutex<Reader>]>,
    /// The first error of reading a row.
    failed: Mutex<Option<FormatError>>,
    /// Whether slots belong to rows that may not have been read, because a batch panicked.
    unread: bool,
    reads: TableReads,
}

/// The rows of a table's cache, shared by tasks.
#[derive(Clone, Copy)]
struct Rows {
    base: *mut u8,
    bytes: usize,
    slots: usize,
}

// SAFETY: the pointer is used through `slot` and `slot_mut`; their callers promise disjoint use.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// The bytes of a slot, to write them.
    ///
    /// # Safety
    /// The region outlives the slice, and no other slice of this slot is alive.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slot_mut<'a>(&self, slot: usize) -> &'a mut [u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: inside the region, which has `self.slots` slots.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(slot * self.bytes), self.bytes) }
    }

    /// The bytes of a slot.
    ///
    /// # Safety
    /// The region outlives the slice, and nothing writes to the slot.
    unsafe fn slot<'a>(&self, slot: usize) -> &'a [u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: inside the region, which has `self.slots` slots.
        unsafe { std::slice::from_raw_parts(self.base.add(slot * self.bytes), self.bytes) }
    }
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FileTables {
    /// Opens the files of all tables and maps their caches. Returns none if no table stays in a file.
    pub fn open(
        table: &WeightTable,
        (checkpoint, ledger, threads): (&Checkpoint, &Arc<Ledger>, usize),
    ) -> Result<Option<Self>, LoadError> {
        if table.file_tables().is_empty() {
            return Ok(None);
        }
        let in_files = table.linears.iter().filter(|linear| linear.in_file.is_some());
        let stored = checkpoint.stored_rows(in_files.map(|linear| &*linear.name)).map_err(LoadError::Table)?;
        let tables: Box<[Table]> = table.caches().map(|cache| Table { cache, batch: 0 }).collect();
        let region = Region::map(ledger, Component::TableCache, table.table_cache_bytes() as u64, true)?;
        let widest = tables.iter().map(|table| table.cache.row_bytes).max().unwrap_or(0);
        let reader = |_| {
            let (bytes, mut row) = (vec![0; widest], RowBuf::new());
            // Steps do not allocate: the buffers are as long as they will ever be.
            stored.tensors().iter().for_each(|tensor| tensor.decode(&bytes[..tensor.row_bytes()], &mut row));
            Mutex::new(Reader { bytes, row })
        };
        let readers = (0..threads).map(reader).collect();
        let failed = Mutex::new(None);
        let mut opened = Self { stored, tables, region, readers, failed, unread: false, reads: TableReads::default() };
        opened.forget();
        Ok(Some(opened))
    }

    /// Looks up `count` rows of a table. `place(i)` returns the matrix that has the i-th row, and the row's number there. The values are
    /// written to `out(i)`.
    pub fn look_up<'a>(
        &mut self,
        pool: &mut ThreadPool,
        (table, count): (usize, usize),
        place: impl Fn(usize) -> (InFile, usize) + Sync,
        out: impl Fn(usize) -> &'a mut [f32] + Sync,
    ) {
        if self.unread {
            self.forget();
        }
        self.unread = true;
        let mut slots = [0; BATCH_ROWS];
        for first in (0..count).step_by(BATCH_ROWS) {
            let slots = &mut slots[..BATCH_ROWS.min(count - first)];
            let missing = self.find(table, slots, |i| {
                let (at, row) = place(first + i);
                at.first + row
            });
            self.reads.cached += (slots.len() - missing) as u64;
            self.reads.read += missing as u64;
            let rows = self.rows(table);
            let this = &*self;
            let tasks = slots.len().div_ceil(ROWS_PER_TASK);
            let each = |task: usize| task * ROWS_PER_TASK..((task + 1) * ROWS_PER_TASK).min(slots.len());
            if missing > 0 {
                pool.run(tasks, &|_, task| {
                    for i in each(task).filter(|i| slots[*i] & MISSING != 0) {
                        // SAFETY: the region outlives the job. In a batch one row alone has this slot and is missing.
                        let slot = unsafe { rows.slot_mut((slots[i] & !MISSING) as usize) };
                        this.read_row(place(first + i), slot);
                    }
                });
            }
            pool.run(tasks, &|thread, task| {
                let reader = &mut *locked(&this.readers[thread]);
                for i in each(task) {
                    let (at, slot) = (place(first + i), slots[i] & !MISSING);
                    let bytes = if slot == DIRECT {
                        let bytes = &mut reader.bytes[..rows.bytes];
                        this.read_row(at, bytes);
                        &*bytes
                    } else {
                        // SAFETY: the region outlives the job, in which nothing writes to slots.
                        unsafe { rows.slot(slot as usize) }
                    };
                    this.stored.tensors()[at.0.tensor].decode(bytes, &mut reader.row);
                    reader.row.dequantize(out(i + first));
                }
            });
        }
        self.unread = locked(&self.failed).is_some();
    }

    /// Gives every row of a batch its slot, and returns how many rows must be read. The least recently used row is evicted, unless it
    /// belongs to the same batch.
    fn find(&mut self, table: usize, slots: &mut [u32], row: impl Fn(usize) -> usize) -> usize {
        let table = &mut self.tables[table];
        table.batch = table.batch.wrapping_add(1);
        let (cache, now) = (table.cache, table.batch);
        let (tags, _) = self.region.bytes_mut()[cache.tags_at()..][..cache.slots * TAG].as_chunks_mut::<TAG>();
        let word = |tag: &[u8; TAG], half: usize| {
            u32::from_ne_bytes(tag[4 * half..][..4].try_into().expect("a tag has two words"))
        };
        let mut missing = 0;
        for (i, slot) in slots.iter_mut().enumerate() {
            let number = row(i) as u32;
            // N-grams have hashed numbers, and common tokens small ones: both spread over the sets.
            let first = number as usize % (cache.slots / WAYS) * WAYS;
            let set = &mut tags[first..first + WAYS];
            let found = set.iter().position(|tag| word(tag, 0) == number);
            let age = |tag: &[u8; TAG]| if word(tag, 0) == EMPTY { u32::MAX } else { now.wrapping_sub(word(tag, 1)) };
            let way = found.unwrap_or_else(|| (0..WAYS).max_by_key(|way| age(&set[*way])).unwrap_or(0));
            *slot = (first + way) as u32;
            if found.is_none() {
                missing += 1;
                if age(&set[way]) == 0 {
                    *slot = DIRECT;
                    continue;
                }
                *slot |= MISSING;
                set[way][..4].copy_from_slice(&number.to_ne_bytes());
            }
            set[way][4..].copy_from_slice(&now.to_ne_bytes());
        }
        missing
    }

    fn rows(&mut self, table: usize) -> Rows {
        let CacheLayout { slots, row_bytes, at } = self.tables[table].cache;
        Rows { base: self.region.as_mut_ptr().wrapping_add(at), bytes: row_bytes, slots }
    }

    /// Reads a row. An error leaves zeros, and [`Self::intact`] returns it.
    fn read_row(&self, (at, row): (InFile, usize), bytes: &mut [u8]) {
        if let Err(error) = self.stored.tensors()[at.tensor].read(row, bytes) {
            bytes.fill(0);
            *locked(&self.failed) = Some(error);
        }
    }

    /// Empties the caches.
    fn forget(&mut self) {
        self.unread = false;
        for table in &self.tables {
            self.region.bytes_mut()[table.cache.tags_at()..][..table.cache.slots * TAG].fill(0xff);
        }
    }

    /// Checks that all rows that were looked up since the last call are the model's.
    pub fn intact(&self) -> Result<(), FormatError> {
        locked(&self.failed).take().map_or(Ok(()), Err)?;
        self.stored.unchanged()
    }

    /// Returns the counts of rows that were looked up since the last call.
    pub fn take_reads(&mut self) -> TableReads {
        std::mem::take(&mut self.reads)
    }
}
