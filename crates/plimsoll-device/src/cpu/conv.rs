//! A causal convolution on all cores. A task is a block of channels, and channels are independent. No cut changes a result.

use plimsoll_kernels::{self as kernels, ConvRows, ConvSpec, HeadNorm};

use super::CpuDevice;
use super::states::{CONV_BLOCK, States};
use crate::device::{Buf, CausalConv, SeqSpan, StepInput};
use crate::weights::VectorId;

/// A convolution, without its state.
#[derive(Clone, Copy)]
pub(super) struct Convolution {
    pub channels: usize,
    pub weight: VectorId,
    pub bias: Option<VectorId>,
    pub taps: usize,
    /// Rows from one tap to the next.
    pub dilation: usize,
    pub silu: bool,
}

impl CpuDevice {
    pub(super) fn run_conv(&mut self, spec: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>) {
        let CausalConv { layer, channels, weight, bias, taps, silu } = *spec;
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        assert_eq!((shape.conv_channels, shape.conv_history), (channels, taps - 1), "the layer's state");
        assert!(layer < shape.layers, "recurrent layer {layer} of {}", shape.layers);
        let states = self.states(layer, step.state_out);
        self.run_convolution(Convolution { channels, weight, bias, taps, dilation: 1, silu }, x, gates, &states, step);
    }

    /// Convolves the rows of all sequences; `states` are the slots with the layer's earlier inputs.
    pub(super) fn run_convolution(
        &mut self,
        conv: Convolution,
        x: Buf,
        gates: Option<[Buf; 2]>,
        states: &States<'_>,
        step: &StepInput<'_>,
    ) {
        let Convolution { channels, taps, dilation, silu, .. } = conv;
        assert_eq!((x.cols, step.state_out.len()), (channels, x.rows), "a slot, or none, for every row");
        let shaped = |gate: &Buf| (gate.rows, gate.cols) == (x.rows, x.cols);
        assert!(gates.iter().flatten().all(shaped), "gates have the shape of the rows");
        self.check_slots(step);
        let (isa, arena) = (self.isa, self.arena());
        let (weight, bias) = (self.weights.vector(conv.weight), conv.bias.map(|bias| self.weights.vector(bias)));
        let all_taps = (taps - 1) * dilation + 1;
        assert_eq!(weight.len(), channels * taps, "weights of the convolution");
        self.pool.run(channels.div_ceil(CONV_BLOCK), &|thread, task| {
            let first = task * CONV_BLOCK;
            let width = CONV_BLOCK.min(channels - first);
            // SAFETY: scratch belongs to this thread.
            let scratch = unsafe { arena.scratch(thread) };
            let (weights, scratch) = scratch.split_at_mut(kernels::conv_weights_len(width, all_taps));
            kernels::dilated_conv_weights(&weight[first * taps..][..width * taps], (taps, dilation), weights);
            let bias = bias.map(|bias| &bias[first..][..width]);
            let conv = ConvSpec { weights, taps: all_taps, bias, silu, norm: HeadNorm::None, history_ld: channels };
            let multiply = |seq: &SeqSpan, gate: Buf| {
                for row in seq.first_row..seq.first_row + seq.rows {
                    // SAFETY: the row is inside both matrices, which do not overlap. These channels of `x` are this task's alone, and
                    // nothing writes a gate.
                    let (x, gate) = unsafe { (arena.part(x, row, first, width), arena.matrix(gate)) };
                    kernels::mul(isa, x, &gate[row * channels + first..][..width]);
                }
            };
            for seq in step.seqs {
                if let Some([before, _]) = gates {
                    multiply(seq, before);
                }
                // SAFETY: the sequence's rows of these channels are inside `x`, and, like the same channels in its slots, this task's
                // alone; slots were checked.
                unsafe {
                    let ptr = arena.pointer(x).add(seq.first_row * channels + first);
                    let rows = ConvRows { ptr, ld: channels, channels: width };
                    kernels::causal_conv(isa, &conv, rows, &states.at(first, seq), scratch);
                }
                if let Some([_, after]) = gates {
                    multiply(seq, after);
                }
            }
        });
    }
}
