//! The workspace of a mixture of experts: one list of what is taken, in one order, for the planner and for the device.
//!
//! Every row has `top_k` copies, grouped by expert. The sizes are therefore `rows · top_k` for every choice of experts,
//! whether all rows choose the same ones or all different ones.

use plimsoll_kernels::ActLayout;
use plimsoll_memory::step::{StepOverflow, StepStack};

use crate::device::{Buf, Experts};
use crate::weights::{LinearId, WeightTable};

/// The inputs of some grouped products, one row a choice: quantized, as floats, or both, as the weights want them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs {
    /// The width of a row.
    pub cols: usize,
    /// How the quantized copies lie, and where, if any weight is quantized.
    pub acts: Option<(ActLayout, usize)>,
    /// Float rows, if any weight is of floats.
    pub floats: Option<Buf>,
}

/// Where everything lies, as byte offsets in the workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    /// Rows times chosen experts.
    pub choices: usize,
    /// The chosen experts' ids: `choices` words.
    pub ids: usize,
    /// Each choice's place among all, grouped by expert: `choices` words.
    pub places: usize,
    /// Where each expert's choices begin, and the end: one word an expert and one more.
    pub starts: usize,
    /// The same for tasks' blocks of rows.
    pub blocks: usize,
    /// The chosen experts' weights, a row of `top_k` for each row.
    pub weights: Buf,
    /// Results of the gate, in grouped order; then the product with `up`.
    pub gate: Buf,
    /// Results of `up`.
    pub up: Buf,
    /// The grouped copies of the input.
    pub inputs: Inputs,
    /// The grouped input of `down`.
    pub hidden: Inputs,
    /// Results of `down`, in grouped order.
    pub y: Buf,
}

impl Space {
    /// Takes what lasts for the whole operation.
    pub fn begin(stack: &mut StepStack, table: &WeightTable, spec: &Experts<'_>, x: Buf) -> Result<Self, StepOverflow> {
        let (experts, choices) = (spec.gate.len(), x.rows * spec.top_k);
        assert!(spec.up.len() == experts && spec.down.len() == experts, "three matrices an expert");
        assert!(spec.top_k <= experts, "{} of {experts} experts", spec.top_k);
        let width = table.linear(spec.gate[0]).packing.out();
        let mut words = |count: usize| stack.take(count * size_of::<u32>());
        let (ids, places, starts, blocks) =
            (words(choices)?, words(choices)?, words(experts + 1)?, words(experts + 1)?);
        let mut matrix = |rows, cols| take_matrix(stack, rows, cols);
        let weights = matrix(x.rows, spec.top_k)?;
        let (gate, up) = (matrix(choices, width)?, matrix(choices, width)?);
        let y = Buf { offset: 0, rows: choices, cols: x.cols };
        let wants = |matrices: &[&[LinearId]], cols| Inputs::wanted(table, matrices, choices, cols);
        let inputs = wants(&[spec.gate, spec.up], x.cols);
        // Floats for `down` are the rows of `gate` themselves.
        let hidden = Inputs { floats: Some(gate), ..wants(&[spec.down], width) };
        Ok(Self { choices, ids, places, starts, blocks, weights, gate, up, inputs, hidden, y })
    }

    /// Takes the grouped copies of the input; they may be given back when gate and up are there.
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
    /// What weights `matrices` want of an input of `rows` rows; nothing is taken yet.
    fn wanted(table: &WeightTable, matrices: &[&[LinearId]], rows: usize, cols: usize) -> Self {
        let quantized = |id: &LinearId| table.linear(*id).packing.wants_acts();
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
