//! The workspace of a mixture of experts: one list of buffers, in one order, for the planner and for the device.
//!
//! Every row has `top_k` copies, grouped by expert. The sizes are therefore `rows · top_k` for every choice of experts,
//! whether all rows choose the same ones or all different ones.

use plimsoll_kernels::ActLayout;
use plimsoll_memory::step::{StepOverflow, StepStack};

use crate::device::{Buf, Device, DeviceError, Experts};
use crate::weights::{LinearId, WeightTable};

/// The inputs of some grouped products, one row per choice: quantized, as floats, or both, as the weights need them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs {
    /// The width of a row.
    pub cols: usize,
    /// Layout and place of the quantized copies, if any weight is quantized.
    pub acts: Option<(ActLayout, usize)>,
    /// Float rows, if any weight is of floats.
    pub floats: Option<Buf>,
}

/// The places of all buffers, as byte offsets in the workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    /// Rows times chosen experts.
    pub choices: usize,
    /// The chosen experts' ids: `choices` words.
    pub ids: usize,
    /// Each choice's place among all, grouped by expert: `choices` words.
    pub places: usize,
    /// First place of each expert's choices, and the end: one word per expert and one more.
    pub starts: usize,
    /// Blocks of rows before each expert's own, and the number of all: one word per expert and one more.
    pub blocks: usize,
    /// The chosen experts' weights, a row of `top_k` for each row.
    pub weights: Buf,
    /// Results of the gate, in grouped order; then the product with `up`.
    pub gate: Buf,
    /// Results of `up`; without such matrices, nothing.
    pub up: Buf,
    /// The grouped copies of the input.
    pub inputs: Inputs,
    /// The grouped input of `down`.
    pub hidden: Inputs,
    /// Results of `down`, in grouped order.
    pub y: Buf,
}

impl Space {
    /// Takes the buffers that last for the whole operation.
    pub fn begin(stack: &mut StepStack, table: &WeightTable, spec: &Experts<'_>, x: Buf) -> Result<Self, StepOverflow> {
        let (experts, choices) = (spec.gate.len(), x.rows * spec.top_k);
        assert!(
            [0, experts].contains(&spec.up.len()) && spec.down.len() == experts,
            "three matrices an expert, or two"
        );
        assert!(spec.top_k <= experts, "{} of {experts} experts", spec.top_k);
        let width = table.linear(spec.gate[0]).packing.out();
        let mut words = |count: usize| stack.take(count * size_of::<u32>());
        let (ids, places, starts, blocks) =
            (words(choices)?, words(choices)?, words(experts + 1)?, words(experts + 1)?);
        let mut matrix = |rows, cols| take_matrix(stack, rows, cols);
        let weights = matrix(x.rows, spec.top_k)?;
        let (gate, up) = (matrix(choices, width)?, matrix(choices, if spec.up.is_empty() { 0 } else { width })?);
        let y = Buf { offset: 0, rows: choices, cols: x.cols };
        let copies = |matrices: &[&[LinearId]], cols| Inputs::wanted(table, matrices, choices, cols);
        let inputs = copies(&[spec.gate, spec.up], x.cols);
        // Floats for `down` are the rows of `gate` themselves.
        let hidden = Inputs { floats: Some(gate), ..copies(&[spec.down], width) };
        Ok(Self { choices, ids, places, starts, blocks, weights, gate, up, inputs, hidden, y })
    }

    /// Takes the grouped copies of the input; they may be released when gate and up are computed.
    pub fn take_inputs(&mut self, stack: &mut StepStack) -> Result<(), StepOverflow> {
        if let Some((layout, at)) = &mut self.inputs.acts {
            *at = stack.take(layout.bytes())?;
        }
        if let Some(floats) = &mut self.inputs.floats {
            *floats = take_matrix(stack, floats.rows, floats.cols)?;
        }
        Ok(())
    }

    /// Takes the quantized input of `down`, and its results.
    pub fn take_outputs(&mut self, stack: &mut StepStack) -> Result<(), StepOverflow> {
        if let Some((layout, at)) = &mut self.hidden.acts {
            *at = stack.take(layout.bytes())?;
        }
        self.y = take_matrix(stack, self.y.rows, self.y.cols)?;
        Ok(())
    }
}

