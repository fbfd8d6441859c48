//! A gated short convolution over time with three projections of the input. Two of them multiply the third, one before and one after the
//! convolution.
//!
//! Reference: transformers, `modeling_lfm2.py` (`Lfm2ShortConv`).

use plimsoll_device::{
    Buf, CausalConv, Declare, DeclareError, Device, DeviceError, Input, LinearId, Mode, RowPiece, StepInput,
};
use plimsoll_formats::ModelConfig;

/// Weights of one layer with a gated short convolution.
pub struct ShortConvBlock {
    /// The projections to the factor before the convolution, to the factor after it, and to its input.
    before: LinearId,
    after: LinearId,
    input: LinearId,
    out: LinearId,
    spec: CausalConv,
}

impl ShortConvBlock {
    /// Declares `{prefix}.conv.*`; `index` counts recurrent layers.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        index: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (prefix, hidden, taps) = (format!("{prefix}.conv"), config.hidden_size, config.variant.conv_taps);
        let mut part = |part: usize| {
            let rows = [RowPiece::span(part * hidden, hidden)];
            declare.linear_rows(&format!("{prefix}.in_proj.weight"), &[3 * hidden, hidden], &rows, hidden)
        };
        let [before, after, input] = [part(0)?, part(1)?, part(2)?];
        let weight = declare.conv_taps(&format!("{prefix}.conv.weight"), hidden, taps)?;
        Ok(Self {
            before,
            after,
            input,
            out: declare.linear(&format!("{prefix}.out_proj.weight"), hidden, hidden)?,
            spec: CausalConv { layer: index, channels: hidden, weight, bias: None, taps, silu: false },
        })
    }

    /// The convolution, which also describes the layer's state of a sequence.
    pub fn spec(&self) -> &CausalConv {
        &self.spec
    }

    /// `out (+)= layer(input)`. The state moves from slot to slot as `step` requires.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        out: Buf,
        mode: Mode,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, rows, width) = (device.mark(), input.x.rows, self.spec.channels);
        let (before, after) = (device.temp(rows, width)?, device.temp(rows, width)?);
        let x = device.temp(rows, width)?;
        let layers = [(self.before, before), (self.after, after), (self.input, x)];
        device.linear_rows(input, &layers, Mode::Store, step.bf16_rows)?;
        device.causal_conv(&self.spec, x, Some([before, after]), step);
        device.linear_rows(x.into(), &[(self.out, out)], mode, step.bf16_rows)?;
        device.release(scope);
        Ok(())
    }
}
