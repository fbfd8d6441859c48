//! Steps on the planner's device: the memory and work that a step takes.

use plimsoll_device::{
    Bf16Rows, CANDIDATES_MAX, Calls, ModelShape, NO_STATE, PAGE_TOKENS, PlanDevice, SeqSpan, StepInput, Work,
};

use super::Blueprint;
use super::constants::ROWS_OF_MEDIA;
use crate::api::options::Options;
use crate::api::plan_error::PlanError;
use crate::runner::cpu::Passes;
use crate::runner::encoder_batch::{self, EncoderStep};
use crate::schedule::scheduler::StepLimits;

/// Tokens of the input for which an encoder's plan states the work.
pub const INPUT_TOKENS: usize = 128;

/// A step of one sequence, for the planner's device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    pub start: usize,
    pub rows: usize,
    pub logit_rows: usize,
    /// Rows from which drafts are made.
    pub lanes: usize,
    /// Passes of the draft head.
    pub draft_passes: usize,
    /// Whether the state after each row is kept.
    pub each: bool,
    /// Whether a chunk as large as the step waits between two layers meanwhile.
    pub layered: bool,
    /// Whether hidden states are used for logits alone; if so, layers skip rows without logits.
    pub only_logits: bool,
}

impl Run {
    /// A step that decodes one row.
    pub const ALONE: Self = Self {
        start: 127,
        rows: 1,
        logit_rows: 1,
        lanes: 1,
        draft_passes: 0,
        each: false,
        layered: false,
        only_logits: false,
    };
}

/// The needs of a step: memory, work and transfers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ran {
    pub workspace: usize,
    /// Bytes of the workspace that a chunk between two layers takes.
    pub below: usize,
    pub rounds: bool,
    pub forward: Work,
    pub draft: Work,
    /// The most words that a pass sends to a device with memory of its own, page ids excluded. The pass is the model's, or one that drafts.
    pub upload: usize,
    /// The most calls of a pass on a device that records it.
    pub calls: Calls,
    /// An operation that the model needs and the target lacks.
    pub missing: Option<&'static str>,
}

impl Ran {
    /// Room for either of two steps.
    pub fn or(self, other: Self) -> Self {
        Self {
            workspace: self.workspace.max(other.workspace),
            below: self.below.max(other.below),
            upload: self.upload.max(other.upload),
            calls: self.calls.max(other.calls),
            missing: self.missing.or(other.missing),
            ..self
        }
    }
}

impl Blueprint {
    /// Whether rows compute anything in bfloat16. On AMX any layer can: an encoder's do not, nor do float layers or experts. Elsewhere
    /// attention does, if any layer is quantized.
    pub(super) fn rounds(&self, options: &Options) -> Result<bool, PlanError> {
        let one = Run { rows: 1, logit_rows: 1, lanes: 1, ..Run::default() };
        let shape = self.model.shape(options.kv_dtype);
        Ok(self.encoder.is_none() && self.weights.bf16() != Bf16Rows::None && self.run(&shape, one)?.rounds)
    }

    /// The largest step, which is `full` except for an encoder, and one of a single row or input.
    pub(super) fn steps(
        &self,
        shape: &ModelShape,
        step: &StepLimits,
        full: Run,
        context: usize,
    ) -> Result<[Ran; 2], PlanError> {
        if step.encoder_batch {
            let largest = encoder_batch::largest(step, context);
            return Ok([self.run_whole(shape, &largest)?, self.run_whole(shape, &[INPUT_TOKENS.min(context)])?]);
        }
        let mut largest = self.run(shape, full)?;
        if self.weights.on_gpu() {
            // A GPU also needs room for input and recorded calls. These are not always fewer when fewer rows are computed.
            largest = largest.or(self.run(shape, Run { only_logits: true, ..full })?);
        }
        Ok([largest, self.run(shape, Run::ALONE)?])
    }

    /// Runs a step of whole sequences on the planner's device.
    pub(super) fn run_whole(&self, shape: &ModelShape, rows: &[usize]) -> Result<Ran, PlanError> {
        let mut device = PlanDevice::new(&self.weights, &shape.kv);
        Passes::default().forward(&*self.model, &mut device, &EncoderStep::new(rows).input())?;
        Ok(Ran {
            workspace: device.high_water(),
            below: 0,
            rounds: false,
            forward: device.work(),
            draft: Work::default(),
            upload: device.upload_words(),
            calls: device.calls(),
            missing: device.missing(),
        })
    }

    /// Runs a step on the planner's device.
    pub(super) fn run(&self, shape: &ModelShape, run: Run) -> Result<Ran, PlanError> {
        let Run { start, rows, logit_rows, lanes, draft_passes, each, layered, only_logits } = run;
        let tokens = vec![0; rows];
        let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
        let pages: Vec<u32> = (0..(start + rows).div_ceil(PAGE_TOKENS) as u32).collect();
        let wanted: Vec<u32> = (0..logit_rows as u32).collect();
        // A device with memory of its own finds the most likely tokens of rows.
        let candidates = vec![CANDIDATES_MAX as u32; if self.weights.on_gpu() { logit_rows } else { 0 }];
        let places = vec![[0.0; 3]; if self.media.is_some() { rows } else { 0 }];
        let state = shape.state.filter(|_| start > 0).map(|_| 0);
        let mut seqs = [SeqSpan { first_row: 0, rows, start, pages_at: 0, pages: pages.len(), seen_from: 0, state }];
        let kept = |row: usize| if each || row + 1 == rows { row as u32 + 1 } else { NO_STATE };
        let logit_seqs = [SeqSpan { rows: logit_rows, ..seqs[0] }];
        let state_out: Vec<u32> = shape.state.map_or(Vec::new(), |_| (0..rows).map(kept).collect());
        let input = StepInput {
            tokens: &tokens,
            positions: &positions,
            seqs: &seqs,
            pages: &pages,
            window_pages: &pages,
            logit_rows: &wanted,
            logit_seqs: &logit_seqs,
            candidates: &candidates,
            only_logits,
            state_out: &state_out,
            places: &places,
            media: if self.media.is_some() { &ROWS_OF_MEDIA } else { &[] },
            bf16_rows: rows,
            ..StepInput::default()
        };
        let mut device = PlanDevice::new(&self.weights, &shape.kv);
        let mut passes = Passes::default();
        if layered {
            passes.begin(&*self.model, &mut device, &input)?;
        }
        let (begun, below) = (device.work(), device.high_water());
        device.begin_step();
        passes.forward(&*self.model, &mut device, &input)?;
        let (forward, mut upload, mut calls) = (device.work() - begun, device.upload_words(), device.calls());
        seqs[0].state = None;
        for pass in 0..draft_passes {
            let rows = if pass == 0 { rows } else { lanes };
            seqs[0].rows = rows;
            let from: Vec<u32> = (0..rows as u32).collect();
            let input = StepInput {
                tokens: &tokens[..rows],
                positions: &positions[..rows],
                places: &places[..if places.is_empty() { 0 } else { rows }],
                seqs: &seqs,
                pages: &pages,
                logit_rows: &from[..lanes],
                candidates: &candidates[..lanes.min(candidates.len())],
                ..StepInput::default()
            };
            device.begin_step();
            passes.draft(&*self.model, &mut device, &from, &input)?;
            (upload, calls) = (upload.max(device.upload_words()), calls.max(device.calls()));
        }
        let draft = Work { state_bytes: 0, ..device.work() - begun - forward };
        let (rounds, missing) = (device.rounds(), device.missing());
        Ok(Ran { workspace: device.high_water(), below, rounds, forward, draft, upload, calls, missing })
    }
}
