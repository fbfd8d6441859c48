//! The most likely tokens of rows of logits.

use plimsoll_device::{Buf, CANDIDATE_BLOCK};

use super::operations::{by_row, elements};
use super::{GpuDevice, at};
use crate::kernel::Kernel;

impl GpuDevice {
    /// [`plimsoll_device::Device::candidates`].
    pub(super) fn find_candidates(&mut self, out: Buf, blocks: Buf, x: Buf, counts: &[u32]) {
        let per_row = x.cols.div_ceil(CANDIDATE_BLOCK);
        assert_eq!(
            (counts.len(), blocks.cols),
            (x.rows, per_row),
            "a count for every row, and the greatest of its blocks"
        );
        assert!(blocks.rows >= x.rows && out.cols == 2, "blocks of every row, and pairs");
        let (mut rows, mut first) = (0, 0);
        let words = (0..).zip(counts).filter(|(_, count)| **count > 0).flat_map(|(row, count)| {
            let words = [row, *count, first];
            (rows, first) = (rows + 1, first + count);
            words
        });
        let sent = self.record.send(words);
        assert_eq!(first as usize, out.rows, "a row for every candidate");
        let params = |count: usize| [at(x), at(blocks), at(out), x.cols as u32, per_row as u32, count as u32, sent];
        self.call(Kernel::BlockMaxima, elements(rows * per_row), &params(rows * per_row));
        self.call(Kernel::Candidates, by_row(rows), &params(rows));
    }
}
