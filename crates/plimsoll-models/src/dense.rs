//! A feed-forward part with or without a gate.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, LinearId, Mode,
};
use plimsoll_formats::ModelConfig;

use crate::block::{activation, feed_forward};

/// A feed-forward part, with or without a gate.
pub enum Dense {
    /// `down(act(gate(x)) * up(x))`.
    Gated(FeedForward),
    /// `down(act(gate(x) · scale) * up(x)) · scale`, with two different factors.
    Scaled(FeedForward, [f32; 2]),
    /// `down(act(up(x)))`.
    Plain {
        /// Up projection, and its outputs.
        up: (LinearId, usize),
        /// Down projection.
        down: LinearId,
        /// The activation between them.
        act: Activation,
    },
}

impl Dense {
    /// Declares `{prefix}.up_proj`, `down_proj` and, if there is a gate, `gate_proj`, `width` wide between them.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        width: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        if !config.variant.ungated {
            let layer = feed_forward(config, prefix, width, declare)?;
            return Ok(match config.variant.mlp_scales {
                Some(scales) => Self::Scaled(layer, scales),
                None => Self::Gated(layer),
            });
        }
        let mut matrix = |name: &str, out: usize, k: usize| match config.mlp_bias {
            true => declare.linear_with_bias(&format!("{prefix}.{name}"), out, k),
            false => declare.linear(&format!("{prefix}.{name}.weight"), out, k),
        };
        let (up, down) =
            (matrix("up_proj", width, config.hidden_size)?, matrix("down_proj", config.hidden_size, width)?);
        Ok(Self::Plain { up: (up, width), down, act: activation(config.hidden_act) })
    }

    /// `out (+)= part(input)`. The last `bf16_rows` rows are computed in bfloat16 where the device supports it.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let (up, width, down, act) = match self {
            Self::Gated(layer) => return device.feed_forward(layer, input, out, mode, bf16_rows),
            Self::Scaled(layer, scales) => return scaled(layer, *scales, device, input, (out, mode), bf16_rows),
            Self::Plain { up: (up, width), down, act } => (*up, *width, *down, *act),
        };
        let scope = device.mark();
        let inner = device.temp(input.x.rows, width)?;
        device.linear_rows(input, &[(up, inner)], Mode::Store, bf16_rows)?;
        device.activate(inner, act);
        device.linear_rows(inner.into(), &[(down, out)], mode, bf16_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// Runs a gated part with one factor on its gate and one on its result.
fn scaled(
    layer: &FeedForward,
    [of_gate, of_result]: [f32; 2],
    device: &mut dyn Device,
    input: Input,
    (out, mode): (Buf, Mode),
    bf16_rows: usize,
) -> Result<(), DeviceError> {
    let (scope, rows) = (device.mark(), input.x.rows);
    let (gate, up) = (device.temp(rows, layer.width)?, device.temp(rows, layer.width)?);
    device.linear_rows(input, &[(layer.gate, gate), (layer.up, up)], Mode::Store, bf16_rows)?;
    device.scale_rows(gate, &|_| of_gate);
    device.glu_for(layer.down, gate, up, layer.act, bf16_rows);
    // The factor on the result may be applied to the down projection's input: that projection has no bias.
    device.scale_rows(gate, &|_| of_result);
    device.linear_rows(gate.into(), &[(layer.down, out)], mode, bf16_rows)?;
    device.release(scope);
    Ok(())
}
