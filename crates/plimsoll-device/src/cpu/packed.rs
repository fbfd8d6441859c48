//! Packed weights in a file that is mapped: the second start of a model packs nothing.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | `plimpack` |
//! | 8..12 | version of this table: 1; little endian as all numbers here |
//! | 12..16 | blocks of the weights, of 4 MiB each but the last |
//! | 16..24 | bytes of the weights |
//! | 24..56 | the key: a hash of everything that decides the weights |
//! | 56.. | XXH3 of 128 bits: one of each block, then one of the header before it |
//! | next multiple of 64 KiB | the weights, as they lie in a region |
//!
//! Every byte is checked before it is used. A file that is cut or written to afterwards fails the next step
//! ([`CpuWeights::intact`]).

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use plimsoll_formats::{FormatError, Mapping};
use plimsoll_memory::{Component, HeldFile, Ledger, OutOfMemory};
use thiserror::Error;
use twox_hash::XxHash3_128;

use super::CpuWeights;
use crate::pool::ThreadPool;
use crate::weights::WeightTable;

const MAGIC: [u8; 8] = *b"plimpack";
const VERSION: u32 = 1;
/// Bytes of the header before the sums.
const FIXED: usize = 56;
const SUM: usize = 16;
/// Bytes that are checked together.
const BLOCK: usize = 4 << 20;
/// Blocks between two looks at the clock.
const BLOCKS_TOGETHER: usize = 32;
/// The weights begin on a page boundary, for every page size of today's systems.
const ALIGN: usize = 64 << 10;
/// A check on a slower disk is given up: packing reads the model's own files, which may be on another disk.
const BYTES_PER_SECOND_LEAST: u64 = 50 << 20;
/// Time that every check may take, however few bytes it reads.
const CHECK_LEAST: Duration = Duration::from_secs(10);

/// The reason not to use a file of packed weights.
#[derive(Debug, Error)]
pub enum PackedError {
    /// The file could not be mapped, or was changed meanwhile.
    #[error(transparent)]
    File(#[from] FormatError),
    /// The header belongs to other weights, or the file was cut.
    #[error("its header or its length does not fit these weights")]
    Header,
    /// A block does not match its sum.
    #[error("the bytes of '{tensor}' do not match their checksum")]
    Damaged {
        /// The tensor that lies there.
        tensor: String,
    },
    /// The check of the file took too long.
    #[error("checking it took longer than {} seconds", .0.as_secs())]
    Slow(Duration),
    /// The ledger refused the bytes.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The caller has cancelled loading.
    #[error("loading was stopped")]
    Stopped,
}

/// Weights in a mapped file, every byte checked.
pub struct PackedFile {
    /// Dropped before `_held`: the pages are unmapped before the ledger releases them.
    file: Mapping,
    data_at: usize,
    bytes: usize,
    _held: HeldFile,
}

impl PackedFile {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.data_at..][..self.bytes]
    }

    pub(super) fn intact(&self) -> Result<(), FormatError> {
        self.file.unchanged()
    }
}

/// The time that a check of `bytes` bytes may take.
fn check_limit(bytes: usize) -> Duration {
    CHECK_LEAST + Duration::from_secs(bytes as u64 / BYTES_PER_SECOND_LEAST)
}

/// Offset of the weights behind the sums of `blocks` blocks.
fn data_at(blocks: usize) -> usize {
    (FIXED + (blocks + 1) * SUM).next_multiple_of(ALIGN)
}

fn sum(bytes: &[u8]) -> [u8; SUM] {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}

/// The header before the sums.
fn fixed(key: &[u8; 32], bytes: usize) -> [u8; FIXED] {
    let mut fixed = [0; FIXED];
    fixed[..8].copy_from_slice(&MAGIC);
    fixed[8..12].copy_from_slice(&VERSION.to_le_bytes());
    fixed[12..16].copy_from_slice(&(bytes.div_ceil(BLOCK) as u32).to_le_bytes());
    fixed[16..24].copy_from_slice(&(bytes as u64).to_le_bytes());
    fixed[24..].copy_from_slice(key);
    fixed
}

/// Returns the header of a file with `bytes` bytes of weights, padded to the offset of the weights. `sums` are the sums of the blocks.
fn header(key: &[u8; 32], bytes: usize, sums: impl Iterator<Item = [u8; SUM]>) -> Vec<u8> {
    let end = data_at(bytes.div_ceil(BLOCK));
    let mut header = Vec::with_capacity(end);
    header.extend(fixed(key, bytes));
    sums.for_each(|sum| header.extend(sum));
    let own = sum(&header);
    header.extend(own);
    header.resize(end, 0);
    header
}