impl Inputs {
    /// Returns the forms of an input of `rows` rows that weights `matrices` need. No workspace is taken yet.
    fn wanted(table: &WeightTable, matrices: &[&[LinearId]], rows: usize, cols: usize) -> Self {
        let quantized = |id: &LinearId| table.linear(*id).packing.takes_acts();
        let all = || matrices.iter().flat_map(|ids| ids.iter());
        Self {
            cols,
            acts: table.act_layout(rows, cols, all()).map(|layout| (layout, 0)),
            floats: (!all().all(quantized)).then_some(Buf { offset: 0, rows, cols }),
        }
    }
}

fn take_matrix(stack: &mut StepStack, rows: usize, cols: usize) -> Result<Buf, StepOverflow> {
    let buf = Buf { offset: 0, rows, cols };
    Ok(Buf { offset: stack.take(buf.bytes())?, ..buf })
}

/// Least rows that a workgroup multiplies with one expert's matrix on a GPU.
pub const GPU_EXPERT_ROWS: usize = 4;

/// Limits of a GPU: experts of a layer, experts of a row, and groups of experts.
pub const GPU_EXPERTS_MAX: [usize; 3] = [1024, 64, 64];

/// The workspace of a mixture of experts on a GPU. Whole numbers are stored as floats.
#[derive(Clone, Copy, Debug)]
pub struct GpuExperts {
    /// The chosen experts' ids, a row of `top_k` for each row.
    pub ids: Buf,
    /// The chosen experts' weights.
    pub weights: Buf,
    /// Choices, ordered by expert.
    pub order: Buf,
    /// Blocks of choices with one expert: its number, their first place in `order`, and their count.
    pub blocks: Buf,
    /// Results of the gate, a row a choice.
    pub gate: Buf,
    /// Results of `up`, if there is such a matrix.
    pub up: Buf,
    /// Results of `down`.
    pub down: Buf,
}

impl GpuExperts {
    /// Takes all buffers, for `rows` rows of `cols` and experts that are `width` wide inside.
    ///
    /// # Errors
    /// [`DeviceError::Workspace`].
    pub fn take<D: Device + ?Sized>(
        device: &mut D,
        spec: &Experts<'_>,
        [rows, cols, width]: [usize; 3],
    ) -> Result<Self, DeviceError> {
        let choices = rows * spec.top_k;
        let up = if spec.up.is_empty() { 0 } else { choices };
        Ok(Self {
            ids: device.temp(rows, spec.top_k)?,
            weights: device.temp(rows, spec.top_k)?,
            order: device.temp(choices, 1)?,
            blocks: device.temp(Self::most_blocks(choices, spec.gate.len(), GPU_EXPERT_ROWS), 3)?,
            gate: device.temp(choices, width)?,
            up: device.temp(up, width)?,
            down: device.temp(choices, cols)?,
        })
    }

    /// Returns the most blocks of `rows` for `choices` choices: every chosen expert may leave one block unfilled.
    pub fn most_blocks(choices: usize, experts: usize, rows: usize) -> usize {
        (choices + (rows - 1) * choices.min(experts)) / rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_distribution_of_choices_makes_more_blocks() {
        for (choices, experts) in [(0_usize, 4_usize), (1, 4), (8, 4), (9, 3), (40, 7), (7, 128), (4096, 128)] {
            for rows in [GPU_EXPERT_ROWS, 32] {
                let most = GpuExperts::most_blocks(choices, experts, rows);
                assert!(
                    most <= GpuExperts::most_blocks(choices, experts, GPU_EXPERT_ROWS),
                    "longer blocks are no more"
                );
                // As many experts as possible with one choice each; the last expert takes all other choices.
                for used in 1..=experts.min(choices) {
                    let blocks = used - 1 + (choices - (used - 1)).div_ceil(rows);
                    assert!(blocks <= most, "{choices} choices, {used} of {experts}");
                }
                let even = (0..experts).map(|i| (choices + i) / experts).map(|n: usize| n.div_ceil(rows));
                assert!(even.sum::<usize>() <= most, "{choices} choices, {experts} experts");
            }
        }
    }
}
