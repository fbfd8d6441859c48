//! A Mamba-2 layer: projections, a short causal convolution, the recurrence over a state matrix per head, a gated norm, and the output
//! projection.
//!
//! Reference: transformers, `modeling_granitemoehybrid.py` (Dao, Gu 2024).

use plimsoll_device::{
    Activation, Buf, CausalConv, Change, Declare, DeclareError, Device, DeviceError, Input, LinearId, Mode, RowPiece,
    SelectiveScan, StateShape, StepInput, VectorId,
};
use plimsoll_formats::{Mamba, MambaScales, ModelConfig};

/// Weights of one Mamba-2 layer.
pub struct MambaBlock {
    gate: LinearId,
    /// Values, B and C.
    input: LinearId,
    dt: LinearId,
    norm: Norm,
    out: LinearId,
    /// Factors on the gate, on each channel of the convolution and on time steps.
    scales: Option<(f32, VectorId, f32)>,
    conv: CausalConv,
    scan: SelectiveScan,
    eps: f32,
}

/// The norm of the recurrence's result, by groups of heads.
enum Norm {
    /// The result is not normed.
    None,
    /// One norm over the whole row.
    Row(VectorId),
    /// Several groups: `ones` are the norm's weights in each group, `weight` are the weights of all groups.
    Groups { ones: VectorId, weight: VectorId },
}

impl MambaBlock {
    /// Declares `{prefix}.mamba.*`; `index` counts recurrent layers.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        index: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("{prefix}.mamba");
        let mamba = config.variant.mamba.as_ref().ok_or_else(|| {
            DeclareError::Unsupported(format!("'{prefix}' without the configuration of Mamba layers"))
        })?;
        let Mamba { heads, head_dim, state_dim, groups, taps, .. } = *mamba;
        let (hidden, width, channels) = (config.hidden_size, mamba.width(), mamba.channels());
        let mut first = 0;
        let mut part = |rows: usize| {
            let piece = [RowPiece::span(first, rows)];
            first += rows;
            declare.linear_rows(
                &format!("{prefix}.in_proj.weight"),
                &[width + channels + heads, hidden],
                &piece,
                hidden,
            )
        };
        let (gate, input, dt) = (part(width)?, part(channels)?, part(heads)?);
        let weight = declare.conv_taps(&format!("{prefix}.conv1d.weight"), channels, taps)?;
        let bias = format!("{prefix}.conv1d.bias");
        let bias = match declare.has(&bias) || declare.is_plan() && mamba.conv_bias {
            true => Some(declare.vector(&bias, channels, 0.0)?),
            false => None,
        };
        let conv = CausalConv { layer: index, channels, weight, bias, taps, silu: true };
        // GGUF files store vectors with one element per head as columns.
        let by_head: [&[usize]; 2] = [&[heads], &[heads, 1]];
        let a_log = match declare.has(&format!("{prefix}.A")) {
            true => declare.changed_flat_vector(&format!("{prefix}.A"), &by_head, Change::LogOfNegated)?,
            false => declare.flat_vector(&format!("{prefix}.A_log"), &by_head)?,
        };
        let scan = SelectiveScan {
            layer: index,
            heads,
            groups,
            state_dim,
            head_dim,
            a_log,
            dt_bias: declare.vector(&format!("{prefix}.dt_bias"), heads, 0.0)?,
            skip: declare.flat_vector(&format!("{prefix}.D"), &by_head)?,
            limits: mamba.time_limits,
        };
        let norm = match mamba.norm {
            true => norm(&prefix, [groups, width], declare)?,
            false => Norm::None,
        };
        let scales = mamba.scales.map(|MambaScales([gate, value, b, c, dt])| {
            let of = |factor: f32, count: usize| std::iter::repeat_n(factor, count);
            let state = groups * state_dim;
            (gate, declare.values(of(value, width).chain(of(b, state)).chain(of(c, state)).collect()), dt)
        });
        let out = declare.linear(&format!("{prefix}.out_proj.weight"), hidden, width)?;
        Ok(Self { gate, input, dt, norm, out, scales, conv, scan, eps: config.norm_eps })
    }

    /// The shape of a slot's state in `layers` such layers.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        self.scan.state_shape(layers, self.conv.taps)
    }

    /// Elements that are normed together.
    pub fn norm_width(&self) -> usize {
        match self.norm {
            Norm::None => 0,
            Norm::Row(_) => self.scan.width(),
            Norm::Groups { .. } => self.scan.width() / self.scan.groups,
        }
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
        let (scope, rows, scan) = (device.mark(), input.x.rows, &self.scan);
        let gate = device.temp(rows, scan.width())?;
        let x = device.temp(rows, scan.channels())?;
        let (dt, decay) = (device.temp(rows, scan.heads)?, device.temp(rows, scan.heads)?);
        let layers = [(self.gate, gate), (self.input, x), (self.dt, dt)];
        device.linear_rows(input, &layers, Mode::Store, step.bf16_rows)?;
        if let Some((of_gate, of_channels, of_dt)) = self.scales {
            device.scale_rows(gate, &|_| of_gate);
            device.multiply(x, of_channels);
            device.scale_rows(dt, &|_| of_dt);
        }
        device.causal_conv(&self.conv, x, None, step);
        let mixed = device.temp(rows, scan.width())?;
        device.selective_scan(scan, mixed, x, [dt, decay], step);
        device.glu(gate, mixed, Activation::Silu);
        let normed = match self.norm {
            Norm::None => gate.into(),
            Norm::Row(weight) => Input::normed(mixed, gate, weight, self.eps),
            Norm::Groups { ones, weight } => {
                let groups = gate.reshape(self.norm_width());
                device.rms_norm(groups, groups, ones, self.eps);
                device.multiply(gate, weight);
                gate.into()
            }
        };
        device.linear_rows(normed, &[(self.out, out)], mode, step.bf16_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// Declares `{prefix}.norm.weight` of `groups` groups, which are `width` wide together.
fn norm(prefix: &str, [groups, width]: [usize; 2], declare: &mut Declare<'_>) -> Result<Norm, DeclareError> {
    let weight = declare.flat_vector(&format!("{prefix}.norm.weight"), &[&[width], &[groups, width / groups]])?;
    Ok(match groups {
        1 => Norm::Row(weight),
        _ => Norm::Groups { ones: declare.values(vec![1.0; width / groups]), weight },
    })
}