/// Returns the sums of the blocks, or none unless the file has this key and `bytes` bytes of weights.
fn sums<'a>(file: &'a [u8], key: &[u8; 32], bytes: usize) -> Option<&'a [[u8; SUM]]> {
    let blocks = bytes.div_ceil(BLOCK);
    let (begin, end) = (FIXED, FIXED + blocks * SUM);
    let whole = file.len() == data_at(blocks) + bytes && file[..FIXED] == fixed(key, bytes);
    (whole && file[end..][..SUM] == sum(&file[..end])).then(|| file[begin..end].as_chunks().0)
}

/// The name of the tensor at this offset of the weights.
fn tensor_at(table: &WeightTable, at: usize) -> String {
    let linear = table.linears.iter().rfind(|linear| linear.in_file.is_none() && linear.offset <= at);
    linear.map_or_else(|| "a vector".to_owned(), |linear| linear.name.to_string())
}

impl PackedFile {
    /// Maps a file of [`CpuWeights::packed_header`] and [`CpuWeights::bytes`] that was written for `table` under the same key. Reads
    /// every byte and compares it with its sum. `progress` and `stopped` are as in [`CpuWeights::load_unless`].
    ///
    /// # Errors
    /// [`PackedError`]. For all but [`PackedError::OutOfMemory`] and [`PackedError::Stopped`], the caller packs the weights again.
    pub fn open(
        table: &WeightTable,
        path: &Path,
        key: &[u8; 32],
        (ledger, pool): (&Arc<Ledger>, &mut ThreadPool),
        mut progress: impl FnMut(u64),
        stopped: impl Fn() -> bool,
    ) -> Result<Self, PackedError> {
        let began = Instant::now();
        let file = Mapping::open(path)?;
        let sums = sums(file.bytes(), key, table.bytes).ok_or(PackedError::Header)?;
        let data_at = data_at(sums.len());
        let held = HeldFile::commit(ledger, Component::Weights, table.bytes as u64)?;
        let blocks: Vec<(&[u8], &[u8; SUM])> = file.bytes()[data_at..].chunks(BLOCK).zip(sums).collect();
        let (limit, damaged) = (check_limit(table.bytes), AtomicUsize::new(usize::MAX));
        for (round, together) in blocks.chunks(BLOCKS_TOGETHER).enumerate() {
            if stopped() {
                return Err(PackedError::Stopped);
            }
            pool.run(together.len(), &|_, at| {
                if sum(together[at].0) != *together[at].1 {
                    damaged.fetch_min(round * BLOCKS_TOGETHER + at, Relaxed);
                }
            });
            let block = damaged.load(Relaxed);
            // A file that was cut during the check reads as zeros from there on.
            file.unchanged()?;
            if block != usize::MAX {
                return Err(PackedError::Damaged { tensor: tensor_at(table, block * BLOCK) });
            }
            if began.elapsed() > limit {
                return Err(PackedError::Slow(limit));
            }
            progress(together.iter().map(|(bytes, _)| bytes.len() as u64).sum());
        }
        Ok(Self { file, data_at, bytes: table.bytes, _held: held })
    }
}

impl CpuWeights {
    /// The header of a file of these weights; [`Self::bytes`] follow it.
    pub fn packed_header(&self, key: &[u8; 32], pool: &mut ThreadPool) -> Vec<u8> {
        let blocks: Vec<&[u8]> = self.bytes().chunks(BLOCK).collect();
        let sums: Vec<OnceLock<[u8; SUM]>> = blocks.iter().map(|_| OnceLock::new()).collect();
        pool.run(blocks.len(), &|_, block| _ = sums[block].set(sum(blocks[block])));
        header(key, self.bytes().len(), sums.into_iter().map(|sum| sum.into_inner().expect("every task ran")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_fits_one_key_and_one_length() {
        let data = vec![7; BLOCK + 100];
        let mut file = header(&[3; 32], data.len(), data.chunks(BLOCK).map(sum));
        assert_eq!(file.len(), ALIGN);
        file.extend(&data);
        let found = sums(&file, &[3; 32], data.len()).expect("it is whole");
        assert_eq!(found, [sum(&data[..BLOCK]), sum(&data[BLOCK..])]);
        assert!(sums(&file, &[4; 32], data.len()).is_none(), "another key");
        assert!(sums(&file, &[3; 32], data.len() - 1).is_none(), "another length");
        assert!(sums(&file[..file.len() - 1], &[3; 32], data.len()).is_none(), "cut");
        for bit in 0..(FIXED + 3 * SUM) * 8 {
            file[bit / 8] ^= 1 << (bit % 8);
            assert!(sums(&file, &[3; 32], data.len()).is_none(), "bit {bit}");
            file[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(sums(&[], &[3; 32], data.len()).is_none());
    }

    #[test]
    fn a_check_has_a_limit_of_time() {
        assert_eq!(check_limit(0), Duration::from_secs(10));
        assert_eq!(check_limit(20 << 30), Duration::from_secs(10 + 20 * 1024 / 50));
    }
}
