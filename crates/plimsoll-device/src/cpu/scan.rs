//! The recurrence of Mamba-2 on all cores: time steps row by row, then the states.

use plimsoll_kernels as kernels;

use super::CpuDevice;
use super::arena::Arena;
use super::rows::for_rows;
use super::states::Heads;
use crate::device::{Buf, SelectiveScan, StepInput};

impl CpuDevice {
    pub(super) fn run_scan(
        &mut self,
        spec: &SelectiveScan,
        out: Buf,
        x: Buf,
        [dt, decay]: [Buf; 2],
        step: &StepInput<'_>,
    ) {
        let SelectiveScan { layer, heads, groups, state_dim, head_dim, limits, .. } = *spec;
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        assert_eq!(spec.state_shape(shape.layers, shape.conv_history + 1), shape, "the layer's state");
        assert!(layer < shape.layers, "recurrent layer {layer} of {}", shape.layers);
        assert!(heads.is_multiple_of(groups), "whole groups of heads");
        assert_eq!((x.cols, out.cols), (spec.channels(), spec.width()), "widths");
        assert_eq!((dt.cols, decay.cols), (heads, heads), "one time step a head");
        assert_eq!(step.state_out.len(), x.rows, "a slot, or none, for every row");
        assert!([out.rows, dt.rows, decay.rows].iter().all(|rows| *rows == x.rows), "one height");
        self.check_slots(step);
        let isa = self.isa;
        let (a_log, dt_bias) = (self.weights.vector(spec.a_log), self.weights.vector(spec.dt_bias));
        let arena = Arena::new(&mut self.memory.workspace, self.memory.scratch_at, self.memory.scratch);
        for_rows(&mut self.pool, dt, |_, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (dt, decay) = unsafe { (arena.row(dt, row), arena.row(decay, row)) };
            kernels::time_steps(isa, dt, decay, a_log, dt_bias, limits);
        });
        let columns = |head: usize| {
            let group = head / (heads / groups);
            let [b, c] = [group, groups + group].map(|place| spec.width() + place * state_dim);
            [c, b, head * head_dim]
        };
        let heads = Heads { layer, count: heads, columns: &columns, skip: Some(spec.skip) };
        self.update(&heads, out, x, [decay, dt], step);
    }
}
