//! A step's batch, laid out for the device in buffers that are reserved once.

use plimsoll_device::{SeqSpan, StepInput};

use crate::scheduler::{Seq, Share, StepLimits};

/// Reserved buffers for one step.
#[derive(Debug)]
pub struct StepBuffers {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seqs: Vec<SeqSpan>,
    pages: Vec<u32>,
    logit_rows: Vec<u32>,
    rows_max: usize,
    logit_rows_max: usize,
}

impl StepBuffers {
    /// Room for the largest step: `pages` is the number of page ids all running sequences may name together.
    pub fn new(limits: &StepLimits, pages: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(limits.rows),
            positions: Vec::with_capacity(limits.rows),
            seqs: Vec::with_capacity(limits.running),
            pages: Vec::with_capacity(pages),
            logit_rows: Vec::with_capacity(limits.logit_rows),
            rows_max: limits.rows,
            logit_rows_max: limits.logit_rows,
        }
    }

    /// Lays out `shares` of `running`, one after another.
    pub fn fill<T>(&mut self, shares: &[Share], running: &[Seq<T>]) -> StepInput<'_> {
        self.tokens.clear();
        self.positions.clear();
        self.seqs.clear();
        self.pages.clear();
        self.logit_rows.clear();
        for share in shares {
            let seq = &running[share.seq];
            let end = share.start + share.rows;
            let first_row = self.tokens.len();
            self.seqs.push(SeqSpan {
                first_row,
                rows: share.rows,
                start: share.start,
                pages_at: self.pages.len(),
                pages: seq.pages.ids().len(),
                seen_from: 0,
                state: None,
            });
            self.tokens.extend_from_slice(&seq.tokens[share.start..end]);
            self.positions.extend(share.start as u32..end as u32);
            self.pages.extend_from_slice(seq.pages.ids());
            let last = first_row + share.rows;
            self.logit_rows.extend((last - share.logit_rows) as u32..last as u32);
        }
        debug_assert!(
            self.tokens.len() <= self.rows_max && self.logit_rows.len() <= self.logit_rows_max,
            "I6: a step larger than the one that was proven"
        );
        StepInput {
            tokens: &self.tokens,
            positions: &self.positions,
            seqs: &self.seqs,
            pages: &self.pages,
            logit_rows: &self.logit_rows,
            state_out: &[],
        }
    }
}
