//! Steps on the planner's device: what one takes, and what a model makes of it.

use plimsoll_device::{ModelShape, NO_STATE, PAGE_TOKENS, PlanDevice, Rounded, SeqSpan, StepInput, Work};

use super::Blueprint;
use super::constants::ROWS_OF_MEDIA;
use super::error::PlanError;
use crate::api::options::Options;
use crate::runner::cpu::Passes;
use crate::runner::encoder_batch::EncoderStep;

/// A step of one sequence, for the planner's device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    pub start: usize,
    pub rows: usize,
    pub logit_rows: usize,
    /// Rows that are drafted after.
    pub lanes: usize,
    /// Passes of the draft head.
    pub draft_passes: usize,
    /// The state after each row is kept.
    pub each: bool,
    /// A chunk as large as the step stands between two layers meanwhile.
    pub layered: bool,
}

/// What it came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ran {
    pub workspace: usize,
    /// What of it a chunk between two layers takes.
    pub below: usize,
    pub rounds: bool,
    pub forward: Work,
    pub draft: Work,
}

impl Blueprint {
    /// Whether rows compute anything in bfloat16. On AMX any layer that a row passes: an encoder's do not, nor those of floats, nor experts;
    /// elsewhere attention, if any layer is quantized.
    pub(super) fn rounds(&self, options: &Options) -> Result<bool, PlanError> {
        let one = Run { rows: 1, logit_rows: 1, lanes: 1, ..Run::default() };
        let shape = self.model.shape(options.kv_dtype);
        Ok(self.encoder.is_none() && self.weights.rounded() != Rounded::None && self.run(&shape, one)?.rounds)
    }

    /// Runs a step of whole sequences on the planner's device.
    pub(super) fn run_whole(&self, shape: &ModelShape, rows: &[usize]) -> Result<Ran, PlanError> {
        let mut device = PlanDevice::new(&self.weights, shape.kv);
        Passes::default().forward(&*self.model, &mut device, &EncoderStep::new(rows).input())?;
        Ok(Ran {
            workspace: device.high_water(),
            below: 0,
            rounds: false,
            forward: device.work(),
            draft: Work::default(),
        })
    }

    /// Runs a step on the planner's device.
    pub(super) fn run(&self, shape: &ModelShape, run: Run) -> Result<Ran, PlanError> {
        let Run { start, rows, logit_rows, lanes, draft_passes, each, layered } = run;
        let tokens = vec![0; rows];
        let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
        let pages: Vec<u32> = (0..(start + rows).div_ceil(PAGE_TOKENS) as u32).collect();
        let wanted: Vec<u32> = (0..logit_rows as u32).collect();
        let places = vec![[0.0; 3]; if self.media.is_some() { rows } else { 0 }];
        let state = shape.state.filter(|_| start > 0).map(|_| 0);
        let mut seqs = [SeqSpan { first_row: 0, rows, start, pages_at: 0, pages: pages.len(), seen_from: 0, state }];
        let kept = |row: usize| if each || row + 1 == rows { row as u32 + 1 } else { NO_STATE };
        let state_out: Vec<u32> = shape.state.map_or(Vec::new(), |_| (0..rows).map(kept).collect());
        let input = StepInput {
            tokens: &tokens,
            positions: &positions,
            seqs: &seqs,
            pages: &pages,
            logit_rows: &wanted,
            state_out: &state_out,
            places: &places,
            media: if self.media.is_some() { &ROWS_OF_MEDIA } else { &[] },
            rounded_rows: rows,
            ..StepInput::default()
        };
        let mut device = PlanDevice::new(&self.weights, shape.kv);
        let mut passes = Passes::default();
        if layered {
            passes.begin(&*self.model, &mut device, &input)?;
        }
        let (begun, below) = (device.work(), device.high_water());
        passes.forward(&*self.model, &mut device, &input)?;
        let forward = device.work() - begun;
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
                ..StepInput::default()
            };
            passes.draft(&*self.model, &mut device, &from, &input)?;
        }
        let draft = Work { state_bytes: 0, ..device.work() - begun - forward };
        Ok(Ran { workspace: device.high_water(), below, rounds: device.rounds(), forward, draft })
    }
}
