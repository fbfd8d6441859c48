//! Work of sparse attention and of n-gram embeddings, neither of which has a kernel on GPUs.

use super::{PlanDevice, states_moved};
use crate::device::{Buf, NgramConv, Selection, StepInput};
use crate::kv::PAGE_TOKENS;

impl PlanDevice<'_> {
    pub(super) fn count_selected(&mut self, spec: &Selection, q: Buf, [queries, ..]: [Buf; 3], step: &StepInput<'_>) {
        self.calls.plain += 3;
        self.not_on_gpu("sparse attention over selected blocks");
        let from = spec.attention.selects_from.unwrap_or(usize::MAX);
        let layer = self.kv.layers()[spec.attention.layer];
        let (slot, page) = (layer.index.map_or(0, |index| index.slot_bytes()), layer.kv_bytes());
        let positions = step.seqs.iter().flat_map(|seq| seq.start.max(from)..seq.start + seq.rows);
        for position in positions {
            let blocks = spec.complete(position);
            let seen = spec.blocks * spec.block + (position + 1) % spec.block;
            self.work.flops += (2 * blocks * queries.cols + 4 * seen * q.cols) as u64;
            self.work.kv_bytes += (blocks * slot + seen.div_ceil(PAGE_TOKENS) * page) as u64;
        }
    }

    pub(super) fn count_ngrams(&mut self, out: Buf, ids: Buf, step: &StepInput<'_>) {
        self.calls.plain += 1;
        self.not_on_gpu("n-gram embeddings");
        self.upload += ids.rows * ids.cols;
        self.work.flops += (out.rows * out.cols) as u64;
        self.work.state_bytes += (states_moved(step) * 64) as u64;
    }

    pub(super) fn count_ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>) {
        self.calls.plain += 1;
        self.not_on_gpu("n-gram embeddings");
        self.send_slots(x.rows);
        self.work.flops += (x.rows * x.cols * (2 * spec.taps + 8)) as u64;
        self.work.state_bytes += (states_moved(step) * spec.history() * spec.channels * size_of::<f32>()) as u64;
    }
}
